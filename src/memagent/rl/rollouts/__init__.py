"""Running agents on tasks: which tasks, in which order, by which driver, and the rollouts on disk.

Not here: agents themselves (`rl/agents`), and training on their rollouts (`rl/update`). No tensors.
"""
