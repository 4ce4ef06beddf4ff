"""The reading gateway: an OpenAI-compatible endpoint for texts longer than the model's window.

app.py           the routes                        conversation.py  which part is read, which is the question
requests.py      requests, validated               answering.py     short ones to the engine, long ones to readings
readings.py      readings on disk, continued       state.py         files, readings and usage in SQLite
files.py         /v1/files                         chat_format.py   answers of /v1/chat/completions
openapi.py       the description of the API        responses_format.py   answers of /v1/responses
accounts.py      what calls of a holder use

Not here: the loop itself (`agent`), and a local model behind HTTP without a reader (`serve/app.py`).
"""
