"""From groups of rollouts to new weights: advantages, rows, packing, attention, loss, optimizer.

Not here: which weights are trained and where they are kept (`rl/weights`).
"""
