"""The reading gateway: an OpenAI-compatible endpoint for texts longer than the model's window.

app.py           the routes                        requests.py   requests, validated: the text, and the question
gateway.py       short ones to the engine, long ones are read
files.py         /v1/files                         state.py      files, readings and usage in SQLite

Not here: the loop itself (`agent`), a local model behind HTTP without a reader (`serve/app.py`), and what answers consist
of and how they are written (`serve/chat.py`, `serve/responses.py`).
"""
