"""Damaged tokenizers: folders with a tokenizer.json and a chat template, with a few changes each.

    python -m tests.hostile.tokenizer_files --count 2000 --seed 0

opens each of them as `tokenizer` does, counts, cuts and renders; see `harness.py` for what is wrong.
"""

import json
import random
import sys
import tempfile
from functools import cache
from pathlib import Path

from memagent.documents.chunking import Chunks
from memagent.documents.document import Document
from memagent.errors import MemagentError
from memagent.tokens.tokenizers import open_tokenizer
from tests.conftest import CHAT_TEMPLATE, QWEN_PATTERN, make_tokenizer, prose
from tests.hostile.harness import main, wrong_line
from tests.hostile.json_damage import damaged_bytes, damaged_json
from tests.hostile.model_files import TEMPLATES

TEXT = prose(60) + "<|im_end|> 漢字 👩\u200d🚀 \x00\ufffd " + "a" * 40 + "!"


@cache
def _originals() -> dict[str, str]:
    with tempfile.TemporaryDirectory() as folder:
        make_tokenizer(Path(folder), pattern=QWEN_PATTERN)
        tokenizer = (Path(folder) / "tokenizer.json").read_text()
    config = '{"bos_token": "<s>", "eos_token": {"content": "<|im_end|>"}, "chat_template": "x"}'
    return {
        "tokenizer.json": tokenizer,
        "tokenizer_config.json": config,
        "chat_template.jinja": CHAT_TEMPLATE,
    }


def make_damaged(folder: Path, rng: random.Random) -> None:
    """Write a tokenizer with one file changed."""
    originals = _originals()
    for name, text in originals.items():
        (folder / name).write_text(text)
    name = rng.choice(("tokenizer.json", "tokenizer.json", *originals))
    path = folder / name
    if rng.random() < 0.05:
        path.unlink()
    elif path.suffix == ".jinja":
        path.write_text(rng.choice(TEMPLATES))
    elif name == "tokenizer.json" and rng.random() < 0.1:
        step = {"type": "Replace", "pattern": {"String": rng.choice("ae ")}, "content": "eaea "}
        steps = {"type": "Sequence", "normalizers": [step] * rng.randint(1, 40)}
        path.write_text(json.dumps({**json.loads(originals[name]), "normalizer": steps}))
    elif rng.random() < 0.1:
        path.write_bytes(damaged_bytes(path.read_bytes(), rng))
    elif rng.random() < 0.2:
        pattern = rng.choice(("(a|a)+$|(a+)+!", "(", "(.*)*(.*)*x", "[", "a{1000000}"))
        path.write_text(originals[name].replace("\\\\s+(?!\\\\S)", pattern))
    else:
        path.write_bytes(damaged_json(originals[name], rng))


def complaint(number: int, seed: int) -> str | None:
    """What is wrong with how a tokenizer is opened and used; None if nothing is."""
    rng = random.Random(f"{seed} {number}")
    with tempfile.TemporaryDirectory(prefix="damaged-") as folder:
        make_damaged(Path(folder), rng)
        try:
            use(folder)
        except MemagentError as error:
            return wrong_line(error, "damaged-")
    return None


def use(folder: str) -> None:
    """Open a tokenizer and do with it what a reading does."""
    tokenizer = open_tokenizer(folder)
    tokenizer.count(TEXT)
    list(Chunks(Document.from_text(TEXT), tokenizer, 100))
    tokenizer.count_messages([{"role": "user", "content": TEXT}])


if __name__ == "__main__":
    sys.exit(
        main(
            __spec__.name if __spec__ else __name__,
            complaint,
            count=2000,
            what="damaged tokenizers",
        )
    )
