"""A function of a kernel as a record: asked once for each, checked, and taken to the digit."""

from collections.abc import Callable
from typing import Any

import pytest

from clustersim import Scenario, simulate
from clustersim.build import distinct_kernels
from clustersim.common.errors import InputError
from clustersim.cost.calibration_record import RecordOrigin, signature_of
from clustersim.cost.measured_kernels import MeasuredKernels
from clustersim.cost.record_file import read_record, write_record
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


def made(seconds: Callable[[Kernel], Any]) -> Any:
    return record_from_function(seconds, KERNELS, accelerator="h100-sxm-80gb", description="a rule")


def test_each_kernel_is_asked_for_once_and_takes_what_was_said() -> None:
    asked = []

    def seconds(kernel: Kernel) -> float:
        asked.append(signature_of(kernel))
        return 1.0 + len(asked)

    record = made(seconds)
    assert len(asked) == len(set(asked)) == len(record.kernels)
    assert None not in asked
    assert record.origin is RecordOrigin.DERIVED
    source = MeasuredKernels(record, load_accelerator("h100-sxm-80gb"))
    for number, row in enumerate(record.kernels):
        timing = source.time_kernel(row.kernel)
        assert (timing.seconds, timing.provenance) == (2.0 + number, Provenance.DERIVED)


def test_what_is_left_out_is_the_models(tmp_path: Any) -> None:
    assert made(lambda _: None).kernels == ()
    write_record(made(lambda _: None), tmp_path / "own.json")
    assert read_record(tmp_path / "own.json") == made(lambda _: None)
    changed = SCENARIO.with_overrides(f"cost.record={tmp_path / 'own.json'}")
    assert simulate(changed).step_time == simulate(SCENARIO).step_time


def raising(kernel: Kernel) -> float:
    raise KeyError(kernel.kind.value)


@pytest.mark.parametrize(
    ("seconds", "sentence"),
    [
        (raising, r"^raising\(.*\): KeyError: "),
        (lambda _: 0.0, "0.0 is no time above zero, in seconds; None leaves the kernel to the model"),
        (lambda _: -1, "-1 is no time above zero"),
        (lambda _: float("nan"), "nan is no time above zero"),
        (lambda _: "fast", "TypeError: "),
    ],
)
def test_what_is_no_time_is_refused(seconds: Callable[[Kernel], Any], sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        made(seconds)
