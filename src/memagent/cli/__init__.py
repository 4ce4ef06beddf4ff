"""The command line: one small file per command, a folder where a command has sub-commands.

Not here: whatever decides an answer, a score or an update; that is in the rooms below, callable from Python.
"""
