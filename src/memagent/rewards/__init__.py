"""Graders: one verdict on an answer, for training, evaluation and the command line."""
