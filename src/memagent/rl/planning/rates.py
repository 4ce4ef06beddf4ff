"""What was measured of the trainer and the engine, as constants that carry over to other GPUs and models.

An update token takes arithmetic (matrix products and attention, at a share of the GPU's peak) and traffic of
activations (in proportion to layers x widths, at the memory's bandwidth). A decoding step takes the same for
each layer, whatever is in it, and reads weights and the keys and values of its rows.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """Constants of the model of times. Each is documented with the measurement it was fitted to, on one H200."""

    peak: float = 0.6
    """Share of peak arithmetic that matrix products of very wide models reach; narrower ones reach
    width / (width + half_width) of it."""
    half_width: float = 400.0
    """Width at which half of that is reached: with `traffic`, the rates of 135M and 1.5B."""
    traffic: float = 105.0
    """Bytes that an update moves for each token, layer and unit of 4 x hidden + 2 x feed-forward width:
    42,700 to 36,800 tokens/s eager at 1.5B with an adapter; 135M, all weights, 156,800 tokens in 1.36 s."""
    compiled_traffic: float = 0.7
    """The share of it that is left with compiled layers: 135M, 1.08 instead of 1.36 s."""
    forward_share: float = 0.3
    """A forward pass alone, as a share of the traffic of a whole update."""
    update_seconds: float = 0.15
    """Every update, however small: packing, masks, the optimizer (135M: 0.25 s, 1.5B: 0 to 0.1)."""
    layer_seconds: float = 100e-6
    """A layer in a decoding step, whatever is in it: 135M, 256 replies of 150 tokens in 0.72 s."""
    adapter_layer_seconds: float = 130e-6
    """The same with an adapter that is not merged, on top: 11.1 instead of 7.4 ms a step at 1.5B."""
    cache_bandwidth: float = 0.5
    """Share of the memory's bandwidth when keys and values are read: 2.46 of 4.8 TB/s."""
    weight_bandwidth: float = 0.75
    """The same for weights, which are read in larger pieces. Assumed."""
    host_seconds: float = 0.8e-3
    """The driver's own time for a call: rendering, encoding, recording (0.7 ms, and 0.1 to 0.6 for templates)."""
    cluster_host_seconds: float = 0.95e-3
    """The same with replicas on a cluster (`benchmarks.driver_scaling`: 0.9 to 1.0 ms)."""
    link_share: float = 0.6
    """Share of a link's bandwidth that collectives reach. Assumed."""
    disk_bandwidth: float = 1e9
    """Bytes a second and node that a checkpoint is written at. Assumed."""
    pause_seconds: float = 0.5
    """Stopping an engine for new weights and starting it again, besides the transfer. Assumed."""
    store_bandwidth: float = 2e9
    """Bytes a second from a trainer through the object store to engines, on two CPU cores
    (`benchmarks/weight_transfer.py`)."""

    def peak_share(self, width: int) -> float:
        """Share of peak arithmetic in products of a width."""
        return self.peak * width / (width + self.half_width)


MEASURED = Rates()
