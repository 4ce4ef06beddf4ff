"""Training on a Ray cluster: what runs on its nodes, and what the driver keeps of it.

    ranks, rank_group           processes that train              replica, vllm_replica, replicas    engines that sample
    buckets, weight_group, shared_buffers, transfer, direct       weights from the ones to the others, directly
    shipping                    the same through the object store
    opening                     all of it for a run

Not here: joining the cluster and reserving places (`memagent/cluster.py`), the loop (`rl/trainer.py`), what one
process of training does (`rl/update/learner.py`).
"""
