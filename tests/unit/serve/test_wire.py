"""Requests over the wire: what is accepted, what is refused, and the errors."""

import asyncio
import json
import threading
from typing import Annotated, Any

import pytest
from fastapi import Request
from pydantic import AfterValidator

from memagent.serve.http import QUICK_BYTES, parsed
from memagent.serve.reading.requests import GatewayChat
from memagent.serve.wire import ApiError, ChatRequest, CompletionRequest, WireModel, parse
from memagent.types import Sampling

HELLO: dict[str, Any] = {"messages": [{"role": "user", "content": "Hello"}]}


def chat(**fields: Any) -> ChatRequest:
    return parse(ChatRequest, json.dumps({**HELLO, **fields}).encode())


def completion(**fields: Any) -> CompletionRequest:
    return parse(CompletionRequest, json.dumps(fields).encode())


def refusal(kind: type[ChatRequest] | type[CompletionRequest], body: bytes) -> ApiError:
    with pytest.raises(ApiError) as caught:
        parse(kind, body)
    assert caught.value.status == 400
    return caught.value


def test_unknown_fields_and_nulls_are_ignored() -> None:
    request = chat(user="me", store=None, wish="more", temperature=None, n=None, stop=None)
    assert request.conversation == [{"role": "user", "content": "Hello"}]
    assert request.num_choices == 1
    assert request.stop == ()


def test_all_sampling_fields_arrive() -> None:
    request = chat(temperature=1, top_p=0.5, top_k=4, seed=7, stop="END", n=2)
    assert request.sampling(max_tokens=9, choice=1) == Sampling(
        max_tokens=9, temperature=1.0, top_p=0.5, top_k=4, seed=8, stop=("END",)
    )


@pytest.mark.parametrize("top_k", [0, -1, None])
def test_top_k_can_be_off(top_k: int | None) -> None:
    assert chat(top_k=top_k).sampling(max_tokens=1, choice=0).top_k is None


def test_the_lower_of_two_limits_counts() -> None:
    assert chat().token_limit is None
    assert chat(max_tokens=5).token_limit == 5
    assert chat(max_tokens=5, max_completion_tokens=4).token_limit == 4
    assert completion(prompt="a").token_limit == 16


def test_text_parts_are_joined_and_developer_means_system() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    request = chat(messages=[{"role": "developer", "content": parts}])
    assert request.conversation == [{"role": "system", "content": "ab"}]


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [("a", ("a",)), (["a", "b"], ("a", "b")), ([1, 2], ((1, 2),)), ([[1], [2, 3]], ((1,), (2, 3)))],
)
def test_prompts_come_in_four_forms(prompt: Any, expected: Any) -> None:
    assert completion(prompt=prompt).prompt == expected


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": -1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": 1.5}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_completion_tokens": -3}, "max_completion_tokens"),
        ({"seed": 1.5}, "seed"),
        ({"seed": 2**63}, "seed"),
        ({"n": 17}, "n"),
        ({"n": 0}, "n"),
        ({"stop": 5}, "stop"),
        ({"stop": [""]}, "stop"),
        ({"stop": ["x"] * 17}, "stop"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"messages": []}, "messages"),
        ({"messages": [{"content": "no role"}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages"),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"presence_penalty": 0.5}, "presence_penalty"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
    ],
)
def test_a_wrong_value_is_named(fields: dict[str, Any], param: str) -> None:
    error = refusal(ChatRequest, json.dumps({**HELLO, **fields}).encode())
    assert error.param == param
    assert param in error.message


@pytest.mark.parametrize("prompt", [[], "", [""], [[]], [1, "a"], 5, [True], ["a"] * 257])
def test_a_wrong_prompt_is_named(prompt: Any) -> None:
    assert refusal(CompletionRequest, json.dumps({"prompt": prompt}).encode()).param == "prompt"


def test_a_missing_field_is_named() -> None:
    error = refusal(CompletionRequest, b"{}")
    assert (error.param, error.code) == ("prompt", "missing_required_parameter")


@pytest.mark.parametrize("body", [b"", b"{", b"\xff\xfe", b'{"messages": [], "a": "\\ud800"}'])
def test_a_body_that_is_not_json_is_refused(body: bytes) -> None:
    assert refusal(ChatRequest, body).code == "invalid_json"


@pytest.mark.parametrize("body", [b"[]", b"5", b"null", b"[" * 10_000])
def test_a_body_that_is_not_an_object_is_refused(body: bytes) -> None:
    refusal(ChatRequest, body)


def test_not_a_number_is_refused() -> None:
    body = b'{"messages": [{"role": "user", "content": "a"}], "temperature": NaN}'
    assert refusal(ChatRequest, body).param == "temperature"


def test_stream_options_without_stream_are_refused() -> None:
    assert chat(stream=True, stream_options={"include_usage": True}).wants_usage
    error = refusal(ChatRequest, json.dumps({**HELLO, "stream_options": {}}).encode())
    assert "stream_options" in error.message


# --- what a body may become -----------------------------------------------------------------------


PART = b'{"type":"text","text":"a"}'


@pytest.mark.parametrize(
    "body",
    [
        b'{"messages":[{"role":"user","content":[' + b",".join([PART] * 20_000) + b"]}]}",
        b'{"messages":[' + b",".join([b'{"role":"user"}'] * 40_000) + b"]}",
        b'{"messages":[],"reading":{"x":' + b"[[],{}]," * 40_000 + b"0}}",
        b'{"messages":[],"other":"' + b'"' * 200_000,
    ],
    ids=["parts", "messages", "empty values", "quotes"],
)
def test_a_body_of_more_pieces_than_are_built_is_refused_unbuilt(body: bytes) -> None:
    for kind in (ChatRequest, GatewayChat):
        with pytest.raises(ApiError) as caught:
            parse(kind, body)
        assert (caught.value.status, caught.value.code) == (413, "too_many_parts")


def test_marks_inside_texts_are_not_counted() -> None:
    text = '[{"a": 1, "b": [2, 3]}, \\" \\\\ \\\\\\"]' * 50_000
    parts = [{"type": "text", "text": "x"}] * 10_000
    request = parse(
        GatewayChat,
        json.dumps({"messages": [*HELLO["messages"], {"role": "user", "content": text}]}).encode(),
    )
    assert request.messages[1].content == text
    body = json.dumps({"messages": [{"role": "user", "content": parts}]}).encode()
    assert len(parse(GatewayChat, body).messages[0].content or "") == 10_000
    assert len(completion(prompt=[list(range(200_000))]).prompt[0]) == 200_000


async def test_a_large_body_is_parsed_while_the_event_loop_goes_on() -> None:
    begun, may_end = threading.Event(), threading.Event()

    def slow(text: str) -> str:
        begun.set()
        assert may_end.wait(30), "the event loop waits for this"
        return text

    class Slow(WireModel):
        text: Annotated[str, AfterValidator(slow)]

    text = "x" * QUICK_BYTES

    async def receive() -> Any:
        return {"type": "http.request", "body": json.dumps({"text": text}).encode()}

    request = Request({"type": "http", "method": "POST", "headers": []}, receive)
    parsing = asyncio.ensure_future(parsed(Slow, request))
    while not begun.is_set():
        await asyncio.sleep(0.001)
    may_end.set()
    assert (await parsing).text == text
