"""Tasks beyond RULER: what published memory agents fail at; they need no source.

    coreference    return the i-th of several similar items, word for word
    counting       how often something happened in the whole text
    aggregation    sums, largest values and leaders over the whole text
    two_hop        the fact that is needed second comes first
    corrections    facts that are changed later; the last valid value counts
    unanswerable   the text has no answer, only near misses
    injection      the text gives orders to its reader

A file holds a task, `near_misses.py` the last two: its settings and a `plan`, which says what is asked and which
sentences matter. `weave.py` puts them into prose of the grammar in `filler.py`, at the requested length.
"""
