"""Text for grading: what of a reply is the answer, and when two answers are the same.

    reply ──▶ without_reasoning ──▶ last_boxed │ after "the answer is" │ all of it ──▶ candidates
    candidate, gold ──▶ answer_key ──▶ equal?

Ways to write an answer down for comparison, from the strictest to the most forgiving:

    original_key  as the original project's reward: blanks and LaTeX spacing do not count
    strict_key    case, spaces and LaTeX spacing do not count
    squad_key     as SQuAD and HotpotQA: case, ASCII punctuation, articles, spaces do not count
    answer_key    also accents, typographic signs, markup and the way numbers are written

    >>> strict_key("The  Seine")
    'theseine'
    >>> squad_key("The Café, Paris.")
    'café paris'
    >>> answer_key("the **Café** — Paris (1,200.0)")
    'cafe paris 1200'
"""

from __future__ import annotations

import re
import string
import unicodedata
from collections import deque

ARTICLES = frozenset({"a", "an", "the"})
_NUMBERS = "zero one two three four five six seven eight nine ten eleven twelve"
NUMBER_WORDS = {word: str(number) for number, word in enumerate(_NUMBERS.split(" "))}

MAX_BOXES = 32
"""If a reply has more boxes, only the last ones are looked at."""

_reasoning_tag = re.compile(r"<(/?)(?:think|thinking|thought|reasoning)>", re.IGNORECASE)
_box = re.compile(r"\\(?:boxed|fbox)(?![a-zA-Z])")
_brace = re.compile(r"\\.|[{}]", re.DOTALL)
_said = re.compile(r"(?:\bthe )?\banswer[*_]*(?:\s+is\b|\s*:)[*_]*[\s:]*", re.IGNORECASE)
_sentence_end = re.compile(r"[.!?](?=\s)")

_strict_noise = re.compile(r"\\[!,;: ]|\\left|\\right|\^\{?\\circ\}?|°|\\?[$%]|\s+")
_strict_frac = re.compile(r"\\[td]frac")
_escape = re.compile(r"\\([%$&#_])")
_wrapper = re.compile(r"\\(?:text(?:bf|it|rm)?|math(?:rm|bf|it)|emph)\s*\{([^{}]*)\}")

_ORIGINAL_CHANGES = (
    *(("\n", ""), ("\\!", ""), ("\\\\", "\\"), ("tfrac", "frac"), ("dfrac", "frac")),
    *((command, "") for command in ("\\left", "\\right", "^{\\circ}", "^\\circ", "\\$", "\\%")),
    *((" .", " 0."), ("{.", "{0."), (" ", "")),
)
"""What the original's reward replaces before it compares, in this order."""

_squad_articles = re.compile(r"\b(a|an|the)\b")
_squad_punctuation = str.maketrans("", "", string.punctuation)

_accent = re.compile("[\u0300-\u036f]")
_thousands = re.compile(r"(?<![\w.,])\d{1,3}(?:[,\u2009\u202f]\d{3})+(?!\d|,\d)", re.ASCII)
_decimal = re.compile(r"(?<!\w)(?<!\d\.)(\d+)\.(\d+)(?!\d|\.\d)")
_inner_dot = re.compile(r"(?<=\d)\.(?=\d)")
_minus = re.compile(r"(?<![\w)\]])-(?=\d)")
_initials = re.compile(r"\b(?:[^\W\d_]\.){2,}")
_fraction = re.compile(r"\\[td]?frac\s*\{(\w+)\}\s*\{(\w+)\}")
_name_sign = re.compile(r"(?<=[^\W\d_])[+#]+(?![\w+#])")
_KEPT = {".": "\ue000", "-": "\ue001", "+": "\ue002", "#": "\ue003"}
"""Private characters that stand for signs to keep while other punctuation is removed."""


# --- what of a reply is the answer ----------------------------------------------------------------


def without_reasoning(reply: str) -> str:
    """The reply without its reasoning blocks.

    A closing tag without an opening one ends reasoning too, and an opening tag without a closing one
    means that all the rest is reasoning.
    """
    if "<" not in reply:
        return reply.strip()
    kept: list[str] = []
    start, is_reasoning = 0, False
    for tag in _reasoning_tag.finditer(reply):
        is_closing = bool(tag[1])
        if is_closing and not is_reasoning:
            kept.clear()
        elif is_reasoning and not is_closing:
            continue
        elif not is_closing:
            kept.append(reply[start : tag.start()])
        start, is_reasoning = tag.end(), not is_closing
    if not is_reasoning:
        kept.append(reply[start:])
    return "".join(kept).strip()


def last_boxed(text: str) -> str | None:
    r"""What stands in the last `\boxed{...}`; None where there is none or it is not closed.

    `\fbox` counts as well, and `\boxed 42` without braces up to a `$` or the end of its line.
    """
    box = _last_match(_box, text)
    return _content(text, box.end()) if box else None


def unboxed(text: str, *, is_asked: bool = False) -> str:
    r"""The answer of a reply as people read it: what stands in its box, without LaTeX around it.

    Where the prompt asked for a box (`is_asked`), everything else of the reply is explanation, and several boxes on
    its last line with one are several answers. Otherwise only a reply that is nothing but a box is unboxed.

        >>> unboxed(r"It was cast in \boxed{\text{Paris}}.", is_asked=True)
        'Paris'
    """
    content = last_boxed(text)
    if content is None or not content.strip():
        return text
    if not is_asked:
        return plain_text(content) if text.strip(" \t\r\n$.") == f"\\boxed{{{content}}}" else text
    line = next(line for line in reversed(text.splitlines()) if _box.search(line))
    boxes = [box.strip() for box in last_boxes(line)] or [content.strip()]
    return ", ".join(dict.fromkeys(plain_text(box) for box in boxes if box))


def plain_text(latex: str) -> str:
    r"""What stands in a box without commands for text and without escapes: `\text{5\%}` is 5%."""
    return _escape.sub(r"\1", _wrapper.sub(r"\1", latex)).strip()


def last_boxes(text: str) -> list[str]:
    """What stands in the last boxes of a text, in order; none where the last is not closed."""
    ends = deque((box.end() for box in _box.finditer(text)), maxlen=MAX_BOXES)
    contents = [_content(text, end) for end in ends]
    if not contents or contents[-1] is None:
        return []
    return [content for content in contents if content is not None]


def last_phrase(text: str) -> re.Match[str] | None:
    """The last "the answer is" or "answer:" of a text that is followed by something."""
    phrase = _last_match(_said, text)
    return phrase if phrase and text[phrase.end() :].strip() else None


def answer_candidates(reply: str) -> tuple[str, ...]:
    r"""What a reply may have meant as its answer, most likely first; empty for an empty reply.

    The last box; else what follows the last "answer is" or "answer:", its line or its first
    sentence; else the whole reply or its last line.
    """
    text = without_reasoning(reply)
    boxed = last_boxed(text)
    if boxed is not None:
        return (boxed.strip(),) if boxed.strip() else ()
    if phrase := last_phrase(text):
        line = text[phrase.end() :].strip().splitlines()[0].strip()
        sentence = _sentence_end.split(line, maxsplit=1)[0].strip()
        return _distinct(line, sentence)
    if not text:
        return ()
    return _distinct(text, text.splitlines()[-1].strip())


def _last_match(pattern: re.Pattern[str], text: str) -> re.Match[str] | None:
    last = None
    for last in pattern.finditer(text):  # noqa: B007 - one at a time: there may be very many
        pass
    return last


def _distinct(first: str, second: str) -> tuple[str, ...]:
    return (first,) if second == first or not second else (first, second)


def _content(text: str, start: int) -> str | None:
    """The group that opens at or after `start`, or a bare word where no group does."""
    after = text[start:].lstrip(" ")
    if not after.startswith("{"):
        if after == text[start:]:
            return None
        return re.split(r"[$\n]", after, maxsplit=1)[0].strip() or None
    depth = 0
    for brace in _brace.finditer(after):
        if brace[0] == "{":
            depth += 1
        elif brace[0] == "}":
            depth -= 1
            if depth == 0:
                return _unwrapped(after[1 : brace.start()])
    return None


def _unwrapped(content: str) -> str:
    """Without a second pair of braces around all of it, which some prompts provoke."""
    inner = content.strip()
    if not (inner.startswith("{") and inner.endswith("}")):
        return content
    depth = 0
    for brace in _brace.finditer(inner):
        depth += {"{": 1, "}": -1}.get(brace[0], 0)
        if depth == 0:
            return inner[1:-1] if brace.end() == len(inner) else content
    return content


def original_boxed(text: str) -> str | None:
    r"""As `last_boxed`, by the rule of the original's reward.

    A `\boxed` followed by a blank anywhere wins, up to a `$`; else the last one must open a group at once.
    """
    if "\\boxed " in text:
        return text.rpartition("\\boxed ")[2].partition("$")[0]
    _, command, after = text.rpartition("\\boxed")
    if not command or not after.startswith("{"):
        return None
    depth = 0
    for at, character in enumerate(after):
        depth += {"{": 1, "}": -1}.get(character, 0)
        if depth == 0:
            return after[1:at]
    return None


# --- when two answers are the same ----------------------------------------------------------------


def strict_key(text: str) -> str:
    """An answer for the training verifier: articles and punctuation count, case and spaces do not."""
    text = text.casefold()
    if "\\" not in text:
        return _strict_noise.sub("", text)
    # until nothing changes: what is left of `\\le\\!ft` is a command itself
    while (shorter := _strict_noise.sub("", _wrapper.sub(r"\1", text))) != text:
        text = shorter
    return _strict_frac.sub(r"\\frac", text)


def original_key(text: str) -> str:
    """An answer as the original's reward compares it: LaTeX spacing and blanks do not count."""
    for old, new in _ORIGINAL_CHANGES:
        text = text.replace(old, new)
    return text


def squad_key(text: str) -> str:
    """An answer as the SQuAD and HotpotQA scripts compare it; articles alone leave nothing."""
    return " ".join(_squad_articles.sub(" ", text.lower().translate(_squad_punctuation)).split())


def answer_key(text: str) -> str:
    """An answer for comparison by people's standards.

    Never empty unless the text is blank: an answer of articles alone keeps them, one of signs alone
    keeps the signs. A number word that is the whole answer becomes the number.
    """
    words = words_of(text)
    key = " ".join([word for word in words if word not in ARTICLES] or words)
    return NUMBER_WORDS.get(key, key) or "".join(_folded(text).split()) or text.strip()


def words_of(text: str) -> list[str]:
    """The words of a text, articles included: folded, without punctuation, numbers in one form."""
    text = _folded(text).replace("'", "")
    if "\\" in text:
        text = _wrapper.sub(r"\1", _fraction.sub(r"\1/\2", text))
    if "." in text:
        text = _initials.sub(lambda match: match[0].replace(".", ""), text)
    if "+" in text or "#" in text:  # C++ is not C
        text = _name_sign.sub(lambda match: "".join(_KEPT[sign] for sign in match[0]), text)
    if not text.isalpha() and any(map(str.isdecimal, text)):
        text = _plain_numbers(text)
    return text.translate(_separators).split()


def _folded(text: str) -> str:
    """Without case, accents and typographic variants of characters."""
    if text.isascii():
        return text.lower()
    text = _thousands.sub(_joined, text)  # before narrow spaces become plain ones
    text = unicodedata.normalize("NFKD", unicodedata.normalize("NFKD", text).casefold())
    return unicodedata.normalize("NFC", _accent.sub("", text)).translate(_plain_signs)


def _plain_numbers(text: str) -> str:
    """Numbers without thousands separators and trailing zeros, their dots and minus signs marked."""
    text = _thousands.sub(_joined, text)
    text = _decimal.sub(_shortest, text)
    return _minus.sub(_KEPT["-"], _inner_dot.sub(_KEPT["."], text))


def _joined(match: re.Match[str]) -> str:
    return "".join(filter(str.isdecimal, match[0]))


def _shortest(match: re.Match[str]) -> str:
    digits = match[2].rstrip("0")
    return f"{match[1]}.{digits}" if digits else match[1]


class _Separators(dict[int, str]):
    """What becomes of each character, worked out when it is first met: signs become spaces."""

    def __missing__(self, code: int) -> str:
        character = chr(code)
        is_sign = unicodedata.category(character)[0] in "PSZC"
        self[code] = " " if is_sign else character
        return self[code]


_separators = _Separators(
    {ord("&"): " and ", ord("%"): " percent ", **{ord(kept): sign for sign, kept in _KEPT.items()}}
)
_plain_signs = str.maketrans(
    {
        **dict.fromkeys("\u2018\u2019\u201b\u02bc\u00b4`", "'"),
        **dict.fromkeys("\u2010\u2011\u2012\u2212", "-"),
    }
)
