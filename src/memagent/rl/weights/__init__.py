"""The model that is trained: opening it, giving its weights to engines, checkpoints, export.

Not here: how weights are updated (`rl/update`).
"""
