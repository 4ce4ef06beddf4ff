"""What several commands use: options made from settings, run directories, progress, interrupts.

Not here: what a command does; that is in the command's own file, and what decides an answer is below `cli`.
"""
