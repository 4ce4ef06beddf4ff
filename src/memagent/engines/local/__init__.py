"""Local models: what computes them, their files, and the engine in torch, for many requests at once.

engine.py      the Engine: threads, requests, weights      generator.py   one step of all requests
loading.py     models, tokenizers, adapters from files     gguf_files.py  GGUF files
scheduler.py   which tokens are computed next              cache.py       slots and the prefix tree
model.py       a step in plain torch                       cuda/          faster steps
sampling.py    logits to tokens                           embedding.py   embedding models, endpoints included

`engines/base.py` chooses between torch and llama.cpp, which is in `engines/llamacpp`. HTTP is in `memagent.serve`; where model files come from is `engines/store.py`.
"""
