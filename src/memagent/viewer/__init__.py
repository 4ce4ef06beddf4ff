"""`memagent view`: a read-only page over run directories.

app.py         the routes                       serving.py    the process: listen, shut down
library.py     the runs that are shown          line_index.py lines of files that grow, by number
traces.py      steps, from any kind of run      step_prompts.py  the messages of a step, worded again
diffs.py       what changed between two memories
readings.py    the questions of a reading       evaluations.py  cells and items of an evaluation
trainings.py   curves, rollouts, validations    comparison.py two evaluations side by side
texts.py       texts that were given to show    export.py     one page that holds a run
pages/         what the browser gets: a page, a stylesheet and modules, without a build step

Only the folders that were given are read, and nothing is written to them. Run directories may come from
anybody: every value is checked before it is sent, and the page shows all of it as text.
"""
