"""Warm-start conversations, byte for byte: prompts, memories and their order.

`warmstart/examples.jsonl` holds one example per task; `warmstart/conversations_PROMPTS.jsonl` is what
`memagent data traces` wrote for them before demonstrations were played through the reader.
"""

from pathlib import Path

import pytest

from memagent.config import AgentConfig
from memagent.rl.warmstart.trace_files import write_traces
from memagent.tokens.tokenizers import ByteTokenizer

REFERENCE = Path(__file__).parent / "warmstart"


@pytest.mark.parametrize("prompts", ["default", "boxed"])
def test_conversations_are_the_reference_byte_for_byte(prompts: str, tmp_path: Path) -> None:
    name = f"conversations_{prompts}.jsonl"
    config = AgentConfig(
        window=8192, chunk_tokens=500, memory_tokens=900, answer_tokens=400, prompts=prompts
    )
    write_traces(
        REFERENCE / "examples.jsonl", tmp_path / name, config=config, tokenizer=ByteTokenizer()
    )
    for file in (name, f"{name}.manifest.json"):
        assert (tmp_path / file).read_bytes() == (REFERENCE / file).read_bytes()
