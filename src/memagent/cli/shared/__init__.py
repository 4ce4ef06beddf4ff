"""What several commands use: options from settings classes, run directories, engines, progress, messages.

Not here: what a command does; that is in the command's own file, and what decides an answer is below `cli`.
"""
