"""By how much do kernels and collectives slow each other on this machine?

One kernel of each class (`cost.interference`) beside one collective of each kind, with the payload and the groups that
it has in a step: a scenario's own, or usual ones. How that is timed on a GPU and on a CPU: `collectives.contention_benchmark`.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Final

from calibrate.collectives.contention_benchmark import LostTime, SideBySide, Sides, Together, Work
from calibrate.collectives.process_groups import World, least
from calibrate.collectives.sweep import Skipped, laps
from calibrate.collectives.timing import Lap
from calibrate.devices.device import TorchDevice
from calibrate.devices.stopwatch import Action
from calibrate.kernels.copy_interference import SIZES, typical_kernel
from calibrate.kernels.measure import row
from calibrate.kernels.pytorch_ops import prepare, settings
from calibrate.kernels.timing import QUICK
from clustersim.common.units import Bytes
from clustersim.cost.calibration_record import CollectiveCall, InterferenceSample, KernelSample
from clustersim.cost.interference import KernelClass, kernel_class_of
from clustersim.model import memory_bound
from clustersim.model.attention import AttentionCore
from clustersim.model.kernels import AttentionShape, Kernel, KernelKind
from clustersim.program.task import CollectiveType

KINDS: Final = (
    CollectiveType.ALL_REDUCE,
    CollectiveType.ALL_GATHER,
    CollectiveType.REDUCE_SCATTER,
    CollectiveType.SEND_RECV,
)
PAYLOADS: Final = {"cuda": 2.0**27, "cpu": 2.0**26}  # bytes, where no scenario says it: those of a layer's gradients
ROUNDS: Final = 5
_FEW: Final = 1e-3  # of the largest payload: below that a kind of collective is not looked at

Pair = tuple[Kernel, CollectiveCall]


def usual_kernels(device: TorchDevice) -> tuple[Kernel, ...]:
    """A kernel of each class that lasts some time on the device: a product, attention and a residual sum."""
    matmul, size = typical_kernel(device), SIZES[device.torch.type]
    heads = max(1, size // 256)
    shape = AttentionShape(1, size // 2, size // 2, heads, heads, 128, causal=True)
    (attention,) = AttentionCore(shape, matmul.dtype, dropout=False, fused=True).flash_operators()
    total = memory_bound.GRADIENT_SUM.forward_kernel(
        "beside.sum", matmul.dtype, memory_bound.GRADIENT_SUM.shape_for(size, size)
    )
    return matmul, *attention.forward, total


def usual_calls(world: World, payload: Bytes) -> tuple[CollectiveCall, ...]:
    """One collective of each kind of the whole world, and messages between two ranks."""
    pair = CollectiveCall(CollectiveType.SEND_RECV, payload, 2, 1 if world.per_node > 1 else 2)
    whole = (
        CollectiveCall(kind, payload, world.ranks, world.nodes)
        for kind in KINDS
        if kind is not CollectiveType.SEND_RECV
    )
    return (*whole, pair)


def heaviest_kernels(kernels: Iterable[Kernel]) -> tuple[Kernel, ...]:
    """Of each class the kernel that computes, or else moves, the most; no optimizer, as these wait for collectives."""
    found: dict[KernelClass, Kernel] = {}
    for kernel in kernels:
        known = found.get(kernel_class_of(kernel.kind))
        if _beside_any(kernel) and (known is None or _weight(kernel) > _weight(known)):
            found[kernel_class_of(kernel.kind)] = kernel
    return tuple(found.values())


def _beside_any(kernel: Kernel) -> bool:
    """Whether it says what it computes, and runs beside collectives in a step."""
    return kernel.shape is not None and kernel.kind is not KernelKind.OPTIMIZER


def _weight(kernel: Kernel) -> float:
    return kernel.bytes if kernel_class_of(kernel.kind) is KernelClass.MEMORY else kernel.flops


def largest_calls(calls: Iterable[CollectiveCall]) -> tuple[CollectiveCall, ...]:
    """Of each kind of collective the call with the largest payload; none of those whose few bytes slow nothing."""
    found: dict[CollectiveType, CollectiveCall] = {}
    for call in calls:
        if call.ranks > 1 and (call.collective not in found or call.payload > found[call.collective].payload):
            found[call.collective] = call
    most = max((call.payload for call in found.values()), default=0.0)
    return tuple(call for call in found.values() if call.payload >= _FEW * most)


def beside(
    pairs: Sequence[Pair], device: TorchDevice, *, rounds: int = ROUNDS
) -> Iterator[InterferenceSample | Skipped]:
    """Kernels beside calls, in the order of the calls' groups; all ranks call it alike and get the same."""
    sides: Sides = SideBySide(device, rounds) if device.torch.type == "cuda" else LostTime(device, rounds)
    alone = {kernel: _measured(kernel, device) for kernel in dict.fromkeys(kernel for kernel, _ in pairs)}
    for call, lap in laps(list(dict.fromkeys(call for _, call in pairs)), device):
        if isinstance(lap, Skipped):
            yield lap
            continue
        for kernel in (kernel for kernel, other in pairs if other == call):
            yield _beside((call, lap), alone[kernel], sides, device)


def _measured(kernel: Kernel, device: TorchDevice) -> KernelSample:
    """The kernel alone, without a time where any rank has none."""
    found = row(kernel, device, QUICK)
    return found if least(float(found.time is not None), device.torch) == 1.0 else replace(found, time=None)


def _beside(
    moved: tuple[CollectiveCall, Lap], kernel: KernelSample, sides: Sides, device: TorchDevice
) -> InterferenceSample | Skipped:
    call, lap = moved
    if kernel.time is None:
        return Skipped(call, f"beside {kernel.name}, which could not be run by itself ({kernel.outcome.value})")
    found = _together(kernel, lap, sides, device)
    if found is None:
        return Skipped(call, f"beside {kernel.name}: no memory for both, or nothing of them was beside each other")
    alone, times = replace(kernel, time=found.alone), (found.call_alone, found.call_together)
    return InterferenceSample(alone, call.collective.value, found.together, call, *times)


def _together(kernel: KernelSample, lap: Lap, sides: Sides, device: TorchDevice) -> Together | None:
    with settings(kernel.kernel, device.torch):
        run = _prepared(kernel.kernel, device)
        found = None if run is None else sides.together(Work(run, kernel.launches), lap)
    device.release()
    return found


def _prepared(kernel: Kernel, device: TorchDevice) -> Action | None:
    """What runs the kernel; None where its operands do not fit on a rank beside those of the collective."""
    run: Action | None = None
    try:
        run = prepare(kernel, device.torch)
    except RuntimeError as error:
        if not device.out_of_memory(error):
            raise
    return None if least(float(run is not None), device.torch) < 1.0 else run
