"""What accelerators can do by their data sheets: dense bfloat16 arithmetic, memory, links.

find_accelerator("h100").bandwidth
"""

from __future__ import annotations

from dataclasses import dataclass

from memagent.errors import ConfigError
from memagent.names import hint

GIB = 2**30
TERA = 1e12
GIGA = 1e9


@dataclass(frozen=True, slots=True, kw_only=True)
class Accelerator:
    """One GPU, and its share of the machine around it."""

    name: str
    memory: float
    """Bytes that programs can use."""
    flops: float
    """Dense bfloat16 operations a second."""
    bandwidth: float
    """Bytes a second from its own memory."""
    link: float
    """Bytes a second to a GPU of the same node, in one direction."""
    network: float = 50 * GIGA
    """Bytes a second to a GPU of another node."""
    host_link: float = 50 * GIGA
    """Bytes a second to the memory of the machine."""


def _gpu(name: str, gib: float, teraflops: float, tb_s: float, link_gb_s: float) -> Accelerator:
    return Accelerator(
        name=name,
        memory=gib * GIB,
        flops=teraflops * TERA,
        bandwidth=tb_s * TERA,
        link=link_gb_s * GIGA,
    )


ACCELERATORS: dict[str, Accelerator] = {
    gpu.name: gpu
    for gpu in (
        _gpu("B200", 178, 2250, 8.0, 900),
        _gpu("H200", 139, 989, 4.8, 450),
        _gpu("H100", 79, 989, 3.35, 450),
        _gpu("H800", 79, 989, 3.35, 200),
        _gpu("H20", 95, 148, 4.0, 450),
        _gpu("A100", 79, 312, 2.0, 300),
        _gpu("A100-40GB", 39, 312, 1.55, 300),
        _gpu("L40S", 44, 362, 0.86, 25),
        _gpu("RTX4090", 23.5, 165, 1.0, 12),
    )
}
"""By name. `A100` is the one of 80 GB."""


def find_accelerator(name: str) -> Accelerator:
    """The accelerator of a name, in capitals or not."""
    found = {known.lower(): gpu for known, gpu in ACCELERATORS.items()}.get(name.lower())
    if found is None:
        raise ConfigError(f"there is no accelerator {name!r}; {hint(name.upper(), ACCELERATORS)}")
    return found
