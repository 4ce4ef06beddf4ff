"""Warm-start traces: the reader's own prompts, memories that suffice, files that can be resumed."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from memagent import Reader
from memagent.agent.prompts import open_prompts
from memagent.cli.main import run
from memagent.config import AgentConfig
from memagent.data.example import Evidence, Example, Passage
from memagent.data.formats.files import write_examples
from memagent.data.tasks.beyond import KINDS
from memagent.data.tasks.registry import open_task
from memagent.documents.chunking import split
from memagent.documents.document import Document
from memagent.engines.scripted import ScriptedEngine
from memagent.errors import DataError
from memagent.rewards.verifiers import grade
from memagent.rl.warmstart.conversations import Conversation
from memagent.rl.warmstart.trace_files import TracesWritten, write_traces
from memagent.rl.warmstart.traces import NOTHING_YET, TraceRefused, conversations
from memagent.tokens.tokenizers import ByteTokenizer
from recipes.questions import likeliest, likely
from tests.support.beyond_solvers import solve_from_memory

BYTES = ByteTokenizer()
CONFIG = AgentConfig(window=8192, chunk_tokens=1200, memory_tokens=900, answer_tokens=400)
TASKS = [*KINDS, "ruler/vt", "ruler/niah_single_1"]


def made(name: str, index: int = 0, **settings: object) -> Example:
    return open_task(name, {"tokens": 8000, "tokenizer": "bytes", "seed": 2, **settings}).example(
        index
    )


def trace(example: Example, config: AgentConfig = CONFIG) -> list[Conversation]:
    rules = {"questions": likeliest if config.prompts == "add" else likely}
    return conversations(example, config=config, tokenizer=BYTES, rules=rules)


def replies(steps: list[Conversation]) -> list[str]:
    return [step.messages[-1]["content"] for step in steps]


def facts(*sentences: str, evidence: tuple[int, ...] = (), **fields: object) -> Example:
    """Sentences of 20 bytes each, some of which are evidence."""
    texts = [sentence.ljust(19, "x") + " " for sentence in sentences]
    spans = [
        Evidence(document=0, start=20 * n, end=20 * n + 19, text=texts[n][:19]) for n in evidence
    ]
    values: dict[str, object] = {"answers": ("a",), "task": "own", "question": "What?", **fields}
    return Example(
        id="one",
        documents=(Passage(text="".join(texts)),),
        evidence=tuple(spans),
        **values,  # type: ignore[arg-type]
    )


# --- the steps ------------------------------------------------------------------------------------


@pytest.mark.parametrize("prompts", ["default", "boxed", "paper"])
@pytest.mark.parametrize("name", TASKS)
def test_a_reader_that_replies_so_sends_exactly_these_prompts(name: str, prompts: str) -> None:
    config = CONFIG.model_copy(update={"prompts": prompts})
    for index in range(3):
        example = made(name, index)
        steps = trace(example, config)
        engine = ScriptedEngine(replies(steps))
        played = Reader(engine, tokenizer=BYTES, config=config).ask(
            example.question, example.text()
        )
        assert engine.prompts == [list(step.messages[:-1]) for step in steps]
        assert [step.kind for step in played.steps] == [step.kind for step in steps]
        assert [step.index for step in played.steps] == [step.step for step in steps]
        assert [step.memory for step in played.steps[:-1]] == replies(steps)[:-1]
        assert [step.flags for step in played.steps] == [()] * len(steps)
        assert grade(example.grader, played.answer, example.answers, example.match).value == 1.0


@pytest.mark.parametrize("name", list(KINDS))
def test_the_last_memory_is_enough_for_the_answer(name: str) -> None:
    for index in range(60):
        example = made(name, index, **_half_answerable(name))
        *_, memory, answer = replies(trace(example))
        assert solve_from_memory(name, memory, example.question) == answer == example.answers[0]


@pytest.mark.parametrize("name", list(KINDS))
def test_a_section_without_news_repeats_the_memory(name: str) -> None:
    num_repeated = 0
    for index in range(20):
        example = made(name, index)
        chunks = split(Document.from_text(example.text()), BYTES, chunk_tokens=1200)
        ends = [end for _, end in example.evidence_offsets()]
        for role in ("similar", "candidate"):
            ends += [end for _, end, _ in example.metadata["spans"].get(role, [])]
        before = NOTHING_YET
        for chunk, memory in zip(chunks, replies(trace(example)), strict=False):
            if not any(chunk.start < end <= chunk.end for end in ends):
                assert memory == before
                num_repeated += 1
            before = memory
    assert num_repeated > 10


def test_a_section_without_news_says_so_where_the_prompts_allow_it() -> None:
    example = facts("One.", "Two.", "Three.", "Four.", "Five.", evidence=(1, 3))
    config = AgentConfig(window=4000, chunk_tokens=20, memory_tokens=200, prompts="keep")
    first, second = "Two.".ljust(19, "x"), "Four.".ljust(19, "x")
    steps = trace(example, config)
    assert replies(steps) == [
        "No change.",
        first,
        "No change.",
        f"{first}\n{second}",
        "No change.",
        "\\boxed{a}",
    ]
    played = Reader(ScriptedEngine(replies(steps)), tokenizer=BYTES, config=config).ask(
        example.question, example.text()
    )
    assert [step.memory for step in played.steps] == ["", first, first, *3 * [f"{first}\n{second}"]]


def test_frequent_words_are_kept_in_the_order_of_their_counts_so_far() -> None:
    words = [*["ab"] * 9, *["cd"] * 6, *["ef"] * 4, "gh", "... ij"]
    text = " ".join([*words, *["ij"] * 19])
    example = Example(
        id="one",
        task="ruler/fwe",
        question="Which?",
        answers=("ij", "ab", "cd"),
        match="all",
        documents=(Passage(text=text),),
    )
    config = AgentConfig(window=4000, chunk_tokens=70, memory_tokens=200)
    assert replies(trace(example, config)) == [
        "Most frequent so far: ab, cd, ef, gh.",
        "Most frequent so far: ij, ab, cd, ef, gh.",
        "ij, ab, cd",
    ]


def test_the_numbers_of_a_list_are_no_words() -> None:
    example = made("ruler/cwe", tokens=3000)
    *memories, answer = replies(trace(example))
    held = [memory.removeprefix("Most frequent so far: ").rstrip(".") for memory in memories]
    assert set(answer.split(", ")) == set(example.answers)
    assert set(example.answers) <= set(held[-1].split(", "))
    assert not any(word.isdigit() for memory in held for word in memory.split(", "))


def _half_answerable(name: str) -> dict[str, object]:
    return {"answerable_share": 0.5} if name == "beyond/unanswerable" else {}


def facts_with_candidates() -> Example:
    sentences = ("gold one", "likely a", "likely b", "other", "likely c", "gold two", "likely d")
    return facts(
        *sentences,
        evidence=(0, 5),
        task="questions",
        metadata={
            "num_candidates": 2,
            "candidates": [[39, "likely a", 0.5], [59, "likely b", 0.3], [99, "likely c", 0.4],
                           [139, "likely d", 0.9]],
        },
    )  # fmt: skip


def test_likely_sentences_are_kept_until_all_evidence_is_found() -> None:
    example = facts_with_candidates()
    config = CONFIG.model_copy(update={"chunk_tokens": 20})
    gold = [sentence.ljust(19, "x") for sentence in ("gold one", "gold two")]
    assert [memory.splitlines() for memory in replies(trace(example, config))[:-1]] == [
        [gold[0]],
        [gold[0], "likely a"],
        [gold[0], "likely a", "likely b"],
        [gold[0], "likely a", "likely b"],
        [gold[0], "likely a", "likely c"],
        gold,
        gold,
    ]


def test_the_likeliest_sentences_are_added_where_replies_add_to_the_memory() -> None:
    example = facts_with_candidates()
    config = AgentConfig(window=4000, chunk_tokens=20, memory_tokens=200, prompts="add")
    assert replies(trace(example, config)) == [
        "gold one".ljust(19, "x"),
        "likely a",
        "No change.",
        "No change.",
        "likely c",
        "gold two".ljust(19, "x"),
        "No change.",
        "\\boxed{a}",
    ]


def test_a_state_that_changes_replaces_the_memory_where_replies_add_to_it() -> None:
    config = AgentConfig(window=4000, chunk_tokens=900, memory_tokens=300, prompts="add")
    example = made("beyond/counting", tokens=4000)
    said = [reply for reply in replies(trace(example, config))[:-1] if reply != "No change."]
    assert not said[0].startswith("New memory:")
    assert len(said) > 1
    assert all(reply.startswith("New memory:\n") for reply in said[1:])


def test_likely_sentences_without_evidence_are_refused() -> None:
    example = facts("one", task="questions", metadata={"num_candidates": 2, "candidates": []})
    with pytest.raises(TraceRefused, match="has no evidence"):
        trace(example)


def test_evidence_counts_in_the_section_where_it_ends() -> None:
    # without spaces, sections are 30 bytes each: 0 to 30, 30 to 60, 60 to 90
    text = "a" * 20 + "b" * 10 + "c" * 25 + "d" * 10 + "e" * 25
    spans = {"b": (20, 30), "d": (55, 65)}
    example = Example(
        id="torn",
        task="own",
        question="What?",
        answers=("d",),
        documents=(Passage(text=text),),
        evidence=tuple(
            Evidence(document=0, start=start, end=end, text=text[start:end], note=note)
            for note, (start, end) in spans.items()
        ),
    )
    config = AgentConfig(chunk_tokens=30, memory_tokens=100)
    assert replies(trace(example, config)) == ["b", "b", "b\nd", "d"]


def test_titles_name_the_subject_of_a_sentence() -> None:
    example = Example(
        id="films",
        task="hotpotqa",
        question="Who directed it?",
        answers=("Ada Holm",),
        documents=(
            Passage(title="Grey Gulls", text="It was directed by Ada Holm."),
            Passage(title="Other", text="Nothing here."),
            Passage(title="Ada Holm", text="Ada Holm was born in 1901."),
        ),
        evidence=(
            Evidence(document=2, start=0, end=26, text="Ada Holm was born in 1901."),
            Evidence(document=0, start=0, end=28, text="It was directed by Ada Holm."),
        ),
    )
    assert replies(trace(example)) == [
        "Grey Gulls: It was directed by Ada Holm.\nAda Holm was born in 1901.",
        "Ada Holm",
    ]


def test_memories_are_worked_out_by_hand_for_corrections() -> None:
    example = facts("Set 4 May.", "Rain.", "Now 9 May.", evidence=(0, 2), task="beyond/corrections")
    first, last = example.evidence
    example = replace(
        example, evidence=(replace(first, note="It is 4 May."), replace(last, note="It is 9 May."))
    )
    config = AgentConfig(chunk_tokens=25, memory_tokens=100)
    assert replies(trace(example, config))[:3] == ["It is 4 May.", "It is 4 May.", "It is 9 May."]


def test_the_answer_has_the_form_that_the_prompts_ask_for() -> None:
    several = facts("b a.", evidence=(0,), answers=("a.", "b"), match="all")
    forms = [
        replies(trace(several, CONFIG.model_copy(update={"prompts": prompts})))[-1]
        for prompts in ("default", "boxed", "paper")
    ]
    assert forms == ["b, a.", "\\boxed{b, a.}", "\\boxed{b, a.}"]
    other = facts("nothing", evidence=(0,), answers=("q", "p"), match="all")
    assert replies(trace(other))[-1] == "q, p"


def test_injected_instructions_never_reach_the_memory() -> None:
    for index in range(100):
        example = made("beyond/injection", index)
        for memory in replies(trace(example)):
            assert example.metadata["wrong_answer"] not in memory


def test_a_text_stored_as_its_origin_has_the_same_demonstration() -> None:
    example = made("beyond/two_hop")
    assert trace(replace(example, documents=None)) == trace(example)


@pytest.mark.parametrize(
    ("example", "config", "reason"),
    [
        (facts("One."), CONFIG, "one has no evidence"),
        (facts("One.", evidence=(0,), answers=()), CONFIG, "no accepted answer"),
        (
            facts("One.", evidence=(0,)),
            AgentConfig(memory_tokens=10),
            r"has 56 tokens, more than `memory_tokens=10`; raise `memory_tokens`",
        ),
        (
            facts("One.", evidence=(0,), answers=("long answer",)),
            AgentConfig(answer_tokens=5),
            r"has 11 tokens, more than `answer_tokens=5`; raise `answer_tokens`",
        ),
        (
            facts("One.", evidence=(0,), task="beyond/counting"),
            CONFIG,
            "lacks 'counted' in its metadata; rebuild it",
        ),
    ],
)
def test_examples_without_a_demonstration_are_refused(
    example: Example, config: AgentConfig, reason: str
) -> None:
    with pytest.raises(TraceRefused, match=reason):
        conversations(example, config=config, tokenizer=BYTES)


def test_quotes_that_are_copied_into_the_memory_need_no_marks() -> None:
    plain = CONFIG.model_copy(update={"prompts": "compact_add"})
    copied = plain.model_copy(update={"evidence": True, "quotes": "copied"})
    example = made("beyond/two_hop")
    assert trace(example, copied) == trace(example, plain)


def test_a_memory_need_not_hold_what_no_reply_says() -> None:
    config = AgentConfig(window=4000, chunk_tokens=20, memory_tokens=40, prompts="keep")
    assert len(NOTHING_YET) > config.memory_tokens
    said = replies(trace(facts("One.", "Two.", evidence=(1,)), config))
    assert said[:2] == ["No change.", "Two.".ljust(19, "x")]


# --- files ----------------------------------------------------------------------------------------


@pytest.fixture
def dataset(tmp_path: Path) -> Path:
    path = tmp_path / "train.jsonl"
    names = ["beyond/counting", "beyond/two_hop", "ruler/vt", "beyond/unanswerable"]
    write_examples(path, [made(name, tokens=5000) for name in names])
    return path


def write(source: Path, out: Path, **options: object) -> TracesWritten:
    return write_traces(source, out, config=CONFIG, tokenizer=BYTES, **options)  # type: ignore[arg-type]


def test_a_file_holds_the_conversations_in_order(dataset: Path, tmp_path: Path) -> None:
    out = tmp_path / "traces.jsonl"
    written = write(dataset, out)
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    expected = [
        step.record()
        for name in ("beyond/counting", "beyond/two_hop", "ruler/vt", "beyond/unanswerable")
        for step in trace(made(name, tokens=5000))
    ]
    assert lines == expected
    assert written == TracesWritten(num_examples=4, num_conversations=len(expected), num_refused=0)
    manifest = json.loads((tmp_path / "traces.jsonl.manifest.json").read_text())
    assert manifest["num_conversations"] == len(expected)
    assert manifest["prompts_sha256"] == open_prompts("default").sha256
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "traces.jsonl",
        "traces.jsonl.manifest.json",
        "train.jsonl",
    ]


@pytest.mark.parametrize("share", [0.0, 0.001, 0.2, 0.5, 0.9, 0.999, 1.0])
def test_a_file_truncated_anywhere_is_completed_with_the_same_bytes(
    dataset: Path, tmp_path: Path, share: float
) -> None:
    whole, out = tmp_path / "whole.jsonl", tmp_path / "out.jsonl"
    write(dataset, whole)
    seen: list[str] = []

    def die_at_the_end(example: Example) -> None:
        seen.append(example.task)
        if len(seen) == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write(dataset, out, on_example=die_at_the_end)
    part = tmp_path / "out.jsonl.part"
    data = part.read_bytes()
    assert data == whole.read_bytes()
    part.write_bytes(data[: int(len(data) * share)])
    redone: list[str] = []
    written = write(dataset, out, on_example=lambda example: redone.append(example.task))
    assert out.read_bytes() == whole.read_bytes()
    assert written.num_examples == 4
    assert redone == seen[4 - len(redone) :]
    assert len(redone) == {0.0: 4, 1.0: 0}.get(share, len(redone))


@pytest.mark.parametrize(
    "other", [{"chunk_tokens": 1000}, {"section_ends": "exact"}, {"mode": "parallel"}]
)
def test_a_file_is_not_resumed_with_other_settings(
    dataset: Path, tmp_path: Path, other: dict[str, object]
) -> None:
    out = tmp_path / "out.jsonl"

    def die(example: Example) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write(dataset, out, on_example=die)
    config = CONFIG.model_copy(update=other)
    with pytest.raises(DataError, match=r"out\.jsonl\.part was started .* with other settings"):
        write_traces(dataset, out, config=config, tokenizer=BYTES)


def test_refused_examples_are_counted_or_an_error(dataset: Path, tmp_path: Path) -> None:
    source, out = tmp_path / "mixed.jsonl", tmp_path / "out.jsonl"
    bare = facts("One.")
    write_examples(source, [made("ruler/vt"), bare, made("beyond/counting"), bare])
    with pytest.raises(TraceRefused, match=r"one has no evidence.*; `skip_refused` skips it"):
        write(source, out)
    written = write(source, out, skip_refused=True)
    assert (written.num_examples, written.num_refused) == (2, 2)


def test_a_file_that_exists_is_not_overwritten(dataset: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    out.write_text("mine")
    with pytest.raises(DataError, match="exists; name another file, or overwrite it with `force`"):
        write(dataset, out)
    assert out.read_text() == "mine"
    write(dataset, out, force=True)
    assert out.read_text() != "mine"


# --- the command ----------------------------------------------------------------------------------


def test_the_command_writes_traces(
    dataset: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "traces.jsonl"
    options = ["--tokenizer", "bytes", "--chunk-tokens", "1200", "--memory-tokens", "900"]
    arguments = ["data", "traces", str(dataset), "--out", str(out), *options]
    assert run([*arguments, "--answer-tokens", "400"]) == 0
    num_lines = len(out.read_text().splitlines())
    assert capsys.readouterr().out == f"{out}: 4 examples, {num_lines} conversations\n"
    same = tmp_path / "same.jsonl"
    write(dataset, same)
    assert out.read_bytes() == same.read_bytes()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--tokenizer", "bytes", "--window", "6500", "--chunk-tokens", "6000"], "window of 6500"),
        (["--tokenizer", "bytes", "--chunk-tokens", "9000"], "does not fit a window of 8192"),
        (["--tokenizer", "bytes", "--prompts", "nosuch"], "there is no prompt set"),
    ],
)
def test_the_command_names_the_remedy(
    dataset: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    options: list[str],
    message: str,
) -> None:
    out = tmp_path / "traces.jsonl"
    assert run(["data", "traces", str(dataset), "--out", str(out), *options]) == 2
    said = capsys.readouterr().err
    assert message in said
    assert said.count("\n") == 1
    assert not out.exists()
