"""Published files that datasets are built from: the catalogue, the cache they are fetched to, their readers.

Not here: what is built from them (`data/tasks`).
"""
