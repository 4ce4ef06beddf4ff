"""Tokenizers: exact where they can be had, an honest estimate elsewhere, never a crash."""

import base64
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from memagent.errors import ConfigError
from memagent.tokens.tokenizers import (
    ByteTokenizer,
    EstimatingTokenizer,
    open_tokenizer,
    tokenizer_for_model,
)
from tests.conftest import prose
from tests.support.handlers import Handler, listening

MESSAGES = [{"role": "user", "content": "Where is the red ledger?"}]


def test_a_folder_is_opened_and_counts_as_the_library_does(tokenizer_folder: Path) -> None:
    tokenizer = open_tokenizer(str(tokenizer_folder))
    reference = tokenizers.Tokenizer.from_file(str(tokenizer_folder / "tokenizer.json"))
    for text in (prose(50), "naïve café 漢字", "x" * 100, "", "  \n\n "):
        assert tokenizer.count(text) == len(reference.encode(text, add_special_tokens=False))
    assert tokenizer.is_exact


def test_a_prompt_is_counted_with_the_models_chat_template(tokenizer_folder: Path) -> None:
    tokenizer = open_tokenizer(str(tokenizer_folder))
    rendered = "<|im_start|>user\nWhere is the red ledger?<|im_end|>\n<|im_start|>assistant\n"
    reference = tokenizers.Tokenizer.from_file(str(tokenizer_folder / "tokenizer.json"))
    assert tokenizer.knows_template
    assert tokenizer.count_messages(MESSAGES) == len(reference.encode(rendered))


def test_without_a_template_there_is_an_allowance(qwen_like_folder: Path) -> None:
    tokenizer = open_tokenizer(str(qwen_like_folder))
    assert not tokenizer.knows_template
    assert tokenizer.count_messages(MESSAGES) == tokenizer.count(MESSAGES[0]["content"]) + 64


def test_truncation_in_a_published_file_is_switched_off(
    tokenizer_folder: Path, tmp_path: Path
) -> None:
    cut = tokenizers.Tokenizer.from_file(str(tokenizer_folder / "tokenizer.json"))
    cut.enable_truncation(5)
    cut.save(str(tmp_path / "tokenizer.json"))
    assert open_tokenizer(str(tmp_path)).count(prose(20)) > 100


def test_a_chat_template_that_refuses_is_a_clear_error(
    tokenizer_folder: Path, tmp_path: Path
) -> None:
    (tmp_path / "tokenizer.json").write_bytes((tokenizer_folder / "tokenizer.json").read_bytes())
    (tmp_path / "chat_template.jinja").write_text("{{ raise_exception('no system role') }}")
    with pytest.raises(ConfigError, match="no system role"):
        open_tokenizer(str(tmp_path)).count_messages(MESSAGES)


def test_a_chat_template_that_is_no_template_is_a_clear_error(
    tokenizer_folder: Path, tmp_path: Path
) -> None:
    (tmp_path / "tokenizer.json").write_bytes((tokenizer_folder / "tokenizer.json").read_bytes())
    (tmp_path / "chat_template.jinja").write_text("{% for %}")
    with pytest.raises(ConfigError, match=rf"{tmp_path} has a broken chat template: Expected"):
        open_tokenizer(str(tmp_path)).count_messages(MESSAGES)


def test_named_templates_and_special_tokens_come_from_the_config(
    tokenizer_folder: Path, tmp_path: Path
) -> None:
    (tmp_path / "tokenizer.json").write_bytes((tokenizer_folder / "tokenizer.json").read_bytes())
    config = {
        "chat_template": [
            {"name": "default", "template": "{{ bos_token }}{{ messages[0].content }}"},
            {"name": "tool_use", "template": "unused"},
        ],
        "bos_token": {"content": "<|im_start|>"},
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = open_tokenizer(str(tmp_path))
    assert tokenizer.count_messages(MESSAGES) == 1 + tokenizer.count(MESSAGES[0]["content"])


@pytest.mark.parametrize("content", ["not json", "{}", '{"model": {"type": "nonsense"}}'])
def test_a_broken_tokenizer_file_is_a_one_line_error(tmp_path: Path, content: str) -> None:
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(ConfigError, match="is not a tokenizer") as caught:
        open_tokenizer(str(tmp_path))
    assert "\n" not in str(caught.value)


DOUBLING = [{"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}] * 30
LONG_CHARSMAP = base64.b64encode(bytes([4, 0, 0, 0]) + bytes(4) + b"x" * 200 + b"\0").decode()
GROWING = {
    "doubling": {"normalizer": {"type": "Sequence", "normalizers": DOUBLING}},
    "doubling without types": {
        "normalizer": {"normalizers": [{**one, "type": None} for one in DOUBLING]}
    },
    "doubling in a decoder": {"decoder": {"type": "Sequence", "decoders": DOUBLING}},
    "doubling bytes": {
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [{"type": "ByteLevel"}] * 30}
    },
    "a long word for each place": {
        "normalizer": {"type": "Replace", "pattern": {"Regex": ""}, "content": "x" * 100}
    },
    "a long prefix": {"normalizer": {"type": "Prepend", "prepend": "x" * 100}},
    "a long replacement": {
        "normalizer": {"type": "Precompiled", "precompiled_charsmap": LONG_CHARSMAP}
    },
}


@pytest.mark.parametrize("change", GROWING.values(), ids=GROWING)
def test_a_tokenizer_that_makes_texts_many_times_as_long_is_refused(
    qwen_like_folder: Path, tmp_path: Path, change: dict[str, Any]
) -> None:
    """The library would end this process when memory has run out."""
    contents = json.loads((qwen_like_folder / "tokenizer.json").read_text())
    (tmp_path / "tokenizer.json").write_text(json.dumps({**contents, **change}))
    with pytest.raises(
        ConfigError, match=r"tokenizer.json can make a text [\d,]+ times as long; use an"
    ):
        open_tokenizer(str(tmp_path))


def test_replacements_of_published_tokenizers_are_used(
    qwen_like_folder: Path, tmp_path: Path
) -> None:
    contents = json.loads((qwen_like_folder / "tokenizer.json").read_text())
    steps = [
        {"type": "Prepend", "prepend": "\u2581"},
        {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"},
        {"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": " "},
        {"type": "Replace", "pattern": {"String": "\u2026"}, "content": "..."},
    ]
    contents["normalizer"] = {"type": "Sequence", "normalizers": steps}
    (tmp_path / "tokenizer.json").write_text(json.dumps(contents))
    assert open_tokenizer(str(tmp_path)).count("a b") > 0


def test_a_folder_without_a_tokenizer_says_so(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no tokenizer\.json"):
        open_tokenizer(str(tmp_path))


def test_an_unknown_model_gets_an_estimate_and_the_reason() -> None:
    tokenizer, reason = tokenizer_for_model("someone/some-model")
    assert isinstance(tokenizer, EstimatingTokenizer)
    assert not tokenizer.is_exact
    assert reason is not None
    assert "someone/some-model" in reason


def test_a_model_name_that_no_hub_would_take_gets_an_estimate_too() -> None:
    tokenizer, reason = tokenizer_for_model("my served model!")
    assert isinstance(tokenizer, EstimatingTokenizer)
    assert reason is not None
    assert "`tokenizer`" in reason


def test_an_unknown_tiktoken_name_lists_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="o200k_base"):
        open_tokenizer("tiktoken:nonsense")


KNOWN_COUNTS = {
    "prose": (prose(200), 3520, 2966),
    "code": ("def f(x):\n    return x + 1  # comment\n" * 50, 750, 700),
    "japanese": ("漢字とひらがなの文章です。" * 60, 1320, 780),
    "russian": ("Привет, как дела сегодня утром? " * 60, 1441, 961),
    "arabic": ("مرحبا كيف حالك اليوم؟ " * 60, 1141, 1021),
    "digits": ("12345 67890 " * 100, 1200, 600),
    "emoji": ("🙂🚀" * 100, 500, 500),
    "table": ("| 12.5 | 0.003 | n/a |\n" * 80, 1520, 1120),
}
"""Texts and their tokens by SmolLM2's tokenizer and by tiktoken's cl100k_base."""


@pytest.mark.parametrize("kind", KNOWN_COUNTS)
def test_the_estimate_is_above_real_tokenizers_but_not_by_far(kind: str) -> None:
    text, *known = KNOWN_COUNTS[kind]
    estimate = EstimatingTokenizer().count(text)
    assert estimate >= max(known)
    assert estimate <= 2 * max(known)


def test_long_compound_words_are_not_underestimated() -> None:
    text = (
        "Die Donaudampfschifffahrtsgesellschaft veröffentlichte überraschend ihre Jahresberichte. "
    )
    assert EstimatingTokenizer().count(text * 40) >= 1081  # cl100k_base


def test_bytes_are_counted_by_hand() -> None:
    tokenizer = ByteTokenizer()
    assert tokenizer.count("é漢a") == 6
    measured = tokenizer.measure("é漢a")
    assert measured.num_tokens == 6
    assert [measured.end_of(n) for n in range(7)] == [0, 0, 1, 1, 1, 2, 3]
    assert [measured.tokens_before(n) for n in range(4)] == [0, 2, 5, 6]


def test_a_measured_prefix_never_splits_a_character(tokenizer_folder: Path) -> None:
    tokenizer = open_tokenizer(str(tokenizer_folder))
    text = "漢字🙂" * 20
    measured = tokenizer.measure(text)
    for limit in range(measured.num_tokens):
        end = measured.end_of(limit)
        assert tokenizer.count(text[:end]) <= limit


@pytest.fixture
def hub(tokenizer_folder: Path) -> Iterator[str]:
    class Hub(Handler):
        """Enough of the Hugging Face hub to download files of one repository."""

        def do_GET(self) -> None:
            prefix = "/someone/some-model/resolve/main/"
            file = tokenizer_folder / self.path.removeprefix(prefix)
            if not self.path.startswith(prefix) or not file.is_file():
                self.reply(b"", 404, headers={"X-Error-Code": "EntryNotFound"})
                return
            data = file.read_bytes()
            self.reply(data, headers={"ETag": f'"{len(data):040x}"', "X-Repo-Commit": "a" * 40})

        do_HEAD = do_GET

    with listening(Hub) as url:
        yield url


def test_a_tokenizer_is_downloaded_from_a_hub_and_kept(
    hub: str, tokenizer_folder: Path, tmp_path: Path
) -> None:
    """In a process of its own: the hub's library reads its settings when it is imported."""
    import os
    import subprocess

    code = (
        "from memagent.tokens.tokenizers import open_tokenizer\n"
        "t = open_tokenizer('someone/some-model')\n"
        "print(t.name, t.knows_template, t.count('Where is the red ledger?'))"
    )
    environment = {**os.environ, "HF_HOME": str(tmp_path), "HF_ENDPOINT": hub}
    online = {**environment, "HF_HUB_OFFLINE": "0"}
    command = [sys.executable, "-c", code]
    first = subprocess.run(command, env=online, capture_output=True, text=True, check=True)
    expected = open_tokenizer(str(tokenizer_folder)).count("Where is the red ledger?")
    assert first.stdout == f"someone/some-model True {expected}\n"
    offline = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert offline.stdout == first.stdout
