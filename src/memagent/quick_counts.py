"""Tokens about twenty times faster, by the library tokie, where it finds those that the tokenizer does.

    quick_counter(file, ...)      how many tokens a text has
    quick_encoder(file, ...)      which they are

Converting a tokenizer takes a while, so the result is kept in the user's cache folder under the
fingerprint of the `tokenizer.json` it was made from. Only what agrees with the tokenizer on `SAMPLES` is
kept or used; without tokie, or where it does not agree, there is none. Nor is there one for a vocabulary whose
ids are not those from 0 on, each once: with some of them tokie never returns.

tokie is exact on short texts of known characters only: beyond about 10 kB it cuts inside words, and it
can panic. So a text is taken in blocks that end where every tokenizer ends a token, and a block goes to
the exact tokenizer if it has no such end, has rare characters, or tokie fails on it:

    text ──┬── block ──┬── block ──┬── block ──▶   sum of the counts, or all ids in a row
           └ seam: between two words, or after a line
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from platformdirs import user_cache_path

from memagent.files import evict_oldest, mark_used, replacing

if TYPE_CHECKING:
    import tokie

Count = Callable[[str], int]
Encode = Callable[[str], list[int]]

_Found = TypeVar("_Found", int, list[int])

BLOCK_BYTES = 8000
MAX_CHAR_BYTES = 4
SEAM_CHARS = 24
"""Block size in which the samples are compared once more, so that they are cut at many seams."""
MAX_CACHE_BYTES = 500_000_000
"""Of all converted tokenizers on disk; those that were not used for longest are dropped."""
_LETTER = r"[^\W\d_]"
_SEAM = re.compile(
    rf"(?<={_LETTER})(?= {_LETTER})"  # a blank begins a token with the word behind it
    rf"|(?<={_LETTER})(?=[\u3001\u3002\uff01\uff0c\uff1a\uff1b\uff1f]{_LETTER})"  # Chinese, Japanese marks
    r"|(?<=\S\n)(?=\S)"
)
_RARE = re.compile(
    "[\x00-\x08\x0b\x0c\x0e-\x1f\x7f"  # often missing from vocabularies
    "\u16ee-\u16f0\u2160-\u2188\u3021-\u3029\u3038-\u303a\ua6e6-\ua6ef"  # numbers that are letters
    "\U00010000-\U0001efff\U0001fb00-\U0001ffff\U00033480-\U0010ffff]"  # beyond emoji and Chinese
)
"""Characters that tokie and a tokenizer may treat differently."""
_PLAIN_BYTES = bytes({*b"\t\n\r", *range(0x20, 0x7F), *range(0x80, 0xF0)} - {0xE1, 0xE3, 0xEA})
_RARE_STARTS = re.compile(b"\xe2[\x85\x86]")
"""A text in UTF-8 of plain bytes and without these starts has no rare character."""

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
    mark_used(kept)
    exact = open_exact()
    with suppress(tokie.TokieError, OSError):
        return _in_blocks(tokie.Tokenizer.from_file(str(kept)).count_tokens, exact, _total)
    tokenizer = _converted(file)
    if tokenizer is None:
        return None
    quick: Count = tokenizer.count_tokens
    if not _agree(quick, exact, _total, SAMPLES):
        return None
    with suppress(tokie.TokieError, OSError):  # the cache is a convenience
        kept.parent.mkdir(parents=True, exist_ok=True)
        with replacing(kept, sync=False) as part:
            tokenizer.save(str(part))
        evict_oldest(kept.parent, max_bytes=MAX_CACHE_BYTES, keep=kept)
    return _in_blocks(quick, exact, _total)


def quick_encoder(file: Path, exact: Encode, *, samples: Sequence[str] = ()) -> Encode | None:
    """A quick encoder for a tokenizer.json; it has to find the tokens of `exact`, in `samples` too."""
    try:
        import tokie
    except ImportError:
        return None
    kept = None
    with suppress(tokie.TokieError, OSError):
        kept = tokie.Tokenizer.from_file(str(_cache_file(file)))
    tokenizer = _converted(file) if kept is None else kept
    if tokenizer is None:
        return None

    def quick(text: str) -> list[int]:
        return list(tokenizer.encode(text, add_special_tokens=False).ids)

    if not _agree(quick, exact, _joined, (*SAMPLES, *samples)):
        return None
    return _in_blocks(quick, exact, _joined)


def _agree(
    quick: Callable[[str], _Found],
    exact: Callable[[str], _Found],
    join: Callable[[Iterator[_Found]], _Found],
    samples: Sequence[str],
) -> bool:
    """Whether tokie finds what the tokenizer finds, in whole samples and in pieces of them."""
    in_pieces = _in_blocks(quick, exact, join, block_chars=SEAM_CHARS)
    try:
        return all(quick(text) == exact(text) == in_pieces(text) for text in samples)
    except BaseException as error:
        _raise_if_meant(error)
        return False


def _in_blocks(
    quick: Callable[[str], _Found],
    exact: Callable[[str], _Found],
    join: Callable[[Iterator[_Found]], _Found],
    *,
    block_chars: int = BLOCK_BYTES,
) -> Callable[[str], _Found]:
    """What `quick` finds in a text, taken in blocks; what `exact` finds in blocks it is not sure of."""

    def in_block(block: str, data: bytes) -> _Found:
        if len(data) <= BLOCK_BYTES and not _has_rare(block, data):
            try:
                return quick(block)
            except BaseException as error:  # a panic of Rust code is no Exception
                _raise_if_meant(error)
        return exact(block)

    def in_text(text: str) -> _Found:
        return join(
            in_block(part, data)
            for block in _blocks(text, block_chars)
            for part, data in _fitting(block)
        )

    return in_text


def _has_rare(text: str, data: bytes) -> bool:
    """Whether a text has rare characters. Its bytes say so for most texts, ten times faster."""
    is_plain = not data.translate(None, _PLAIN_BYTES)
    if is_plain and (text.isascii() or _RARE_STARTS.search(data) is None):
        return False
    return _RARE.search(text) is not None


def _fitting(block: str) -> Iterator[tuple[str, bytes]]:
    """The block and its bytes; in smaller ones if it has too many bytes."""
    data = _utf8(block)
    if len(data) <= BLOCK_BYTES:
        yield block, data
        return
    for part in _blocks(block, BLOCK_BYTES // MAX_CHAR_BYTES):
        yield part, _utf8(part)


def _blocks(text: str, size: int) -> Iterator[str]:
    """The text in blocks that end at seams. A block is longer than `size` where there is no seam."""
    start = 0
    while len(text) - start > size:
        seam = _SEAM.search(text, start + size // 2)
        if seam is None:
            break
        yield text[start : seam.end()]
        start = seam.end()
    yield text[start:]


def _utf8(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def _total(counts: Iterator[int]) -> int:
    return sum(counts)


def _joined(pieces: Iterator[list[int]]) -> list[int]:
    return [token for piece in pieces for token in piece]


def _raise_if_meant(error: BaseException) -> None:
    """Pass on what ends the program; everything else is a failure of tokie."""
    if isinstance(error, (KeyboardInterrupt, SystemExit, GeneratorExit)):
        raise error


def _converted(file: Path) -> tokie.Tokenizer | None:
    """The tokenizer of a file in tokie; None where tokie does not know its kind or must not have it."""
    import tokie

    if not _has_regular_ids(file):
        return None
    try:
        return tokie.Tokenizer.from_json(str(file))
    except BaseException as error:  # a panic of Rust code is no Exception
        _raise_if_meant(error)
        return None


def _has_regular_ids(file: Path) -> bool:
    """Whether the ids of a vocabulary are those from 0 on, each of one token."""
    try:
        description = json.loads(file.read_text(encoding="utf-8"))
        vocabulary = description["model"]["vocab"]
        if isinstance(vocabulary, list):  # the place of a token is its id
            return True
        added = {one["content"]: one["id"] for one in description.get("added_tokens") or ()}
        is_same = all(
            vocabulary.get(content, number) == number for content, number in added.items()
        )
        ids = sorted({**vocabulary, **added}.values())
        return is_same and ids == [*range(len(ids))]
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return False


def _cache_file(file: Path) -> Path:
    with file.open("rb") as stream:
        fingerprint = hashlib.file_digest(stream, "sha256").hexdigest()[:32]
    folder = user_cache_path("memagent", appauthor=False) / "tokenizers"
    return folder / f"{fingerprint}-tokie-{version('tokie')}-3.bin"
