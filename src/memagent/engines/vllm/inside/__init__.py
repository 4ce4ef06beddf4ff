"""What runs in the process of vLLM, whose Python may have nothing of ours: files that import the standard library only.

Not here: what starts and calls servers (`engines/vllm`).
"""
