"""Engines: anything that turns messages into a completion, behind one async method."""
