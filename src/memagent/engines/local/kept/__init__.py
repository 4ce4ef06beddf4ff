"""Texts whose keys and values are kept, so that later questions skip reading them.

texts.py   which prefixes of prompts are kept, and where: in the cache, in memory, on disk
disk.py    kept texts on disk, within a budget
keys.py    the fingerprint of weights and adapter that kept values belong to

The prefix tree itself is in `engines/local/cache.py`; which prompts share a section is the reader's knowledge.
"""
