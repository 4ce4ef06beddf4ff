"""The gateway over the embedded model: a message of 300,000 tokens through a window of 8,192.

    make test-clients

Skipped unless MEMAGENT_TEST_CLIENTS is set: it takes a quarter of an hour on two free cores. MEMAGENT_TEST_TOKENS sets
another length.
"""

import os
import sys
import time
from itertools import cycle
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import openai
import pytest
from platformdirs import user_data_path

from memagent.engines import store
from memagent.engines.base import EMBEDDED, open_engine
from memagent.tokens.tokenizers import Tokenizer, tokenizer_for_model
from tests.support.gateways import MODEL, serving_gateway

DATA_HOME = user_data_path("memagent", appauthor=False).parent
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
    monkeypatch.setenv("XDG_DATA_HOME", str(DATA_HOME))


NEEDLE = "The school bell of Hollowbrook was cast by Amara Delacroix in 1874."
ASKED = "Who cast the school bell of Hollowbrook?"
DEPTH = 0.4
"""Where the sentence stands in the text, so that it has to be kept for more than half of the sections."""


def manual(tokenizer: Tokenizer, num_tokens: int) -> str:
    """Python's own manual, as often as needed, with the sentence between two of its paragraphs."""
    paragraphs = [text for name in sorted(topics) for text in topics[name].split("\n\n")]
    filler: list[str] = []
    total = 0
    for paragraph in cycle(paragraphs):
        if total >= num_tokens:
            break
        filler.append(paragraph)
        total += tokenizer.count(f"{paragraph}\n\n")
    filler.insert(round(DEPTH * len(filler)), NEEDLE)
    return "\n\n".join(filler)


def test_a_message_far_above_the_window_is_answered_by_the_embedded_model(tmp_path: Path) -> None:
    if store.find(store.EMBEDDED) is None:
        pytest.skip(f"`memagent models pull {store.EMBEDDED}` fetches the model")
    with open_engine(EMBEDDED) as engine:
        tokenizer, _ = tokenizer_for_model(engine.tokenizer)
        message = f"{manual(tokenizer, NUM_TOKENS)}\n\n{ASKED}"
        num_tokens = tokenizer.count(message)
        with serving_gateway(tmp_path, engine, reading={}) as gateway:
            started = time.monotonic()
            answer, usage = _streamed(gateway.client(timeout=7200), message)
    took = time.monotonic() - started
    print(f"{num_tokens:,} tokens in {took:.0f} s: {answer!r}; {usage}", file=sys.stderr)
    assert "Amara Delacroix" in answer
    assert usage.prompt_tokens > num_tokens > 0.99 * NUM_TOKENS


def _streamed(client: openai.OpenAI, message: str) -> tuple[str, Any]:
    """The answer and the usage; progress is shown as it comes."""
    stream = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": message}],
        stream=True,
        stream_options={"include_usage": True},
    )
    texts, usage = [], None
    for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            if progress := getattr(choice.delta, "reasoning_content", None):
                print(progress, end="", file=sys.stderr, flush=True)
            texts.append(choice.delta.content or "")
    return "".join(texts), usage
