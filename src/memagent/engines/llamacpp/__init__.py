"""GGUF models on CPUs and Macs: llama.cpp's server in a process of its own, and the engine that calls it.

`__main__.py` is the process, `engine.py` the engine, `adapters.py` writes LoRA adapters as GGUF files. How processes
are started and ended is in `launcher.py`, headers and tokenizers are in `engines/local/gguf_files.py`.
"""
