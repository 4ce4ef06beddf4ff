"""The gateway over the embedded model: a message of 300,000 tokens through a window of 8,192.

    make test-clients

Skipped unless MEMAGENT_TEST_CLIENTS is set: it takes a quarter of an hour on two cores. MEMAGENT_TEST_TOKENS sets
another length.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import openai
import pytest

from memagent.data.tasks.registry import open_task
from memagent.engines import store
from memagent.engines.base import EMBEDDED, open_engine
from tests.support.gateways import MODEL, serving_gateway

DATA_HOME = os.environ.get("XDG_DATA_HOME")
"""Of the user, where the model is; tests have folders of their own."""
NUM_TOKENS = int(os.environ.get("MEMAGENT_TEST_TOKENS", "300000"))
pytestmark = [
    pytest.mark.skipif(
        not os.environ.get("MEMAGENT_TEST_CLIENTS"), reason="make test-clients runs it"
    ),
    pytest.mark.timeout(7200),
]


@pytest.fixture(autouse=True)
def users_models(own_home: None, monkeypatch: pytest.MonkeyPatch) -> None:
    if DATA_HOME is None:
        monkeypatch.delenv("XDG_DATA_HOME")
    else:
        monkeypatch.setenv("XDG_DATA_HOME", DATA_HOME)


def test_a_message_far_above_the_window_is_answered_by_the_embedded_model(tmp_path: Path) -> None:
    if store.find(store.EMBEDDED) is None:
        pytest.skip(f"`memagent models pull {store.EMBEDDED}` fetches the model")
    with open_engine(EMBEDDED) as engine:
        settings: dict[str, Any] = {"tokens": NUM_TOKENS, "tokenizer": engine.tokenizer}
        example = open_task("ruler/niah_single_1", settings).example(0)
        message = f"{example.text()}\n\n{example.question}"
        with serving_gateway(tmp_path, engine, reading={}) as gateway:
            started = time.monotonic()
            answer = _streamed(gateway.client(timeout=7200), message)
    print(f"{NUM_TOKENS:,} tokens in {time.monotonic() - started:.0f} s: {answer}", file=sys.stderr)
    assert example.answers[0] in answer


def _streamed(client: openai.OpenAI, message: str) -> str:
    messages: Any = [{"role": "user", "content": message}]
    stream = client.chat.completions.create(model=MODEL, messages=messages, stream=True)
    texts = []
    for chunk in stream:
        delta = chunk.choices[0].delta
        if progress := getattr(delta, "reasoning_content", None):
            print(progress, end="", file=sys.stderr)
        texts.append(delta.content or "")
    return "".join(texts)
