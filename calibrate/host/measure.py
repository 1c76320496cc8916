"""How long does the host need for a launch of forward and of backward?

The modules of a real step (`host.passes`), so small that the device is done with each kernel before the host has
launched the next (`host.tiny_model`): on a GPU what it takes until `forward` and `backward` return is the host's time alone,
Python, autograd's engine, hooks and dispatch. That the GPU was idle is seen from how soon all is done after that. The
median over rounds is divided by the launches that clustersim counts in the pass, of which a real one may be several.
Of CUDA graphs, a row is the launch of one for each pass.

A CPU computes what it launches. Arithmetic on a few tokens is next to nothing, so the passes take what the host does,
its allocations included (on the `meta` device other code would run instead: shape functions in Python). What of it
kernels contain that are timed by themselves is measured with the same small kernels (`HostRow.alone`).

Assumed: a launch takes the host as long in a large model as in a small one, though the data of large kernels drive its
code out of a CPU's caches; the optimizer's launches take what forward's do.
"""

import sys
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from statistics import median
from time import perf_counter
from typing import Final

from calibrate.devices.device import TorchDevice
from calibrate.host.passes import MAKES, Passes
from calibrate.host.tiny_model import Counted, counted
from calibrate.kernels import measure as kernel_rows
from calibrate.kernels.formulas import Unsupported
from calibrate.kernels.timing import QUICK
from clustersim.common.units import Seconds, format_seconds
from clustersim.cost.calibration_record import HostLaunchSample, HostState, KernelSignature, signature_of
from clustersim.scenario import Scenario

_WARM: Final = 3  # rounds, in the first of which layers are compiled
_FEWEST: Final = 5  # rounds
_MOST: Final = 500
_BEHIND: Final = 0.25  # times what launching took: longer than that the device is not waited for
_WARM_KERNELS: Final = replace(QUICK, seconds=0.02, cold=False)  # operands as small as these stay in the caches


@dataclass(frozen=True, slots=True)
class Round:
    """Seconds until forward and backward were launched, and until the device was done after that."""

    forward: Seconds
    backward: Seconds
    behind: Seconds


@dataclass(frozen=True, slots=True)
class Host:
    """What is measured: the host of a device. seconds: for rounds of one state."""

    device: TorchDevice
    seconds: Seconds


def host_rows(
    scenario: Scenario, device: TorchDevice, seconds: Seconds, states: Collection[HostState] = tuple(HostState)
) -> tuple[HostLaunchSample, ...]:
    """What launching takes in each state that can be had here; the others are left out, with a sentence on stderr.

    seconds: for rounds of all of them, to which comes what it takes to build and to compile; states: that are asked
    for.
    """
    asked = [state for state in MAKES if state in states and (state is not HostState.GRAPH or not _is_cpu(device))]
    host = Host(device, seconds / max(1, len(asked)))
    rows = [_measured(state, scenario, host) for state in asked]
    return tuple(row for row in rows if row is not None)


def _measured(state: HostState, scenario: Scenario, host: Host) -> HostLaunchSample | None:
    row = None
    try:
        with MAKES[state](scenario, host.device) as passes:
            row = _row(state, passes, host)
    except Exception as reason:  # whatever a state lacks here, the others can be measured
        print(f"host: {state.value} is left out: {_sentence(reason)}", file=sys.stderr)
    host.device.synchronize()  # what leaves the device unusable is raised here
    host.device.release()
    return row


def _row(state: HostState, passes: Passes, host: Host) -> HostLaunchSample:
    took, both = typical(passes, host), counted(passes.plan)
    if state is HostState.GRAPH:
        return HostLaunchSample(state, took.forward, took.backward, (both[0].launches, both[1].launches))
    if took.behind > _BEHIND * (took.forward + took.backward):
        raise Unsupported(
            f"the device was done {format_seconds(took.behind)} after launches that took "
            f"{format_seconds(took.forward + took.backward)}, so that the host may have waited for it"
        )
    forward, backward = (item.launches for item in both)
    alone = _alone(both, host.device) if _is_cpu(host.device) else (0.0, 0.0)
    return HostLaunchSample(state, took.forward / forward, took.backward / backward, (forward, backward), alone)


def typical(passes: Passes, host: Host) -> Round:
    """Medians of rounds, after some that are not timed."""
    for _ in range(_WARM):
        _round(passes, host)
    rounds: list[Round] = []
    began = perf_counter()
    while len(rounds) < _FEWEST or (perf_counter() - began < host.seconds and len(rounds) < _MOST):
        rounds.append(_round(passes, host))
    columns = (median(getattr(item, field.name) for item in rounds) for field in fields(Round))
    return Round(*columns)


def _round(passes: Passes, host: Host) -> Round:
    host.device.synchronize()
    began = perf_counter()
    made = passes.forward()
    between = perf_counter()
    passes.backward(made)
    ended = perf_counter()
    host.device.synchronize()
    return Round(between - began, ended - between, perf_counter() - ended)


def _alone(both: tuple[Counted, Counted], device: TorchDevice) -> tuple[Seconds, Seconds]:
    """Seconds of a launch that kernels take by themselves, of forward and backward; what has no kernel takes none."""
    kernels = [operation.kernel for item in both for operation in item.operations if operation.kernel is not None]
    times = {row.signature: row.time.seconds for row in kernel_rows.rows(kernels, device, _WARM_KERNELS) if row.time}
    forward, backward = (sum(_seconds(element, times)) / element.launches for element in both)
    return forward, backward


def _seconds(each: Counted, times: Mapping[KernelSignature, Seconds]) -> Iterator[Seconds]:
    for operation in each.operations:
        known = None if operation.kernel is None else signature_of(operation.kernel)
        yield 0.0 if known is None else times.get(known, 0.0)


def _is_cpu(device: TorchDevice) -> bool:
    return device.torch.type == "cpu"


def _sentence(reason: Exception) -> str:
    return next((line for line in str(reason).splitlines() if line.strip()), type(reason).__name__)
