"""Replies that are kept: by scope, prompt and number, on disk before they are used."""

import asyncio
from pathlib import Path

import pytest

from memagent.errors import RunError, RunNotWritable
from memagent.replies import KeptReply, Replies, Scope
from memagent.run_files import read_lines
from memagent.types import Completion, Message, Sampling, Usage

HELLO: list[Message] = [{"role": "user", "content": "hello"}]
SAMPLING = Sampling(max_tokens=9)


class Model:
    """Numbers its replies."""

    def __init__(self) -> None:
        self.num_calls = 0

    async def __call__(self) -> KeptReply:
        self.num_calls += 1
        usage = Usage(calls=1, prompt_tokens=7, completion_tokens=2)
        text = f"reply {self.num_calls}"
        return KeptReply(Completion(text=text, usage=usage, logprobs=(-0.5, -1.0)), 1.5, 0.25)


async def said(scope: Scope, model: Model, prompt: list[Message] = HELLO) -> KeptReply:
    return await scope.known(model, prompt, SAMPLING)


async def test_equal_prompts_are_told_apart_by_scope_and_number(tmp_path: Path) -> None:
    model = Model()
    for _ in range(3):
        replies = Replies(tmp_path / "replies")
        texts = [
            (await said(scope, model)).completion.text
            for scope in (replies.scope("a"), replies.scope("b"))
            for _ in range(2)
        ]
        replies.close()
        assert texts == ["reply 1", "reply 2", "reply 3", "reply 4"]
    assert model.num_calls == 4


async def test_another_prompt_or_sampling_is_another_call(tmp_path: Path) -> None:
    await said(Replies(tmp_path / "replies").scope("a"), Model())
    scope = Replies(tmp_path / "replies").scope("a")
    assert scope.knows(HELLO, SAMPLING)
    assert not scope.knows([{"role": "system", "content": "hello"}], SAMPLING)
    assert not scope.knows([*HELLO, *HELLO], SAMPLING)
    assert not scope.knows(HELLO, Sampling(max_tokens=8))
    assert not Replies(tmp_path / "replies").scope("b").knows(HELLO, SAMPLING)


async def test_a_known_reply_is_as_it_was(tmp_path: Path) -> None:
    first = await said(Replies(tmp_path / "replies").scope("a"), Model())
    again = await said(Replies(tmp_path / "replies").scope("a"), Model())
    assert not first.is_known
    assert again.is_known
    assert (again.started, again.seconds) == (first.started, first.seconds)
    assert again.completion.usage == first.completion.usage
    assert again.completion.logprobs == (-1.5,)


async def test_replies_of_earlier_runs_cost_nothing_and_are_kept_with_this_one(
    tmp_path: Path,
) -> None:
    model = Model()
    await said(Replies(tmp_path / "first").scope("a"), model)
    second = Replies(tmp_path / "second", also=[tmp_path / "first"])
    carried = await said(second.scope("a"), model)
    assert carried.is_carried
    assert carried.completion.usage == second.usage == Usage()
    (tmp_path / "first").unlink()
    again = await said(Replies(tmp_path / "second").scope("a"), model)
    assert again.is_known
    assert again.is_carried
    assert model.num_calls == 1


async def test_what_is_forgotten_is_asked_again_and_stays_counted(tmp_path: Path) -> None:
    model = Model()
    replies = Replies(tmp_path / "replies")
    scope = replies.scope("a")
    await scope.forget([await said(scope, model)])
    later = Replies(tmp_path / "replies")
    assert later.usage.calls == 1
    assert (await said(later.scope("a"), model)).completion.text == "reply 2"
    last = Replies(tmp_path / "replies")
    assert last.usage.calls == 2
    assert (await said(last.scope("a"), model)).completion.text == "reply 2"


async def test_a_reply_that_arrives_while_its_caller_is_cancelled_is_kept(tmp_path: Path) -> None:
    replies = Replies(tmp_path / "replies")
    call = asyncio.ensure_future(said(replies.scope("a"), Model()))
    while not replies.usage.calls:
        await asyncio.sleep(0)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert len(list(read_lines(tmp_path / "replies"))) == 1


async def test_scopes_that_are_not_named_are_not_loaded(tmp_path: Path) -> None:
    replies = Replies(tmp_path / "replies")
    for name in ("a", "b"):
        await said(replies.scope(name), Model())
    few = Replies(tmp_path / "replies", scopes=["b"])
    assert not few.scope("a").knows(HELLO, SAMPLING)
    assert few.scope("b").knows(HELLO, SAMPLING)


async def test_files_that_cannot_be_read_or_written_are_one_line(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="no regular file"):
        Replies(tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(RunNotWritable, match="cannot read"):
        Replies(tmp_path / "file" / "replies")
    replies = Replies(tmp_path / "gone" / "replies")
    with pytest.raises(RunNotWritable, match="cannot write to"):
        await said(replies.scope("a"), Model())
