"""Texts that tokenizers and the cutting of sections find hard. Each is a function of length and seed."""

import base64
import random
from collections.abc import Callable

Rng = random.Random


def _from(alphabet: str) -> Callable[[int, Rng], str]:
    return lambda num_chars, rng: "".join(rng.choices(alphabet, k=num_chars))


def _range(*ranges: tuple[int, int]) -> Callable[[int, Rng], str]:
    return _from("".join(chr(code) for low, high in ranges for code in range(low, high)))


def _emoji(num_chars: int, rng: Rng) -> str:
    sequences = ["👩\u200d👩\u200d👧\u200d👦", "👍🏽", "🏳️\u200d🌈", "🇨🇭", "🙂", "❤️", "1️⃣"]
    return "".join(rng.choices(sequences, k=num_chars // 3))[:num_chars]


def _combining(num_chars: int, rng: Rng) -> str:
    marks = _range((0x300, 0x36F))
    return "".join(
        rng.choice("abe ") + marks(rng.randrange(60), rng) for _ in range(num_chars // 30)
    )


def _base64(num_chars: int, rng: Rng) -> str:
    return base64.b64encode(rng.randbytes(num_chars * 3 // 4)).decode()


def _minified(num_chars: int, rng: Rng) -> str:
    names = ["a", "b", "function", "e", "return", "null", "0x1f", "this", "prototype"]
    return "".join(rng.choice(names) + rng.choice("(){};,=.!&|") for _ in range(num_chars // 4))


def _blanks(num_chars: int, rng: Rng) -> str:
    return "".join(rng.choice(" \n\t") * rng.randrange(1, 400) for _ in range(num_chars // 200))


def _uneven(num_chars: int, rng: Rng) -> str:
    """Long runs that cost few tokens between short ones that cost many."""
    dense = _range((0x13000, 0x13400))
    runs = (" " * rng.randrange(2000) + dense(rng.randrange(300), rng) for _ in range(1000))
    return "".join(runs)[:num_chars]


def _unicode(num_chars: int, rng: Rng) -> str:
    codes = (rng.randrange(0x110000) for _ in range(num_chars))
    return "".join(chr(code) for code in codes if not 0xD800 <= code < 0xE000)


SCRIPTS: dict[str, Callable[[int, Rng], str]] = {
    "arabic": _range((0x621, 0x64B), (0x20, 0x21)),
    "chinese": _range((0x4E00, 0x9FA5), (0x3002, 0x3003)),
    "combining": _combining,
    "devanagari": _range((0x904, 0x950), (0x20, 0x21)),
    "emoji": _emoji,
    "hangul": _range((0xAC00, 0xD7A0), (0x20, 0x21)),
    "japanese": _range((0x3041, 0x30FF), (0x4E00, 0x4F00)),
    "thai": _range((0xE01, 0xE3A), (0xE40, 0xE4E)),
    "unicode": _unicode,
}
TEXTS: dict[str, Callable[[int, Rng], str]] = {
    **SCRIPTS,
    "base64": _base64,
    "blanks": _blanks,
    "digits": _from("0123456789"),
    "dna": _from("ATCG"),
    "joiners": _from("\u200d"),
    "minified": _minified,
    "one_letter": _from("a"),
    "spaces": _from(" "),
    "uneven": _uneven,
}


def hostile_text(kind: str, num_chars: int, seed: int = 0) -> str:
    """A text of a kind in `TEXTS`; the same for the same arguments."""
    return TEXTS[kind](num_chars, random.Random(f"{kind} {seed}"))
