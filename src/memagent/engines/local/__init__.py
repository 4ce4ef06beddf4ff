"""The embedded engine: a language model in this process, on torch, generating for many requests at once.

engine.py      the Engine: threads, requests, weights      generator.py   one step of all requests
loading.py     models, tokenizers, adapters from files     gguf_files.py, gguf_weights.py  GGUF files
scheduler.py   which tokens are computed next              cache.py       slots and the prefix tree
model.py       a step in plain torch                       cpu/ cuda/     faster steps
sampling.py    logits to tokens                            streaming.py   tokens to text

HTTP is in `memagent.serve`; where model files come from is `engines/store.py`.
"""
