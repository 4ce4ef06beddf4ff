"""What counting tokens costs: the quick counter against the tokenizer itself, and cutting with each.

python -m benchmarks.counting [--text PATH...] [--tokenizer FOLDER]
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.reader import SECTION_TOKENS, find_texts, read_text
from benchmarks.tokenizer import smollm2_tokenizer
from memagent.documents.chunking import Chunks
from memagent.documents.document import Document
from memagent.documents.tokenizers import HuggingFaceTokenizer

BLOCK_CHARS = 19_500
NUM_BLOCKS = 200


def milliseconds_each(count: Callable[[str], int], blocks: list[str]) -> float:
    count(blocks[0])
    started = time.perf_counter()
    for block in blocks:
        count(block)
    return (time.perf_counter() - started) * 1e3 / len(blocks)


def cutting(document: Document, tokenizer: HuggingFaceTokenizer) -> tuple[int, float]:
    """How many sections, and the milliseconds each takes to cut."""
    started = time.perf_counter()
    total = Chunks(document, tokenizer, SECTION_TOKENS).total()
    return total, (time.perf_counter() - started) * 1e3 / total


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.counting", description=__doc__)
    parser.add_argument("--text", type=Path, nargs="+", default=[])
    parser.add_argument("--tokenizer", help="folder; SmolLM2's where absent")
    arguments = parser.parse_args()
    text = "\n".join(read_text(path) for path in find_texts(arguments.text))
    quick = HuggingFaceTokenizer.from_path(
        Path(arguments.tokenizer or smollm2_tokenizer()), "benchmark"
    )
    assert quick.is_quick, 'install the quick counter: pip install "memagent[fast]"'
    exact = HuggingFaceTokenizer.from_path(quick._file, "benchmark")
    exact._quick_count, exact.is_quick = None, False
    starts = range(0, min(len(text), NUM_BLOCKS * BLOCK_CHARS), BLOCK_CHARS)
    blocks = [text[start : start + BLOCK_CHARS] for start in starts]
    times = [milliseconds_each(tokenizer.count, blocks) for tokenizer in (exact, quick)]
    print(f"counting {BLOCK_CHARS:,} characters: tokenizers {times[0]:.2f} ms, quick {times[1]:.2f} ms, "
          f"{times[0] / times[1]:.0f} times faster")  # fmt: skip
    differing = sum(exact.count(block) != quick.count(block) for block in blocks)
    print(f"blocks counted differently: {differing} of {len(blocks)}")
    document = Document.from_text(text)
    for name, tokenizer in (("tokenizers", exact), ("quick", quick)):
        total, each = cutting(document, tokenizer)
        print(f"cutting with {name}: {total} sections, {each:.2f} ms each")


if __name__ == "__main__":
    main()
