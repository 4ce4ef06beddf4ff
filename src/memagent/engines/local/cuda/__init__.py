"""The embedded engine on a GPU: packed prompts, replies as captured graphs, and their Triton kernels.

Not here: which tokens are computed next (`scheduler.py` above), attention with gradients (`rl/update/attention`).
"""
