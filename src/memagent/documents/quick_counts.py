"""Tokens about twenty times faster, by the library tokie, where it finds those that the tokenizer does.

    quick_counter(file, ...)      how many tokens a text has
    quick_encoder(file, ...)      which they are

Converting a tokenizer takes a while, so the result is kept in the user's cache folder under the
fingerprint of the `tokenizer.json` it was made from. Only what agrees with the tokenizer on `SAMPLES` is
kept or used; without tokie, or where it does not agree, there is none.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path

from platformdirs import user_cache_path

from memagent.files import replacing

Count = Callable[[str], int]
Encode = Callable[[str], list[int]]

SAMPLES = (
    "It was 7:45 a.m. on the 3rd of May, 1873; nobody (not even \u201cthe captain\u201d) had slept.\n",
    "Don't you think we'd better go?\n\nThey're late \u2014 again! Caf\u00e9 na\u00efve \u6f22\u5b57 \u4e00\u884c\u3002",
    "def f(x: int) -> str:\n    return str(x + 1)  # \u00fcber\n\n\tindented\r\n   spaces   \n",
    "e-mail: someone@example.org, 100% of $1,234.56; antidisestablishmentarianism \U0001f469\u200d\U0001f680!",
    " ",
    "",
)


def quick_counter(file: Path, open_exact: Callable[[], Count]) -> Count | None:
    """A quick counter for a tokenizer.json; `open_exact` gives the counts it has to agree with."""
    try:
        import tokie
    except ImportError:
        return None
    kept = _cache_file(file)
    with suppress(tokie.TokieError, OSError):
        counter: Count = tokie.Tokenizer.from_file(str(kept)).count_tokens
        return counter
    try:
        tokenizer = tokie.Tokenizer.from_json(str(file))
        count: Count = tokenizer.count_tokens
        exact = open_exact()
        if any(count(sample) != exact(sample) for sample in SAMPLES):
            return None
    except tokie.TokieError:  # a kind of tokenizer that it does not know
        return None
    with suppress(tokie.TokieError, OSError):  # the cache is a convenience
        _keep(tokenizer, kept)
    return count


def quick_encoder(file: Path, exact: Encode, *, samples: Sequence[str] = ()) -> Encode | None:
    """A quick encoder for a tokenizer.json; it has to find the tokens of `exact`, in `samples` too."""
    try:
        import tokie
    except ImportError:
        return None
    try:
        tokenizer = _opened(file)
        if any(tokenizer(sample) != exact(sample) for sample in (*SAMPLES, *samples)):
            return None
    except tokie.TokieError:  # a kind of tokenizer that it does not know
        return None
    return tokenizer


def _opened(file: Path) -> Encode:
    import tokie

    try:
        tokenizer = tokie.Tokenizer.from_file(str(_cache_file(file)))
    except (tokie.TokieError, OSError):
        tokenizer = tokie.Tokenizer.from_json(str(file))
    return lambda text: list(tokenizer.encode(text, add_special_tokens=False).ids)


def _cache_file(file: Path) -> Path:
    with file.open("rb") as stream:
        fingerprint = hashlib.file_digest(stream, "sha256").hexdigest()[:32]
    folder = user_cache_path("memagent", appauthor=False) / "tokenizers"
    return folder / f"{fingerprint}-tokie-{version('tokie')}.bin"


def _keep(tokenizer: object, kept: Path) -> None:
    kept.parent.mkdir(parents=True, exist_ok=True)
    with replacing(kept, sync=False) as part:
        tokenizer.save(str(part))  # type: ignore[attr-defined]  # tokie has no type hints
