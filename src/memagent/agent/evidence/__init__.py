"""Where an answer comes from: quotes in replies, their places in the text, the ledger of them, counts.

Not here: the loop that collects them (`agent/reader.py`), their wording in prompts (`agent/prompts.py`).
"""
