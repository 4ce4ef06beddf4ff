"""Measures between a prediction and one gold answer. Pure functions of two strings.

equal          1 when both are the same answer
token_f1       overlap of words, as SQuAD and HotpotQA score it
is_stated      the gold stands in the prediction as whole words, is not denied, and is not one
               of many guesses
says_unknown   the prediction says that there is no answer
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise

from memagent.rewards.text import ARTICLES, answer_key, squad_key, strict_key, words_of

MAX_WORDS = 100
"""A longer prediction is a text, not an answer: that it contains the gold says little."""
MAX_ITEMS = 5
"""More short items than this one after the other are guesses, not an answer."""
ITEM_WORDS = 3
"""Words of an item that counts as short."""
DENIAL_WORDS = 5
"""How many words before the gold can deny it, within its clause."""


def _pattern(text: str) -> re.Pattern[str]:
    """An expression for what `words_of` makes of a text: without apostrophes."""
    return re.compile(text.replace("'", ""))


_DENIALS = """
    not never neither nor cannot without except excluding unlike isn't wasn't aren't weren't don't doesn't
    didn't can't couldn't won't wouldn't hasn't haven't hadn't
"""
_denials = frozenset(_DENIALS.replace("'", "").split())
_second_of_denial = {"than": ("rather", "other"), "of": ("instead",)}
_turns = frozenset({"but", "however", "though", "instead"})
_no_denial_after = frozenset({"only", "just", "merely", "simply", "until"})
_denied_after = _pattern(
    r"(?:(?:is|was|are|were) not|isn't|wasn't|aren't|weren't) (?:\w+ )?"
    r"(?:it|answer|correct|right|true)\b"
    r"|(?:is|was|are|were|would be) (?:\w+ )?(?:wrong|incorrect|false)\b"
)
_clause_end = re.compile(r"(?<=[.;:!?,])\s+|\n+|[()\u2014\u2013]+")
_item_end = re.compile(r"[,;/\n\u2022|]+|\bor\b|\band\b", re.IGNORECASE)
_list_end = re.compile(r"\s*(?:[,;\n]|\band\b|&)\s*", re.IGNORECASE)
_YES_NO = ("yes", "no")
_NO_OVERLAP = frozenset({"yes", "no", "noanswer"})

_TELLS = (
    r"(?:mention|state|specify|provide|give|tell|say|contain|include|indicate|disclose|reveal|list|"
    r"describe|explain|answer|discuss|address|identify|name|support|hold|offer)"
)
_TOLD = (
    r"(?:mentioned|stated|specified|provided|given|told|said|contained|included|indicated|disclosed|"
    r"revealed|listed|described|explained|answered|discussed|addressed|identified|named|supported|"
    r"known|available|answerable|determined|inferred|possible|clear|enough|sufficient|present)"
)
_TEXT = r"(?:text|passage|document|documents|context|memory|article|story|section|sections|notes)"
_unknown_alone = re.compile(
    r"(?:answer )?(?:is )?(?:unknown|unanswerable|undetermined|unspecified|noanswer|no answer|n a|"
    r"none given|not found)"
)
_unknown_said = _pattern(
    rf"\b(?:not|never|isn't|wasn't|aren't|weren't|can't|couldn't) (?:be )?(?:\w+ )?{_TOLD}\b"
    r"|\b(?:cannot|can not|can't|could not|couldn't) be (?:\w+ )?(?:found|answered|determined|known)\b"
    rf"|\b(?:does not|doesn't|do not|don't) (?:\w+ )?{_TELLS}\b"
    rf"|\b{_TEXT} (?:did not|didn't|never) (?:\w+ )?{_TELLS}\b"
    rf"|\b(?:not|isn't|wasn't|aren't) (?:\w+ )?in (?:any )?{_TEXT}\b"
    r"|\b(?:i|we) (?:do not|don't|did not|didn't|cannot|can not|can't|could not|couldn't) (?:\w+ )?"
    r"(?:know|find|determine|tell|answer|say|see)\b"
    r"|\b(?:is|its|are|was|were|remains?) (?:currently |still )?(?:unknown|unanswerable|unclear)\b"
    r"|\bno (?:\w+ )?(?:information|mention|answer|evidence|details?|indication|data)\b"
    r"|\b(?:insufficient|lacks?|missing|without) (?:\w+ )?(?:information|evidence|details?|data)\b"
    r"|\b(?:unable|impossible) to (?:\w+ )?(?:answer|determine|tell|say|find|know)\b"
)


# --- sameness -------------------------------------------------------------------------------------


def equal(prediction: str, gold: str) -> bool:
    """Whether both are the same answer, as `answer_key` sees it. Nothing equals a blank."""
    key, gold_key = answer_key(prediction), answer_key(gold)
    if not key or not gold_key:
        return False
    return key == gold_key or _without_letter_gaps(key) == _without_letter_gaps(gold_key)


def strictly_equal(prediction: str, gold: str) -> bool:
    """Whether both are the same answer, as `strict_key` sees it. Nothing equals a blank."""
    key = strict_key(prediction)
    return bool(key) and key == strict_key(gold)


def squad_equal(prediction: str, gold: str) -> bool:
    """Whether both are the same answer, as `squad_key` sees it. Nothing equals a blank."""
    key = squad_key(prediction)
    return bool(key) and key == squad_key(gold)


def items_of(answer: str) -> list[str]:
    """The items of an answer that lists several."""
    return [item for item in _list_end.split(answer) if item]


def holds_run(items: Sequence[str], wanted: Sequence[str]) -> bool:
    """Whether `wanted` stands in `items`, in order and without gaps; an empty one never does."""
    return bool(wanted) and _first_run(items, wanted, 0) is not None


def token_f1(prediction: str, gold: str) -> float:
    """Harmonic mean of the shares of common words; yes and no overlap with nothing else."""
    key, gold_key = squad_key(prediction), squad_key(gold)
    if key != gold_key and (key in _NO_OVERLAP or gold_key in _NO_OVERLAP):
        return 0.0
    words, gold_words = key.split(), gold_key.split()
    num_common = sum((Counter(words) & Counter(gold_words)).values())
    if num_common == 0:
        return 0.0
    return 2 * num_common / (len(words) + len(gold_words))


def _without_letter_gaps(key: str) -> str:
    """Spider-Man is Spiderman; gaps between digits stay, because 1 2 is not 12."""
    words = key.split(" ")
    parts = [words[0]]
    for before, word in pairwise(words):
        parts.append(word if before[-1:].isalpha() and word[:1].isalpha() else f" {word}")
    return "".join(parts)


# --- containment ----------------------------------------------------------------------------------


def content_words(text: str) -> list[str]:
    """The words of a text without articles, unless there are only articles."""
    words = words_of(text)
    return [word for word in words if word not in ARTICLES] or words


def is_among(words: Sequence[str], gold: str) -> bool:
    """Whether the gold stands among the words of a prediction, whole and in order."""
    wanted = content_words(gold)
    if not ARTICLES.issuperset(wanted):
        words = [word for word in words if word not in ARTICLES]
    return holds_run(words, wanted)


def is_stated(prediction: str, gold: str, *, num_golds: int = 1) -> bool:
    """Whether a prediction states the gold.

    A gold of one character that is the only one must be all of the prediction; yes and no must open
    it. An occurrence that is denied in its clause does not count. Predictions that are too long, or
    list more guesses than `num_golds` explains, state nothing.
    """
    if equal(prediction, gold):
        return True
    wanted = content_words(gold)
    if not wanted or (num_golds == 1 and len(wanted) == 1 and len(wanted[0]) == 1):
        return False
    clauses = [content for clause in _clause_end.split(prediction) if (content := words_of(clause))]
    words, clause_starts = _flat(clauses)
    num_items = num_golds - 1 + len(items_of(gold))
    if len(words) > MAX_WORDS or is_enumeration(prediction, num_golds=num_items):
        return False
    if len(wanted) == 1 and wanted[0] in _YES_NO:
        return words[:1] == wanted
    at = _first_run(words, wanted, 0)
    while at is not None:
        start = clause_starts[at]
        if not _is_denied(words[start:at], words[at + len(wanted) : at + len(wanted) + 6]):
            return True
        at = _first_run(words, wanted, at + 1)
    return False


def is_enumeration(prediction: str, *, num_golds: int = 1) -> bool:
    """Whether a prediction lists clearly more short items in a row than there are answers."""
    longest = run = 0
    for item in _item_end.split(prediction):
        num_words = len(item.split())
        if num_words:
            run = run + 1 if num_words <= ITEM_WORDS else 0
            longest = max(longest, run)
    return longest > MAX_ITEMS + num_golds - 1


def says_unknown(prediction: str) -> bool:
    """Whether a prediction says that the answer is not known or not given, and then gives none."""
    words = words_of(prediction)
    without_articles = " ".join(word for word in words if word not in ARTICLES)
    if _unknown_alone.fullmatch(" ".join(words)) or _unknown_alone.fullmatch(without_articles):
        return True
    if len(words) > MAX_WORDS:
        return False
    found = list(_unknown_said.finditer(without_articles))
    return bool(found) and _turns.isdisjoint(without_articles[found[-1].end() :].split())


def _flat(clauses: list[list[str]]) -> tuple[list[str], list[int]]:
    """The words of all clauses without articles, and for each word where its clause starts."""
    words: list[str] = []
    starts: list[int] = []
    for clause in clauses:
        kept = [word for word in clause if word not in ARTICLES]
        starts += [len(words)] * len(kept)
        words += kept
    return words, starts


def _first_run(items: Sequence[str], wanted: Sequence[str], start: int) -> int | None:
    size = len(wanted)
    for at in range(start, len(items) - size + 1):
        if items[at] == wanted[0] and items[at : at + size] == wanted:
            return at
    return None


def _is_denied(before: list[str], after: list[str]) -> bool:
    if _denied_after.match(" ".join(after)):
        return True
    for back in range(1, min(DENIAL_WORDS, len(before)) + 1):
        word = before[-back]
        if word in _turns:
            return False
        if word in _denials:
            return not (back > 1 and before[-back + 1] in _no_denial_after)
        if before[-back - 1 : -back] and before[-back - 1] in _second_of_denial.get(word, ()):
            return True
    return False
