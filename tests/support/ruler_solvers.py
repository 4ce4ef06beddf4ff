"""Solvers for RULER's made-up tasks: they see the text and the question, and nothing else.

solve("ruler/vt", text, question) == {"QWXZA", "LMNOP", ...}
"""

import re
from collections import Counter

NEEDLE = re.compile(r"One secret (\w+) of (\S+) is (\S+)\.(?=\s|$)")
NEEDLE_QUESTION = re.compile(
    r"^What (?:is|are all) the secret (\w+?)s? of (.+) that the text gives\?$"
)
ASSIGNMENT = re.compile(r"\bSet ([A-Z]+) = (\w+)\.")
LISTED = re.compile(r"(\d+)\. (\S+)")


def solve(task: str, text: str, question: str) -> set[str]:
    """The answers to a question, derived from the text."""
    family = task.removeprefix("ruler/").partition("_")[0]
    return {"niah": values, "vt": variables, "cwe": common, "fwe": frequent}[family](text, question)


def values(text: str, question: str) -> set[str]:
    asked = NEEDLE_QUESTION.match(question)
    assert asked is not None, question
    noun, keys = asked[1], re.split(r", | and ", asked[2])
    return {value for kind, key, value in NEEDLE.findall(text) if kind == noun and key in keys}


def variables(text: str, question: str) -> set[str]:
    """Runs the assignments in their order: a copy takes what its source holds by then."""
    value = re.findall(r"end up with the value (\d+)\?", question)[-1]
    held: dict[str, str] = {}
    for name, right in ASSIGNMENT.findall(text):
        held[name] = right if right.isdigit() else held[right]
    return {name for name, number in held.items() if number == value}


def common(text: str, question: str) -> set[str]:
    count = int(re.findall(r"Which (\d+) words", question)[0])
    return _commonest([word for _, word in LISTED.findall(text)], count)


def frequent(text: str, question: str) -> set[str]:
    assert "three coded words" in question
    return _commonest([word for word in text.split() if word.strip(".")], 3)


def _commonest(words: list[str], count: int) -> set[str]:
    ranked = Counter(words).most_common(count + 1)
    assert len(ranked) == count or ranked[count - 1][1] > ranked[count][1], "a tie"
    return {word for word, _ in ranked[:count]}
