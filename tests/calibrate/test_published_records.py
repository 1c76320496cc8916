"""Packaged records of published measurements are reproducible, and return the published times."""

from pathlib import Path

import numpy as np
import pytest

import calibrate
from calibrate.command import main
from calibrate.fit import published_fit
from calibrate.fit.fit_quality import AcceleratorFits
from calibrate.fit.published_fit import TARGETS
from calibrate.fit.published_kernels import matmul_samples
from calibrate.fit.published_records import build_records
from clustersim.cost.calibration_record import CalibrationRecord, signature_of
from clustersim.cost.measured_kernels import MeasuredKernels
from clustersim.cost.record_file import read_record, record_text
from clustersim.cost.record_kinds import RecordOrigin
from clustersim.cost.timing import Provenance
from clustersim.hardware.accelerator import load_accelerator
from clustersim.program.task import CollectiveType
from clustersim.validation.collectives import read_collectives

pytestmark = pytest.mark.slow

PACKAGED_FOLDER = Path(calibrate.__file__).parent / "records" / "published"


@pytest.fixture(scope="module")
def built_records(fits: AcceleratorFits) -> dict[str, CalibrationRecord]:
    return build_records(fits)


def test_packaged_records_are_reproduced_byte_for_byte(built_records: dict[str, CalibrationRecord]) -> None:
    assert {path.stem for path in PACKAGED_FOLDER.glob("*.json")} == set(built_records)
    for name, record in built_records.items():
        assert record_text(record) == (PACKAGED_FOLDER / f"{name}.json").read_text(encoding="utf-8"), name


def test_records_are_readable_small_and_name_their_sources(built_records: dict[str, CalibrationRecord]) -> None:
    for name, record in built_records.items():
        path = PACKAGED_FOLDER / f"{name}.json"
        assert path.stat().st_size < 400_000
        assert read_record(path) == record
        assert record.origin is RecordOrigin.PUBLISHED
        assert all(sample.source for sample in (*record.kernels, *record.collectives))


def test_published_kernel_has_published_provenance(built_records: dict[str, CalibrationRecord]) -> None:
    name = "h100-sxm-80gb"
    cost = MeasuredKernels(built_records[name], load_accelerator(name))
    candidate = next(sample for sample in built_records[name].kernels if sample.time is not None)
    timing = cost.time_kernel(candidate.kernel)
    assert candidate.time is not None
    assert timing.seconds == candidate.time.seconds
    assert timing.provenance is Provenance.PUBLISHED


def test_fitted_accelerators_have_residuals(built_records: dict[str, CalibrationRecord]) -> None:
    for target in TARGETS:
        kernel_fit = built_records[target.name].kernel_fit
        assert kernel_fit is not None
        assert kernel_fit.residuals
        assert all(residual.leave_one_out_error <= 0.25 for residual in kernel_fit.residuals.values())
    assert built_records["v100-sxm-32gb"].kernel_fit is None  # uses a sibling's constants


def test_different_sources_are_one_sample_with_median_and_range(built_records: dict[str, CalibrationRecord]) -> None:
    """All-reduce of 64 KiB among 8 H100: 19.53 us in dgxc-benchmarking, 42.2 us in Azure's table, and two between."""
    samples = built_records["h100-sxm-80gb"].collectives
    candidate = next(
        sample
        for sample in samples
        if sample.call.collective is CollectiveType.ALL_REDUCE and sample.call.payload == 2**16
    )
    published = [
        case.positive_float("time_us") * 1e-6
        for case in read_collectives()
        if case.text("case_id").startswith("coll-")
        and case.boolean("in_fit")
        and case.text("gpu") == "h100-sxm-80gb"
        and (case.text("n_gpus"), case.text("nodes"), case.text("collective"), case.text("algo"))
        == ("8", "1", "all_reduce", "")
        and case.text("bytes") == "65536"
    ]
    assert candidate.time.repetitions == len(published) >= 2
    assert candidate.time.p5 <= min(published) * 1.01 <= max(published) * 0.99 <= candidate.time.p95
    assert candidate.time.seconds == pytest.approx(np.median(published))
    assert "dgxc" in candidate.source
    assert "azure" in candidate.source


def test_collectives_are_intra_node_and_fitted(built_records: dict[str, CalibrationRecord]) -> None:
    for record in built_records.values():
        assert all(sample.call.nodes == 1 for sample in record.collectives)
    assert {fit.collective for fit in built_records["b200-sxm-180gb"].collective_fits} == {
        CollectiveType.ALL_REDUCE,
        CollectiveType.ALL_GATHER,
        CollectiveType.REDUCE_SCATTER,
        CollectiveType.ALL_TO_ALL,
        CollectiveType.SEND_RECV,
    }


def test_every_published_matmul_is_in_its_record(built_records: dict[str, CalibrationRecord]) -> None:
    signatures = {(name, sample.signature) for name, record in built_records.items() for sample in record.kernels}
    for sample in matmul_samples():
        assert any(name == sample.accelerator and signature.shape == sample.shape for name, signature in signatures)
    assert all(
        signature_of(sample.kernel) == sample.signature
        for record in built_records.values()
        for sample in record.kernels
    )


def test_uncreatable_folder_is_one_sentence(
    fits: AcceleratorFits, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(published_fit, "fit_published", lambda: fits)
    (tmp_path / "file").write_text("")
    assert main(["fit-published", "--records", str(tmp_path / "file" / "folder")]) == 2
    assert "cannot be made" in capsys.readouterr().err
