"""The report of a record: efficiencies and ratios by their definition, and missing sections."""

import json
import subprocess
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from calibrate.command import EXIT_BAD_INPUT, main
from calibrate.fit.record_fit import fit_record
from calibrate.report.build import build_report
from calibrate.report.command import load_report
from calibrate.report.constants import compare_constants
from calibrate.report.efficiency import achieved_efficiencies, efficiency_section, roofline_limits
from calibrate.report.figures import efficiency_figure, telemetry_figure
from calibrate.report.format import describe_telemetry, in_situ_factor, steady_telemetry
from calibrate.report.page import report_page
from calibrate.report.telemetry import concatenate_sessions, stage_intervals, throttle_shares
from calibrate.report.text import format_report
from clustersim.common.dtypes import DType
from clustersim.common.errors import InputError
from clustersim.cost.calibration_record import CalibrationRecord, DeviceTelemetry, InSituSample, TelemetrySample
from clustersim.cost.record_file import read_record, write_record
from clustersim.cost.timing import Bottleneck
from tests.calibrate.report_record import PACKAGED_ACCELERATOR, SLOWDOWN, full_record
from tests.calibrate.synthetic_records import kernel_sample, sized_matmul, synthetic_record
from tests.sentences import parts

PEAK_FLOPS, BANDWIDTH = 989e12, 3.35e12  # of an H100, dense BF16


@pytest.fixture(scope="session")
def fitted_record() -> CalibrationRecord:
    return fit_record(full_record(), PACKAGED_ACCELERATOR)


def _empty() -> CalibrationRecord:
    return synthetic_record(PACKAGED_ACCELERATOR, [])


def test_efficiency_is_peak_time_over_measured_time() -> None:
    """8192 cubed is 1.1 PFLOP: 1.11 ms at the peak. A matmul with k = 8 is memory-bound."""
    large, memory_bound = sized_matmul(8192, 8192, 8192), sized_matmul(8192, 8192, 8)
    record = replace(_empty(), kernels=(kernel_sample(large, 2e-3), kernel_sample(memory_bound, 1e-4)))
    limits = roofline_limits(record, PACKAGED_ACCELERATOR)
    assert limits is not None and limits.is_from_datasheet
    first, second = achieved_efficiencies(record, limits)
    assert (first.bound, first.rate) == (Bottleneck.COMPUTE, pytest.approx(2 * 8192**3 / 2e-3))
    assert first.efficiency == pytest.approx(2 * 8192**3 / PEAK_FLOPS / 2e-3)
    byte_count = 2 * (2 * 8192 * 8 + 8192 * 8192)
    assert (second.bound, second.rate) == (Bottleneck.MEMORY, pytest.approx(byte_count / 1e-4))
    assert second.efficiency == pytest.approx(byte_count / BANDWIDTH / 1e-4)


def test_efficiency_lists_best_median_and_worst_shape_per_family() -> None:
    sizes = (1024, 2048, 4096, 8192, 16384)  # all compute-bound on an H100
    samples = tuple(
        kernel_sample(sized_matmul(size, size, size), 2 * size**3 / (PEAK_FLOPS * share))
        for size, share in zip(sizes, (0.5, 0.6, 0.7, 0.8, 0.1), strict=True)
    )
    record = replace(_empty(), kernels=samples)
    limits = roofline_limits(record, PACKAGED_ACCELERATOR)
    assert limits is not None
    section = efficiency_section(record, limits)
    assert [(cells[0], cells[1], cells[-1]) for cells in section.rows] == [
        ("matmul bf16 (5)", "best 80.0%", "NT m 8192, n 8192, k 8192"),
        ("", "median 60.0%", "NT m 2048, n 2048, k 2048"),
        ("", "worst 10.0%", "NT m 16384, n 16384, k 16384"),
    ]


def test_cpu_is_compared_with_its_fitted_peak(fitted_record: CalibrationRecord) -> None:
    cpu_record = replace(fitted_record, device=replace(fitted_record.device, threads=4))
    limits = roofline_limits(cpu_record, PACKAGED_ACCELERATOR)
    assert limits is not None and fitted_record.kernel_fit is not None
    assert not limits.is_from_datasheet and limits.flops == fitted_record.kernel_fit.peak


def test_constants_of_a_slower_device(fitted_record: CalibrationRecord) -> None:
    """Samples take SLOWDOWN times the packaged model's time: fitted rates and latencies are worse by that factor."""
    constants_by_key = {constant.key: constant for constant in compare_constants(fitted_record, PACKAGED_ACCELERATOR)}
    for key in ("matmul_bf16", "memory"):
        assert constants_by_key[key].ratio == pytest.approx(1 / SLOWDOWN, rel=0.02)
    assert constants_by_key["kernel_latency"].ratio == pytest.approx(SLOWDOWN, rel=0.1)
    assert constants_by_key["launch_interval"].measured == fitted_record.launch_interval
    assert constants_by_key["sustained_ratio"].measured == pytest.approx(20 / 23)  # from the in-situ samples of matmuls
    assert constants_by_key["interference"].measured == pytest.approx(
        0.25
    )  # from the overlapped collective, not the copy
    assert constants_by_key["gpu_spread"].measured == pytest.approx(
        0.0229 / 1.035, rel=1e-2
    )  # of 1.00 to 1.07: 0.01 x sqrt(63 / 12)


def test_in_situ_factor_is_weighted_by_time() -> None:
    samples = (InSituSample("a", 1, isolated=9.0, in_situ=9.0), InSituSample("b", 1, isolated=1.0, in_situ=2.0))
    assert in_situ_factor(samples) == pytest.approx(1.1)
    assert in_situ_factor(()) is None


def test_steady_state_is_the_end_of_burn_in(fitted_record: CalibrationRecord) -> None:
    last = [sample for sample in fitted_record.telemetry if sample.stage == "burn_in"][-1]
    assert steady_telemetry(fitted_record) == last.state
    assert steady_telemetry(_empty()) is None


def test_telemetry_of_sessions_is_concatenated() -> None:
    state = DeviceTelemetry(1500.0)
    samples = [
        TelemetrySample(t, stage, state)
        for t, stage in ((0.0, "burn_in"), (5.0, "kernels"), (0.0, "burn_in"), (3.0, "host"))
    ]
    assert [(sample.seconds, sample.stage) for sample in concatenate_sessions(samples)] == [
        (0.0, "burn_in"), (5.0, "kernels"), (5.0, "burn_in"), (8.0, "host"),
    ]  # fmt: skip
    assert stage_intervals(concatenate_sessions(samples)) == [
        ("burn_in", 0.0, 0.0), ("kernels", 5.0, 5.0), ("burn_in", 5.0, 5.0), ("host", 8.0, 8.0),
    ]  # fmt: skip


def test_throttle_reasons_are_shares_of_samples() -> None:
    states = [
        DeviceTelemetry(throttled=("a", "b")),
        DeviceTelemetry(throttled=("a",)),
        DeviceTelemetry(),
        DeviceTelemetry(),
    ]
    assert throttle_shares(states) == {"a": 0.5, "b": 0.25}
    assert describe_telemetry(DeviceTelemetry()) == "the device does not report its clock"


def test_text_page_and_json_have_every_section(fitted_record: CalibrationRecord) -> None:
    report = build_report("full.json", fitted_record, PACKAGED_ACCELERATOR)
    keys = [
        "holdout_steps",
        "constants",
        "efficiency",
        "telemetry",
        "in_situ",
        "host_launches",
        "interference",
        "collectives",
        "gpus",
    ]
    assert [section.key for section in report.sections] == [*keys, "copies"]
    assert report.missing_contents == ()
    text, page, content = format_report(report), report_page(report), json.loads(report.to_json())
    for section in report.sections:
        assert section.title in text and section.title in page
        assert content[section.key]
    assert content["in_situ"]["factor"] == pytest.approx(27.0 / 24.0)
    assert content["device"]["power_limit_w"] == 700.0
    assert "its operands take 24 GiB; 9 GiB are free" in text


def test_page_loads_no_resources_and_escapes_text(fitted_record: CalibrationRecord) -> None:
    renamed = replace(fitted_record, device=replace(fitted_record.device, name="<script>alert(1)</script>"))
    page = report_page(build_report("<b>.json", renamed, PACKAGED_ACCELERATOR))
    assert "default-src 'none'" in page
    assert "<script>alert" not in page and "<b>.json" not in page
    assert "http://" not in page.partition("<script")[0] and "https://" not in page.partition("<script")[0]


def test_figures_have_a_mark_per_kernel_and_a_band_per_stage(fitted_record: CalibrationRecord) -> None:
    limits = roofline_limits(fitted_record, PACKAGED_ACCELERATOR)
    assert limits is not None
    kernels = achieved_efficiencies(fitted_record, limits)
    samples = [kernel for kernel in fitted_record.kernels if kernel.time is not None]
    assert sum(len(trace["x"]) for trace in efficiency_figure(kernels).traces) == len(kernels) == len(samples)
    figure = telemetry_figure(fitted_record)
    assert [note["text"] for note in figure.layout["annotations"]] == ["burn_in", "kernels", "in_situ", "host"]
    intervals = [(shape["x0"], shape["x1"]) for shape in figure.layout["shapes"]]
    assert all(end == begin for (_, end), (begin, _) in pairwise(intervals))


def _run_report(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    status = main(["report", *arguments])
    output = capsys.readouterr()
    return status, output.out, output.err


@pytest.mark.parametrize("name", ["published/h100-sxm-80gb", "published/v100-sxm-32gb", "published/mi300x"])
def test_published_records_state_what_they_lack(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = _run_report(capsys, name)
    assert status == 0
    assert "published by others" in out and "Missing measurements" in out and "clocks and power under load" in out
    assert "clustersim calibrate --for" not in out  # machines of other publishers cannot be measured here


def test_record_without_later_stages_is_reported(
    fitted_record: CalibrationRecord, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "r.json"
    write_record(replace(fitted_record, telemetry=(), in_situ=(), host_launches=(), gpus=(), holdout_steps=()), path)
    content = json.loads(path.read_text())
    for key in ("telemetry", "in_situ", "host_launches", "gpus", "holdout_steps"):
        del content[key]
    path.write_text(json.dumps(content))
    status, out, _ = _run_report(capsys, str(path))
    assert status == 0
    assert parts("in-situ factors ... host launch times, holdout steps (clustersim calibrate").search(out)


def test_unknown_accelerator_has_no_constants_section(fitted_record: CalibrationRecord, tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    write_record(replace(fitted_record, device=replace(fitted_record.device, accelerator="mine")), path)
    report = load_report(str(path))
    assert "constants" not in {section.key for section in report.sections}
    assert "efficiency" in {section.key for section in report.sections}  # relative to the best measured rates
    assert any("clustersim has no mine" in missing for missing in report.missing_contents)
    assert "constants" in {section.key for section in load_report(str(path), "h100-sxm-80gb").sections}


@pytest.mark.parametrize("content", ["", "{}", '{"version": 9}', "[1]", "{"])
def test_invalid_record_is_one_sentence(content: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "r.json"
    path.write_text(content)
    status, _, err = _run_report(capsys, str(path))
    assert status == EXIT_BAD_INPUT
    assert err.startswith(f"error: {path}: ") and err.count("\n") == 1


def test_empty_record_is_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "r.json"
    write_record(replace(_empty(), launch_interval=None), path)
    status, _, err = _run_report(capsys, str(path))
    assert (status, err.count("\n")) == (EXIT_BAD_INPUT, 1)
    assert f"{path}: holds no measurements" in err
    with pytest.raises(InputError, match="holds no measurements"):
        load_report(str(path))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("nowhere.json",), "nowhere.json: cannot be read"),
        (("published/h100",), "did you mean published/h100"),
        (("published/h100-sxm-80gb", "--html", "nowhere/r.html"), "there is no directory nowhere"),
        (("published/h100-sxm-80gb", "--accelerator", "h100"), "did you mean h100"),
    ],
)
def test_invalid_report_arguments_are_one_sentence(
    arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    status, _, err = _run_report(capsys, *arguments)
    assert (status, err.count("\n")) == (EXIT_BAD_INPUT, 1)
    assert message in err


def test_output_does_not_overwrite_the_record(
    fitted_record: CalibrationRecord, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "r.json"
    write_record(fitted_record, path)
    status, _, err = _run_report(capsys, str(path), "--json", str(path))
    assert status == EXIT_BAD_INPUT and "is the record itself" in err
    assert read_record(path) == fitted_record


@pytest.mark.parametrize("word", ["reprot", "plan.yaml"])
def test_unknown_calibrate_command_is_one_sentence(word: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([word]) == EXIT_BAD_INPUT
    err = capsys.readouterr().err
    assert ("did you mean report?" if word == "reprot" else "measure a scenario with --for plan.yaml") in err


def test_report_does_not_import_torch() -> None:
    code = "import sys; from calibrate.command import main; main(['report', 'published/v100-sxm-32gb', '--json', '-'])"
    process = subprocess.run(
        [sys.executable, "-c", f"{code}; assert 'torch' not in sys.modules"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.returncode == 0, process.stderr
    content: Any = json.loads(process.stdout)
    assert content["origin"] == "published"


def test_formats_with_scales_use_the_peak_of_their_bits() -> None:
    record = replace(_empty(), kernels=(kernel_sample(sized_matmul(8192, 8192, 8192, DType.MXFP8), 1e-3),))
    limits = roofline_limits(
        record, replace(PACKAGED_ACCELERATOR, peak={DType.BF16: PEAK_FLOPS, DType.FP8: 2 * PEAK_FLOPS})
    )
    assert limits is not None
    (efficiency,) = achieved_efficiencies(record, limits)
    assert efficiency.efficiency == pytest.approx(2.0 * 8192**3 / (2 * PEAK_FLOPS) / 1e-3)


def test_formats_without_a_peak_are_omitted() -> None:
    """An accelerator without FP8, and no fit that gives it a peak."""
    record = replace(_empty(), kernels=(kernel_sample(sized_matmul(512, 512, 512, DType.FP8), 1e-5),))
    limits = roofline_limits(record, replace(PACKAGED_ACCELERATOR, peak={DType.BF16: PEAK_FLOPS}))
    assert limits is not None and achieved_efficiencies(record, limits) == []
