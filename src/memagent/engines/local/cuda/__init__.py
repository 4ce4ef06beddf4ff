"""The embedded engine on a GPU: packed prompts, replies as captured graphs, and their Triton kernels."""
