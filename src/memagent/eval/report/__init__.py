"""Reports of finished evaluations: tables, plots, one HTML page, and published results beside ours.

Not here: asking and scoring (`eval/runner.py`), intervals and tests (`eval/stats.py`).
"""
