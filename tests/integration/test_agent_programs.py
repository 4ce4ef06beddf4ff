"""Agents in their own processes: an unmodified OpenAI client, recorded and trained as an agent function."""

import asyncio
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import openai
import pytest

from memagent.data.tasks.arithmetic import problem
from memagent.errors import ConfigError
from memagent.rl.agents.api import open_agent
from memagent.rl.agents.client import Client
from memagent.rl.agents.command import endpoint_of
from memagent.rl.agents.session import Session
from memagent.rl.resume import remember_named, resumed_config, stored_values
from memagent.rl.rollouts.collect import Collection, RolloutSpec
from memagent.rl.settings import parse_config
from memagent.rl.trainer import open_training
from memagent.rl.types import Group, Outcome
from memagent.tracking import comparable, read_metrics
from tests.support.processes import is_running, kill_after, marked, one_of
from tests.support.sizes import sized
from tests.support.timing import wait_until
from tests.support.tiny_training import tiny_run
from tests.support.token_engine import TokenTakingScript, random_reply

PROGRAM = """
import json, sys
from openai import OpenAI

task = json.loads(sys.stdin.readline())
client = OpenAI()
messages = [{"role": "user", "content": task["question"]}]
for turn in range(2):
    reply = client.chat.completions.create(model="any", messages=messages, max_tokens=24)
    messages.append({"role": "assistant", "content": reply.choices[0].message.content})
    messages.append({"role": "user", "content": "Go on."})
other = client.chat.completions.create(model="any", messages=messages[:1], max_tokens=24)
print("thinking aloud")
print(json.dumps({"answer": other.choices[0].message.content, "metrics": {"turns": 2}}))
"""


async def function(task: Any, client: Client) -> Outcome:
    """What the program does, as a function."""
    messages: list[Any] = [{"role": "user", "content": task.question}]
    for _ in range(2):
        reply = await client.chat.completions.create(messages=messages, max_tokens=24)
        messages.append(reply.choices[0].message)
        messages.append({"role": "user", "content": "Go on."})
    other = await client.chat.completions.create(messages=messages[:1], max_tokens=24)
    return Outcome(answer=other.choices[0].message.content, metrics={"turns": 2})


@pytest.fixture
def program(tmp_path: Path) -> str:
    file = tmp_path / "my_agent.py"
    file.write_text(PROGRAM)
    return f"command:{sys.executable} {file}"


async def reward(task: Any, outcome: Outcome) -> float:
    return float(len(outcome.answer) % 3)


async def group_of(agent: Any, *, group_size: int = 1, **options: Any) -> Group:
    spec = RolloutSpec(agent=agent, reward=reward, group_size=group_size, seed=5, **options)
    async with Collection([problem(0, seed=0)], TokenTakingScript(random_reply), spec) as groups:
        (group,) = await groups.all()
    return group


async def test_the_rows_of_a_program_equal_those_of_the_same_agent_as_a_function(
    program: str,
) -> None:
    in_process = await group_of(function, group_size=3)
    in_its_own = await group_of(open_agent(program), group_size=3)
    for one, other in zip(in_process.rollouts, in_its_own.rollouts, strict=True):
        assert other.error is None
        assert other.samples == one.samples
        assert other.reward == one.reward
        assert other.answer == one.answer
        assert other.metrics["turns"] == 2
        assert len(one.samples) == 2
    assert len({rollout.samples for rollout in in_process.rollouts}) == 3


async def test_rollouts_are_told_apart_by_key_or_header() -> None:
    engine = TokenTakingScript(random_reply)
    sessions = [Session(engine, task_id="t", index=index, seed=0) for index in range(2)]
    messages: Any = [{"role": "user", "content": "Hello"}]
    async with (
        endpoint_of(Client(sessions[0])) as first,
        endpoint_of(Client(sessions[1])) as second,
    ):
        assert first.base_url == second.base_url
        async with openai.AsyncOpenAI(base_url=first.base_url, api_key=first.api_key) as client:
            await client.chat.completions.create(model="any", messages=messages)
            by_header = client.with_options(default_headers={"x-memagent-rollout": second.api_key})
            await by_header.chat.completions.create(model="any", messages=messages, n=2)
            chunks = [
                chunk
                async for chunk in await client.chat.completions.create(
                    model="any", messages=messages, stream=True
                )
            ]
        async with openai.AsyncOpenAI(base_url=first.base_url, api_key="another") as stranger:
            with pytest.raises(openai.AuthenticationError, match="no rollout has this key"):
                await stranger.chat.completions.create(model="any", messages=messages)
    assert [session.usage.calls for session in sessions] == [2, 2]
    replies = [step.reply for step in sessions[0].steps]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == replies[1]


async def test_what_the_run_does_not_allow_fails_the_rollout_with_its_reason() -> None:
    session = Session(TokenTakingScript(random_reply), task_id="t", index=0, seed=0)
    async with (
        endpoint_of(Client(session)) as endpoint,
        openai.AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key) as client,
    ):
        with pytest.raises(openai.BadRequestError, match="leave temperature out of the agent"):
            await client.chat.completions.create(
                model="any", messages=[{"role": "user", "content": "Hi"}], temperature=0.3
            )
        assert isinstance(endpoint.error, ConfigError)


@pytest.mark.parametrize(
    ("source", "failed_by", "reason"),
    [
        ("import sys; sys.exit('no idea')", "machine", "ended with code 1: no idea"),
        ("import os; os.kill(os.getpid(), 9)", "machine", "ended with code 137: no message"),
        (
            PROGRAM.replace("max_tokens=24", "max_tokens=24, temperature=0.1"),
            "machine",
            "asks for temperature=0.1",
        ),
        (
            PROGRAM.replace('print("thinking aloud")', "raise ValueError('odd')"),
            "policy",
            "ValueError: odd",
        ),
        ("print('an answer without a call')", "machine", "without a call of the client"),
    ],
)
async def test_a_program_that_fails_is_a_failed_rollout(
    tmp_path: Path, source: str, failed_by: str, reason: str
) -> None:
    file = tmp_path / "my_agent.py"
    file.write_text(source)
    agent = open_agent(f"command:{sys.executable} {file}")
    group = await group_of(agent, stop_after=99)
    assert group.rollouts[0].failed_by == failed_by
    assert reason in str(group.rollouts[0].error)


async def test_a_program_that_hangs_is_ended_with_what_it_started(tmp_path: Path) -> None:
    file, pids = tmp_path / "my_agent.py", tmp_path / "pids"
    file.write_text(
        "import os, subprocess, sys, time\n"
        f"child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(99)'])\n"
        f"open({str(pids)!r}, 'a').write(f'{{os.getpid()}} {{child.pid}} ')\n"
        "time.sleep(99)\n"
    )
    agent = open_agent(f"command:{sys.executable} {file}", {"max_processes": 8})
    group = await group_of(agent, seconds=2.0, stop_after=99)
    assert "took longer than 2 s" in str(group.rollouts[0].error)
    await asyncio.sleep(0.1)
    for pid in map(int, pids.read_text().split()):
        assert not is_running(pid)


WITH_CHILD = PROGRAM.replace(
    'print("thinking aloud")',
    "import subprocess; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(99)'])",
)
STARTED_BY = """
import asyncio, sys
from types import SimpleNamespace
from memagent.rl.agents.command import _output
endpoint = SimpleNamespace(base_url="", api_key="", error=None)
asyncio.run(_output(sys.argv[1:], b"", endpoint))
"""
HANGING = (
    "import subprocess, sys; subprocess.call([sys.executable, '-c', 'import time; time.sleep(99)'])"
)


async def test_programs_killed_at_whatever_moment_fail_their_own_rollouts_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "my_agent.py"
    file.write_text(WITH_CHILD)
    monkeypatch.setenv("TRIED", "agents")
    agent, rng = open_agent(f"command:{sys.executable} {file}"), random.Random(1)
    for _ in range(sized(2, 20)):
        timer = kill_after(rng.uniform(0, 3), lambda: one_of(marked("TRIED=agents"), rng))
        group = await group_of(agent, group_size=3, stop_after=99, seconds=60.0)
        timer.join()
        errors = [str(one.error) for one in group.rollouts if one.error]
        assert len(errors) <= 1
        assert all("ended with code" in error for error in errors)
        assert not marked("TRIED=agents")


def test_a_program_ends_with_the_training_that_is_killed_at_whatever_moment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TRIED", "training")
    rng = random.Random(2)
    for _ in range(sized(2, 20)):
        command = [sys.executable, "-c", STARTED_BY, sys.executable, "-c", HANGING]
        with subprocess.Popen(command) as training:
            wait_until(lambda: len(marked("TRIED=training")) > 1)
            time.sleep(rng.uniform(0, 0.5))
            training.kill()
        wait_until(lambda: not marked("TRIED=training"))


def test_commands_are_checked_when_they_are_named() -> None:
    for spec, reason in (("command:", "name a program"), ("command:echo 'x", "is no command")):
        with pytest.raises(ConfigError, match=reason):
            open_agent(spec)
    with pytest.raises(ConfigError, match="max_process"):
        open_agent("command:echo", {"max_proces": 3})
    with pytest.raises(ConfigError, match="driver"):
        parse_config(
            {
                "model": {"source": "x"},
                "agent": {"name": "command:echo"},
                "rollout": {"driver": "lockstep"},
                "tasks": [{"tasks": ["small/colours"]}],
            }
        )


def test_a_command_of_a_run_directory_is_used_only_if_the_user_named_it(tmp_path: Path) -> None:
    values = tiny_run(tmp_path, warm_start=None)
    values["agent"] = {"name": "command:python my_agent.py", "reward": "strict"}
    values["rollout"] = {"prompts": 2, "group_size": 2}
    config = parse_config(values)
    with pytest.raises(ConfigError, match="which you have not named on this machine"):
        resumed_config(stored_values(config))
    again = resumed_config(stored_values(config), changes=["agent.name=command:python my_agent.py"])
    assert again.agent.name == config.agent.name
    remember_named(config)
    assert resumed_config(stored_values(config)).agent == config.agent


async def test_a_program_is_trained_as_the_same_agent_as_a_function(tmp_path: Path) -> None:
    first = await trained(tmp_path, "program", steps=1)
    second = await trained(tmp_path, "function", steps=1)
    assert first == second
    assert first["grad_norm"] >= 0


ONE_CALL = """
import json, sys
from openai import OpenAI
task = json.loads(sys.stdin.readline())
reply = OpenAI().chat.completions.create(
    model="any", messages=[{"role": "user", "content": task["question"]}], max_tokens=8)
print(json.dumps({"answer": reply.choices[0].message.content}))
"""
ONE_CALL_FUNCTION = """
from memagent.rl.types import Outcome
async def agent(task, client):
    messages = [{"role": "user", "content": task.question}]
    reply = await client.chat.completions.create(messages=messages, max_tokens=8)
    return Outcome(answer=reply.choices[0].message.content)
"""


async def trained(folder: Path, agent: str, *, steps: int) -> dict[str, float]:
    """Metrics of the last step of a training, without times. `agent` is program, function, or a name."""
    program, function = folder / "one_call.py", folder / "one_function.py"
    program.write_text(ONE_CALL)
    function.write_text(ONE_CALL_FUNCTION)
    values = tiny_run(
        folder,
        seed=4,  # the two rollouts of a group get different rewards
        steps=steps,
        warm_start=None,
        validation=None,
        objective={"dynamic_sampling": False},
        checkpoint={"every": steps, "keep": 1},
        rollout={"prompts": 1, "group_size": 2, "concurrency": 1},
        update={"updates": 1, "max_tokens": 1024},
    )
    ours = {"program": f"command:{sys.executable} {program}", "function": f"{function}:agent"}
    values["agent"] = {**values["agent"], "name": ours.get(agent, agent), "settings": {}}
    run = folder / f"run-{len(list(folder.iterdir()))}"
    async with open_training(parse_config(values), run) as trainer:
        await trainer.train()
    return comparable(read_metrics(run)[-1])
