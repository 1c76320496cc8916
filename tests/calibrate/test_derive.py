"""What a record says of another board with the same compute die, and that it says nothing of other dies."""

from dataclasses import replace
from pathlib import Path

import pytest

from calibrate.command import main
from calibrate.derive import DIES, derive_record
from calibrate.fit.record_fit import fit_record
from clustersim.common.errors import InputError
from clustersim.cost.calibration_record import CalibrationRecord, RecordOrigin, signature_of
from clustersim.cost.measured_kernels import MeasuredKernels
from clustersim.cost.record_file import read_record, write_record
from clustersim.cost.roofline import Roofline
from clustersim.hardware.accelerator import load_accelerator
from clustersim.model.kernels import Kernel
from tests.calibrate.synthetic_records import matmul, matmuls, record_of, streams

H200 = load_accelerator("h200-sxm-141gb")
H100 = load_accelerator("h100-sxm-80gb")
COMPUTE = matmul(8192, 8192, 8192)
MEMORY = next(streams([16384], [8192]))
LAUNCH = matmul(16, 16, 16)


def record() -> CalibrationRecord:
    return fit_record(record_of(H200, [COMPUTE, MEMORY, LAUNCH]), H200)


def seconds(record: CalibrationRecord, kernel: Kernel) -> float:
    time = next(row.time for row in record.kernels if row.signature == signature_of(kernel))
    assert time is not None
    return time.seconds


def test_compute_and_launches_carry_over_and_memory_goes_by_the_bandwidths() -> None:
    """An H200 moves 4.8 TB/s, an H100 3.35: what memory bounds takes 1.43 times as long there."""
    before = record()
    after = derive_record(before, "h100-sxm-80gb")
    assert seconds(after, COMPUTE) == seconds(before, COMPUTE)
    assert seconds(after, LAUNCH) == seconds(before, LAUNCH)
    assert seconds(after, MEMORY) == pytest.approx(seconds(before, MEMORY) * 4.8 / 3.35)


def test_a_derived_record_predicts_the_other_board_as_its_own_measurements_would() -> None:
    """Both boards follow the kernel model with the H200's constants; only the memory bandwidth differs.

    Within a quarter: a product near the ridge is taken to be bound by memory on both boards, or on neither.
    """
    kernels = [*matmuls([256, 2048, 8192]), *streams([128, 8192], [4096])]  # attention's constants are each board's own
    source = fit_record(record_of(H200, kernels), H200)
    answers = MeasuredKernels(derive_record(source, "h100-sxm-80gb"), H100)
    truth = Roofline(replace(H100, efficiency=replace(H200.efficiency, memory=H100.efficiency.memory)))
    for kernel in kernels:
        assert answers.time_kernel(kernel).seconds == pytest.approx(truth.time_kernel(kernel).seconds, rel=0.25)


def test_a_derived_record_says_what_it_is_and_from_what() -> None:
    after = derive_record(record(), "h100-sxm-80gb")
    assert after.origin is RecordOrigin.DERIVED
    assert after.device.accelerator == "h100-sxm-80gb"
    assert after.device.memory_bytes == H100.memory_bytes
    assert "h200-sxm-141gb" in after.derivation
    assert "datasheet" in after.derivation


@pytest.mark.parametrize(
    ("to", "said"),
    [
        ("a100-sxm-80gb", "has another compute die; records of a100-sxm-40gb carry over to it"),
        ("h200-sxm-141gb", "is of it already"),
        ("h100-pcie-80gb", "did you mean h100-sxm-80gb"),
        ("nonsense", "choose one of"),
    ],
)
def test_another_die_is_refused(to: str, said: str) -> None:
    with pytest.raises(InputError, match=said):
        derive_record(record(), to)


def test_all_boards_of_a_die_are_shipped_and_have_equal_compute_units() -> None:
    for die in DIES:
        units = {load_accelerator(name).compute_units for name in die.relative_rates}
        assert len(units) == 1


def test_the_command_writes_a_record_that_can_be_read(tmp_path: Path) -> None:
    source, target = tmp_path / "h200.json", tmp_path / "h100.json"
    write_record(record(), source)
    assert main(["derive", str(source), "--to", "h100-sxm-80gb", "-o", str(target)]) == 0
    assert read_record(target) == derive_record(read_record(source), "h100-sxm-80gb")


def test_a_missing_record_is_one_sentence_and_status_two(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["derive", str(tmp_path / "no.json"), "--to", "h100-sxm-80gb", "-o", str(tmp_path / "out.json")]) == 2
    assert "cannot be read" in capsys.readouterr().err
