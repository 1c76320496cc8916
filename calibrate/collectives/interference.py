"""By how much do kernels and collectives slow each other on this machine?

One kernel of each class (`cost.interference`) overlapped with one collective of each kind, with the payload
and the groups that it has in a step: a scenario's, or defaults. How that is timed on a GPU and on a CPU:
`collectives.contention_benchmark`.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Final

from calibrate.collectives.contention_benchmark import (
    ContentionBenchmark,
    CpuContentionBenchmark,
    GpuContentionBenchmark,
    KernelAction,
    OverlapTimes,
)
from calibrate.collectives.process_groups import World, min_over_ranks
from calibrate.collectives.sweep import SkippedCall, prepared_iterations
from calibrate.collectives.timing import CollectiveIteration
from calibrate.devices.device import TorchDevice
from calibrate.devices.stopwatch import Action
from calibrate.kernels.copy_interference import MATMUL_SIZES, typical_kernel
from calibrate.kernels.measure import measure_kernel
from calibrate.kernels.pytorch_ops import kernel_settings, prepare_kernel
from calibrate.kernels.timing import QUICK
from clustersim.common.units import Bytes
from clustersim.cost.calibration_record import CollectiveCall, InterferenceSample, KernelSample
from clustersim.cost.interference import KernelClass, kernel_class_of
from clustersim.model import memory_bound
from clustersim.model.attention import AttentionCore
from clustersim.model.kernels import AttentionShape, Kernel, KernelKind
from clustersim.program.task import CollectiveType

INTERFERING_COLLECTIVES: Final = (
    CollectiveType.ALL_REDUCE,
    CollectiveType.ALL_GATHER,
    CollectiveType.REDUCE_SCATTER,
    CollectiveType.SEND_RECV,
)
DEFAULT_PAYLOADS: Final = {
    "cuda": 2.0**27,
    "cpu": 2.0**26,
}  # bytes, where no scenario gives them: those of a layer's gradients
"""Bytes by device type, where no scenario gives them: those of a layer's gradients."""
DEFAULT_ROUNDS: Final = 5
_MIN_PAYLOAD_FRACTION: Final = 1e-3  # fraction of the largest payload, below which a kind of collective is skipped

KernelCallPair = tuple[Kernel, CollectiveCall]


def default_kernels(device: TorchDevice) -> tuple[Kernel, ...]:
    """One kernel of each class that is long enough to overlap: a matmul, attention and a residual sum."""
    matmul, size = typical_kernel(device), MATMUL_SIZES[device.torch.type]
    heads = max(1, size // 256)
    shape = AttentionShape(1, size // 2, size // 2, heads, heads, 128, causal=True)
    (attention,) = AttentionCore(shape, matmul.dtype, dropout=False, fused=True).flash_operators()
    gradient_sum = memory_bound.GRADIENT_SUM.forward_kernel(
        "overlapped.sum", matmul.dtype, memory_bound.GRADIENT_SUM.shape_for(size, size)
    )
    return matmul, *attention.forward, gradient_sum


def default_calls(world: World, payload: Bytes) -> tuple[CollectiveCall, ...]:
    """One collective of each kind over the whole world, and messages between two ranks."""
    pair = CollectiveCall(CollectiveType.SEND_RECV, payload, 2, 1 if world.ranks_per_node > 1 else 2)
    world_calls = (
        CollectiveCall(kind, payload, world.world_size, world.node_count)
        for kind in INTERFERING_COLLECTIVES
        if kind is not CollectiveType.SEND_RECV
    )
    return (*world_calls, pair)


def heaviest_kernels(kernels: Iterable[Kernel]) -> tuple[Kernel, ...]:
    """Of each class the kernel with the most FLOP or bytes; no optimizer kernels, which run after collectives."""
    heaviest: dict[KernelClass, Kernel] = {}
    for kernel in kernels:
        current = heaviest.get(kernel_class_of(kernel.kind))
        if _can_overlap(kernel) and (current is None or _work_amount(kernel) > _work_amount(current)):
            heaviest[kernel_class_of(kernel.kind)] = kernel
    return tuple(heaviest.values())


def _can_overlap(kernel: Kernel) -> bool:
    """Whether the kernel's shape is known and it overlaps collectives in a step."""
    return kernel.shape is not None and kernel.kind is not KernelKind.OPTIMIZER


def _work_amount(kernel: Kernel) -> float:
    return kernel.bytes if kernel_class_of(kernel.kind) is KernelClass.MEMORY else kernel.flops


def largest_calls(calls: Iterable[CollectiveCall]) -> tuple[CollectiveCall, ...]:
    """Of each kind of collective the call with the largest payload; none whose payload is negligible."""
    largest: dict[CollectiveType, CollectiveCall] = {}
    for call in calls:
        if call.ranks > 1 and (call.collective not in largest or call.payload > largest[call.collective].payload):
            largest[call.collective] = call
    max_payload = max((call.payload for call in largest.values()), default=0.0)
    return tuple(call for call in largest.values() if call.payload >= _MIN_PAYLOAD_FRACTION * max_payload)


def measure_interference(
    pairs: Sequence[KernelCallPair], device: TorchDevice, *, rounds: int = DEFAULT_ROUNDS
) -> Iterator[InterferenceSample | SkippedCall]:
    """Measure kernels overlapped with calls, in the order of the calls' groups.

    All ranks call it with the same arguments and get the same results.
    """
    benchmark: ContentionBenchmark = (
        GpuContentionBenchmark(device, rounds)
        if device.torch.type == "cuda"
        else CpuContentionBenchmark(device, rounds)
    )
    isolated = {kernel: _measure_isolated(kernel, device) for kernel in dict.fromkeys(kernel for kernel, _ in pairs)}
    for call, iteration in prepared_iterations(list(dict.fromkeys(call for _, call in pairs)), device):
        if isinstance(iteration, SkippedCall):
            yield iteration
            continue
        for kernel in (kernel for kernel, paired_call in pairs if paired_call == call):
            yield _measure_pair((call, iteration), isolated[kernel], benchmark, device)


def _measure_isolated(kernel: Kernel, device: TorchDevice) -> KernelSample:
    """The isolated kernel's sample, without a time where any rank has none."""
    sample = measure_kernel(kernel, device, QUICK)
    return sample if min_over_ranks(float(sample.time is not None), device.torch) == 1.0 else replace(sample, time=None)


def _measure_pair(
    call_iteration: tuple[CollectiveCall, CollectiveIteration],
    kernel: KernelSample,
    benchmark: ContentionBenchmark,
    device: TorchDevice,
) -> InterferenceSample | SkippedCall:
    call, iteration = call_iteration
    if kernel.time is None:
        return SkippedCall(
            call, f"overlapped with {kernel.name}, which could not be run in isolation ({kernel.outcome.value})"
        )
    times = _run_overlapped(kernel, iteration, benchmark, device)
    if times is None:
        return SkippedCall(call, f"overlapped with {kernel.name}: no memory for both, or they did not overlap")
    isolated_sample, call_times = (
        replace(kernel, time=times.kernel_isolated),
        (times.call_isolated, times.call_overlapped),
    )
    return InterferenceSample(isolated_sample, call.collective.value, times.kernel_overlapped, call, *call_times)


def _run_overlapped(
    kernel: KernelSample, iteration: CollectiveIteration, benchmark: ContentionBenchmark, device: TorchDevice
) -> OverlapTimes | None:
    with kernel_settings(kernel.kernel, device.torch):
        action = _prepare_on_all_ranks(kernel.kernel, device)
        times = None if action is None else benchmark.measure(KernelAction(action, kernel.launches), iteration)
    device.release_memory()
    return times


def _prepare_on_all_ranks(kernel: Kernel, device: TorchDevice) -> Action | None:
    """The kernel's action; None where its operands and the collective's do not fit on some rank."""
    action: Action | None = None
    try:
        action = prepare_kernel(kernel, device.torch)
    except RuntimeError as error:
        if not device.is_out_of_memory(error):
            raise
    return None if min_over_ranks(float(action is not None), device.torch) < 1.0 else action
