"""Calls become rows: an extended prompt continues a row, another one starts a row, each sampled token counts once."""

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memagent.engines.scripted import ScriptedEngine
from memagent.errors import ConfigError, EngineError, EngineRefused
from memagent.rl.agents.client import Client
from memagent.rl.agents.recorder import Call, Turn, call_of, continued_prompt, merge_calls
from memagent.rl.agents.session import RunSampling, Session, call_seed
from memagent.rl.types import Sample
from memagent.types import Completion, Message, Sampling
from tests.support.token_engine import (
    END,
    PAIR,
    START,
    TokenScript,
    TokenTakingScript,
    chat_template,
    decode,
    in_pairs,
    random_reply,
    without_ends,
    without_thoughts,
)


def call(prompt: Sequence[int], sampled: Sequence[int], version: int = 0) -> Call:
    logprobs = tuple(-token / 10 for token in sampled)
    return Call(
        prompt_ids=tuple(prompt),
        completion_ids=tuple(sampled),
        logprobs=logprobs,
        policy_version=version,
    )


def drawn_of(sample: Sample) -> list[tuple[int, float]]:
    marked = zip(sample.ids, sample.logprobs, sample.is_sampled, strict=True)
    return [(token, logprob) for token, logprob, is_sampled in marked if is_sampled]


def test_a_call_that_extends_another_continues_its_row() -> None:
    rows = merge_calls([call([1, 2], [3, 4]), call([1, 2, 3, 4, 5], [6], version=2)])
    assert rows == (
        Sample(
            ids=(1, 2, 3, 4, 5, 6),
            is_sampled=(False, False, True, True, False, True),
            logprobs=(0.0, 0.0, -0.3, -0.4, 0.0, -0.6),
            policy_version=0,
            token_versions=(0, 0, 0, 0, 0, 2),
        ),
    )


def test_a_call_whose_prompt_differs_in_one_token_starts_a_row_and_no_token_counts_twice() -> None:
    rows = merge_calls([call([1, 2], [3, 4]), call([1, 2, 3, 9, 5], [6])])
    assert [row.ids for row in rows] == [(1, 2, 3, 4), (1, 2, 3, 9, 5, 6)]
    assert rows[1].is_sampled == (False, False, False, False, False, True)


def test_a_prompt_without_the_sampled_end_starts_a_row() -> None:
    rows = merge_calls([call([1], [2, 3]), call([1, 2, 8], [4])])
    assert [row.num_sampled for row in rows] == [2, 1]


def test_of_two_calls_that_extend_a_row_the_first_continues_it() -> None:
    rows = merge_calls([call([1], [2]), call([1, 2, 3], [4]), call([1, 2, 5], [6])])
    assert [row.ids for row in rows] == [(1, 2, 3, 4), (1, 2, 5, 6)]
    assert rows[1].is_sampled == (False, False, False, True)


def test_the_longest_row_is_continued() -> None:
    rows = merge_calls([call([1], [2]), call([1, 2, 3, 3], [4]), call([1], [2])])
    assert [row.ids for row in rows] == [(1, 2, 3, 3, 4), (1, 2)]
    rows = merge_calls([call([1], [2]), call([1, 7], [8]), call([1, 7, 8, 9], [5])])
    assert [row.ids for row in rows] == [(1, 2), (1, 7, 8, 9, 5)]


def test_the_oldest_version_of_a_row_counts() -> None:
    assert merge_calls([call([1], [2], 5), call([1, 2], [3], 4)])[0].policy_version == 4


@st.composite
def call_lists(draw: st.DrawFn) -> list[Call]:
    """Calls over few tokens; many extend an earlier one, some only nearly."""
    rng = random.Random(draw(st.integers(0, 2**32)))
    calls: list[Call] = []
    for _ in range(rng.randint(1, 8)):
        prompt = list(rng.choice(calls).ids) if calls and rng.random() < 0.7 else [1]
        if rng.random() < 0.2:
            prompt[rng.randrange(len(prompt))] = rng.randint(1, 3)
        prompt += [rng.randint(1, 3) for _ in range(rng.randint(0, 3))]
        calls.append(call(prompt, [rng.randint(1, 3) for _ in range(rng.randint(0, 4))]))
    return calls


@given(call_lists())
@settings(max_examples=300, deadline=None)
def test_rows_hold_every_sampled_token_once_in_the_order_of_the_calls(calls: list[Call]) -> None:
    # a log-probability that nothing else has identifies a sampled token
    marked = [
        replace(one, logprobs=tuple(-(10 * n + k + 1) / 64 for k in range(len(one.logprobs))))
        for n, one in enumerate(calls)
    ]
    owner = {
        logprob: (n, k) for n, one in enumerate(marked) for k, logprob in enumerate(one.logprobs)
    }
    found = []
    for row in merge_calls(marked):
        places = [place for place, is_sampled in enumerate(row.is_sampled) if is_sampled]
        sampled = [owner[row.logprobs[place]] for place in places]
        assert sampled == sorted(sampled)
        for place, (number, position) in zip(places, sampled, strict=True):
            one = marked[number]
            assert place == len(one.prompt_ids) + position
            assert row.ids[: place + 1] == one.ids[: place + 1]
        assert all(row.logprobs[place] == 0 for place in range(len(row.ids)) if place not in places)
        found += sampled
    assert sorted(found) == sorted(owner.values())


# --- what an engine returns -------------------------------------------------------------------------


def completion(**changes: Any) -> Completion:
    values: dict[str, Any] = {
        "prompt_ids": (1,),
        "completion_ids": (2, 3),
        "logprobs": (-0.1, -0.2),
    }
    return Completion(text="x", **{**values, **changes})


@pytest.mark.parametrize("missing", ["prompt_ids", "completion_ids", "logprobs"])
def test_an_engine_without_tokens_is_refused_in_one_line(missing: str) -> None:
    with pytest.raises(
        EngineRefused, match=r"^m returns no token ids .* use an engine local:MODEL"
    ):
        call_of(completion(**{missing: None}), model="m", policy_version=0)


@pytest.mark.parametrize(
    "wrong",
    [
        {"logprobs": (-0.1,)},
        {"logprobs": (-0.1, float("nan"))},
        {"logprobs": (-1.0, 0.5)},
        {"prompt_ids": ()},
    ],
)
def test_inconsistent_tokens_are_an_error(wrong: dict[str, Any]) -> None:
    with pytest.raises(EngineError):
        call_of(completion(**wrong), model="m", policy_version=0)


def test_the_version_of_the_engine_overrides_that_of_the_run() -> None:
    assert call_of(completion(policy_version=4), model="m", policy_version=7).policy_version == 4
    assert call_of(completion(), model="m", policy_version=7).policy_version == 7


# --- conversations ----------------------------------------------------------------------------------


def session(engine: Any, **options: Any) -> Session:
    return Session(engine, task_id="t", index=0, seed=1, **options)


async def converse(
    engine: Any, *, tools: Sequence[str] = ("one", "two"), max_tokens: int = 50
) -> Session:
    """A conversation of several turns over one list of messages, as a tool agent has it."""
    ours = session(engine)
    create = Client(ours).chat.completions.create
    messages: list[Any] = [{"role": "user", "content": "begin"}]
    for tool in (*tools, None):
        reply = await create(messages=messages, max_tokens=max_tokens)
        messages.append(reply.choices[0].message)
        if tool is not None:
            messages.append({"role": "user", "content": tool})
    return ours


def scripted(*replies: str) -> Any:
    left = iter(replies)
    return lambda messages, sampling: next(left)


async def test_a_conversation_is_one_row_in_which_only_replies_carry_loss() -> None:
    ours = await converse(TokenScript(scripted("Aa", "Bb", "Cc")))
    (row,) = ours.recorder.samples()
    end = chr(0)
    shown = [(chr(t) if t < 256 else end, s) for t, s in zip(row.ids, row.is_sampled, strict=True)]
    assert "".join(c for c, is_sampled in shown if is_sampled) == f"Aa{end}Bb{end}Cc{end}"
    assert "".join(c for c, is_sampled in shown if not is_sampled).replace(end, "") == (
        "user\nbeginassistant\nuser\noneassistant\nuser\ntwoassistant\n"
    )


@pytest.mark.parametrize("engine_class", [TokenScript, TokenTakingScript])
async def test_a_template_that_drops_reasoning_starts_a_row_per_turn(
    engine_class: type[TokenScript],
) -> None:
    replies = ("<think>hm</think>A", "<think>so</think>B", "C")
    engine = engine_class(scripted(*replies), template=without_thoughts)
    rows = (await converse(engine)).recorder.samples()
    assert [decode([t for t, _ in drawn_of(row)]) for row in rows] == list(replies)
    assert "hm" not in decode(
        rows[1].ids
    )  # the model was shown none of it, so nothing else carries loss


@pytest.mark.parametrize("engine_class", [TokenScript, TokenTakingScript])
async def test_a_template_without_end_tokens_starts_a_row_per_turn(
    engine_class: type[TokenScript],
) -> None:
    rows = (
        await converse(engine_class(scripted("A", "B", "C"), template=without_ends))
    ).recorder.samples()
    assert [decode([t for t, _ in drawn_of(row)]) for row in rows] == ["A", "B", "C"]
    assert all(drawn_of(row)[-1][0] == END for row in rows)


async def test_replies_that_encode_differently_start_rows_where_only_text_can_be_sent() -> None:
    rows = (
        await converse(TokenScript(scripted("Abcd", "Efgh", "Ijkl"), drift=True))
    ).recorder.samples()
    assert len(rows) == 3
    assert [token for token, _ in drawn_of(rows[1])] == [*in_pairs("Efgh"), END]
    assert max(t for t, s in zip(rows[1].ids, rows[1].is_sampled, strict=True) if not s) < PAIR


async def test_replies_that_encode_differently_continue_rows_where_tokens_can_be_sent() -> None:
    engine = TokenTakingScript(scripted("Abcd", "Efgh", "Ijkl"), drift=True)
    (row,) = (await converse(engine)).recorder.samples()
    assert [token for token, _ in drawn_of(row)] == [
        token for reply in ("Abcd", "Efgh", "Ijkl") for token in (*in_pairs(reply), END)
    ]
    assert decode(row.ids) == (
        "user\nbeginassistant\nAbcduser\noneassistant\nEfghuser\ntwoassistant\nIjkl"
    )
    assert engine.prompts[2] == row.ids[: len(engine.prompts[2])]


async def test_a_reply_cut_by_its_limit_gets_an_end_that_carries_no_loss() -> None:
    ours = await converse(
        TokenTakingScript(scripted("Abcdef", "Bc"), drift=True), tools=["x"], max_tokens=3
    )
    (row,) = ours.recorder.samples()
    assert [token for token, _ in drawn_of(row)] == [*in_pairs("Abcdef"), *in_pairs("Bc"), END]
    place = row.ids.index(END, len(chat_template([{"role": "user", "content": "begin"}])))
    assert not row.is_sampled[place]


def turn_of(reply: str, sampled: Sequence[int], template: Any = chat_template) -> Turn:
    messages: tuple[Message, ...] = ({"role": "user", "content": "q"},)
    ids = tuple(template(messages))
    return Turn(messages=messages, reply=reply, rendered_ids=ids, call=call(ids, sampled))


def test_a_prompt_is_continued_only_if_the_template_keeps_the_reply() -> None:
    def rendered(reply: str) -> list[int]:
        return chat_template(
            [
                {"role": "user", "content": "q"},
                {"role": "assistant", "content": reply},
                {"role": "user", "content": "r"},
            ]
        )

    turn = turn_of("abcd", [*in_pairs("abcd"), END])
    tail = chat_template([{"role": "user", "content": "r"}])
    assert continued_prompt(turn, rendered("abcd"), decode) == turn.call.ids + tuple(tail)
    assert continued_prompt(turn, rendered("  abcd "), decode) == turn.call.ids + tuple(tail)
    assert continued_prompt(turn, rendered("abc"), decode) is None  # changed
    assert continued_prompt(turn, rendered("abcd")[1:], decode) is None  # another beginning
    cut = turn_of("abcd", in_pairs("abcd"))
    assert continued_prompt(cut, rendered("abcd"), decode) == (*cut.call.ids, END, *tail)
    ended_otherwise = turn_of("abcd", [*in_pairs("abcd"), START])
    assert continued_prompt(ended_otherwise, rendered("abcd"), decode) is None
    stopped = turn_of("ab", in_pairs("abcd"))  # "cd" was the stop text
    assert continued_prompt(stopped, rendered("ab"), decode) is None
    assert continued_prompt(turn_of("", []), rendered(""), decode) is None


# --- the client -------------------------------------------------------------------------------------


async def test_replies_have_the_shape_of_the_openai_package() -> None:
    ours = session(TokenScript(random_reply))
    messages = [{"role": "user", "content": "hi"}]
    reply = await Client(ours).chat.completions.create(
        model="any", messages=messages, n=3, stop="x"
    )
    assert [choice.index for choice in reply.choices] == [0, 1, 2]
    assert len({choice.message.content for choice in reply.choices}) == 3
    assert reply.choices[0].finish_reason == "stop"
    assert reply.usage.total_tokens == reply.usage.prompt_tokens + 3 * 13
    assert len(ours.recorder.samples()) == 3


async def test_the_same_question_asked_again_gets_another_seed_and_other_rollouts_too() -> None:
    engine = TokenScript(random_reply)
    for index in (0, 1):
        ours = Session(engine, task_id="t", index=index, seed=1)
        for _ in range(2):
            await Client(ours).chat.completions.create(messages=[{"role": "user", "content": "hi"}])
    assert len(set(engine.seeds)) == 4
    assert all(seed is not None and 0 <= seed < 2**31 for seed in engine.seeds)
    again = Session(engine, task_id="t", index=0, seed=1)
    await Client(again).chat.completions.create(messages=[{"role": "user", "content": "hi"}])
    assert engine.seeds[-1] == engine.seeds[0]
    assert call_seed(1, "t", 0, "a", 0) != call_seed(2, "t", 0, "a", 0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"temperature": 0.5}, "asks for temperature=0.5 and the run samples with 1; leave"),
        ({"top_p": 0.9}, "asks for top_p=0.9 and the run samples with 1"),
        ({"n": 0}, "n=0 asks for no reply"),
        ({"messages": [{"role": "user", "content": ["a"]}]}, "needs a role and a text as content"),
        (
            {"messages": [{"role": "assistant", "content": "", "tool_calls": []}]},
            "write tool_calls into the content",
        ),
    ],
)
async def test_requests_that_cannot_be_trained_on_are_refused(arguments: Any, message: str) -> None:
    given = {"messages": [{"role": "user", "content": "hi"}], **arguments}
    with pytest.raises(ConfigError, match=message):
        await Client(session(TokenScript(random_reply))).chat.completions.create(**given)


async def test_forced_sampling_overrides_the_agent() -> None:
    asked: list[Sampling] = []

    def script(messages: Sequence[Message], sampling: Sampling) -> str:
        asked.append(sampling)
        return "x"

    forced = RunSampling(temperature=0.0, is_forced=True)
    ours = session(ScriptedEngine(script), sampling=forced, needs_tokens=False)
    messages = [{"role": "user", "content": "hi"}]
    await Client(ours).chat.completions.create(messages=messages, temperature=0.7, top_p=0.9)
    assert (asked[0].temperature, asked[0].top_p) == (0.0, None)
    assert ours.recorder.samples() == ()
