"""Running agents on tasks: which tasks, in which order, by which driver, and what is kept on disk.

Not here: agents themselves (`rl/agents`), and learning from what they did (`rl/update`). No tensors.
"""
