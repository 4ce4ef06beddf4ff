"""What an agent is and calls: the agents that ship, client and session, the recorder of tokens, rewards; programs as agents.

Not here: when agents run and how often (`rl/rollouts`). No tensors.
"""
