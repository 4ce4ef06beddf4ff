"""Servers that cut prompts and say nothing are found before the next call; others are never taken for one."""

import random
from pathlib import Path

import openai
import pytest

from memagent.agent.budget import check_budget
from memagent.agent.model_call import Limits, call_model
from memagent.agent.prompts import prompts_for
from memagent.cli.main import run
from memagent.config import AgentConfig, EngineConfig
from memagent.data.example import Example, Passage
from memagent.data.formats.files import write_examples
from memagent.engines.openai import EndpointEngine
from memagent.errors import PromptCut
from memagent.eval.records import read_items
from memagent.tokens.tokenizers import EstimatingTokenizer, Tokenizer
from memagent.types import Sampling
from tests.conftest import prose
from tests.support.chat_servers import Chat, Json, chat_server, prompt_of, said
from tests.support.gateways import serving_gateway
from tests.support.loopback import running

CAP = 1023
NO_CAP = 10**9
SAMPLING = Sampling(max_tokens=64)


def num_words(request: Json) -> int:
    """What the servers here take for tokens: words of at most 4 letters, as common tokenizers nearly do."""
    return sum(-(-len(word) // 4) for word in prompt_of(request).split())


def cutting(cap: int = CAP, *, scale: float = 1.0) -> Chat:
    """A server that reads only the last tokens of a prompt, and reports no others."""

    def reply(request: Json) -> Json:
        seen = min(cap, round(scale * num_words(request)))
        return said("A reply.", prompt_tokens=seen, completion_tokens=3)

    return reply


class ExactTokenizer(EstimatingTokenizer):
    """Counts as the servers here do, or too many by a factor, and knows the template of the model."""

    knows_template = True
    is_exact = True

    def __init__(self, factor: float = 1.0) -> None:
        self.factor = factor

    def count_messages(self, messages: object) -> int:
        return round(self.factor * num_words({"messages": messages}))


async def num_calls_of(chat: Chat, tokenizer: Tokenizer, prompts: list[str]) -> int:
    """The calls that the server gets for these prompts. Raises what a call raises."""
    with chat_server(chat) as server:
        async with EndpointEngine(EngineConfig(model="m", base_url=server.base_url)) as engine:
            for prompt in prompts:
                messages = [{"role": "user", "content": prompt}]
                await call_model(engine, tokenizer, Limits(), messages, SAMPLING)  # type: ignore[arg-type]
        return len(server.chats)


def prompts(num: int, num_words: int, seed: int = 0) -> list[str]:
    """Prompts of about so many words, no two of the same length."""
    rng = random.Random(seed)
    words = prose(4 * num_words, seed=seed).split()
    return [" ".join(rng.choices(words, k=num_words + 23 * n)) for n in range(num)]


# --- found ----------------------------------------------------------------------------------------


async def test_our_own_count_finds_the_first_prompt_that_is_cut() -> None:
    with pytest.raises(PromptCut) as raised:
        await num_calls_of(cutting(), ExactTokenizer(), prompts(1, 1200))
    assert "cut the prompt to 1,023 tokens, of about" in str(raised.value)
    assert "OLLAMA_CONTEXT_LENGTH=2048" in str(raised.value)
    assert str(raised.value).endswith("begin again with `window=1024`")


async def test_an_estimate_finds_a_round_number_at_once() -> None:
    with pytest.raises(PromptCut):
        await num_calls_of(cutting(1024), EstimatingTokenizer(), prompts(1, 1200))


async def test_an_estimate_finds_any_number_that_comes_again() -> None:
    with pytest.raises(PromptCut, match="cut the prompt to 1,333 tokens"):
        await num_calls_of(cutting(1333), EstimatingTokenizer(), prompts(4, 1500))


async def test_after_shorter_prompts_too() -> None:
    few = prompts(3, 300)
    assert await num_calls_of(cutting(), ExactTokenizer(), few) == len(few)
    with pytest.raises(PromptCut):
        await num_calls_of(cutting(), ExactTokenizer(), [*few, *prompts(1, 1200)])


# --- never taken for one --------------------------------------------------------------------------


@pytest.mark.parametrize("factor", [1.0, 1.3, 1.1, 4.0])
async def test_a_server_that_cuts_nothing_is_asked_for_little_more(factor: float) -> None:
    """A foreign tokenizer that counts 30 % too many costs a comparison, twice where prompts grow."""
    num = await num_calls_of(cutting(NO_CAP), ExactTokenizer(factor), prompts(20, 600))
    assert num <= 20 + (0 if factor == 1.0 else 4)


@pytest.mark.parametrize("scale", [0.3, 0.6, 1.0, 1.2])
@pytest.mark.parametrize("size", [300, 1024, 4000])
async def test_estimates_of_any_quality_raise_no_alarm(scale: float, size: int) -> None:
    chat = cutting(NO_CAP, scale=scale)
    assert await num_calls_of(chat, EstimatingTokenizer(), prompts(20, size)) <= 20 + 2


@pytest.mark.parametrize("reported", [0, 1, 7, 1000, 1024])
async def test_servers_that_always_report_the_same_are_not_believed(reported: int) -> None:
    def reply(request: Json) -> Json:
        return said("A reply.", prompt_tokens=reported, completion_tokens=3)

    num = await num_calls_of(reply, ExactTokenizer(), prompts(9, 1200))
    assert num <= 9 + 2


async def test_a_server_that_reports_nothing_is_not_compared() -> None:
    def reply(request: Json) -> Json:
        return {name: value for name, value in said("A reply.").items() if name != "usage"}

    assert await num_calls_of(reply, ExactTokenizer(), prompts(5, 1200)) == 5


async def test_a_server_that_does_not_count_what_is_cached_cuts_nothing() -> None:
    cached = ""

    def reply(request: Json) -> Json:
        nonlocal cached
        prompt, before = prompt_of(request), cached
        cached = prompt
        shared = next(
            (n for n, (a, b) in enumerate(zip(prompt, before, strict=False)) if a != b),
            min(len(prompt), len(before)),
        )
        rest = {"messages": [{"content": prompt[shared:]}]}
        return said("A reply.", prompt_tokens=max(1, num_words(rest)), completion_tokens=3)

    growing = [" ".join(prose(9000).split()[: 500 + 90 * n]) for n in range(12)]
    assert await num_calls_of(reply, ExactTokenizer(), growing) <= 12 + 2


async def test_a_server_that_refuses_long_prompts_cuts_nothing(tmp_path: Path) -> None:
    """The longer prompt of the comparison is refused, and that decides as well."""
    with running(tmp_path / "log", context_window=1700) as server:
        engine = EndpointEngine(EngineConfig(model="test-model", base_url=server.base_url))
        async with engine:
            for prompt in prompts(3, 1150):
                messages = [{"role": "user", "content": prompt}]
                tokenizer = ExactTokenizer(3.0)
                await call_model(engine, tokenizer, Limits(), messages, SAMPLING)  # type: ignore[arg-type]


async def test_without_room_for_the_comparison_the_reply_is_used() -> None:
    limits = Limits(max_calls=1)
    messages = [{"role": "user", "content": prompts(1, 1200)[0]}]
    with chat_server(cutting(NO_CAP)) as server:
        async with EndpointEngine(EngineConfig(model="m", base_url=server.base_url)) as engine:
            used = await call_model(engine, ExactTokenizer(1.3), limits, messages, SAMPLING)  # type: ignore[arg-type]
        assert (used.completion.text, len(server.chats)) == ("A reply.", 1)


# --- the commands ---------------------------------------------------------------------------------


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(prose(3000))
    return path


def test_a_reading_stops_before_the_next_call_and_says_what_to_do(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with chat_server(cutting()) as server:
        where = ["--base-url", server.base_url, "--run-dir", str(tmp_path / "run")]
        asked = ["ask", str(text), "-q", "Who?", *where, "--tokenizer=estimate"]
        assert run([*asked, "--set=window=6000"]) == 3
        assert len(server.chats) <= 2 + 2
    shown = capsys.readouterr().err
    assert "cut the prompt to 1,023 tokens" in shown
    assert "--window 1024" in shown


def test_the_window_that_is_advised_is_enough(text: Path) -> None:
    """Sections and memory follow from it."""
    with chat_server(cutting(4095, scale=1.3)) as server:
        where = ["--base-url", server.base_url, "--tokenizer=estimate", "--quiet"]
        assert run(["ask", str(text), "-q", "Who?", *where]) == 3
        assert run(["ask", str(text), "-q", "Who?", *where, "--set=window=4096"]) == 0
        assert max(1.3 * num_words(request) for request in server.chats[5:]) < 4096


@pytest.mark.parametrize("window", [1280, 1500, 2048, 4096, 6000, 8191])
@pytest.mark.parametrize("settings", [{}, {"mode": "parallel"}, {"prompts": "boxed"}])
def test_a_window_alone_is_enough(window: int, settings: Json) -> None:
    config = AgentConfig.parse({"window": window, **settings})
    prompts, tokenizer = prompts_for(config), EstimatingTokenizer()
    budget = check_budget("Who inherits the house in the end?", config, prompts, tokenizer)
    assert budget.section > window // 8
    assert max(budget.read_total, budget.answer_total) > window // 2


def test_sizes_that_are_given_stay_and_larger_windows_change_nothing() -> None:
    given = AgentConfig.parse({"window": 4096, "chunk_tokens": 100, "memory_tokens": 50})
    assert (given.chunk_tokens, given.memory_tokens, given.answer_tokens) == (100, 50, 512)
    for window in (8192, 32768):
        usual = AgentConfig.parse({"window": window})
        assert (usual.chunk_tokens, usual.memory_tokens, usual.answer_tokens) == (5000, 1024, 1024)


def test_an_evaluation_stops_and_no_item_counts_as_wrong(tmp_path: Path) -> None:
    examples = [
        Example(id=str(n), question="Who?", answers=("A",), documents=(Passage(text=prompt),))
        for n, prompt in enumerate(prompts(12, 1300))
    ]
    write_examples(tmp_path / "examples.jsonl", examples)
    with chat_server(cutting()) as server:
        where = ["--base-url", server.base_url, "--run-dir", str(tmp_path / "run"), "--quiet"]
        sizes = [
            "--set=window=8000",
            "--set=tokenizer=estimate",
            "--method=direct",
            "--concurrency=1",
        ]
        file = ["--file", str(tmp_path / "examples.jsonl"), "--set=length_tokenizer=estimate"]
        assert run(["eval", *file, *sizes, *where]) == 3
        assert len(server.chats) < 12
    assert list(read_items(tmp_path / "run")) == []
    with chat_server(cutting(NO_CAP)) as server:
        again = ["eval", "--resume", str(tmp_path / "run"), "--base-url", server.base_url]
        assert run(again) == 0
        assert len(server.chats) == 12
    assert len(list(read_items(tmp_path / "run"))) == 12


def test_the_gateway_fails_and_its_log_has_the_reason(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with chat_server(cutting()) as server:
        engine = EndpointEngine(EngineConfig(model="m", base_url=server.base_url))
        engine.tokenizer = "estimate"
        reading = {"window": 8192, "tokenizer": ExactTokenizer()}
        with serving_gateway(tmp_path, engine, reading=reading) as gateway:
            for content in (prose(150), prose(3000)):
                num_before = len(server.chats)
                with pytest.raises(openai.InternalServerError, match="503"):
                    gateway.client().chat.completions.create(
                        model="memagent",
                        messages=[
                            {"role": "user", "content": content},
                            {"role": "user", "content": "Who?"},
                        ],
                    )
                assert len(server.chats) <= num_before + 3
                assert "cut the prompt to 1,023" in caplog.text
                caplog.clear()
