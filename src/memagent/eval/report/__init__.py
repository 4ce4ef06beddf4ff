"""Reports of finished evaluations: tables, plots, one HTML page, and published results next to yours.

Not here: asking and scoring (`eval/runner.py`), intervals and tests (`eval/stats.py`).
"""
