"""Other ways to read than section after section: in parallel or in segments, by relevance, texts that have grown.

Not here: the loop itself (`agent/reader.py`), and quotes, items and citations (`agent/evidence`).
"""
