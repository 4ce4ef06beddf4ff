"""The reading gateway: an OpenAI-compatible endpoint for texts longer than the model's window.

app.py           the routes                        conversation.py  which part is read, which is the question
requests.py      requests, validated               answering.py     short ones to the engine, long ones to readings
readings.py      readings on disk, continued       state.py         files, readings and usage in SQLite
files.py         /v1/files                         accounts.py      what calls of a holder use
events.py        what happens while it answers

Not here: the loop itself (`agent`), a local model behind HTTP without a reader (`serve/app.py`), and how answers are
written (`serve/chat.py`, `serve/responses.py`).
"""
