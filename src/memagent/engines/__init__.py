"""Engines: anything that turns messages into a completion, behind one async method; models on this machine.

Not here: prompts and what becomes of a reply (`agent`), HTTP serving of a local model (`serve`).
"""
