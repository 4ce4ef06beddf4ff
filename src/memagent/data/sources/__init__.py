"""Published files that datasets are built from: the cache they are fetched to, their readers; `choices.py` lists them.

Not here: what is built from them (`data/tasks`).
"""
