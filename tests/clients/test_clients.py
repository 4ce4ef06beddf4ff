"""Clients of others against the gateway: OpenAI's for JavaScript, LangChain, LlamaIndex, smolagents, schemathesis.

    make test-clients

Skipped unless MEMAGENT_TEST_CLIENTS names a Python that has them, and CLIENTS_NODE a folder with the npm package
openai. They have a venv of their own, because they need certain versions of many libraries.
"""

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from memagent.data.tasks.arithmetic import problem
from memagent.rl.agents.api import open_agent
from memagent.rl.agents.client import Client
from memagent.rl.rollouts.collect import Collection, RolloutSpec
from memagent.rl.types import Group, Outcome
from tests.integration.test_agent_programs import trained
from tests.support.gateways import FACT, QUESTION, Gateway, PatientEngine, novel, serving_gateway
from tests.support.token_engine import TokenTakingScript, random_reply

PYTHON = os.environ.get("MEMAGENT_TEST_CLIENTS", "")
NODE_FOLDER = os.environ.get("CLIENTS_NODE", "")
HERE = Path(__file__).parent
pytestmark = [
    pytest.mark.skipif(not Path(PYTHON).is_file(), reason="make test-clients runs it"),
    pytest.mark.timeout(1200),
]


@pytest.fixture
def gateway(tmp_path: Path) -> Iterator[Gateway]:
    with serving_gateway(tmp_path, PatientEngine(0.01), reading={}) as gateway:
        yield gateway


def told(gateway: Gateway, *command: str) -> dict[str, Any]:
    """What a client prints of its requests."""
    given = {"base_url": gateway.base_url, "text": novel(29_000), "question": QUESTION}
    done = subprocess.run(command, input=json.dumps(given), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize("name", ["langchain_client.py", "llamaindex_client.py"])
def test_chat_classes_of_frameworks_work_unchanged(gateway: Gateway, name: str) -> None:
    found = told(gateway, PYTHON, str(HERE / name))
    assert found["short"] == "The text does not tell."
    assert found["long"] == found["streamed"] == FACT
    assert found["tokens"] > 300_000
    assert found["error"].endswith("NotFoundError")


@pytest.mark.skipif(not NODE_FOLDER or not shutil.which("node"), reason="no node, or no package")
def test_the_javascript_client_works_unchanged(gateway: Gateway) -> None:
    found = told(gateway, "node", str(HERE / "client.mjs"))
    assert found["short"] == "The text does not tell."
    assert found["long"] == found["streamed"] == found["response"] == found["file"] == FACT
    assert found["progress"] > 50
    assert found["tokens"] > 300_000
    assert (found["error"], found["aborted"]) == ("NotFoundError", "APIUserAbortError")


def test_schemathesis_finds_no_error_of_the_server(gateway: Gateway, tmp_path: Path) -> None:
    command = [
        str(Path(PYTHON).absolute().with_name("schemathesis")),
        "run",
        f"{gateway.url}/openapi.json",
        *("--checks", "not_a_server_error,status_code_conformance"),
        *("--max-examples", "50", "--generation-deterministic", "--request-timeout", "60"),
    ]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)  # it keeps a cache
    assert done.returncode == 0, done.stdout[-4000:]
    assert gateway.send("GET", "/health").status_code == 200


# --- agents of frameworks in training -------------------------------------------------------------


async def function(task: Any, client: Client) -> Outcome:
    messages = [{"role": "user", "content": task.question}]
    reply = await client.chat.completions.create(messages=messages, max_tokens=8)
    return Outcome(answer=reply.choices[0].message.content)


async def reward(task: Any, outcome: Outcome) -> float:
    return float(len(outcome.answer) % 3)


async def group_of(agent: Any) -> Group:
    spec = RolloutSpec(agent=agent, reward=reward, group_size=3, seed=5)
    async with Collection([problem(0, seed=0)], TokenTakingScript(random_reply), spec) as groups:
        (group,) = await groups.all()
    return group


@pytest.mark.parametrize("name", ["langchain_agent.py", "smolagents_agent.py"])
async def test_rows_of_a_frameworks_agent_equal_those_of_a_function(name: str) -> None:
    ours = await group_of(function)
    theirs = await group_of(open_agent(f"command:{PYTHON} {HERE / name}"))
    assert [rollout.error for rollout in theirs.rollouts] == [None] * 3
    assert [one.samples for one in theirs.rollouts] == [one.samples for one in ours.rollouts]
    assert [one.reward for one in theirs.rollouts] == [one.reward for one in ours.rollouts]


@pytest.mark.parametrize("name", ["langchain_agent.py", "smolagents_agent.py"])
async def test_a_frameworks_agent_is_trained_for_a_few_steps(tmp_path: Path, name: str) -> None:
    first = await trained(tmp_path, f"command:{PYTHON} {HERE / name}", steps=3)
    second = await trained(tmp_path, "function", steps=3)
    assert first == second
