"""Commands around the reader: view, mcp and doctor.

Commands that read, evaluate, train and serve are beside this folder; `main.py` lists all of them.
"""
