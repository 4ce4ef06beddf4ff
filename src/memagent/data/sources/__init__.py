"""The published files that datasets are made from: their names, how they are fetched, how they are read.

Not here: what is made from them (`data/tasks`).
"""
