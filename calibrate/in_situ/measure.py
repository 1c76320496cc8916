"""By what factor do kernels take longer (or less long) in a step than by themselves?

In turns, because a machine's speed changes while it is measured: real layers for some seconds, some of their steps
under a profiler, then each of their kernels alone, as rows of a record are measured. A factor is the median over turns
of a label's time in the chain over that of its kernels alone: caches are as the kernel before leaves them, clocks as
the power of the mix allows.

Kernels that one label holds in several number formats have one factor. Left out, and said, are labels of which a kernel
cannot be measured alone (too large, or this device has none), or of which the profiler saw nothing.
"""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from statistics import median
from time import monotonic
from typing import Final

import torch

from calibrate.check.operator_labels import Label
from calibrate.check.torch_dtypes import allow_tf32
from calibrate.devices.device import TorchDevice
from calibrate.in_situ.real_layers import Chain, RealLayers
from calibrate.in_situ.single_rank import alone
from calibrate.kernels import measure as kernel_rows
from calibrate.kernels.timing import Method
from calibrate.kernels.training_errors import refusal
from clustersim.common.errors import InputError
from clustersim.common.units import Seconds
from clustersim.cost.calibration_record import InSituSample, KernelSample, KernelSignature, family_of, signature_of
from clustersim.model.kernels import Kernel
from clustersim.model.precision_recipe import PrecisionRecipe
from clustersim.scenario import Scenario

SECONDS: Final = 60.0
TURNS: Final = 4
_ROOM: Final = 0.5  # of the free memory; kernels alone need some beside the model
_SAMPLES: Final = 3  # of a kernel in each turn, at least

Say = Callable[[str], None]
Alone = Callable[[Kernel, Seconds], KernelSample]
"""Measures a kernel by itself, for so many seconds."""


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def chain_rows(
    scenario: Scenario, device: TorchDevice, seconds: Seconds = SECONDS, *, say: Say = _say
) -> tuple[InSituSample, ...]:
    """Factors of a scenario's kernels; none, and why is said, where this device cannot run such layers.

    seconds: for all of it, of which half goes to real layers.
    """
    torch.manual_seed(0)
    try:
        cut = alone(scenario, _ROOM * device.free_bytes())
        with _precision(cut.training.recipe):
            return compared(RealLayers(cut, device), _measured_on(device), seconds, say)
    except Exception as error:
        too_large = f"layers of {scenario.model.name} do not fit on {device.name} beside what is there"
        said = error if isinstance(error, InputError) else refusal(error, device, too_large)
        if said is None:
            raise
        if not isinstance(said, InputError):
            raise said from error
        say(f"no chain of kernels: {said}")
    finally:
        device.release()
    return ()


def compared(chain: Chain, measure: Alone, seconds: Seconds, say: Say) -> tuple[InSituSample, ...]:
    """Turns of a chain and of its kernels alone, as rows by family."""
    parts = _by_label(chain.kernels)
    turns = list(_turns(chain, measure, seconds))
    for label, kernels in parts.items():
        if missing := _missing(label, kernels, turns):
            say(f"chain: no factor of {label.name}: {missing}")
    known = {label: kernels for label, kernels in parts.items() if not _missing(label, kernels, turns)}
    return tuple(row for label, kernels in known.items() for row in _rows(label, kernels, turns))


@dataclass(frozen=True, slots=True)
class _Turn:
    """Seconds of labels in the chain, and of kernels alone."""

    chain: Mapping[Label, Seconds]
    alone: Mapping[KernelSignature, KernelSample]


_Kernels = Mapping[KernelSignature, int]


def _turns(chain: Chain, measure: Alone, seconds: Seconds) -> Iterator[_Turn]:
    """One turn, and more while there is time for another like the longest."""
    began = before = monotonic()
    longest = 0.0
    for _ in range(TURNS):
        yield _turn(chain, measure, seconds / TURNS)
        longest, before = max(longest, monotonic() - before), monotonic()
        if before - began + longest > seconds:
            return


def _turn(chain: Chain, measure: Alone, seconds: Seconds) -> _Turn:
    once = chain.run(seconds / 2.0)
    profile = chain.profile(once)
    kernels = kernel_rows.distinct(chain.kernels)
    rows = [measure(kernel, seconds / 2.0 / len(kernels)) for kernel in kernels]
    return _Turn(profile, {row.signature: row for row in rows})


def _by_label(kernels: Mapping[Kernel, int]) -> Mapping[Label, _Kernels]:
    """How often each signature runs, by its label."""
    found: dict[Label, dict[KernelSignature, int]] = {}
    for kernel, count in kernels.items():
        if (known := signature_of(kernel)) is not None:
            same = found.setdefault(Label.of(kernel), {})
            same[known] = same.get(known, 0) + count
    return found


def _missing(label: Label, kernels: _Kernels, turns: Sequence[_Turn]) -> str:
    """Why a label has no factor; empty if it has one."""
    unmeasured = [turn.alone[kernel] for turn in turns for kernel in kernels if turn.alone[kernel].time is None]
    if unmeasured:
        return f"{unmeasured[0].name} alone: {unmeasured[0].outcome.value}, {unmeasured[0].source}"
    return "" if all(turn.chain.get(label, 0.0) > 0.0 for turn in turns) else "the profiler saw nothing of it"


def _rows(label: Label, kernels: _Kernels, turns: Sequence[_Turn]) -> Iterator[InSituSample]:
    """A row for each family of a label."""
    factor = median(turn.chain[label] / _alone(kernels, turn) for turn in turns)
    for name in dict.fromkeys(map(family_of, kernels)):
        same = {
            kernel_signature: count
            for kernel_signature, count in kernels.items()
            if family_of(kernel_signature) == name
        }
        isolated = median(_alone(same, turn) for turn in turns)
        yield InSituSample(name, sum(same.values()), isolated, factor * isolated)


def _alone(kernels: _Kernels, turn: _Turn) -> Seconds:
    times = ((turn.alone[kernel_signature].time, count) for kernel_signature, count in kernels.items())
    return sum(time.seconds * count for time, count in times if time is not None)


def _measured_on(device: TorchDevice) -> Alone:
    def measure(kernel: Kernel, seconds: Seconds) -> KernelSample:
        return kernel_rows.row(kernel, device, replace(Method(), seconds=seconds, least=_SAMPLES))

    return measure


@contextmanager
def _precision(recipe: PrecisionRecipe) -> Iterator[None]:
    """TF32 where the scenario computes in it; all is as before afterwards."""
    before = torch.get_float32_matmul_precision()
    allow_tf32(recipe)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
