"""The embedded engine on a GPU: packed prompts, captured replies, and the kernels of both."""
