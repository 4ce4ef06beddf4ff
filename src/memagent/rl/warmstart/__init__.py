"""Supervised training before reinforcement learning: demonstrations by rule, their rows and batches.

Not here: the loop that trains on them (`rl/trainer.py`).
"""
