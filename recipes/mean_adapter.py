"""The adapter half-way between two, where one was trained on from the other: what each learned, in part.

python -m recipes.mean_adapter adapters/memagent-1.5b runs/reader-answers/final --out runs/mean
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file


def weights_of(adapter: Path) -> dict[str, torch.Tensor]:
    """The weights of an adapter, from one file or several."""
    found: dict[str, torch.Tensor] = {}
    for path in sorted(adapter.glob("*.safetensors")):
        found |= load_file(path)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("adapters", nargs=2, type=Path, help="folders of two adapters")
    parser.add_argument("--out", type=Path, required=True, help="a new folder")
    arguments = parser.parse_args()
    first, second = map(weights_of, arguments.adapters)
    if not first or {name: one.shape for name, one in first.items()} != {
        name: one.shape for name, one in second.items()
    }:
        parser.error("the adapters have other weights or none; give two of one model and rank")
    arguments.out.mkdir(parents=True)
    shutil.copy(arguments.adapters[0] / "adapter_config.json", arguments.out)
    mean = {
        name: ((one.float() + second[name].float()) / 2).to(one.dtype)
        for name, one in first.items()
    }
    save_file(mean, arguments.out / "adapter_model.safetensors")


if __name__ == "__main__":
    main()
