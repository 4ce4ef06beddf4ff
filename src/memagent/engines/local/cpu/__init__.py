"""The embedded engine on a CPU: replies through a C kernel, prompts through torch.

Not here: reading GGUF files (`gguf_files.py` above), which tokens are computed next (`scheduler.py` above).
"""
