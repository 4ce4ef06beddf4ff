"""`memagent eval` as a process: an endpoint with faults, kills and limits, and what is recorded.

The loopback endpoint reads by rule: it keeps the sentences that have the key which the question quotes,
and answers with what they say, so a perfect endpoint scores 100.
"""

import json
import random
import signal
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from memagent.data.example import Evidence, Example, Passage
from memagent.data.formats.files import write_examples
from memagent.eval.records import ItemRecord, read_items
from memagent.runs import read_manifest
from tests.integration.conftest import (
    SMALL_SECTIONS,
    Cli,
    Outcome,
    finish,
    on_a_small_disk,
    story,
    wait_until,
)
from tests.support.loopback import Endpoint, running
from tests.support.sizes import sized
from tests.support.tiny_models import make_tiny_model

Call = Callable[..., Outcome]
IS_FORKED = True
NUM_ITEMS = 12
NUM_SECTIONS = 5
NUM_KILLS = sized(6, 20)
TIMES = ("seconds", "started", "num_attempts")


def make_example(number: int) -> Example:
    """A text of five sections (with SMALL_SECTIONS) that states one code."""
    fact = f'The code of "box-{number}" is {4000 + number}.'
    text = story(1800, seed=number, fact=fact)
    start = text.index(fact)
    return Example(
        id=f"e{number}",
        task="codes",
        question=f'What is the code of "box-{number}"?',
        answers=(str(4000 + number),),
        grader="lenient",
        documents=(Passage(text=text),),
        evidence=(Evidence(document=0, start=start, end=start + len(fact), text=fact),),
    )


@pytest.fixture
def dataset(tmp_path: Path) -> Path:
    path = tmp_path / "codes.jsonl"
    write_examples(path, [make_example(number) for number in range(NUM_ITEMS)])
    return path


def asked(dataset: Path, endpoint: Endpoint, run: Path, *more: str) -> tuple[str | Path, ...]:
    return (
        *("eval", "--file", dataset, "--base-url", endpoint.base_url, "--model", "test-model"),
        *(*SMALL_SECTIONS, "--run-dir", run, "--quiet", *more),
    )


def without_times(value: Any) -> Any:
    """A record without what differs from run to run."""
    if isinstance(value, dict):
        return {name: without_times(part) for name, part in value.items() if name not in TIMES}
    return [without_times(part) for part in value] if isinstance(value, list) else value


def records_of(run: Path) -> dict[str, Any]:
    """The records by item, without times; an item that is there twice is an error."""
    found = [record.to_dict() for record in read_items(run)]
    keyed = {f"{one['method']} {one['index']}": without_times(one) for one in found}
    assert len(keyed) == len(found)
    return keyed


def items(run: Path) -> list[ItemRecord]:
    return sorted(read_items(run), key=lambda record: record.key.index)


# --- the whole command ----------------------------------------------------------------------------


def test_every_item_is_a_record_with_its_trace_and_calls_keep_to_the_limit(
    cli: Cli, dataset: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    with running(log=tmp_path / "calls.jsonl", latency_ms=10) as endpoint:
        outcome = cli(
            *asked(dataset, endpoint, run, "--concurrency", "5", "--json"),
            *("--set", "price_in=1", "--set", "price_out=2", "--seed", "3"),
        )
        calls = endpoint.calls()
    assert outcome.code == 0, outcome.stderr
    (row,) = json.loads(outcome.stdout)
    assert (row["num"], row["num_failed"], row["score"], row["num_calls"]) == (12, 0, 1.0, 6.0)
    assert len(calls) == NUM_ITEMS * (NUM_SECTIONS + 1)
    assert max(call["inflight"] for call in calls) == 5
    found = items(run)
    assert [record.id for record in found] == [f"e{number}" for number in range(NUM_ITEMS)]
    assert [record.answer for record in found] == [rf"\boxed{{{4000 + n}}}" for n in range(12)]
    assert {record.num_sections for record in found} == {NUM_SECTIONS}
    assert {record.is_cut for record in found} == {False}
    assert len({record.seed for record in found}) == NUM_ITEMS
    for number, record in enumerate(found):
        example = make_example(number)
        expected = example.evidence[0].start / len(example.text())
        assert record.depth == pytest.approx(expected)
        assert [step["kind"] for step in record.trace["steps"]] == ["read"] * 5 + ["answer"]
        assert record.trace["document_sha256"]
        expected_cost = (record.prompt_tokens + 2 * record.completion_tokens) / 1e6
        assert record.cost == pytest.approx(expected_cost)
    manifest = read_manifest(run)
    assert (manifest["kind"], manifest["model"], manifest["seed"]) == ("eval", "test-model", 3)
    assert manifest["methods"]["reader"]["settings"]["chunk_tokens"] == 400
    assert manifest["num_items"] == NUM_ITEMS
    assert list(manifest["files"]) == ["codes.jsonl"]
    assert not (run / "replies.jsonl").exists()


def test_a_run_killed_many_times_equals_one_that_was_not(
    cli: Cli, dataset: Path, tmp_path: Path
) -> None:
    methods = ("--method", "reader", "--method", "map_reduce", "--concurrency", "4")
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    with running(reply="echo", latency_ms=4) as endpoint:
        assert cli.as_users_start_it(*asked(dataset, endpoint, whole, *methods)).code == 0
        num_calls = endpoint.num_calls()
    rng = random.Random(20)
    with running(log=tmp_path / "calls.jsonl", reply="echo", latency_ms=4) as endpoint:
        moments = sorted(rng.sample(range(4, num_calls - 12), NUM_KILLS))
        for number, moment in enumerate(moments):
            command = ("eval", "--resume", broken, "--quiet")
            if number == 0:
                command = asked(dataset, endpoint, broken, *methods)  # type: ignore[assignment]
            with cli.started(*command) as process:
                wait_until(lambda moment=moment: endpoint.num_calls() >= moment)  # type: ignore[misc]
                finish(process, number=signal.SIGKILL)
        done = cli("eval", "--resume", broken, "--quiet")
        assert done.code == 0, done.stderr
        answered = Counter(call["sha"] for call in endpoint.calls() if call["outcome"] == "ok")
        num_before = endpoint.num_calls()
        again = cli("eval", "--resume", broken, "--quiet")
        assert again.stdout == done.stdout
        assert endpoint.num_calls() == num_before
    assert records_of(broken) == records_of(whole)
    assert len(records_of(broken)) == 2 * NUM_ITEMS
    # only calls in flight at a kill are repeated, and those whose replies were being written
    assert answered.total() - len(answered) <= NUM_KILLS * (4 + 4)
    assert len(answered) == num_calls


def test_items_whose_calls_fail_for_good_count_as_wrong_and_are_reported(
    cli: Cli, tmp_path: Path
) -> None:
    dataset, run = tmp_path / "many.jsonl", tmp_path / "run"
    write_examples(dataset, [make_example(number) for number in range(40)])
    with running(log=tmp_path / "calls.jsonl", faults="400=0.2", seed=5) as endpoint:
        outcome = cli(*asked(dataset, endpoint, run, "--method", "direct", "--grader", "contains"))
        outcomes = Counter(call["outcome"] for call in endpoint.calls())
    assert outcome.code == 0, outcome.stderr
    assert outcomes.total() == 40
    num_failed = outcomes["400"]
    assert 4 <= num_failed <= 14
    assert f"{num_failed} of 40 items failed; they count as wrong:" in outcome.stdout
    found = items(run)
    assert sum(record.status == "failed" for record in found) == num_failed
    assert sum(record.score for record in found) == 40 - num_failed
    assert f" {100 * (40 - num_failed) / 40:.1f} " in outcome.stdout
    assert all("refused" in (record.error or "") for record in found if record.status == "failed")


def test_calls_that_fail_for_a_while_change_nothing(
    cli: Cli, dataset: Path, tmp_path: Path
) -> None:
    perfect, faulty = tmp_path / "perfect", tmp_path / "faulty"
    with running() as endpoint:
        assert cli(*asked(dataset, endpoint, perfect, "--num", "6")).code == 0
    faults = {"faults": "500=0.1,reset=0.05,malformed=0.05", "seed": 2}
    with running(log=tmp_path / "calls.jsonl", **faults) as endpoint:
        outcome = cli(*asked(dataset, endpoint, faulty, "--set", "patience=60", "--num", "6"))
        outcomes = Counter(call["outcome"] for call in endpoint.calls())
    assert outcome.code == 0, outcome.stderr
    assert outcomes.total() > 1.1 * outcomes["ok"]
    assert records_of(faulty) == records_of(perfect)
    assert {record.score for record in items(faulty)} == {1.0}


def test_an_outage_stops_the_run_without_blaming_items_and_it_can_be_resumed(
    cli: Cli, dataset: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    with running(log=tmp_path / "calls.jsonl") as endpoint:
        first = cli(*asked(dataset, endpoint, run, "--set", "patience=0", "--max-calls", "15"))
        assert first.code == 4, first.stderr
        assert "raise the limit and resume with: memagent eval --resume" in first.stderr
        num_done = len(items(run))
        endpoint.kill()
        down = cli("eval", "--resume", run, "--quiet", "--max-calls", "1000")
        assert down.code == 3, down.stderr
        assert len(items(run)) == num_done
        endpoint.start()
        done = cli("eval", "--resume", run, "--quiet", "--max-calls", "1000")
        assert done.code == 0, done.stderr
        calls = endpoint.calls()
    assert {record.score for record in items(run)} == {1.0}
    assert len(items(run)) == NUM_ITEMS
    assert len(calls) == NUM_ITEMS * (NUM_SECTIONS + 1)  # also those before the limit: none twice


def test_an_interrupted_run_prints_how_to_resume(cli: Cli, dataset: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    with running(log=tmp_path / "calls.jsonl", latency_ms=12) as endpoint:
        command = asked(dataset, endpoint, run, "--concurrency", "2")
        with cli.started(*command) as process:
            wait_until(lambda: endpoint.num_calls() >= 9)
            outcome = finish(process, number=signal.SIGINT)
        assert outcome.code == 130, outcome.stderr
        assert f"resume with: memagent eval --resume {run}" in outcome.stderr
        assert cli("eval", "--resume", run, "--quiet").code == 0
    assert len(items(run)) == NUM_ITEMS


def test_a_full_disk_stops_the_run_and_it_resumes_when_there_is_room(
    cli: Cli, dataset: Path, tmp_path: Path
) -> None:
    whole, full = tmp_path / "whole", tmp_path / "full"
    with running(log=tmp_path / "calls.jsonl", reply="echo") as endpoint:
        assert cli(*asked(dataset, endpoint, whole)).code == 0
        num_calls = endpoint.num_calls()
        with cli.started(*asked(dataset, endpoint, full), via=on_a_small_disk(12)) as process:
            stopped = finish(process)
        assert stopped.code == 2, stopped.stderr
        assert "cannot write" in stopped.stderr
        assert "File too large" in stopped.stderr
        assert "Traceback" not in stopped.stderr
        done = cli("eval", "--resume", full, "--quiet")
        assert done.code == 0, done.stderr
        repeated = endpoint.num_calls() - 2 * num_calls
    assert records_of(full) == records_of(whole)
    assert len(records_of(full)) == NUM_ITEMS
    assert 0 <= repeated <= 16  # only calls in flight, or whose line did not fit


# --- methods of the user, and mistakes ---------------------------------------------------------

OWN_METHOD = """
async def guess(example, context):
    if example.id == "e3":
        raise KeyError("no such box")
    step = await context.call([{"role": "user", "content": example.question}])
    assert context.settings.options == {"depth": 2}
    return context.trace()


async def forgets(example, context):
    return "a string"


def not_async(example, context):
    return None
"""


@pytest.fixture
def method_file(tmp_path: Path) -> Path:
    path = tmp_path / "own.py"
    path.write_text(OWN_METHOD)
    return path


def test_a_users_method_may_fail_on_one_item_and_the_others_continue(
    here: Call, dataset: Path, method_file: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    with running() as endpoint:
        outcome = here(
            *asked(dataset, endpoint, run, "--method", f"{method_file}:guess"),
            *("--set", "agent.options={depth=2}"),
        )
    assert outcome.code == 0, outcome.stderr
    assert "1 of 12 items failed; they count as wrong:" in outcome.stdout
    by_id = {record.id: record for record in items(run)}
    assert by_id["e3"].error == "KeyError: 'no such box'"
    assert any("own.py" in line for line in by_id["e3"].metadata["method"]["traceback"])
    assert {record.answer for record in by_id.values()} == {r"\boxed{unknown}", ""}


def test_a_method_that_returns_no_trace_is_an_error(
    here: Call, dataset: Path, method_file: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    with running() as endpoint:
        outcome = here(*asked(dataset, endpoint, run, "--method", f"{method_file}:forgets"))
    assert "returned str instead of a Trace" in outcome.stdout
    assert {record.status for record in items(run)} == {"failed"}


def test_a_length_stays_with_the_entry_of_a_suite_that_has_it(here: Call, tmp_path: Path) -> None:
    suite = tmp_path / "three.toml"
    suite.write_text(
        """length_tokenizer = "bytes"
[[methods]]
name = "direct"
[[tasks]]
tasks = ["beyond/two_hop"]
tokens = ["1k", "2k"]
num = 3
[[tasks]]
tasks = ["beyond/two_hop"]
tokens = [4096]
num = 2
"""
    )

    def items_of(*options: str) -> dict[int, int]:
        command = ("eval", str(suite), "--engine", "scripted", "--dry-run", "--json", *options)
        lengths = json.loads(here(*command).stdout)["items"]
        return {one["target_tokens"]: one["num"] for one in lengths}

    assert items_of() == {1024: 3, 2048: 3, 4096: 2}
    assert items_of("--lengths", "1024,4k") == {1024: 3, 4096: 2}
    assert items_of("--lengths", "4k", "--num", "5") == {4096: 5}
    assert items_of("--lengths", "4k,3k") == {4096: 2, 3072: 3}, "a new one goes to the first"


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (("--task", "ruler/niah_sngle_1"), "did you mean ruler/niah_single_1?"),
        (("--file", "gone.jsonl"), "gone.jsonl: No such file"),
        (("--task", "beyond/two_hop", "--lengths", "4x"), "'4x' is not a length"),
        (("--task", "beyond/two_hop", "--method", "redaer"), "did you mean reader?"),
        (("--task", "beyond/two_hop", "--method", "gone.py:f"), "no file gone.py"),
        (("--task", "beyond/two_hop", "--method", "reader:gone"), "no prompt set or file 'gone'"),
        (("--task", "beyond/two_hop", "--lengths", "100"), "raise tokens"),
        (("--task", "beyond/two_hop", "--set", "nmu=3"), "unknown setting nmu; did you mean num?"),
        (("gone.toml",), "there is no suite gone.toml"),
        (("--resume", "."), "there is no run.json"),
        ((), "name what to evaluate"),
    ],
)
def test_a_mistake_is_one_line_before_the_first_call(
    here: Call, more: tuple[str, ...], said: str
) -> None:
    outcome = here("eval", "--engine", "scripted", "--set", "length_tokenizer=bytes", *more)
    assert outcome.code == 2
    assert said in outcome.stderr
    assert len(outcome.said) == 1


def test_yarn_stretches_a_local_model_and_leaves_other_methods_as_they_are(
    here: Call, tmp_path: Path
) -> None:
    folder = tmp_path / "tiny"
    make_tiny_model(folder, "llama", max_position_embeddings=1024, num_hidden_layers=1)
    run = tmp_path / "run"
    outcome = here(
        *("eval", "--engine", f"local:{folder}", "--task", "ruler/niah_single_1"),
        *("--lengths", "2500", "--num", "1", "--method", "direct", "--method", "yarn"),
        *("--set", "chunk_tokens=300", "--set", "memory_tokens=32", "--set", "answer_tokens=8"),
        *("--run-dir", run, "--quiet"),
    )
    assert outcome.code == 0, outcome.stderr
    settings = {name: m["settings"] for name, m in read_manifest(run)["methods"].items()}
    assert settings["direct"]["window"] == 1024
    assert settings["yarn"]["window"] == 4096
    cut = {record.method: record.is_cut for record in read_items(run)}
    assert cut == {"direct": True, "yarn": False}


def test_a_function_that_is_not_async_is_refused(here: Call, method_file: Path) -> None:
    outcome = here(
        *("eval", "--engine", "scripted", "--task", "beyond/two_hop"),
        *("--method", f"{method_file}:not_async"),
    )
    assert outcome.code == 2
    assert "write it as async def not_async(example, context)" in outcome.stderr


def test_lengths_of_two_tokenizers_do_not_go_into_one_run(here: Call, tmp_path: Path) -> None:
    for name in ("bytes", "estimate"):
        made = here(
            *("data", "build", "beyond/two_hop", "--tokens", "1000", "--num", "2", "--no-figure"),
            *("--tokenizer", name, "--out", tmp_path / f"{name}.jsonl", "--quiet"),
        )
        assert made.code == 0, made.stderr
    outcome = here(
        *("eval", "--engine", "scripted", "--file", tmp_path / "bytes.jsonl"),
        *("--file", tmp_path / "estimate.jsonl"),
    )
    assert outcome.code == 2
    assert "counted by the tokenizer bytes" in outcome.stderr
    assert "evaluate them in separate runs" in outcome.stderr


def test_a_key_is_refused_at_once_and_no_run_is_left(
    here: Call, dataset: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    with running(api_key="right") as endpoint:
        outcome = here(*asked(dataset, endpoint, run, "--set", "api_key=wrong"))
    assert outcome.code == 2
    assert "refused the key" in outcome.stderr
    assert not run.exists()


# --- the smoke suite ------------------------------------------------------------------------------


def test_the_smoke_suite_runs_with_a_scripted_engine(here: Call, tmp_path: Path) -> None:
    suite = Path(__file__).resolve().parents[2] / "configs" / "eval" / "smoke.toml"
    run = tmp_path / "run"
    small = ("--num", "1", "--set", "length_tokenizer=bytes", "--set", "tokenizer=bytes")
    sizes = ("window", "methods.2.settings.window", "memory_tokens", "answer_tokens")  # in bytes
    values = zip(sizes, (6000, 2000, 400, 200), strict=True)
    roomy = [part for name, value in values for part in ("--set", f"{name}={value}")]
    outcome = here(
        "eval", suite, "--engine", "scripted", *small, *roomy, "--run-dir", run, "--json"
    )
    assert outcome.code == 0, outcome.stderr
    rows = json.loads(outcome.stdout)
    assert len(rows) == 2 * 2 * 5
    assert {row["num_failed"] for row in rows} == {0}
    found = {row["method"]: row["score"] for row in rows if row["task"] == "ruler/niah_single_1"}
    assert found["reader"] == found["map_reduce"] == 1.0
    assert read_manifest(run)["suite"] == "smoke"
