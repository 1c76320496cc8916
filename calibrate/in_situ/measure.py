"""By what factor do kernels take longer (or shorter) in a step than in isolation?

In alternating rounds, because a machine's speed changes while it is measured: real layers for some seconds,
some of their steps under a profiler, then each of their kernels in isolation, measured like the samples of a
record. A factor is the median over rounds of a label's in-situ time over that of its isolated kernels:
caches are as the previous kernel leaves them, clocks as the power of the kernel mix allows.

Kernels of one label in several number formats share a factor. Labels with a kernel that cannot be measured
in isolation (too large, or unsupported on this device), or that the profiler did not see, are left out and
reported.
"""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from statistics import median
from time import monotonic
from typing import Final

import torch

from calibrate.check.operator_labels import OperatorLabel
from calibrate.check.torch_dtypes import set_tf32
from calibrate.devices.device import TorchDevice
from calibrate.in_situ.real_layers import KernelChain, RealLayers
from calibrate.in_situ.single_rank import single_rank_scenario
from calibrate.kernels import measure as kernel_rows
from calibrate.kernels.timing import MeasurementMethod
from calibrate.kernels.training_errors import explain_training_error
from clustersim.common.errors import InputError
from clustersim.common.units import Seconds
from clustersim.cost.calibration_record import InSituSample, KernelSample, KernelSignature, family_of, signature_of
from clustersim.model.kernels import Kernel
from clustersim.model.precision_recipe import PrecisionRecipe
from clustersim.scenario import Scenario

DEFAULT_SECONDS: Final = 60.0
MAX_ROUNDS: Final = 4
_MEMORY_FRACTION: Final = 0.5  # fraction of the free memory; isolated kernels need some in addition to the model
_MIN_KERNEL_SAMPLES: Final = 3  # minimum samples of a kernel in each round

Notify = Callable[[str], None]
IsolatedMeasurement = Callable[[Kernel, Seconds], KernelSample]
"""Measures an isolated kernel for the given seconds."""


def _print_status(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def measure_in_situ(
    scenario: Scenario, device: TorchDevice, seconds: Seconds = DEFAULT_SECONDS, *, notify: Notify = _print_status
) -> tuple[InSituSample, ...]:
    """In-situ factors of a scenario's kernels; empty, with the reason reported, where this device cannot run them.

    seconds: in total, of which half goes to real layers.
    """
    torch.manual_seed(0)
    try:
        single_rank = single_rank_scenario(scenario, _MEMORY_FRACTION * device.free_bytes())
        with _matmul_precision(single_rank.training.recipe):
            return compare_with_isolated(
                RealLayers(single_rank, device), _isolated_measurement(device), seconds, notify
            )
    except Exception as error:
        too_large = f"layers of {scenario.model.name} do not fit into the free memory of {device.name}"
        reason = error if isinstance(error, InputError) else explain_training_error(error, device, too_large)
        if reason is None:
            raise
        if not isinstance(reason, InputError):
            raise reason from error
        notify(f"no in-situ kernels: {reason}")
    finally:
        device.release_memory()
    return ()


def compare_with_isolated(
    chain: KernelChain, measure: IsolatedMeasurement, seconds: Seconds, notify: Notify
) -> tuple[InSituSample, ...]:
    """Rounds of a kernel chain and of its isolated kernels, as samples by family."""
    kernels_by_label = _signature_counts_by_label(chain.kernel_counts)
    rounds = list(_run_rounds(chain, measure, seconds))
    for label, kernels in kernels_by_label.items():
        if reason := _missing_reason(label, kernels, rounds):
            notify(f"in situ: no factor of {label.profiler_name}: {reason}")
    complete = {
        label: kernels for label, kernels in kernels_by_label.items() if not _missing_reason(label, kernels, rounds)
    }
    return tuple(sample for label, kernels in complete.items() for sample in _family_samples(label, kernels, rounds))


@dataclass(frozen=True, slots=True)
class _InSituRound:
    """Seconds of labels in situ, and samples of isolated kernels."""

    in_situ: Mapping[OperatorLabel, Seconds]
    isolated: Mapping[KernelSignature, KernelSample]


_SignatureCounts = Mapping[KernelSignature, int]


def _run_rounds(chain: KernelChain, measure: IsolatedMeasurement, seconds: Seconds) -> Iterator[_InSituRound]:
    """At least one round, and more while there is time for another one as long as the longest."""
    start_time = previous_end = monotonic()
    longest = 0.0
    for _ in range(MAX_ROUNDS):
        yield _run_round(chain, measure, seconds / MAX_ROUNDS)
        longest, previous_end = max(longest, monotonic() - previous_end), monotonic()
        if previous_end - start_time + longest > seconds:
            return


def _run_round(chain: KernelChain, measure: IsolatedMeasurement, seconds: Seconds) -> _InSituRound:
    step_seconds = chain.run_steps(seconds / 2.0)
    profile = chain.profile_steps(step_seconds)
    kernels = kernel_rows.distinct_kernels(chain.kernel_counts)
    samples = [measure(kernel, seconds / 2.0 / len(kernels)) for kernel in kernels]
    return _InSituRound(profile, {sample.signature: sample for sample in samples})


def _signature_counts_by_label(kernels: Mapping[Kernel, int]) -> Mapping[OperatorLabel, _SignatureCounts]:
    """How often each signature runs, by its label."""
    counts_by_label: dict[OperatorLabel, dict[KernelSignature, int]] = {}
    for kernel, count in kernels.items():
        if (kernel_signature := signature_of(kernel)) is not None:
            label_counts = counts_by_label.setdefault(OperatorLabel.from_kernel(kernel), {})
            label_counts[kernel_signature] = label_counts.get(kernel_signature, 0) + count
    return counts_by_label


def _missing_reason(label: OperatorLabel, kernels: _SignatureCounts, rounds: Sequence[_InSituRound]) -> str:
    """Why a label has no factor; empty if it has one."""
    unmeasured = [
        round_result.isolated[kernel_signature]
        for round_result in rounds
        for kernel_signature in kernels
        if round_result.isolated[kernel_signature].time is None
    ]
    if unmeasured:
        return f"{unmeasured[0].name} alone: {unmeasured[0].outcome.value}, {unmeasured[0].source}"
    return (
        ""
        if all(round_result.in_situ.get(label, 0.0) > 0.0 for round_result in rounds)
        else "the profiler saw nothing of it"
    )


def _family_samples(
    label: OperatorLabel, kernels: _SignatureCounts, rounds: Sequence[_InSituRound]
) -> Iterator[InSituSample]:
    """One sample for each kernel family of a label."""
    factor = median(round_result.in_situ[label] / _isolated_seconds(kernels, round_result) for round_result in rounds)
    for name in dict.fromkeys(map(family_of, kernels)):
        family_counts = {
            kernel_signature: count
            for kernel_signature, count in kernels.items()
            if family_of(kernel_signature) == name
        }
        isolated = median(_isolated_seconds(family_counts, round_result) for round_result in rounds)
        yield InSituSample(name, sum(family_counts.values()), isolated, factor * isolated)


def _isolated_seconds(kernels: _SignatureCounts, round_result: _InSituRound) -> Seconds:
    times = ((round_result.isolated[kernel_signature].time, count) for kernel_signature, count in kernels.items())
    return sum(time.seconds * count for time, count in times if time is not None)


def _isolated_measurement(device: TorchDevice) -> IsolatedMeasurement:
    def measure(kernel: Kernel, seconds: Seconds) -> KernelSample:
        return kernel_rows.measure_kernel(
            kernel, device, replace(MeasurementMethod(), max_seconds=seconds, min_samples=_MIN_KERNEL_SAMPLES)
        )

    return measure


@contextmanager
def _matmul_precision(recipe: PrecisionRecipe) -> Iterator[None]:
    """TF32 while the block runs, where the scenario computes in it; the previous setting is restored."""
    previous = torch.get_float32_matmul_precision()
    set_tf32(recipe)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(previous)
