"""vLLM as an engine: its servers, which are started and ended here, and calls that go on while weights change.

Not here: endpoints that run already (`engines/openai.py`), adapters for them (`rl/weights/sync.py`).
"""
