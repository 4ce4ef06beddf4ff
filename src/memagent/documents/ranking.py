"""Which texts share most words with a question: BM25.

ranked = rank_by_words(["The mill was sold.", "It rained."], "Who sold the mill?")     # [0, 1]
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from importlib import import_module
from typing import Any, NamedTuple

from memagent.plugins import hidden, require


class Ranked(NamedTuple):
    """A text's number, and how well it fits."""

    number: int
    score: float
    """0 for a text that shares no word with the question."""


def check_bm25(what: str) -> None:
    """Raise ConfigError where the library of BM25 is not installed; `what` needs it."""
    require("bm25s", f'{what} needs the library bm25s: pip install "memagent[eval]"')


def rank_by_words(texts: Sequence[str], question: str, *, what: str) -> list[Ranked]:
    """All texts, best BM25 score first, equal ones in their order; `what` asks for it."""
    check_bm25(what)
    bm25s = _bm25s()
    corpus = bm25s.tokenize(list(texts), show_progress=False)
    if not corpus.vocab:
        return [Ranked(number, 0.0) for number in range(len(texts))]
    index = bm25s.BM25()
    index.index(corpus, show_progress=False)
    asked = bm25s.tokenize([question], show_progress=False)
    ranked, scores = index.retrieve(
        asked, k=len(texts), show_progress=False, backend_selection="numpy"
    )
    pairs = map(Ranked, ranked[0].tolist(), scores[0].tolist())
    return sorted(pairs, key=lambda pair: (-pair.score, pair.number))


@cache
def _bm25s() -> Any:
    """The library, which would compute with jax where that is installed, and take most of a GPU's memory."""
    with hidden("jax"):
        return import_module("bm25s")
