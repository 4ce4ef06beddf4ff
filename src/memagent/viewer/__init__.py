"""`memagent view`: a read-only page over run directories.

app.py         the routes and the process       api.py        the answers, as plain values
library.py     runs and texts that are shown    line_index.py lines of files that grow, by number
traces.py      steps of any kind of run and their messages, readings
evaluations.py  cells and items, two evaluations side by side
trainings.py   curves, rollouts, validations    export.py     one page that holds a run
pages/         what the browser gets: a page, a stylesheet and modules, without a build step

Only the folders that were given are read, and nothing is written to them. Run directories may come from
anybody: every value is checked before it is sent, and the page shows all of it as text.
"""
