"""Training on a Ray cluster: what runs on its nodes, and what the driver keeps of it.

    ranks                    processes that train
    replicas, vllm_replica   engines that sample
    weights                  from the ones to the others
    opening                  all of it for a run

Not here: joining the cluster and reserving places (`memagent/cluster.py`), the loop (`rl/trainer.py`), what one
process of training does (`rl/update/learner.py`).
"""
