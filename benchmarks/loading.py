"""How long a GGUF model takes to open: its weights dequantised by torch, and by the gguf library as a comparison.

    python -m benchmarks.loading --model qwen2.5-coder-1.5b --adapter adapters/memagent-1.5b
    python -m benchmarks.loading --model qwen2.5-coder-1.5b --adapter adapters/memagent-1.5b --device cuda

The first line compares both on the weights alone, to bfloat16, tensor by tensor, and checks that they are equal. The second is the whole of
`load`: header, weights, tokenizer, adapter put on and merged. Imports are not in it.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from gguf import GGMLQuantizationType, dequantize

from memagent.engines.local import gguf_files, store
from memagent.engines.local.gguf_weights import dequantised
from memagent.engines.local.loading import load


def compare(path: Path, device: torch.device) -> tuple[float, float]:
    """Seconds for all weights: ours, and the library's with the copy to the device."""
    header = gguf_files.open_header(path)
    ours = library = 0.0
    for tensor, packed in gguf_files.stored(path, header):
        kind = GGMLQuantizationType(tensor.kind)
        packed = packed.copy()  # from the disk, in neither time
        _wait(device)
        started = time.perf_counter()
        found = dequantised(packed, kind, dtype=torch.bfloat16, device=device)
        _wait(device)
        between = time.perf_counter()
        expected = torch.from_numpy(dequantize(packed, kind)).to(torch.bfloat16).to(device)
        _wait(device)
        library += time.perf_counter() - between
        ours += between - started
        assert torch.equal(found, expected.view_as(found)), tensor.name
    return ours, library


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--model", default="smollm2-135m", help="name of a pulled model, or a file")
    parser.add_argument("--adapter", help="folder; it is merged")
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args(arguments)
    path = store.find(options.model)
    if path is None:
        raise SystemExit(f"pull the model first: memagent models pull {options.model}")
    if options.device == "cpu":
        torch.set_num_threads(1)  # as loading does
    ours, library = compare(path, torch.device(options.device))
    print(
        f"weights: {ours:.2f} s; gguf library {library:.2f} s, {library / ours:.1f} times as long"
    )
    started = time.perf_counter()
    load(
        str(path),
        adapter=options.adapter,
        device=options.device,
        dtype=torch.bfloat16,
        merged=bool(options.adapter),
    )
    _wait(torch.device(options.device))
    print(f"load: {time.perf_counter() - started:.2f} s")


if __name__ == "__main__":
    main()
