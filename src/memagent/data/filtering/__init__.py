"""Closed-book filtering: drop the questions that a model answers without the text.

`run.py` is the whole of it, from a file to a filtered file; `screening.py` asks, `report.py` counts.
"""
