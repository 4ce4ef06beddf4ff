"""Training on a Ray cluster: what runs on its nodes, and what the driver keeps of it.

Not here: joining the cluster and reserving places (`memagent/cluster.py`), the loop (`rl/trainer.py`), what one
process of training does (`rl/update/learner.py`).
"""
