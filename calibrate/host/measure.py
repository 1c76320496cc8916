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
from calibrate.host.passes import PASS_BUILDERS, LaunchedPasses
from calibrate.host.tiny_model import CountedPass, count_passes
from calibrate.kernels import measure as kernel_rows
from calibrate.kernels.formulas import UnsupportedKernel
from calibrate.kernels.timing import QUICK
from clustersim.common.units import Seconds, format_seconds
from clustersim.cost.calibration_record import HostLaunchSample, HostState, KernelSignature, signature_of
from clustersim.scenario import Scenario

_WARM_UP_ROUNDS: Final = 3  # rounds, in the first of which layers are compiled
_MIN_ROUNDS: Final = 5  # rounds
_MAX_ROUNDS: Final = 500
_MAX_LAG_RATIO: Final = 0.25  # times what launching took: longer than that the device is not waited for
_WARM_CACHE_METHOD: Final = replace(
    QUICK, max_seconds=0.02, cold_cache=False
)  # operands as small as these stay in the caches


@dataclass(frozen=True, slots=True)
class LaunchTiming:
    """Seconds until forward and backward were launched, and until the device was done after that."""

    forward: Seconds
    backward: Seconds
    device_lag: Seconds


@dataclass(frozen=True, slots=True)
class HostBenchmark:
    """What is measured: the host of a device. seconds: for rounds of one state."""

    device: TorchDevice
    seconds: Seconds


def measure_host_launches(
    scenario: Scenario, device: TorchDevice, seconds: Seconds, states: Collection[HostState] = tuple(HostState)
) -> tuple[HostLaunchSample, ...]:
    """What launching takes in each state that can be had here; the others are left out, with a sentence on stderr.

    seconds: for rounds of all of them, to which comes what it takes to build and to compile; states: that are asked
    for.
    """
    selected_states = [
        state for state in PASS_BUILDERS if state in states and (state is not HostState.GRAPH or not _is_cpu(device))
    ]
    benchmark = HostBenchmark(device, seconds / max(1, len(selected_states)))
    samples = [_measure_state(state, scenario, benchmark) for state in selected_states]
    return tuple(sample for sample in samples if sample is not None)


def _measure_state(state: HostState, scenario: Scenario, benchmark: HostBenchmark) -> HostLaunchSample | None:
    sample = None
    try:
        with PASS_BUILDERS[state](scenario, benchmark.device) as passes:
            sample = _state_sample(state, passes, benchmark)
    except Exception as reason:  # whatever a state lacks here, the others can be measured
        print(f"host: {state.value} is left out: {_first_line(reason)}", file=sys.stderr)
    benchmark.device.synchronize()  # what leaves the device unusable is raised here
    benchmark.device.release_memory()
    return sample


def _state_sample(state: HostState, passes: LaunchedPasses, benchmark: HostBenchmark) -> HostLaunchSample:
    timing, counted_passes = median_timing(passes, benchmark), count_passes(passes.plan)
    if state is HostState.GRAPH:
        return HostLaunchSample(
            state, timing.forward, timing.backward, (counted_passes[0].launch_count, counted_passes[1].launch_count)
        )
    if timing.device_lag > _MAX_LAG_RATIO * (timing.forward + timing.backward):
        raise UnsupportedKernel(
            f"the device was done {format_seconds(timing.device_lag)} after launches that took "
            f"{format_seconds(timing.forward + timing.backward)}, so that the host may have waited for it"
        )
    forward, backward = (counted_pass.launch_count for counted_pass in counted_passes)
    isolated = (
        _isolated_seconds_per_launch(counted_passes, benchmark.device) if _is_cpu(benchmark.device) else (0.0, 0.0)
    )
    return HostLaunchSample(state, timing.forward / forward, timing.backward / backward, (forward, backward), isolated)


def median_timing(passes: LaunchedPasses, benchmark: HostBenchmark) -> LaunchTiming:
    """Medians of rounds, after some that are not timed."""
    for _ in range(_WARM_UP_ROUNDS):
        _time_passes(passes, benchmark)
    rounds: list[LaunchTiming] = []
    start_time = perf_counter()
    while len(rounds) < _MIN_ROUNDS or (perf_counter() - start_time < benchmark.seconds and len(rounds) < _MAX_ROUNDS):
        rounds.append(_time_passes(passes, benchmark))
    medians = (median(getattr(timing, field.name) for timing in rounds) for field in fields(LaunchTiming))
    return LaunchTiming(*medians)


def _time_passes(passes: LaunchedPasses, benchmark: HostBenchmark) -> LaunchTiming:
    benchmark.device.synchronize()
    forward_start = perf_counter()
    output = passes.forward()
    backward_start = perf_counter()
    passes.backward(output)
    backward_end = perf_counter()
    benchmark.device.synchronize()
    return LaunchTiming(backward_start - forward_start, backward_end - backward_start, perf_counter() - backward_end)


def _isolated_seconds_per_launch(
    counted_passes: tuple[CountedPass, CountedPass], device: TorchDevice
) -> tuple[Seconds, Seconds]:
    """Seconds of a launch that kernels take by themselves, of forward and backward; what has no kernel takes none."""
    kernels = [
        operation.kernel
        for counted_pass in counted_passes
        for operation in counted_pass.operations
        if operation.kernel is not None
    ]
    times = {
        sample.signature: sample.time.seconds
        for sample in kernel_rows.measure_sequence(kernels, device, _WARM_CACHE_METHOD)
        if sample.time
    }
    forward, backward = (
        sum(_kernel_seconds(counted_pass, times)) / counted_pass.launch_count for counted_pass in counted_passes
    )
    return forward, backward


def _kernel_seconds(counted_pass: CountedPass, times: Mapping[KernelSignature, Seconds]) -> Iterator[Seconds]:
    for operation in counted_pass.operations:
        kernel_signature = None if operation.kernel is None else signature_of(operation.kernel)
        yield 0.0 if kernel_signature is None else times.get(kernel_signature, 0.0)


def _is_cpu(device: TorchDevice) -> bool:
    return device.torch.type == "cpu"


def _first_line(reason: Exception) -> str:
    return next((line for line in str(reason).splitlines() if line.strip()), type(reason).__name__)
