"""Texts: where they come from, how their tokens are counted and how they are cut into chunks.

Not here: what is asked about them (`agent`), datasets of questions (`data`).
"""
