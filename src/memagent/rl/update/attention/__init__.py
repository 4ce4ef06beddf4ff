"""Attention over packed prefix trees: by a block mask, or cut into parts that flash kernels compute.

Not here: how rows become trees (`rl/update/packing.py`).
"""
