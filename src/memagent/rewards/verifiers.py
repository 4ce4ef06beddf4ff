"""Graders: a reply and the accepted answers in, a Score out. The same for training, evaluation, CLI.

    >>> grade("lenient", "The answer is **Paris**.", ["Paris", "City of Light"])
    Score(value=1.0, extracted='**Paris**.', reason="is 'Paris'")

`match="any"` asks for one of the answers, `match="all"` for each of them; then the value is the share
that was given. Graders are pure and take microseconds. docs/grading.md has their rules, and cases
that are easy to get wrong.

A new grader is a function here, a line in `GRADERS`, and rows in the table of docs/grading.md.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from memagent.errors import ConfigError, DataError
from memagent.names import hint
from memagent.rewards import metrics
from memagent.rewards.text import (
    answer_candidates,
    answer_key,
    last_boxed,
    last_boxes,
    last_phrase,
    original_boxed,
    original_key,
    squad_key,
    strict_key,
    without_reasoning,
    words_of,
)

Match = Literal["any", "all"]

STRICT_CHARS = 300
"""The training verifier looks at so many characters at the end of a reply: an answer comes last."""
SHOWN_CHARS = 60
"""Length to which an answer is cut in a reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """A grader's verdict on one reply.

    Example: Score(value=0.5, extracted="6, 11", reason="2 of 4 found")
    """

    value: float
    """From 0 to 1; rounded by `original_ruler` alone."""
    extracted: str | None
    """What of the reply was graded; None when nothing could be found to grade."""
    reason: str
    """Why, in a few words."""


Grader = Callable[[str, Sequence[str], Match], Score]


def grade(
    name: str,
    reply: str,
    answers: Sequence[str],
    match: Match = "any",
    *,
    max_tokens: int | None = None,
) -> Score:
    """The verdict of the grader `name`. An accepted answer that is blank is never met.

    With `max_tokens` only so much of the answer counts, without what precedes it (`limit_answer`); that
    never raises a score.
    """
    grader, answers = open_grader(name), _checked(answers, name)
    whole = grader(reply, answers, match)
    if max_tokens is None or not whole.value:
        return whole
    parts = [grader(text, answers, match) for text in limit_answer(reply, max_tokens).texts]
    return min(whole, max(parts, key=_value), key=_value)


def further_scores(
    reply: str,
    answers: Sequence[str],
    match: Match,
    graders: Sequence[str],
    *,
    max_tokens: int | None = None,
) -> dict[str, float]:
    """The score by each of several graders; those that need an accepted answer only where there is one."""
    return {
        name: grade(name, reply, answers, match, max_tokens=max_tokens).value
        for name in graders
        if answers or name in NEEDS_NO_ANSWERS
    }


def open_grader(name: str) -> Grader:
    """A grader by name."""
    if name not in GRADERS:
        raise ConfigError(f"there is no grader {name!r}; {hint(name, GRADERS)}")
    return GRADERS[name]


# --- one rule each --------------------------------------------------------------------------------


def strict(reply: str, answers: Sequence[str], match: Match) -> Score:
    r"""Training: the last `\boxed{}`, within the last 300 characters, equal but for case and spaces."""
    boxed = last_boxed(without_reasoning(reply)[-STRICT_CHARS:])
    if boxed is None:
        return _nothing(f"no closed \\boxed{{}} in the last {STRICT_CHARS} characters")
    if match == "any":
        return _best([boxed], answers, metrics.strictly_equal)
    items = [strict_key(item) for item in metrics.items_of(boxed)]
    return _share(boxed, answers, lambda gold: _lists(items, gold, strict_key))


def lenient(reply: str, answers: Sequence[str], match: Match) -> Score:
    """Test: the answer by people's standards, wherever the reply puts it."""
    candidates = answer_candidates(reply)
    if not candidates:
        return _nothing("an empty answer")
    if match == "any":
        return _best(candidates, answers, metrics.equal)
    items = [answer_key(item) for item in metrics.items_of(candidates[0])]
    words = words_of(candidates[0])
    return _share(
        candidates[0],
        answers,
        lambda gold: _lists(items, gold, answer_key) or metrics.is_among(words, gold),
    )


def exact(reply: str, answers: Sequence[str], match: Match) -> Score:
    """Exact match as SQuAD and HotpotQA score it, after the same extraction as `lenient`."""
    candidates = answer_candidates(reply)
    if not candidates:
        return _nothing("an empty answer")
    if match == "any":
        return _best(candidates, answers, metrics.squad_equal)
    items = [squad_key(item) for item in metrics.items_of(candidates[0])]
    return _share(candidates[0], answers, lambda gold: _lists(items, gold, squad_key))


def f1(reply: str, answers: Sequence[str], match: Match) -> Score:
    """Overlap of words as SQuAD and HotpotQA score it, after the same extraction as `lenient`."""
    candidates = answer_candidates(reply)
    if not candidates:
        return _nothing("an empty answer")
    values = [
        max(metrics.token_f1(candidate, gold) for candidate in candidates) for gold in answers
    ]
    value = max(values) if match == "any" else sum(values) / len(values)
    return Score(value=value, extracted=candidates[0], reason=f"f1 {value:.2f}")


def contains(reply: str, answers: Sequence[str], match: Match) -> Score:
    """The gold is stated: whole words, not denied, not one of many guesses (`metrics.is_stated`)."""
    candidates = answer_candidates(reply)
    if not candidates:
        return _nothing("an empty answer")
    prediction, num_golds = candidates[0], len(answers) if match == "all" else 1

    def is_met(gold: str) -> bool:
        return metrics.is_stated(prediction, gold, num_golds=num_golds)

    if match == "all":
        return _share(prediction, answers, is_met)
    for gold in answers:
        if is_met(gold):
            return Score(value=1.0, extracted=prediction, reason=f"states {_shown(gold)}")
    is_guess = metrics.is_enumeration(prediction)
    return Score(
        value=0.0, extracted=prediction, reason="a list of guesses" if is_guess else "not stated"
    )


def recall(reply: str, answers: Sequence[str], match: Match) -> Score:
    """Share of the golds that stand anywhere in the reply as whole words, whatever `match` says."""
    said = without_reasoning(reply)
    words = words_of(said)
    return _share(said or None, answers, lambda gold: metrics.is_among(words, gold))


def ruler_all(reply: str, answers: Sequence[str], match: Match) -> Score:
    """RULER's string_match_all: share of the golds that are in the reply, as substrings."""
    said = without_reasoning(reply)
    lowered = said.lower()
    return _share(said or None, answers, lambda gold: bool(gold) and gold.lower() in lowered)


def ruler_part(reply: str, answers: Sequence[str], match: Match) -> Score:
    """RULER's string_match_part: one of the golds is in the reply, as a substring."""
    said = without_reasoning(reply)
    lowered = said.lower()
    for gold in answers:
        if gold and gold.lower() in lowered:
            return Score(value=1.0, extracted=said, reason=f"has {_shown(gold)}")
    return Score(value=0.0, extracted=said or None, reason="none found")


def unanswerable(reply: str, answers: Sequence[str], match: Match) -> Score:
    """For questions without an answer: the reply says that it is not known. Golds do not count."""
    candidates = answer_candidates(reply)
    if not candidates:
        return _nothing("an empty answer")
    if metrics.says_unknown(candidates[0]):
        return Score(value=1.0, extracted=candidates[0], reason="says it is unknown")
    return Score(value=0.0, extracted=candidates[0], reason="gives an answer")


# --- those of the original project, flaws included: for comparison with published numbers only -----


def original_sub_em(reply: str, answers: Sequence[str], match: Match) -> Score:
    """The published score of questions (HotpotQA, SQuAD), its degenerate wins included.

    What follows the last lower-case "the answer is"; the first gold only; containment either way.
    """
    said = _after_phrase(reply)
    return _nothing('no "the answer is"') if said is None else _original(said, answers[0])


def original_sub_em_boxed(reply: str, answers: Sequence[str], match: Match) -> Score:
    r"""As `original_sub_em`, for prompts that request `\boxed{}`."""
    boxed = last_boxed(reply.rpartition("</think>")[2])
    return _nothing("no \\boxed{}") if boxed is None else _original(boxed, answers[0])


def original_ruler(reply: str, answers: Sequence[str], match: Match) -> Score:
    """The published score of RULER's other tasks: share of the golds after "the answer is", to 0.01."""
    said = _after_phrase(reply)
    return _nothing('no "the answer is"') if said is None else _original_share(said, answers)


def original_ruler_boxed(reply: str, answers: Sequence[str], match: Match) -> Score:
    r"""As `original_ruler`, for prompts that request `\boxed{}`."""
    boxed = last_boxed(reply.rpartition("</think>")[2])
    return _nothing("no \\boxed{}") if boxed is None else _original_share(boxed, answers)


def original_reward(reply: str, answers: Sequence[str], match: Match) -> Score:
    r"""The reward of the published checkpoints: the last `\boxed{}` is one of the golds, but for case.

    Of the last 300 characters, reasoning included; one gold is enough, whatever `match` says.
    """
    boxed = original_boxed(reply[-STRICT_CHARS:].lower())
    if boxed is None:
        return _nothing(f"no closed \\boxed{{}} in the last {STRICT_CHARS} characters")
    golds = [gold for gold in answers if gold.strip()]
    return _best([boxed], golds, lambda one, gold: original_key(one) == original_key(gold.lower()))


def original_contains(reply: str, answers: Sequence[str], match: Match) -> Score:
    """The other rule of the original's closed-book filter: a gold is anywhere in the reply."""
    lowered = reply.lower()
    for gold in answers:
        if gold.strip() and gold.lower() in lowered:
            return Score(value=1.0, extracted=reply, reason=f"has {_shown(gold)}")
    return Score(value=0.0, extracted=reply or None, reason="none found")


GRADERS: dict[str, Grader] = {
    "strict": strict,
    "lenient": lenient,
    "exact": exact,
    "f1": f1,
    "contains": contains,
    "recall": recall,
    "ruler_all": ruler_all,
    "ruler_part": ruler_part,
    "unanswerable": unanswerable,
    "original_sub_em": original_sub_em,
    "original_sub_em_boxed": original_sub_em_boxed,
    "original_ruler": original_ruler,
    "original_ruler_boxed": original_ruler_boxed,
    "original_reward": original_reward,
    "original_contains": original_contains,
}
"""Name to grader."""

NEEDS_NO_ANSWERS = frozenset({"unanswerable"})
"""Graders for questions that have no answer."""


# --- what they share ------------------------------------------------------------------------------


def _value(score: Score) -> float:
    return score.value


def _checked(answers: Sequence[str], name: str) -> Sequence[str]:
    if isinstance(answers, str):  # it would be taken apart into letters
        raise DataError("accepted answers are a list of strings, not one string")
    if not answers and name not in NEEDS_NO_ANSWERS:
        raise DataError(f"{name} needs an accepted answer; without one, the grader is unanswerable")
    return answers


def _best(
    candidates: Sequence[str], answers: Sequence[str], is_same: Callable[[str, str], bool]
) -> Score:
    for candidate in candidates:
        for gold in answers:
            if is_same(candidate, gold):
                return Score(value=1.0, extracted=candidate, reason=f"is {_shown(gold)}")
    return Score(value=0.0, extracted=candidates[0], reason="another answer")


def _share(extracted: str | None, answers: Sequence[str], is_met: Callable[[str], bool]) -> Score:
    num_met = sum(map(is_met, answers))
    reason = f"{num_met} of {len(answers)} found"
    return Score(value=num_met / len(answers), extracted=extracted, reason=reason)


def _lists(items: Sequence[str], gold: str, key: Callable[[str], str]) -> bool:
    """Whether a gold is among the items of an answer; one with commas is several items in a row."""
    return metrics.holds_run(items, [key(item) for item in metrics.items_of(gold)]) and bool(
        key(gold)
    )


def _original(prediction: str, gold: str) -> Score:
    if not prediction:
        return _nothing("an empty prediction")
    key, gold_key = squad_key(prediction), squad_key(gold)
    is_in = gold_key in key or key in gold_key
    reason = "contains or is contained" if is_in else "neither contains the other"
    return Score(value=float(is_in), extracted=prediction, reason=reason)


def _original_share(prediction: str, golds: Sequence[str]) -> Score:
    if not prediction:
        return _nothing("an empty prediction")
    lowered = prediction.lower()
    score = _share(prediction, golds, lambda gold: bool(gold.strip()) and gold.lower() in lowered)
    return replace(score, value=round(score.value, 2))


def _after_phrase(reply: str) -> str | None:
    """What the original's evaluation takes for the answer; None without the phrase it looks for."""
    _, phrase, said = reply.rpartition("</think>")[2].replace("*", "").rpartition("the answer is")
    return said.strip().strip(".") if phrase else None


def _nothing(reason: str) -> Score:
    return Score(value=0.0, extracted=None, reason=reason)


def _shown(gold: str) -> str:
    return repr(gold if len(gold) <= SHOWN_CHARS else gold[: SHOWN_CHARS - 3] + "...")


# --- the part of a reply that a task with a limit grades ------------------------------------------

#     reply ──▶ fits the limit ──────────────▶ all of it
#               has a \boxed{} ──────────────▶ the last box, and boxes before it while they fit
#               has "the answer is" ─────────▶ what follows it, up to the limit
#               marks no answer ─────────────▶ its start or its end up to the limit, whichever scores higher
#
# RULER stops a model after so many tokens, 50 where it asks for three words: a reply cannot score by listing every
# word there is. A model that reasons first would score nothing that way, so the limit here counts the answer alone.

_token = re.compile(r"[^\W\d_]{1,5}|\d|[^\w\s]|_")


class LimitedAnswer(NamedTuple):
    """What of a reply is graded."""

    texts: tuple[str, ...]
    """The best score of these counts."""
    num_tokens: int
    """Tokens of the answer before it was cut."""
    was_cut: bool


def count_tokens(text: str) -> int:
    """Tokens of an answer: digits, signs, and up to five letters of a word each.

    About what tokenizers of models count, and the same for every model.
    """
    return sum(1 for _ in _token.finditer(text))


def limit_answer(reply: str, max_tokens: int) -> LimitedAnswer:
    """The answer in a reply, cut to `max_tokens`; the marks that graders look for stay.

    >>> limit_answer("Counting them gives me this: the answer is red, green and blue.", 3).texts
    ('the answer is red, green',)
    """
    said = without_reasoning(reply)
    num_tokens = count_tokens(said)
    if num_tokens <= max_tokens:
        return LimitedAnswer((reply,), num_tokens, was_cut=False)
    if boxes := last_boxes(said):
        return _limit_boxes(boxes, max_tokens)
    if phrase := last_phrase(said):
        start, answer = said[phrase.start() : phrase.end()], said[phrase.end() :]
        text, num_tokens, was_cut = _shortened(answer, max_tokens)
        return LimitedAnswer((start + text,), num_tokens, was_cut)
    starts = [token.start() for token in _token.finditer(said)]
    head, tail = said[: _end_of(said, max_tokens)], said[starts[-max_tokens] :]
    return LimitedAnswer((head, tail), num_tokens, was_cut=True)


def _limit_boxes(boxes: list[str], max_tokens: int) -> LimitedAnswer:
    *earlier, last = boxes
    text, num_tokens, was_cut = _shortened(last, max_tokens)
    kept = [text + "}" * _num_open(text)]
    for box in reversed(earlier):
        with_box = num_tokens + count_tokens(box)
        if was_cut or with_box > max_tokens:
            break
        kept.insert(0, box)
        num_tokens = with_box
    return LimitedAnswer((", ".join(f"\\boxed{{{box}}}" for box in kept),), num_tokens, was_cut)


def _shortened(text: str, max_tokens: int) -> tuple[str, int, bool]:
    num_tokens = count_tokens(text)
    if num_tokens <= max_tokens:
        return text, num_tokens, False
    return text[: _end_of(text, max_tokens)], num_tokens, True


def _end_of(text: str, max_tokens: int) -> int:
    """Where the first so many tokens end."""
    for number, token in enumerate(_token.finditer(text), start=1):
        if number == max_tokens:
            return token.end()
    return len(text)


def _num_open(text: str) -> int:
    """Braces that a cut left open."""
    depth = 0
    for brace in re.findall(r"\\.|[{}]", text, re.DOTALL):
        depth += {"{": 1, "}": -1}.get(brace, 0)
    return max(depth, 0)
