"""Evaluation: how well texts are read, with intervals, and with failures counted."""
