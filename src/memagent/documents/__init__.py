"""Texts: where they come from, how they are counted and how they are cut into chunks."""
