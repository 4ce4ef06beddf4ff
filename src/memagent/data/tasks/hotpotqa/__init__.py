"""HotpotQA-long: questions over two paragraphs, spread over a text of any length.

`task.py` makes examples; `store.py` holds questions and paragraphs in files that processes map.
"""
