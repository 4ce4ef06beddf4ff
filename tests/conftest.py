"""What all tests share: isolated home folders, and tokenizers small enough to train in a second."""

import os
import random
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from memagent.tokens.tokenizers import ByteTokenizer, HuggingFaceTokenizer

# Tests run in parallel; torch with a thread per core in each of them would slow all of them down.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Where a test takes two threads, the one that waits must not keep a core busy that the other needs.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

# A busy machine is not a failure: no time limit for single examples.
settings.register_profile("memagent", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("memagent")


def restore_interrupts() -> None:
    """Make Ctrl-C work where it arrives ignored, here and in processes that tests start.

    A shell that is not interactive starts background jobs with SIGINT ignored, and children inherit that.
    """
    is_ignored = signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    if is_ignored and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.default_int_handler)


restore_interrupts()

QWEN_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def set_own_folders(monkeypatch: pytest.MonkeyPatch, base: Path) -> None:
    """Put the user's folders under `base`, and the home folder itself, which nothing of memagent may write."""
    for name in ("state", "cache", "data", "config"):
        monkeypatch.setenv(f"XDG_{name.upper()}_HOME", str(base / name))
    monkeypatch.setenv("HOME", str(base / "home"))


@pytest.fixture(scope="session", autouse=True)
def folders_of_the_suite(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Fixtures that outlive a test use no folder of the user either; at the end, nobody has used the home folder."""
    base = tmp_path_factory.getbasetemp()
    (base / "home").mkdir(exist_ok=True)
    with pytest.MonkeyPatch.context() as monkeypatch:
        set_own_folders(monkeypatch, base)
        yield
    written = list((base / "home").rglob("memagent"))
    assert written == [], "a test or a command in it writes to the user's home folder"


@pytest.fixture(autouse=True)
def own_home(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """No test reads or writes the user's own folders, endpoint settings or the hub."""
    set_own_folders(monkeypatch, tmp_path_factory.getbasetemp())
    monkeypatch.delenv("MEMAGENT_PROFILE", raising=False)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    for prefix in ("MEMAGENT_", "OPENAI_", ""):
        for name in ("BASE_URL", "API_KEY", "URL"):
            monkeypatch.delenv(prefix + name, raising=False)


def prose(num_sentences: int, seed: int = 0) -> str:
    """Invented English sentences in paragraphs, the same for the same seed."""
    rng = random.Random(seed)
    people = ["the miller", "Anna Bergström", "a clerk", "Mr. Okafor", "the captain's wife"]
    verbs = ["sold", "found", "didn't mention", "remembered", "carried home", "wrote about"]
    things = ["a red ledger", "12 barrels of salt", "the north gate", "an old map", "café chairs"]
    sentences = [
        f"In {rng.randint(1800, 1999)} {rng.choice(people)} {rng.choice(verbs)} {rng.choice(things)}"
        f"{rng.choice(['.', '!', '; nobody knows why.'])}"
        for _ in range(num_sentences)
    ]
    ends = [rng.choice([" ", " ", " ", "\n", "\n\n"]) for _ in sentences]
    return "".join(sentence + end for sentence, end in zip(sentences, ends, strict=True))


def make_tokenizer(folder: Path, *, pattern: str | None, chat_template: str | None = None) -> Path:
    """A small byte-level tokenizer trained on invented prose, as a Hugging Face folder."""
    tokenizer = Tokenizer(models.BPE())
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pattern is None)
    split = [] if pattern is None else [pre_tokenizers.Split(Regex(pattern), "isolated")]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*split, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=1500,
        special_tokens=["<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([prose(400, seed) for seed in range(5)], trainer)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    if chat_template is not None:
        (folder / "chat_template.jinja").write_text(chat_template)
    return folder


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A GPT-2-like tokenizer with a chat template."""
    folder = tmp_path_factory.mktemp("tokenizers") / "gpt2-like"
    return make_tokenizer(folder, pattern=None, chat_template=CHAT_TEMPLATE)


@pytest.fixture(scope="session")
def qwen_like_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen-like tokenizer without a chat template."""
    return make_tokenizer(tmp_path_factory.mktemp("tokenizers") / "qwen-like", pattern=QWEN_PATTERN)


@pytest.fixture
def small_tokenizer(tokenizer_folder: Path) -> HuggingFaceTokenizer:
    return HuggingFaceTokenizer.from_path(tokenizer_folder, "small")


@pytest.fixture
def byte_tokenizer() -> ByteTokenizer:
    return ByteTokenizer()


@pytest.fixture(scope="session")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with `memagent` and `python`, which start at once; on the disk of a test where it names one."""
    from tests.support import disk
    from tests.support.preloaded import preloaded

    folder = tmp_path_factory.mktemp("programs")
    watched = {"LD_PRELOAD": str(disk.build(folder))} if disk.IS_SUPPORTED else {}
    with preloaded(folder, **watched):
        yield folder


@pytest.fixture(scope="session")
def published(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Published datasets: the real files if they are beside the checkout, else stand-ins."""
    from tests.support.published import published_data

    return published_data(tmp_path_factory.mktemp("published") / "data")
