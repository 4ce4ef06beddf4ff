"""The embedded engine on a GPU: packed prompts, replies as captured graphs, their Triton kernels, and memory
that is freed.

Not here: which tokens are computed next (`scheduler.py` above), attention with gradients (`rl/update/attention`).
"""
