"""Training: rollouts of any agent written as a function, and the update of the model behind it."""
