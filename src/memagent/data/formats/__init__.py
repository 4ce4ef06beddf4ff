"""Examples in files: JSON lines, parquet, and the layouts of other projects, streamed in both directions.

Not here: what an example is (`data/example.py`), and where published files come from (`data/sources`).
"""
