"""How long do replicas wait for the exchange of a fragment?

Sent after the inner optimizer's step, a fragment has `overlap` inner steps to arrive; what it takes longer is waited
for. Sent layer by layer during backward, each layer has from the end of its own backward to its own forward of the
next step, and `overlap` steps more; the messages of a fragment follow each other on the links. A step is one third
forward and two thirds backward, evenly over the layers (a backward has twice the FLOP of a forward).

Reference: Douillard et al. 2025, arXiv:2501.18512, section 3.1: the same graph of layers, in which only the bandwidth
between replicas counts; section 3.3.1: fragments of strided layers.
"""

from collections.abc import Sequence

from clustersim.common.units import Seconds
from clustersim.scenario.diloco import DilocoSettings, OuterSend

FORWARD_FRACTION = 1.0 / 3.0


def fragment_layers(layer_count: int, fragments: int) -> list[range]:
    """Layers of each fragment, as evenly as possible: strided, so that no two early layers travel together.

    >>> fragment_layers(7, 3)
    [range(0, 7, 3), range(1, 7, 3), range(2, 7, 3)]
    """
    return [range(index, layer_count, fragments) for index in range(fragments)]


def exposed_seconds(
    settings: DilocoSettings, step_time: Seconds, layer_count: int, full_exchange: Seconds, latency: Seconds
) -> Seconds:
    """Seconds of a round that replicas wait for its exchanges.

    full_exchange: all layers at once, without latency; latency: of one exchange, however small.
    """
    fragments = fragment_layers(layer_count, settings.fragments)
    if settings.send is OuterSend.AFTER_OPTIMIZER:
        window = settings.overlap * step_time
        return sum(max(0.0, full_exchange * len(layers) / layer_count + latency - window) for layers in fragments)
    return sum(
        _wait_for_layers(layers, layer_count, step_time, (full_exchange / layer_count, latency), settings.overlap)
        for layers in fragments
    )


def _wait_for_layers(
    layers: Sequence[int], layer_count: int, step_time: Seconds, message: tuple[Seconds, Seconds], overlap: int
) -> Seconds:
    """What the next forward waits for the layers of one fragment. message: seconds on the links, and latency."""
    forward, link_seconds = FORWARD_FRACTION * step_time, message[0]
    arrival: dict[int, Seconds] = {}
    free = 0.0
    for layer in reversed(layers):  # backward starts with the last layer
        is_ready = forward + (step_time - forward) * (layer_count - layer) / layer_count
        free = max(free, is_ready) + link_seconds
        arrival[layer] = free + message[1]
    wait = 0.0
    for layer in layers:
        needed = step_time * (1 + overlap) + forward * layer / layer_count
        wait = max(wait, arrival[layer] - needed)
    return wait
