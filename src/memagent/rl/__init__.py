"""Training: rollouts of any agent written as a function, and updates of the model behind it.

A run is read from `settings`, opened by `setup`, driven by `trainer`, checked by `validation`; `types` has the
records that pass between the folders.
"""
