"""Graders: one verdict on an answer, for training and evaluation.

Not here: rewards written by users (`rl/agents/rewards.py`), intervals over scores (`eval/stats.py`).
"""
