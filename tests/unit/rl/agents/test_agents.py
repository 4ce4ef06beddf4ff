"""Agents and rewards: those that ship, those from files, and errors about both."""

import math
from collections.abc import AsyncIterator, Sequence
from importlib import import_module
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest
import torch

from memagent.config import LocalConfig
from memagent.data.example import Evidence, Example, Passage
from memagent.data.tasks.arithmetic import problem
from memagent.engines.base import open_engine
from memagent.engines.local.engine import LocalEngine
from memagent.engines.local.loading import load
from memagent.engines.scripted import ScriptedEngine
from memagent.errors import ConfigError
from memagent.rl.agents.api import AGENTS, open_agent
from memagent.rl.agents.client import Client
from memagent.rl.agents.rewards import check_reward, open_reward, with_bonus
from memagent.rl.agents.session import Session
from memagent.rl.rollouts.collect import check_engine
from memagent.rl.settings import AgentSettings
from memagent.rl.types import Outcome, Sample
from memagent.types import Completion, Message, Sampling, Usage
from tests.conftest import prose
from tests.support.collecting import collecting
from tests.support.tiny_models import make_tiny_model
from tests.support.tiny_server import serving_tiny
from tests.support.token_engine import TokenScript, TokenTakingScript, decode, encode, random_reply

SMALL = {"window": 1000, "chunk_tokens": 120, "memory_tokens": 24, "answer_tokens": 16}
"""Settings of reading that fit a tiny model."""


def example(**changes: Any) -> Example:
    values: dict[str, Any] = {
        "id": "e",
        "task": "test",
        "question": "Who sold the ledger?",
        "answers": ("the miller",),
        "documents": (Passage(text=prose(20)),),
    }
    return Example(**{**values, **changes})


def client(engine: Any, needs_tokens: bool = True) -> Client:
    return Client(Session(engine, task_id="t", index=0, seed=0, needs_tokens=needs_tokens))


# --- shipped agents ---------------------------------------------------------------------------------


def test_each_shipped_agent_has_a_name_and_less_than_100_lines() -> None:
    for name, place in AGENTS.items():
        module = import_module(place.partition(":")[0])
        assert len(Path(str(module.__file__)).read_text().splitlines()) < 100
        open_agent(name)


async def test_the_single_agent_asks_once_below_the_text() -> None:
    engine = ScriptedEngine(["It is \\boxed{the miller}."])
    agent = open_agent("single", {"system": "Be brief.", "max_tokens": 9})
    task = example(documents=(Passage(text="The miller sold it."),))
    outcome = await agent(task, client(engine, needs_tokens=False))
    assert outcome.answer == "It is \\boxed{the miller}."
    assert engine.prompts == [
        [
            {"role": "system", "content": "Be brief."},
            {
                "role": "user",
                "content": "The miller sold it.\n\nWho sold the ledger?\n\n"
                "Put the final answer in \\boxed{}.",
            },
        ]
    ]
    assert await open_reward("strict")(task, outcome) == 1.0


async def test_the_calculator_agent_gets_results_and_answers_in_one_row() -> None:
    replies = iter(["I need <calc>2 * (3 + 4)</calc>", "<calc>14 /</calc>", "So \\boxed{14}."])
    ours = client(TokenTakingScript(lambda messages, sampling: next(replies)))
    outcome = await open_agent("calculator")(problem(0, seed=1), ours)
    assert outcome.answer == "So \\boxed{14}."
    assert outcome.metrics == {"results": 2, "errors": 1}
    assert [text for role, text in outcome.record["messages"] if role == "user"][1:] == [
        "14",
        "error: a number is missing at the end",
    ]
    (row,) = ours.session.recorder.samples()
    sampled = bytes(t for t, s in zip(row.ids, row.is_sampled, strict=True) if s and t < 256)
    assert sampled.decode() == "I need <calc>2 * (3 + 4)</calc><calc>14 /</calc>So \\boxed{14}."


async def test_a_calculator_agent_that_never_answers_has_an_empty_answer() -> None:
    ours = client(TokenScript(lambda messages, sampling: "<calc>1+1</calc>"))
    outcome = await open_agent("calculator", {"max_turns": 3})(problem(0, seed=1), ours)
    assert outcome.answer == ""
    assert outcome.metrics == {"results": 3, "errors": 0}
    assert ours.session.usage.calls == 3


async def test_the_memory_agent_is_the_reader_and_each_read_is_a_row() -> None:
    ours = client(TokenScript(random_reply))
    agent = open_agent("memory", {"chunk_tokens": 400, "memory_tokens": 64, "window": 4096})
    task = example()
    outcome = await agent(task, ours)
    rows = ours.session.recorder.samples()
    sections = int(outcome.metrics["sections"])
    assert sections == math.ceil(len(task.text().encode()) / 400)
    assert len(rows) == sections + 1
    said = [bytes(row.ids[-13:-1]).decode() for row in rows]
    assert outcome.trace is not None
    *reads, answer = outcome.trace.steps
    assert said == [*(step.memory for step in reads), outcome.answer]
    assert [step.section.start for step in reads if step.section][1:] == [
        step.section.end for step in reads[:-1] if step.section
    ]
    assert (answer.kind, answer.index) == ("answer", sections)
    assert (outcome.trace.source, outcome.trace.question) == ("e", task.question)
    for memory, row in zip(said, rows[1:], strict=False):
        assert memory in bytes(token for token in row.ids if token < 256).decode()
    assert b"\\boxed" in bytes(
        token for token in rows[-1].ids if token < 256
    )  # as the reward wants


async def test_an_agent_that_reads_in_parallel_reads_all_sections_and_each_call_is_a_row() -> None:
    def script(messages: Sequence[Message], sampling: Sampling) -> str:
        prompt = messages[-1]["content"]
        if "<note " in prompt:
            return "merged\nMissing: nothing"
        return "Nothing." if prompt.startswith("<section>\nOne") else "a note"

    ours = client(TokenScript(script))
    settings = {"mode": "parallel", "chunk_tokens": 400, "memory_tokens": 64, "window": 4096}
    outcome = await open_agent("memory", settings)(example(), ours)
    assert outcome.trace is not None
    reads = [step for step in outcome.trace.steps if step.kind == "read"]
    assert outcome.metrics["sections"] == len(reads) == outcome.trace.num_chunks
    assert (outcome.metrics["rounds"], outcome.metrics["merges"]) == (1, 1)
    assert outcome.metrics["noted_sections"] == sum(bool(step.memory) for step in reads)
    assert len(ours.session.recorder.samples()) == len(outcome.trace.steps) == len(reads) + 2
    assert outcome.trace.memory == "merged"


async def test_steps_of_the_memory_agent_keep_all_that_the_engine_reports() -> None:
    class Thinking(ScriptedEngine):
        async def complete(self, messages: Any, sampling: Any) -> Completion:
            return Completion(
                text="noted",
                reasoning="hm",
                num_attempts=3,
                usage=Usage(calls=1, prompt_tokens=90, completion_tokens=2, cached_tokens=80),
            )

    agent = open_agent("memory", {"chunk_tokens": 400, "memory_tokens": 64, "window": 4096})
    engine = Thinking([])
    engine.tokenizer = "bytes"
    outcome = await agent(example(), client(engine, needs_tokens=False))
    assert outcome.trace is not None
    for step in outcome.trace.steps:
        assert (step.reply, step.reasoning, step.num_attempts) == ("noted", "hm", 3)
        assert step.usage.cached_tokens == 80


async def test_a_text_of_too_many_sections_is_refused_before_the_first_call() -> None:
    engine = TokenScript(lambda messages, sampling: "noted")
    sizes = {"window": 4000, "chunk_tokens": 300, "memory_tokens": 100, "answer_tokens": 50}
    task = example(id="long", documents=(Passage(text=prose(30)),))
    whole = await open_agent("memory", sizes)(task, client(engine))
    num = int(whole.metrics["sections"])
    assert num > 3
    exact = await open_agent("memory", {**sizes, "max_sections": num})(task, client(engine))
    assert exact.metrics["sections"] == num
    asked = len(engine.prompts)
    message = (
        f"the text of long has {num} sections, more than `max_sections={num - 1}`; raise it or "
        "`chunk_tokens`, or use shorter texts"
    )
    with pytest.raises(ConfigError, match=f"^{message}$"):
        await open_agent("memory", {**sizes, "max_sections": num - 1})(task, client(engine))
    assert len(engine.prompts) == asked
    with pytest.raises(ConfigError, match="max_sections"):
        open_agent("memory", {"max_sections": 0})


@pytest.mark.parametrize("ends", ["natural", "exact"])
async def test_the_middle_of_a_text_of_too_many_sections_is_left_out_where_that_is_set(
    ends: str,
) -> None:
    engine = TokenScript(lambda messages, sampling: "noted")
    sizes = {"window": 4000, "chunk_tokens": 300, "memory_tokens": 100, "answer_tokens": 50}
    limits = {"section_ends": ends, "max_sections": 4, "long_texts": "cut_middle"}
    text = prose(30).encode("ascii", "ignore").decode()
    task = example(id="long", documents=(Passage(text=text),))
    agent = open_agent("memory", {**sizes, **limits})
    outcome = await agent(task, client(engine))
    assert outcome.trace is not None
    *reads, _ = outcome.trace.steps
    assert len(reads) == outcome.metrics["sections"] == 4
    assert outcome.metrics["cut_texts"] == 1.0
    spans = [step.section for step in reads]
    num_read = sum(span.end - span.start for span in spans if span is not None)
    assert 900 <= num_read <= 1200
    if ends == "exact":  # the first 600 bytes and the last 600
        assert num_read == 1200
        assert text[:300] in decode(engine.prompts[0])
        assert text[300:600] in decode(engine.prompts[1])
        assert text[-600:-300] in decode(engine.prompts[2])
        assert text[-300:] in decode(engine.prompts[3])
    short = example(id="short", documents=(Passage(text=text[:1100]),))
    assert (await agent(short, client(engine))).metrics["cut_texts"] == 0.0


async def test_the_memory_agent_reads_in_every_mode_and_reports_how_well() -> None:
    fact = "The miller sold the ledger."
    text = f"{prose(10)} {fact} {prose(30)}"
    start = text.index(fact)
    known = (Evidence(document=0, start=start, end=start + len(fact), text=fact),)
    task = example(documents=(Passage(text=text),), evidence=known)

    def script(messages: Any, sampling: Any) -> str:
        prompt = messages[-1]["content"]
        if "Missing:" in prompt and "<section" not in prompt:
            return f"{fact}\nMissing: nothing"
        if "<section" not in prompt:
            return "\\boxed{the miller}\nSources: 1"
        if fact not in prompt.partition("<section")[2].partition("</section>")[0]:
            return "Nothing." if "Nothing." in prompt else "No change."
        return f"<quote>{fact}</quote>{fact}" + ("<enough/>" if "<enough/>" in prompt else "")

    sizes = {"window": 6000, "chunk_tokens": 300, "memory_tokens": 100, "answer_tokens": 50}
    quoting = {**sizes, "evidence": True, "no_change": True, "quote_tokens": 100}
    found = {}
    for mode in ({"stop_early": True}, {"mode": "parallel"}):
        engine = ScriptedEngine(script)
        agent = open_agent("memory", {**quoting, **mode})
        outcome = await agent(task, client(engine, needs_tokens=False))
        assert outcome.answer == "\\boxed{the miller}"
        assert outcome.metrics["citation_precision"] == outcome.metrics["citation_recall"] == 1.0
        assert outcome.metrics["malformed"] == 0
        found[next(iter(mode))] = outcome.metrics
    assert 0 < found["stop_early"]["stop_moment"] <= 1
    assert found["stop_early"]["sections"] < found["mode"]["sections"]
    assert (found["mode"]["rounds"], found["mode"]["few_rounds"]) == (1, 1.0)


async def test_weighted_metrics_are_added_to_the_reward() -> None:
    task = example()
    reward = with_bonus(open_reward("strict"), {"captured": 0.2, "stop_moment": 0.1})
    right = Outcome(answer="\\boxed{the miller}", metrics={"captured": 0.5})
    assert await reward(task, right) == pytest.approx(1.1)
    assert await reward(task, Outcome(answer="")) == 0.0


def test_a_bonus_for_a_metric_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"no metric 'capturd' .* did you mean captured\?"):
        AgentSettings.parse({"bonus": {"capturd": 0.1}})


@pytest.mark.parametrize(("empty_replies", "memory"), [("keep", "noted"), ("overwrite", "")])
async def test_an_empty_reply_keeps_the_memory_or_overwrites_it(
    empty_replies: str, memory: str
) -> None:
    replies = iter(["noted", "", "the answer"])
    sizes = {"window": 4000, "chunk_tokens": 300, "memory_tokens": 100, "answer_tokens": 50}
    agent = open_agent("memory", {**sizes, "empty_replies": empty_replies, "section_ends": "exact"})
    engine = TokenScript(lambda messages, sampling: next(replies))
    task = example(documents=(Passage(text="It rains. " * 60),))
    outcome = await agent(task, client(engine))
    assert outcome.trace is not None
    assert [step.memory for step in outcome.trace.steps] == ["noted", memory, memory]
    assert outcome.metrics["kept_memories"] == (empty_replies == "keep")


async def test_an_empty_answer_of_the_reader_is_an_answer_and_not_a_failure() -> None:
    def script(messages: Any, sampling: Any) -> str:
        return "noted" if "<section" in messages[-1]["content"] else ""

    ours = client(TokenScript(script))
    agent = open_agent("memory", {"chunk_tokens": 400, "memory_tokens": 64, "window": 4096})
    outcome = await agent(example(), ours)
    assert outcome.answer == ""
    assert outcome.trace is not None
    assert (outcome.trace.answer, outcome.trace.memory) == ("", "noted")
    assert outcome.trace.usage.calls == outcome.metrics["sections"] + 1
    assert len(ours.session.recorder.samples()) == outcome.metrics["sections"] + 1


# --- on a real model --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(
        tmp_path_factory.mktemp("models") / "llama", "llama", max_position_embeddings=1024
    )


@pytest.fixture
async def engine(folder: Path) -> AsyncIterator[LocalEngine]:
    async with LocalEngine(load(str(folder)), LocalConfig(cache_gb=0.01)) as engine:
        yield engine


def recomputed(engine: LocalEngine, sample: Sample) -> list[float]:
    """Log-probabilities of the sampled tokens of a row, by the model alone."""
    ids = torch.tensor([sample.ids])
    with torch.no_grad():
        logits = engine._loaded.model(ids).logits[0].float()
    logprobs = torch.log_softmax(logits, dim=-1)
    places = [place for place, is_sampled in enumerate(sample.is_sampled) if is_sampled]
    return [float(logprobs[place - 1, sample.ids[place]]) for place in places]


def reported(sample: Sample) -> list[float]:
    return [
        p for p, is_sampled in zip(sample.logprobs, sample.is_sampled, strict=True) if is_sampled
    ]


async def test_rows_of_a_conversation_hold_the_logprobs_of_the_model(engine: LocalEngine) -> None:
    """Several turns: what the model sampled is part of the next prompt as it was sampled."""

    async def agent(task: Example, client: Client) -> Outcome:
        messages: list[Any] = [{"role": "user", "content": task.question}]
        for number in range(3):
            reply = await client.chat.completions.create(messages=messages, max_tokens=40)
            messages += [reply.choices[0].message, {"role": "user", "content": f"And {number}?"}]
        return Outcome(answer=messages[-2].content, reward=1.0)

    groups = await collecting([example()], agent, engine, group_size=6, seed=2).all()
    rows = [row for rollout in groups[0].rollouts for row in rollout.samples]
    for row in rows:
        assert reported(row) == pytest.approx(recomputed(engine, row), abs=2e-4)
    total = sum(rollout.metrics["sampled_tokens"] for rollout in groups[0].rollouts)
    assert sum(row.num_sampled for row in rows) == total
    assert {rollout.metrics["rows"] for rollout in groups[0].rollouts} == {1.0}


async def test_the_rollouts_of_a_group_share_each_section_and_differ_after_it(
    engine: LocalEngine,
) -> None:
    agent = open_agent("memory", SMALL)
    collection = collecting([example()], agent, engine, group_size=4, reward=open_reward("strict"))
    (group,) = await collection.all()
    assert group.num_failed == 0, group.rollouts[0].error
    sections = int(group.rollouts[0].metrics["sections"])
    assert sections >= 2
    for step in range(sections):
        rows = [rollout.samples[step] for rollout in group.rollouts]
        columns = zip(*(row.ids for row in rows), strict=False)
        shared = len(list(takewhile(lambda ids: len(set(ids)) == 1, columns)))
        text = engine.decode(rows[0].ids[:shared])
        assert "<section" in text
        assert "</section>" in text  # the whole section stands in the part that all share
        assert shared > SMALL["chunk_tokens"]
    for rollout in group.rollouts:
        assert len(rollout.samples) == sections + 1
        for row in rollout.samples:
            assert reported(row) == pytest.approx(recomputed(engine, row), abs=2e-4)
            first = row.is_sampled.index(True)
            assert all(row.is_sampled[first:])  # one call each: a prompt, then what was sampled
    assert collection.stats.usage.cached_tokens > 0


async def test_both_drivers_sample_the_same_tokens_from_a_model(engine: LocalEngine) -> None:
    sampled = []
    for driver in ("free", "lockstep"):
        groups = await collecting(
            [example(id=name) for name in "ab"],
            open_agent("memory", SMALL),
            engine,
            group_size=3,
            driver=driver,  # type: ignore[arg-type]
            seed=8,
            reward=open_reward("recall"),
        ).all()
        sampled.append(
            [[row.ids for row in rollout.samples] for group in groups for rollout in group.rollouts]
        )
    assert sampled[0] == sampled[1]
    assert len({ids for rollout in sampled[0] for ids in rollout}) > 6


async def test_an_endpoint_that_returns_tokens_has_the_rows_of_the_model_itself(
    engine: LocalEngine, folder: Path
) -> None:
    agent = open_agent("single", {"max_tokens": 12})
    tasks = [example(id=name, documents=()) for name in "ab"]
    rows = []
    with serving_tiny(folder) as server:
        asks = {"return_token_ids": True, "logprobs": True}
        settings = {"base_url": server.base_url, "extra_body": asks}
        endpoint = open_engine(f"openai:{server.engine.model}", **settings)
        await check_engine(endpoint)
        for one in (engine, endpoint):
            collection = collecting(tasks, agent, one, group_size=3, reward=open_reward("strict"))
            groups = await collection.all()
            rows.append([row for g in groups for rollout in g.rollouts for row in rollout.samples])
        await endpoint.aclose()
    assert [row.ids for row in rows[0]] == [row.ids for row in rows[1]]
    assert [row.is_sampled for row in rows[0]] == [row.is_sampled for row in rows[1]]
    for own, sent in zip(*rows, strict=True):
        assert own.logprobs == pytest.approx(sent.logprobs, abs=1e-5)
    assert len({row.ids for row in rows[0]}) == 6


async def test_rows_record_the_version_of_the_weights(engine: LocalEngine) -> None:
    engine.weights_changed()
    (group,) = await collecting(
        [example(documents=())],
        open_agent("single", {"max_tokens": 4}),
        engine,
        group_size=2,
        reward=open_reward("strict"),
    ).all()
    assert {row.policy_version for rollout in group.rollouts for row in rollout.samples} == {1}


# --- agents from files ------------------------------------------------------------------------------

GOOD_AGENT = """
from pydantic import Field
from memagent.config import Settings
from memagent.rl.types import Outcome

class Mine(Settings):
    greeting: str = "hello"
    times: int = Field(default=1, ge=1)

DEFAULTS = Mine(greeting="good day")

async def agent(task, client, settings=DEFAULTS):
    messages = [{"role": "user", "content": settings.greeting * settings.times}]
    reply = await client.chat.completions.create(messages=messages)
    return Outcome(answer=reply.choices[0].message.content, reward=1.0)

async def plain(task, client):
    return Outcome(answer="")

def not_async(task, client):
    return None

async def takes_one(task):
    return None

thing = 3
"""


@pytest.fixture
def agent_file(tmp_path: Path) -> Path:
    file = tmp_path / "mine.py"
    file.write_text(GOOD_AGENT)
    return file


async def test_an_agent_of_a_users_file_is_run_with_its_settings(agent_file: Path) -> None:
    engine = TokenScript(random_reply)
    agent = open_agent(f"{agent_file}:agent", {"times": 2})
    (group,) = await collecting([example()], agent, engine, group_size=2).all()
    assert group.num_failed == 0
    assert bytes(engine.prompts[0][1:22]) == b"user\ngood daygood day"
    assert encode("good day")[0] in engine.prompts[0]


@pytest.mark.parametrize(
    ("spec", "settings", "message"),
    [
        ("{file}:agnet", {}, r"mine.py has no agnet; did you mean agent\?"),
        (
            "{file}:thing",
            {},
            r"mine.py:thing is no function; the agent is def thing\(task, client\)",
        ),
        ("{file}:not_async", {}, "mine.py:not_async is not async; write it as async def"),
        (
            "{file}:takes_one",
            {},
            r"takes_one takes \(task\); the agent is called with \(task, client\)",
        ),
        ("{file}:agent", {"tmes": 2}, r"unknown setting tmes; did you mean times\?"),
        ("{file}:agent", {"times": 0}, "times: input should be greater than or equal to 1"),
        ("{file}:plain", {"x": 1}, "has no settings; remove x"),
        ("{file}", {}, "name the agent as path.py:function"),
        ("{file}x.py:agent", {}, "there is no file .* with the agent; check its path"),
        ("memry", {}, r"there is no agent 'memry'; did you mean memory\?"),
        ("zzz", {}, "known: single, calculator, memory, path.py:function, or command:PROGRAM"),
        ("memory", {"chunk_tokens": 4}, "chunk_tokens: input should be greater"),
    ],
)
def test_mistakes_about_agents_are_one_line_with_the_remedy(
    agent_file: Path, spec: str, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        open_agent(spec.format(file=agent_file), settings)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("def broken(:\n", r"bad.py does not run: SyntaxError: .*bad.py, line 1"),
        ("x = 1\nraise KeyError('no')\n", r"does not run: KeyError: 'no' \(bad.py, line 2\)"),
        ("import nosuchmodule\n", r"ModuleNotFoundError: No module named 'nosuchmodule' \(bad.py"),
        ("import sys\nsys.exit(2)\n", r"SystemExit: 2 \(bad.py, line 2\)"),
    ],
)
def test_a_file_that_does_not_run_is_reported_with_its_line(
    tmp_path: Path, source: str, message: str
) -> None:
    file = tmp_path / "bad.py"
    file.write_text(source)
    with pytest.raises(ConfigError, match=message) as caught:
        open_agent(f"{file}:agent")
    assert "\n" not in str(caught.value)


# --- rewards ----------------------------------------------------------------------------------------


async def test_graders_are_rewards() -> None:
    task = example(answers=("6", "11"), match="all")
    assert await open_reward("strict")(task, Outcome(answer="\\boxed{11, 6}")) == 1.0
    assert await open_reward("strict")(task, Outcome(answer="6 and 11")) == 0.0
    assert await open_reward("recall")(task, Outcome(answer="it was 11, I think")) == 0.5
    anyof = example(answers=("Paris", "City of Light"))
    assert await open_reward("strict")(anyof, Outcome(answer="so \\boxed{city of light}")) == 1.0
    unknown = example(answers=(), grader="unanswerable")
    assert await open_reward("strict")(unknown, Outcome(answer="The text does not say.")) == 1.0


REWARDS = """
import math
def right(task, outcome):
    return outcome.answer == task.answers[0]
async def asynchronous(task, outcome):
    return 0.25
def infinite(task, outcome):
    return math.inf
def nothing(task, outcome):
    pass
def fragile(task, outcome):
    return 1 / len(outcome.answer)
def three(task, outcome, more):
    return 0.0
"""


@pytest.fixture
def reward_file(tmp_path: Path) -> Path:
    file = tmp_path / "scores.py"
    file.write_text(REWARDS)
    return file


async def test_functions_of_a_users_file_are_rewards(reward_file: Path) -> None:
    right = open_reward(f"{reward_file}:right")
    await check_reward(right, example())
    assert await right(example(), Outcome(answer="the miller")) == 1.0
    assert await right(example(), Outcome(answer="a clerk")) == 0.0
    assert await open_reward(f"{reward_file}:asynchronous")(example(), Outcome(answer="")) == 0.25


async def test_a_users_reward_grades_rollouts_in_processes(reward_file: Path) -> None:
    agent = open_agent("single")
    engine = TokenScript(lambda messages, sampling: "the miller")
    reward = open_reward(f"{reward_file}:right")
    (group,) = await collecting([example()], agent, engine, group_size=2, reward=reward).all()
    assert [rollout.reward for rollout in group.rollouts] == [1.0, 1.0]
    silent = TokenScript(lambda messages, sampling: "")
    fragile = open_reward(f"{reward_file}:fragile")
    (group,) = await collecting([example()], agent, silent, group_size=2, reward=fragile).all()
    place = f"{reward_file.name}, line 12"
    assert group.rollouts[0].error == f"ZeroDivisionError: division by zero ({place})"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("rihgt", r"scores.py has no rihgt; did you mean right\?"),
        ("three", r"takes \(task, outcome, more\); the reward is called with \(task, outcome\)"),
        ("infinite", "scores.py:infinite returned inf as reward; it must return a finite number"),
        ("nothing", "returned None as reward; it must return a finite number"),
        (
            "fragile",
            r"cannot grade an empty answer to e: ZeroDivisionError: .*scores.py, line 12.*any answer",
        ),
    ],
)
async def test_mistakes_about_rewards_are_found_before_the_first_rollout(
    reward_file: Path, name: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        await check_reward(open_reward(f"{reward_file}:{name}"), example())
    assert "\n" not in str(caught.value)


def test_an_unknown_reward_is_named_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"there is no reward 'strikt'; did you mean strict\?"):
        open_reward("strikt")
