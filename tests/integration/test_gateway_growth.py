"""Texts that grow or change between two requests for the same answer: the gateway reads only what is new."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.support.gateways import (
    FACT,
    MODEL,
    QUESTION,
    Gateway,
    asking,
    prompts_of,
    serving_gateway,
)

Messages = list[Any]


@pytest.fixture
def gateway(tmp_path: Path) -> Iterator[Gateway]:
    with serving_gateway(tmp_path / "state") as gateway:
        yield gateway


def diary(first: int, last: int) -> str:
    return "".join(
        f"Day {day} of the diary tells of rain and wind.\n\n" for day in range(first, last)
    )


def ask(client: openai.OpenAI, messages: Messages, **options: Any) -> Any:
    return client.chat.completions.create(model=MODEL, messages=messages, **options)


def as_message(client: openai.OpenAI, text: str) -> Messages:
    return asking(text)


def as_file(client: openai.OpenAI, text: str) -> Messages:
    """The text as a file that is sent again under its name."""
    file = client.files.create(file=("diary.txt", text.encode()), purpose="user_data")
    parts = [{"type": "file", "file": {"file_id": file.id}}, {"type": "text", "text": QUESTION}]
    return [{"role": "user", "content": parts}]


def read_whole(tmp_path: Path, messages: Callable[[openai.OpenAI], Messages]) -> list[Any]:
    """The prompts of a gateway that has read nothing before."""
    with serving_gateway(tmp_path / "fresh") as fresh, fresh.client() as client:
        ask(client, messages(client))
        return prompts_of(fresh)


@pytest.mark.parametrize("sent", [as_message, as_file])
def test_of_a_text_that_has_grown_only_the_new_part_is_read(
    tmp_path: Path, gateway: Gateway, sent: Callable[[openai.OpenAI, str], Messages]
) -> None:
    grown = f"{diary(0, 400)}{FACT}\n\n{diary(400, 420)}"
    with gateway.client() as client:
        before = ask(client, sent(client, diary(0, 400)))
        num_before = len(prompts_of(gateway))
        reply = ask(client, sent(client, grown))
    new = prompts_of(gateway)[num_before:]
    whole = read_whole(tmp_path, lambda client: sent(client, grown))
    assert before.choices[0].message.content != FACT
    assert reply.choices[0].message.content == FACT
    assert len(whole) > 20
    assert 2 <= len(new) <= 4  # the last section, what was added, the answer
    assert new == whole[-len(new) :]
    assert reply.reading == {
        "sections": len(whole) - 1,
        "calls": len(new),
        "stored_steps": len(whole) - len(new),
    }
    assert reply.usage.prompt_tokens < before.usage.prompt_tokens / 5


def test_messages_that_follow_the_text_are_read_on(tmp_path: Path, gateway: Gateway) -> None:
    def conversation(client: openai.OpenAI) -> Messages:
        return [
            {"role": "user", "content": diary(0, 400)},
            {"role": "assistant", "content": "The text does not tell."},
            {"role": "user", "content": f"{diary(400, 401)}{FACT}\n\n{diary(401, 420)}"},
            {"role": "user", "content": QUESTION},
        ]

    with gateway.client() as client:
        ask(client, asking(diary(0, 400)))
        num_before = len(prompts_of(gateway))
        reply = ask(client, conversation(client))
    new = prompts_of(gateway)[num_before:]
    whole = read_whole(tmp_path, conversation)
    assert reply.choices[0].message.content == FACT
    assert len(new) <= 4 < 20 < len(whole)
    assert new == whole[-len(new) :]


def test_a_change_in_the_middle_is_read_from_its_section_on(
    tmp_path: Path, gateway: Gateway
) -> None:
    changed = f"{diary(0, 300)}{FACT}\n\n{diary(301, 400)}"
    with gateway.client() as client:
        ask(client, asking(diary(0, 400)))
        num_before = len(prompts_of(gateway))
        reply = ask(client, asking(changed))
    new = prompts_of(gateway)[num_before:]
    whole = read_whole(tmp_path, lambda _: asking(changed))
    assert reply.choices[0].message.content == FACT
    assert 0.2 * len(whole) < len(new) < 0.35 * len(whole)
    assert new == whole[-len(new) :]
    assert FACT in json.dumps(new[0], ensure_ascii=False)


def test_of_several_earlier_texts_the_one_that_shares_most_is_continued(gateway: Gateway) -> None:
    with gateway.client() as client:
        for last in (400, 100):
            ask(client, asking(diary(0, last)))
        reply = ask(client, asking(diary(0, 410)))
    assert reply.reading["calls"] <= 4


def test_a_text_can_grow_again_and_again(gateway: Gateway) -> None:
    with gateway.client() as client:
        calls = [
            ask(client, asking(diary(0, last))).reading["calls"]
            for last in (400, 410, 420, 430, 410)
        ]
    assert calls[0] > 20
    assert max(calls[1:4]) <= 4
    assert calls[4] == 0  # it was read before


def test_another_limit_of_the_answer_costs_one_call(gateway: Gateway) -> None:
    with gateway.client() as client:
        ask(client, asking(diary(0, 100)))
        assert ask(client, asking(diary(0, 100)), max_tokens=30).reading["calls"] == 1


def test_other_settings_of_reading_begin_anew(gateway: Gateway) -> None:
    other = {"extra_body": {"reading": {"memory_tokens": 100}}}
    with gateway.client() as client:
        ask(client, asking(diary(0, 100)))
        assert ask(client, asking(diary(0, 100)), **other).reading["stored_steps"] == 0
        assert ask(client, asking(diary(0, 110)), **other).reading["stored_steps"] > 0


def test_a_text_that_is_read_in_parallel_is_read_on_when_it_has_grown(gateway: Gateway) -> None:
    parallel = {"extra_body": {"reading": {"mode": "parallel", "memory_tokens": 100}}}
    with gateway.client() as client:
        first = ask(client, asking(diary(0, 100)), **parallel)
        reply = ask(client, asking(diary(0, 105)), **parallel)
        assert first.reading["stored_steps"] == 0
        assert reply.reading["calls"] <= 3 < first.reading["calls"]
        assert reply.reading["stored_steps"] >= first.reading["sections"] - 1
        assert ask(client, asking(diary(0, 105)), **parallel).reading["calls"] == 0


def test_an_earlier_reading_that_is_damaged_or_gone_is_passed_over(
    tmp_path: Path, gateway: Gateway
) -> None:
    with gateway.client() as client:
        for last in (100, 110):
            ask(client, asking(diary(0, last)))
        first, second = sorted((tmp_path / "state" / "readings").iterdir())
        (first / "replies.jsonl").write_text('{"scope": "0", "call": 5}\n' * 2)
        (second / "replies.jsonl").unlink()
        reply = ask(client, asking(diary(0, 120)))
    assert reply.reading["stored_steps"] == 0


def test_citations_of_carried_sections_name_the_file_as_it_is_called_now(gateway: Gateway) -> None:
    text = f"{FACT}\n\n{diary(0, 200)}"
    settings = {"evidence": True, "chunk_tokens": 200, "ledger_tokens": 64, "quote_tokens": 64}
    with gateway.client() as client:
        for name, grown in (("old.txt", ""), ("new.txt", diary(200, 230))):
            file = client.files.create(file=(name, (text + grown).encode()), purpose="user_data")
            content = [
                {"type": "file", "file": {"file_id": file.id}},
                {"type": "text", "text": QUESTION},
            ]
            messages: Any = [{"role": "user", "content": content}]
            reply = ask(client, messages, extra_body={"reading": settings})
    (cited,) = reply.choices[0].message.model_dump()["annotations"]
    assert reply.reading["stored_steps"] > 5
    found = cited["file_citation"]
    assert (found["filename"], found["file_id"]) == ("new.txt", file.id)
