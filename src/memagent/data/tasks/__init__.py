"""Tasks: generators of examples, each a pure function of its settings and an index.

Not here: writing examples to files (`data/build.py`, `data/formats`).
"""
