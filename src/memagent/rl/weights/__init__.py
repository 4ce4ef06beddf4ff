"""The model in training: loading it, syncing its weights to engines, checkpoints, export.

Not here: how weights are updated (`rl/update`).
"""
