"""Tokens: how texts and conversations become token ids, for endpoints and for models on this machine.

tokenizers.py   counting and locating tokens       templates.py   chat templates
control.py      text never becomes control tokens, here and in what is sent to an endpoint

Not here: where texts are cut (`documents/chunking.py`), models (`engines`).
"""
