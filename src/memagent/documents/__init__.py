"""Texts: where they come from and how they are cut into chunks.

Not here: how tokens are counted (`tokens`), what is asked about them (`agent`), datasets of questions (`data`).
"""
