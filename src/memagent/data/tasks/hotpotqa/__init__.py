"""HotpotQA-long: questions over two paragraphs, spread over a text of any length.

`task.py` generates examples; `store.py` keeps questions and paragraphs in memory-mapped files.
"""
