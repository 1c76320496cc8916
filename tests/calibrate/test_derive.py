"""Records derived for another board with the same compute die, and refused for other dies."""

from dataclasses import replace
from pathlib import Path

import pytest

from calibrate.command import main
from calibrate.derive import DIES, derive_record
from calibrate.fit.record_fit import fit_record
from clustersim.common.errors import InputError
from clustersim.cost.calibration_record import CalibrationRecord, signature_of
from clustersim.cost.measured_kernels import MeasuredKernels
from clustersim.cost.record_file import read_record, write_record
from clustersim.cost.record_kinds import RecordOrigin
from clustersim.cost.roofline import Roofline
from clustersim.hardware.accelerator import load_accelerator
from clustersim.model.kernels import Kernel
from tests.calibrate.synthetic_records import memory_bound_kernels, sized_matmul, sized_matmuls, synthetic_record

H200 = load_accelerator("h200-sxm-141gb")
H100 = load_accelerator("h100-sxm-80gb")
COMPUTE = sized_matmul(8192, 8192, 8192)
MEMORY = next(memory_bound_kernels([16384], [8192]))
LAUNCH = sized_matmul(16, 16, 16)


def source_record() -> CalibrationRecord:
    return fit_record(synthetic_record(H200, [COMPUTE, MEMORY, LAUNCH]), H200)


def sample_seconds(record: CalibrationRecord, kernel: Kernel) -> float:
    time = next(sample.time for sample in record.kernels if sample.signature == signature_of(kernel))
    assert time is not None
    return time.seconds


def test_compute_and_launch_times_are_kept_and_memory_times_scale() -> None:
    """Large kernels reach 0.78 of 4.8 TB/s on an H200 and 0.88 of 3.35 on an H100: they take 1.27 times as long."""
    source = source_record()
    derived_record = derive_record(source, "h100-sxm-80gb")
    assert sample_seconds(derived_record, COMPUTE) == sample_seconds(source, COMPUTE)
    assert sample_seconds(derived_record, LAUNCH) == sample_seconds(source, LAUNCH)
    assert sample_seconds(derived_record, MEMORY) == pytest.approx(
        sample_seconds(source, MEMORY) * (0.78 * 4.8) / (0.88 * 3.35)
    )


def test_derived_record_predicts_the_other_board() -> None:
    """Both boards follow the kernel model with the H200's constants; only the memory bandwidth differs.

    Within a quarter: a matmul near the ridge is assumed to be memory-bound on both boards, or on neither.
    """
    kernels = [
        *sized_matmuls([256, 2048, 8192]),
        *memory_bound_kernels([128, 8192], [4096]),
    ]  # attention's constants differ between boards
    source = fit_record(synthetic_record(H200, kernels), H200)
    cost = MeasuredKernels(derive_record(source, "h100-sxm-80gb"), H100)
    truth = Roofline(
        replace(
            H100,
            efficiency=replace(H200.efficiency, memory_bandwidth_fraction=H100.efficiency.memory_bandwidth_fraction),
        )
    )
    for kernel in kernels:
        assert cost.time_kernel(kernel).seconds == pytest.approx(truth.time_kernel(kernel).seconds, rel=0.25)


def test_derived_record_states_its_derivation() -> None:
    derived_record = derive_record(source_record(), "h100-sxm-80gb")
    assert derived_record.origin is RecordOrigin.DERIVED
    assert derived_record.device.accelerator == "h100-sxm-80gb"
    assert derived_record.device.memory_bytes == H100.memory_bytes
    assert "h200-sxm-141gb" in derived_record.derivation
    assert "datasheet" in derived_record.derivation


@pytest.mark.parametrize(
    ("to", "message"),
    [
        ("a100-sxm-80gb", r"another compute die.*a100-sxm-40gb"),
        ("h200-sxm-141gb", "is of it already"),
        ("h100-pcie-80gb", "did you mean h100-sxm-80gb"),
        ("nonsense", "choose one of"),
    ],
)
def test_other_compute_dies_are_refused(to: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        derive_record(source_record(), to)


def test_boards_of_a_die_have_equal_compute_units() -> None:
    for die in DIES:
        units = {load_accelerator(name).compute_units for name in die.relative_rates}
        assert len(units) == 1


def test_derive_command_writes_a_readable_record(tmp_path: Path) -> None:
    source, target = tmp_path / "h200.json", tmp_path / "h100.json"
    write_record(source_record(), source)
    assert main(["derive", str(source), "--to", "h100-sxm-80gb", "-o", str(target)]) == 0
    assert read_record(target) == derive_record(read_record(source), "h100-sxm-80gb")


def test_missing_record_is_one_sentence_and_status_2(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["derive", str(tmp_path / "no.json"), "--to", "h100-sxm-80gb", "-o", str(tmp_path / "out.json")]) == 2
    assert "cannot be read" in capsys.readouterr().err
