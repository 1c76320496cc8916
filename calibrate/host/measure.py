"""How long does the host need per launch of forward and of backward?

The modules of a real step (`host.passes`), so small that the device finishes each kernel before the host has
launched the next (`host.tiny_model`): on a GPU the time until `forward` and `backward` return is host time
only, that is Python, autograd's engine, hooks and dispatch. That the GPU was idle is checked by how soon it
finishes after that. The median over rounds is divided by the launches that clustersim counts in the pass, of
which a real one may be several. For CUDA graphs, the sample is the launch of one graph per pass.

A CPU computes what it launches. Arithmetic on a few tokens is next to nothing, so the passes take the host's
time, its allocations included (the `meta` device would run other code: shape functions in Python). The share
of it that isolated kernel samples contain as well is measured with the same small kernels
(`HostLaunchSample.alone`).

Assumed: a launch takes the host as long in a large model as in a small one, though the data of large kernels
evict its code from a CPU's caches; the optimizer's launches take as long as forward's.
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
from clustersim.cost.calibration_record import HostLaunchSample, KernelSignature, signature_of
from clustersim.cost.record_kinds import LaunchMode
from clustersim.scenario import Scenario

_WARM_UP_ROUNDS: Final = 3  # rounds; layers are compiled in the first
_MIN_ROUNDS: Final = 5  # minimum number of rounds
_MAX_ROUNDS: Final = 500
_MAX_LAG_RATIO: Final = 0.25  # maximum device lag over launch time
_WARM_CACHE_METHOD: Final = replace(QUICK, max_seconds=0.02, cold_cache=False)  # operands this small stay in the caches


@dataclass(frozen=True, slots=True)
class LaunchTiming:
    """Seconds to launch forward and backward, and until the device has finished after that."""

    forward: Seconds
    backward: Seconds
    device_lag: Seconds


@dataclass(frozen=True, slots=True)
class HostBenchmark:
    """The host of a device. seconds: for the rounds of one state."""

    device: TorchDevice
    seconds: Seconds


def measure_host_launches(
    scenario: Scenario, device: TorchDevice, seconds: Seconds, states: Collection[LaunchMode] = tuple(LaunchMode)
) -> tuple[HostLaunchSample, ...]:
    """Launch times in each state that is available here; others are left out, with a sentence on stderr.

    seconds: for the rounds of all states; building and compiling come on top; states: that are requested.
    """
    selected_states = [
        state for state in PASS_BUILDERS if state in states and (state is not LaunchMode.GRAPH or not _is_cpu(device))
    ]
    benchmark = HostBenchmark(device, seconds / max(1, len(selected_states)))
    samples = [_measure_state(state, scenario, benchmark) for state in selected_states]
    return tuple(sample for sample in samples if sample is not None)


def _measure_state(state: LaunchMode, scenario: Scenario, benchmark: HostBenchmark) -> HostLaunchSample | None:
    sample = None
    try:
        with PASS_BUILDERS[state](scenario, benchmark.device) as passes:
            sample = _state_sample(state, passes, benchmark)
    except Exception as reason:  # the other states can be measured whatever this one lacks
        print(f"host: {state.value} is left out: {_first_line(reason)}", file=sys.stderr)
    benchmark.device.synchronize()  # an error that leaves the device unusable is raised here
    benchmark.device.release_memory()
    return sample


def _state_sample(state: LaunchMode, passes: LaunchedPasses, benchmark: HostBenchmark) -> HostLaunchSample:
    timing, counted_passes = median_timing(passes, benchmark), count_passes(passes.plan)
    if state is LaunchMode.GRAPH:
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
    """Medians over rounds, after untimed warm-up rounds."""
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
    """Isolated kernel seconds per launch of forward and backward; operations without a kernel count as zero."""
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
