"""Warm-start demonstrations of the reading modes: quotes, items, early stops, notes and merges."""

import pytest

from memagent.config import AgentConfig
from memagent.data.example import Example
from memagent.data.tasks.registry import open_task
from memagent.rl.warmstart.conversations import Conversation
from memagent.rl.warmstart.traces import TraceRefused, conversations
from memagent.tokens.tokenizers import ByteTokenizer

BYTES = ByteTokenizer()
SIZES = {"window": 16_000, "chunk_tokens": 1200, "memory_tokens": 900, "answer_tokens": 400}
TASKS = ["beyond/two_hop", "beyond/coreference", "ruler/niah_single_1"]


def made(name: str, index: int = 0) -> Example:
    return open_task(name, {"tokens": 8000, "tokenizer": "bytes", "seed": 2}).example(index)


def shown(example: Example, **modes: object) -> list[Conversation]:
    config = AgentConfig.parse({**SIZES, "quote_tokens": 1200, "prompts": "keep", **modes})
    return conversations(example, config=config, tokenizer=BYTES)


def reply(one: Conversation) -> str:
    return one.messages[-1]["content"]


def prompt(one: Conversation) -> str:
    return one.messages[-2]["content"]


def test_facts_that_may_matter_are_quoted_until_it_is_known_and_are_no_sources() -> None:
    example = made("beyond/two_hop")
    second, link = example.evidence
    before = [
        example.text()[start:end]
        for start, end, _ in example.metadata["spans"]["candidate"]
        if end < example.evidence_offsets()[1][1]
    ]
    *reads, answer = shown(example, evidence=True)
    quoted = "\n".join(reply(one) for one in reads)
    assert all(f"<quote>{text}</quote>" in quoted for text in [*before, second.text, link.text])
    numbers = reply(answer).splitlines()[-1].removeprefix("Sources: ").split(", ")
    lines = prompt(answer).splitlines()
    sources = [line for line in lines if line.startswith(tuple(f"[{n}] " for n in numbers))]
    assert [line.partition("] ")[2] for line in sources] == [second.text, link.text]


@pytest.mark.parametrize("task", TASKS[1:3])
def test_evidence_is_quoted_where_it_stands_and_named_as_source(task: str) -> None:
    example = made(task)
    *reads, answer = shown(example, evidence=True)
    for item in example.evidence:
        [holder] = [one for one in reads if f"<quote>{item.text}</quote>" in reply(one)]
        assert item.text in prompt(holder)
    last = reply(answer).splitlines()[-1]
    num = len(example.evidence)
    assert last == f"Sources: {', '.join(str(number) for number in range(1, num + 1))}"
    assert all(item.text.split("\n")[0] in prompt(answer) for item in example.evidence)


def test_sections_without_evidence_are_answered_in_two_words() -> None:
    example = made("ruler/niah_single_1")
    *reads, _ = shown(example, evidence=True)
    others = [one for one in reads if example.evidence[0].text not in prompt(one)]
    assert {reply(one) for one in others} == {"No change."}


def test_a_reading_stops_when_all_evidence_has_been_read() -> None:
    example = made("ruler/niah_single_1", 1)
    whole = shown(example, evidence=True)
    *reads, answer = shown(example, evidence=True, stop_early=True)
    said = ["<enough/>" in reply(one) for one in reads]
    first = said.index(True)
    assert example.evidence[0].text in prompt(reads[first])
    assert said == [False] * first + [True]
    assert len(reads) + 1 < len(whole)
    assert reply(answer) == reply(whole[-1])


def test_tasks_about_the_whole_text_never_stop_early() -> None:
    example = made("beyond/counting")
    replies = [reply(one) for one in shown(example, evidence=True, stop_early=True)]
    assert not any("<enough/>" in one for one in replies)


@pytest.mark.parametrize(
    ("task", "expected"),
    [
        ("beyond/counting", "entries: {answer}\n"),
        ("beyond/corrections", "last value {answer} ["),
        ("beyond/coreference", "\nnumber {number} of {name}: [{number}]\n"),
    ],
)
def test_items_are_listed_and_code_shows_the_answer(task: str, expected: str) -> None:
    for index in range(3):
        example = made(task, index)
        *reads, answer = shown(example, items=True, ledger_tokens=4000)
        assert {reply(one).partition("<item>")[0] for one in reads} <= {"", "No change."}
        known = example.metadata
        wanted = expected.format(
            answer=example.answers[0],
            number=known.get("number"),
            name=f"{known.get('kind')} about {known.get('topic')}",
        )
        assert wanted in prompt(answer)


def test_the_last_value_of_each_of_several_things_is_shown_by_code() -> None:
    settings = {"tokens": 8000, "tokenizer": "bytes", "seed": 2, "num_things": 12}
    example = open_task("beyond/corrections", settings).example(0)
    *_, answer = shown(example, items=True, ledger_tokens=6000)
    assert all(f"last value {day} [" in prompt(answer) for day in example.answers)
    *_, plain = shown(example)
    memory = prompt(plain).partition("<memory>\n")[2].partition("\n</memory>")[0]
    assert len(memory.splitlines()) == 12
    assert all(f"is set for {day}." in memory for day in example.answers)


def test_sums_and_leaders_are_computed_from_items() -> None:
    for index in range(6):
        example = made("beyond/aggregation", index)
        *_, answer = shown(example, items=True, ledger_tokens=4000)
        counted = prompt(answer).partition("Counted by code")[2]
        lines = {
            "sum": f"sum of the values: {example.answers[0]}\n",
            "largest": f"largest value: {example.answers[0]} [",
            "leader": f"\n{example.answers[0]}: ",
        }
        assert lines[example.metadata["measure"]] in counted


def test_sections_that_are_read_at_once_quote_what_is_known_to_matter_or_say_nothing() -> None:
    example = made("beyond/two_hop")
    found = shown(example, mode="parallel", evidence=True)
    kinds = [one.kind for one in found]
    first = kinds.index("merge")
    assert kinds == ([*["read"] * first, "merge"] * 2) + ["answer"]
    rounds = [reply(one) for one in found[:first]], [reply(one) for one in found[first + 1 : -2]]
    second, link = example.evidence[0].text, example.evidence[1].text
    for notes, quoted, other in ((rounds[0], link, second), (rounds[1], second, link)):
        assert sum(f"<quote>{quoted}</quote>" in note for note in notes) == 1
        assert not any(other in note for note in notes)
        assert "Nothing." in notes
    assert "Missing: nothing" not in reply(found[first])
    assert reply(found[-2]).endswith("\nMissing: nothing")
    assert reply(found[-1]).endswith("Sources: 1, 2")


def test_quotes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(TraceRefused, match="more than `quote_tokens=16`"):
        shown(made("beyond/coreference"), evidence=True, quote_tokens=16)
