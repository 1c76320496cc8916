"""How much of a collective's time do kernels beside it lose on this machine?

Some all-reduces are started, kernels run beside them for twice as long, then all is waited for. What that lasts longer
than the kernels alone, over what the all-reduces last alone, is the part of their time in which kernels stood still:
nothing where other hardware moves the data, all of it where the same cores do both. The simulator slows kernels by a
part p while a collective lasts, and so loses p / (1 + p) of its time; this p is solved for. That the collective lasts
longer too, in which time kernels lose less, is in the same sum.
"""

from collections.abc import Callable, Sequence
from typing import Final

import torch
import torch.distributed as dist

from calibrate.check.here import Here
from calibrate.collectives.world import largest
from calibrate.devices.stopwatch import Action
from calibrate.kernels.routines import prepare, settings
from clustersim.cost.record import CollectiveRow, KernelRow
from clustersim.units import Bytes, Seconds

COLLECTIVES: Final = 3  # at a time
BESIDE: Final = 2.0  # times as long as they last alone
MOST: Final = 0.99  # part that is lost, so that p is finite


def interference(here: Here, kernels: Sequence[KernelRow], calls: Sequence[CollectiveRow]) -> float | None:
    """That p, for the longest kernel beside all-reduces as large as the largest call; None if there are none."""
    timed = [row for row in kernels if row.time is not None]
    if here.world.ranks == 1 or not timed or not calls:
        return None
    longest = max(timed, key=lambda row: row.kernel.flops)
    device = here.device.torch
    with settings(longest.kernel, device):
        run = prepare(longest.kernel, device)
        lost = _lost(here, run, max(row.call.payload for row in calls))
    return lost / (1.0 - lost)


def _lost(here: Here, run: Action, payload: Bytes) -> float:
    tensor = torch.zeros(max(1, int(payload) // 4), device=here.device.torch)
    _spent(here, lambda: _reduced(tensor, run, 1))
    moving = _spent(here, lambda: _reduced(tensor, run, 0))
    once = _spent(here, lambda: _repeat(run, 3)) / 3
    count = max(1, round(BESIDE * moving / once))
    alone = _spent(here, lambda: _repeat(run, count))
    together = _spent(here, lambda: _reduced(tensor, run, count))
    return min(max(0.0, (together - alone) / moving), MOST)


def _reduced(tensor: torch.Tensor, run: Action, count: int) -> None:
    works = [dist.all_reduce(tensor, async_op=True) for _ in range(COLLECTIVES)]
    _repeat(run, count)
    for work in works:
        if work is not None:
            work.wait()


def _repeat(run: Action, count: int) -> None:
    for _ in range(count):
        run()


def _spent(here: Here, work: Callable[[], None]) -> Seconds:
    """Seconds of the slowest rank, so that all ranks decide alike."""
    here.meet()
    here.device.synchronize()
    mine = here.device.host_seconds(work, 1)
    return float(largest(torch.tensor([mine], dtype=torch.float64), here.device.torch)[0])
