"""Solvers of the tasks beyond RULER. They read text and question, and nothing else.

    solve("beyond/counting", text, question)                 from the whole text
    solve_from_memory("beyond/counting", memory, question)   from the last memory of a trace

They know how facts are worded, from reading, and share no code with what makes them.
"""

import re
from collections import defaultdict
from collections.abc import Callable

NOT_TOLD = "The text does not tell."
NAME = r"[A-Z][a-z]+ [A-Z][a-z]+"
DAY = r"\d+ [A-Z][a-z]+"


def sentences(text: str) -> list[str]:
    return re.split(r"(?<=[.!?])\s+", text)


def matched(pattern: str, question: str) -> tuple[str, ...]:
    found = re.fullmatch(pattern, question)
    assert found, f"not a question of this task: {question}"
    return found.groups()


# --- from the text --------------------------------------------------------------------------------


def counting(text: str, question: str) -> str:
    name, place = matched(r"How many times did (.+) visit (.+)\? Answer with a number\.", question)
    num = 0
    for sentence in sentences(text):
        is_about = name in sentence and place in sentence
        if is_about and re.search(r"\bvisited\b|\bpaid a visit\b", sentence):
            num += 1
    return str(num)


def sales(text: str, goods: str) -> list[tuple[str, int]]:
    active = re.compile(rf"({NAME}) sold (\d+) {goods}\b")
    passive = re.compile(rf"(\d+) {goods} were sold by ({NAME})")
    found = []
    for sentence in sentences(text):
        if match := active.search(sentence):
            found.append((match[1], int(match[2])))
        elif match := passive.search(sentence):
            found.append((match[2], int(match[1])))
    return found


def aggregation(text: str, question: str) -> str:
    if question.startswith("Who"):
        (goods,) = matched(r"Who sold the most (.+) in all\?", question)
        totals: dict[str, int] = defaultdict(int)
        for name, num in sales(text, goods):
            totals[name] += num
        return max(totals, key=totals.__getitem__)
    if question.startswith("How many"):
        goods, asked = matched(
            rf"How many (.+) did ({NAME}) sell in all\? Answer with a number\.", question
        )
        return str(sum(num for name, num in sales(text, goods) if name == asked))
    pattern = rf"What is the largest number of (.+) that ({NAME}) sold at once\?"
    goods, asked = matched(pattern, question)
    return str(max(num for name, num in sales(text, goods) if name == asked))


def two_hop(text: str, question: str) -> str:
    office, name, link = matched(rf"Who is the (.+) of the town where ({NAME}) (.+)\?", question)
    (town,) = set(re.findall(rf"{name} {link} in (\w+)\.", text))
    title = f"(?:[Tt]he )?{office}"
    holders = re.findall(rf"{title} of {town} is ({NAME})\.", text)
    holders += re.findall(rf"({NAME}) is the {office} of {town}\.", text)
    holders += re.findall(rf"In {town}, the post of {office} is held by ({NAME})\.", text)
    (holder,) = set(holders)
    return str(holder)


def corrections(text: str, question: str) -> str:
    if question.startswith("On which days"):
        (things,) = matched(r"On which days do these take place: (.+)\?", question)
        return ", ".join(last_day(text, thing.removeprefix("the ")) for thing in things.split("; "))
    (what,) = matched(r"On which day does the (.+) take place\?", question)
    return last_day(text, what)


def last_day(text: str, what: str) -> str:
    day = NOT_TOLD
    for sentence in sentences(text):
        is_idle = "turned down" in sentence or "not true" in sentence
        if f"{what} " in sentence and not is_idle:
            day = re.findall(DAY, sentence)[-1]
    return day


PLAIN: list[tuple[str, tuple[str, ...]]] = [
    (
        r"Where was (.+) born\?",
        (
            r"{0} was born in (\w+)\.",
            r"The birthplace of {0} is (\w+)\.",
            r"It was in (\w+) that {0} was born\.",
        ),
    ),
    (
        r"Which code opens the locker of (.+)\?",
        (
            r"The locker of {0} opens with the code (\d+)\.",
            r"The code (\d+) opens the locker of {0}\.",
            r"{0} opens a locker with the code (\d+)\.",
        ),
    ),
    (
        r"On which day does (.+) get married\?",
        (
            rf"{{0}} gets married on ({DAY})\.",
            rf"The wedding of {{0}} is on ({DAY})\.",
            rf"On ({DAY}) the wedding of {{0}} takes place\.",
        ),
    ),
    (
        r"What colour is the front door of (.+)\?",
        (
            r"The front door of {0} is (\w+)\.",
            r"{0} lives behind a (\w+) front door\.",
            r"{0} has a front door whose colour is (\w+)\.",
        ),
    ),
    (
        r"Who is (the .+ of \w+)\?",
        (
            rf"(?i:{{0}}) is ({NAME})\.",
            rf"({NAME}) has been appointed as {{0}}\.",
            rf"The duties of {{0}} are in the hands of ({NAME})\.",
        ),
    ),
]


def plain(text: str, question: str) -> str:
    for asked, statements in PLAIN:
        if not (match := re.fullmatch(asked, question)):
            continue
        found = set()
        for statement in statements:
            found |= set(re.findall(statement.format(re.escape(match[1])), text))
        assert len(found) <= 1, f"{question} has several answers: {found}"
        return str(found.pop()) if found else NOT_TOLD
    raise AssertionError(f"not a question of this task: {question}")


ORDINALS = [
    "first",
    "second",
    "third",
    "fourth",
    "fifth",
    "sixth",
    "seventh",
    "eighth",
    "ninth",
    "tenth",
    "eleventh",
    "twelfth",
    "thirteenth",
    "fourteenth",
    "fifteenth",
    "sixteenth",
    "seventeenth",
    "eighteenth",
    "nineteenth",
    "twentieth",
]


def coreference(text: str, question: str) -> str:
    ordinal, kind, topic = matched(r".*Give the ([\w-]+) (\w+) about (.+), counted .*", question)
    asked = f"User: Please write a {kind} about {topic}.\nWriter: "
    items = [entry.removeprefix(asked) for entry in text.split("\n\n") if entry.startswith(asked)]
    tens, _, unit = ordinal.rpartition("-")
    last = {"thirtieth": 29, "fortieth": 39}
    units = {**{word: number for number, word in enumerate(ORDINALS)}, **last}
    return items[{"": 0, "twenty": 20, "thirty": 30}[tens] + units[unit]]


SOLVERS: dict[str, Callable[[str, str], str]] = {
    "beyond/coreference": coreference,
    "beyond/counting": counting,
    "beyond/aggregation": aggregation,
    "beyond/two_hop": two_hop,
    "beyond/corrections": corrections,
    "beyond/unanswerable": plain,
    "beyond/injection": plain,
}


def solve(task: str, text: str, question: str) -> str:
    return SOLVERS[task](text, question)


# --- from a memory --------------------------------------------------------------------------------


def solve_from_memory(task: str, memory: str, question: str) -> str:
    if task == "beyond/coreference":
        return memory.split("\n", 1)[1]
    if task == "beyond/counting":
        return memory.rstrip(".").rsplit(" ", 1)[1]
    if task == "beyond/aggregation":
        state = memory.rstrip(".").rsplit(": ", 1)[1]
        if not question.startswith("Who"):
            return state
        totals = dict(re.findall(rf"({NAME}) (\d+)", state))
        return max(totals, key=lambda name: int(totals[name]))
    if task == "beyond/corrections":
        return re.findall(DAY, memory)[-1]
    return SOLVERS[task](memory, question)
