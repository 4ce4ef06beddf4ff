"""The reader: the loop that reads a text section by section and rewrites its memory. No tensors.

Not here: texts and chunks (`documents`), models (`engines`), agents in training (`rl/agents`).
"""
