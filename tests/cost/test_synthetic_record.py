"""A synthetic record from a function of a kernel: called once per kernel, validated, and reproduced exactly."""

from collections.abc import Callable
from typing import Any

import pytest

from clustersim import Scenario, simulate
from clustersim.build import distinct_kernels
from clustersim.common.errors import InputError
from clustersim.cost.calibration_record import signature_of
from clustersim.cost.measured_kernels import MeasuredKernels
from clustersim.cost.record_file import read_record, write_record
from clustersim.cost.record_kinds import RecordOrigin
from clustersim.cost.synthetic_record import record_from_function
from clustersim.cost.timing import Provenance
from clustersim.hardware.accelerator import load_accelerator
from clustersim.model.kernels import Kernel

SCENARIO = Scenario.from_mapping(
    {
        "model": "llama-tiny",
        "cluster": {"name": "dgx-h100", "gpus": 1},
        "training": {"sequence": 512, "global_batch": 1},
    }
)
KERNELS = distinct_kernels(SCENARIO)


def synthetic_record(seconds: Callable[[Kernel], Any]) -> Any:
    return record_from_function(seconds, KERNELS, accelerator="h100-sxm-80gb", description="a rule")


def test_each_kernel_is_computed_once_and_reproduced() -> None:
    signatures = []

    def seconds(kernel: Kernel) -> float:
        signatures.append(signature_of(kernel))
        return 1.0 + len(signatures)

    record = synthetic_record(seconds)
    assert len(signatures) == len(set(signatures)) == len(record.kernels)
    assert None not in signatures
    assert record.origin is RecordOrigin.DERIVED
    source = MeasuredKernels(record, load_accelerator("h100-sxm-80gb"))
    for index, sample in enumerate(record.kernels):
        timing = source.time_kernel(sample.kernel)
        assert (timing.seconds, timing.provenance) == (2.0 + index, Provenance.DERIVED)


def test_kernels_without_a_time_use_the_model(tmp_path: Any) -> None:
    assert synthetic_record(lambda _: None).kernels == ()
    write_record(synthetic_record(lambda _: None), tmp_path / "own.json")
    assert read_record(tmp_path / "own.json") == synthetic_record(lambda _: None)
    changed = SCENARIO.with_overrides(f"cost.record={tmp_path / 'own.json'}")
    assert simulate(changed).step_time == pytest.approx(simulate(SCENARIO).step_time, rel=1e-12)


def raise_key_error(kernel: Kernel) -> float:
    raise KeyError(kernel.kind.value)


@pytest.mark.parametrize(
    ("seconds", "sentence"),
    [
        (raise_key_error, r"^raise_key_error\(.*\): KeyError: "),
        (lambda _: 0.0, r"0\.0.*above zero, in seconds; None"),
        (lambda _: -1, "-1 is no time above zero"),
        (lambda _: float("nan"), "nan is no time above zero"),
        (lambda _: "fast", "TypeError: "),
    ],
)
def test_invalid_times_are_rejected(seconds: Callable[[Kernel], Any], sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        synthetic_record(seconds)
