"""Bytes to text: find the encoding, or say plainly why the bytes are not text.

The order is from certain to likely, and whatever is chosen decodes the whole text strictly:

    named ─▶ byte order mark ─▶ utf-8 ─▶ declared (HTML) ─▶ guessed from a sample
                                    binary data is refused before anything is guessed
"""

from __future__ import annotations

import codecs
import re
from collections import Counter
from collections.abc import Iterator
from encodings.aliases import aliases

from memagent.errors import DocumentError
from memagent.names import hint

HEAD_BYTES = 8192
"""How much of the beginning decides whether data is binary."""

BOMS: dict[bytes, str] = {  # utf-32 first: its mark begins with the one of utf-16
    codecs.BOM_UTF32_LE: "utf-32-le",
    codecs.BOM_UTF32_BE: "utf-32-be",
    codecs.BOM_UTF8: "utf-8",
    codecs.BOM_UTF16_LE: "utf-16-le",
    codecs.BOM_UTF16_BE: "utf-16-be",
}

MAX_CONTROL_SHARE = 0.05
"""Text has next to no control characters; random bytes have about one in ten."""
_CONTROL = re.compile(r"[\x01-\x06\x0e-\x1a\x1c-\x1f\x7f]")  # ESC is left out: it sets colours

_QUOTES_AND_DASHES = "\u2018\u2019\u201c\u201d\u201e\u2013\u2014\u2026\u00b4\u00a0"
_MARKS = _QUOTES_AND_DASHES + "¡¿«»•·°§©®€£ºª"
_WESTERN = frozenset(_MARKS + "àáâãäåæçèéêëìíîïñòóôõöøùúûüýÿßœ")
_CENTRAL = frozenset(_MARKS + "áâäăąćčçďéëęěíîĺľłńňóôöőŕřśšşßťţúüůűýźžż")
_TURKISH = frozenset(_MARKS + "âçğîıöşûü\u0307")
LATIN_ENCODINGS: dict[str, frozenset[str]] = {
    "cp1252": _WESTERN,
    "latin_1": _WESTERN,
    "iso8859_2": _CENTRAL,
    "cp1250": _CENTRAL,
    "cp1254": _TURKISH,
    "mac_roman": _WESTERN,
}
"""The characters beyond ASCII that a text in each encoding is mostly made of; likeliest first."""
OTHER_ENCODINGS = (
    *("cp1251", "koi8_r", "cp932", "gb18030", "euc_jp", "big5", "cp949"),
    *("cp866", "cp1253", "cp1255", "cp1256"),
)

_WINDOW_BYTES = 128 * 1024
_SAMPLE_BYTES = 64 * 1024
_CUT = re.compile(rb"[\t-/]")  # such a byte is never the second half of a character


def decode(
    data: bytes, source: str, *, encoding: str | None = None, declared: str | None = None
) -> str:
    r"""Text of `data`, strictly decoded. `\r\n` and `\r` become `\n`, a byte order mark is dropped.

    `encoding` is what the user named, and nothing else is tried; `declared` is what the text says
    of itself, which is believed only where utf-8 does not fit. `source` names the data in errors.
    """
    if encoding is not None:
        text = _decode_as_named(data, source, encoding)
    else:
        text = _decode_detected(data, source, declared)
    return normalize_newlines(text)


def normalize_newlines(text: str) -> str:
    r"""`\r\n` and `\r` as `\n`."""
    return text.replace("\r\n", "\n").replace("\r", "\n") if "\r" in text else text


def check_encoding(encoding: str) -> None:
    """Refuse a name that is no encoding of texts, before any file is blamed for it."""
    try:
        b" ".decode(encoding)
    except UnicodeError:
        return  # it exists, and wants more than one byte
    except (LookupError, ValueError) as error:  # ValueError: a NUL in the name
        known = sorted({*aliases, *aliases.values()})
        remedy = hint(encoding, known, otherwise="names look like utf-8, cp1252, shift_jis")
        raise DocumentError(f"there is no text encoding named {encoding!r}; {remedy}") from error


def looks_binary(head: bytes | str) -> bool:
    """Whether the beginning of some data has a NUL, or too many control characters for a text."""
    text = head.decode("latin-1") if isinstance(head, bytes) else head
    return "\0" in text or len(_CONTROL.findall(text)) > MAX_CONTROL_SHARE * len(text)


def bom_encoding(data: bytes) -> str | None:
    """The encoding that a byte order mark announces; None without a mark."""
    return next((name for bom, name in BOMS.items() if data.startswith(bom)), None)


def _decode_as_named(data: bytes, source: str, encoding: str) -> str:
    check_encoding(encoding)
    advice = "name another encoding, or none to have it detected"
    try:
        text = data.decode(encoding)
    except UnicodeError as error:
        where = ""
        if isinstance(error, UnicodeDecodeError):  # some codecs say no more than that it failed
            byte = data[error.start : error.start + 1].hex()
            where = f": byte {error.start} (0x{byte}) does not decode"
        raise DocumentError(f"{source} is not {encoding}{where}; {advice}") from error
    if looks_binary(text[:HEAD_BYTES]):
        raise DocumentError(
            f"{source} read as {encoding} is full of control characters, so it is not text in that "
            f"encoding; {advice}"
        )
    return text.removeprefix("\ufeff")


def _decode_detected(data: bytes, source: str, declared: str | None) -> str:
    if marked := bom_encoding(data):
        try:
            return data.decode(marked).removeprefix("\ufeff")
        except UnicodeDecodeError as error:
            raise DocumentError(
                f"{source} begins with the mark of {marked}, but byte {error.start} does not decode; "
                "repair it, or name its `encoding`"
            ) from error
    if looks_binary(data[:HEAD_BYTES]):
        raise binary_error(source)
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        bad = error.start
    if b"\0" in data:  # text at first, such as the header of an image or an installer script
        raise binary_error(source)
    sample = _sample(data, bad)
    if _is_mostly_utf8(sample):
        raise DocumentError(
            f"{source} is utf-8 but for byte {bad} (0x{data[bad]:02x}); repair it, for example with "
            "`iconv -c -f utf-8 -t utf-8`, or name its `encoding`"
        )
    for encoding in _candidates(sample, declared):
        try:
            return data.decode(encoding)
        except (UnicodeError, LookupError, ValueError):
            continue  # it fits the sample only, or the declared name is wrong
    raise DocumentError(
        f"the encoding of {source} cannot be detected; name it, for example `encoding=cp1252` or shift_jis"
    )


def binary_error(source: str, advice: str | None = None) -> DocumentError:
    """The refusal of binary data; `advice` says what to do with this kind of file."""
    advice = advice or "if it is UTF-16 text, give `encoding=utf-16-le`"
    return DocumentError(f"{source} is binary, not text; {advice}")


def _sample(data: bytes, bad: int) -> bytes:
    """Lines beyond ASCII from around the first byte that is not utf-8: only they distinguish encodings.

    Cuts fall where no multi-byte character can be broken, since guesses are tried strictly.
    """
    low, high = max(bad - _WINDOW_BYTES, 0), min(bad + _WINDOW_BYTES, len(data))
    if low > 0 and (cut := _CUT.search(data, low, bad)):
        low = cut.end()
    window = data[low:high]
    lines = b"\n".join(line for line in window.split(b"\n") if not line.isascii())
    if high == len(data) and len(lines) <= _SAMPLE_BYTES:
        return lines
    lines = lines[:_SAMPLE_BYTES]
    cuts = [found.end() for found in _CUT.finditer(lines)]
    return lines[: cuts[-1]] if cuts else lines


def _is_mostly_utf8(sample: bytes) -> bool:
    """Whether a bad byte is an accident in a utf-8 text rather than a sign of another encoding."""
    text = sample.decode("utf-8", "replace")
    num_bad = text.count("\ufffd")
    num_good = sum(1 for char in text if char > "\x7f") - num_bad
    return num_good > 3 * num_bad


def _candidates(sample: bytes, declared: str | None) -> Iterator[str]:
    if declared is not None:
        # Pages that say latin-1 mean cp1252, browsers found long ago.
        name = declared.lower().replace("_", "-")
        yield "cp1252" if name in ("iso-8859-1", "latin-1", "latin1", "ascii") else declared
    yield from _guesses(sample)


def _guesses(sample: bytes) -> list[str]:
    """Encodings that fit a sample, likeliest first.

    charset-normalizer knows scripts apart but often takes one Latin encoding for another (French as
    cp1257), so among those the letters decide: é, ç and à are common, ŕ and č in one text are not.
    """
    from charset_normalizer import from_bytes

    known = [*LATIN_ENCODINGS, *OTHER_ENCODINGS]
    matches = from_bytes(sample, cp_isolation=known, threshold=0.5)
    ranked = sorted(
        (match.chaos, -match.coherence, known.index(name), name)
        for match in matches
        for name in match.could_be_from_charset
        if name in known
    )
    names = [name for *_, name in ranked]
    if names and names[0] not in LATIN_ENCODINGS:
        return names
    latin = sorted(LATIN_ENCODINGS, key=lambda name: -_usual_share(sample, name))
    return latin + [name for name in names if name not in LATIN_ENCODINGS]


def _usual_share(sample: bytes, encoding: str) -> float:
    """How much of what lies beyond ASCII are characters usual for the encoding."""
    try:
        counts = Counter(sample.decode(encoding).lower())
    except UnicodeDecodeError:
        return 0.0
    beyond = {char: count for char, count in counts.items() if char > "\x7f"}
    usual = sum(count for char, count in beyond.items() if char in LATIN_ENCODINGS[encoding])
    return usual / max(sum(beyond.values()), 1)
