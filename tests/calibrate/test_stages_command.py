"""The calibrate command: from a scenario to a record, resuming, and errors."""

import argparse
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from calibrate.typed_command import typed_command
from clustersim.build import distinct_kernels
from clustersim.common.errors import InputError
from clustersim.cost.calibration_record import (
    CalibrationRecord,
    CopySample,
    InterferenceSample,
    KernelSample,
    TimeStatistics,
    signature_of,
)
from clustersim.cost.record_file import read_record
from clustersim.cost.record_kinds import MeasurementOutcome
from clustersim.model.kernels import Kernel
from clustersim.scenario import Scenario

torch = pytest.importorskip("torch")
calibrate_command = pytest.importorskip("calibrate.stages.command")
from calibrate.command import main  # noqa: E402 - after torch is known to be there
from calibrate.devices import cpu as cpu_device  # noqa: E402
from calibrate.devices.cpu import CpuDevice  # noqa: E402
from calibrate.kernels import copy_benchmark, copy_interference, pytorch_ops, session  # noqa: E402
from calibrate.kernels.copy_interference import typical_kernel  # noqa: E402
from calibrate.kernels.kernel_grid import DEFAULT_RATES  # noqa: E402
from calibrate.stages import holdout_stage as residual_part  # noqa: E402
from calibrate.stages import kernel_stage as kernels_part  # noqa: E402
from calibrate.stages import run as parts_run  # noqa: E402
from tests.calibrate.fake_stages import HOLDOUT_STEPS, HOST_SAMPLES, IN_SITU_SAMPLES, FakeStages  # noqa: E402
from tests.sentences import parts  # noqa: E402

CONSTANT_TIME = TimeStatistics(1e-3, 1e-3, 1e-3, 5)
TINY_SCENARIO = """
model: {preset: llama-tiny, layers: 1, hidden: 64, ffn: 96, heads: 4, kv_heads: 2, head_dim: 16, vocab: 128}
cluster: {name: laptop, gpus: 2}
layout: {tp: 2}
training: {sequence: 32, global_batch: 2, microbatch: 2, precision: fp32, fused: false, loss: torch}
"""


@pytest.fixture(autouse=True)
def fake_stages(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[FakeStages]:
    """One thread, small cache and copies, short samples, an instant fit, and fakes instead of real layers."""
    monkeypatch.setattr(cpu_device, "_CACHE_FOLDER", tmp_path)
    monkeypatch.setattr(cpu_device, "_DEFAULT_CACHE_BYTES", 2.0**18)
    monkeypatch.setattr(copy_benchmark, "_SIZES", (2**16,))
    monkeypatch.setattr(copy_interference, "_COPY_BYTES", 2**20)
    monkeypatch.setitem(copy_interference.MATMUL_SIZES, "cpu", 64)
    for module in (parts_run, residual_part):
        monkeypatch.setattr(module, "fit_record", lambda record, _accelerator: record)
    monkeypatch.setattr(session, "_MAX_SAMPLE_SECONDS", 0.01)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny.yaml").write_text(TINY_SCENARIO)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield FakeStages().install(monkeypatch)
    torch.set_num_threads(threads)


@pytest.fixture
def instant_measurements(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels and copies are measured in no time."""

    def fake_measure(kernels: Any, *_: Any) -> Iterator[KernelSample]:
        for measured_kernel in kernels:
            fields = (
                measured_kernel.name,
                measured_kernel.kind,
                measured_kernel.dtype,
                measured_kernel.shape,
                measured_kernel.flops,
                measured_kernel.bytes,
                measured_kernel.launches,
            )
            yield KernelSample(*fields, CONSTANT_TIME)

    def fake_measure_device(kernel_session: session.KernelSession, *_: Any) -> None:
        record = CalibrationRecord(kernel_session.record.device, kernel_session.record.conditions, launch_interval=1e-6)
        kernel = next(fake_measure([typical_kernel(CpuDevice())]))
        kernel_session.extend(
            replace(
                record,
                copies=(CopySample("device", 2.0**20, CONSTANT_TIME),),
                interference=(InterferenceSample(kernel, "copy", CONSTANT_TIME),),
            )
        )

    monkeypatch.setattr(kernels_part, "measure_within_budget", fake_measure)
    monkeypatch.setattr(kernels_part, "measure_device", fake_measure_device)
    monkeypatch.setattr(kernels_part, "measure_rough_rates", lambda *_: DEFAULT_RATES)


def _run_command(*arguments: str) -> None:
    parser = argparse.ArgumentParser()
    calibrate_command.add_arguments(parser)
    calibrate_command.command(parser.parse_args(["--device", "cpu", *arguments]))


def test_record_has_every_kernel_of_the_scenario(capsys: pytest.CaptureFixture[str]) -> None:
    _run_command("--for", "tiny.yaml", "-o", "r.json")
    record = read_record(Path("r.json"))
    expected = {signature_of(kernel) for kernel in distinct_kernels(Scenario.load("tiny.yaml"))}
    assert {sample.signature for sample in record.kernels} == expected
    assert all(sample.outcome is MeasurementOutcome.MEASURED for sample in record.kernels)
    assert record.launch_interval is not None
    assert [(sample.route, sample.bytes) for sample in record.copies] == [("device", 2.0**16)]
    assert [sample.overlapped_with for sample in record.interference] == ["copy"]
    assert record.device.accelerator == "cpu-laptop"
    assert record.conditions.command.startswith("clustersim calibrate")
    assert record.conditions.method and record.conditions.before and record.conditions.after
    assert "use: clustersim run SCENARIO.yaml --set cost.record=r.json" in capsys.readouterr().out


@pytest.mark.usefixtures("instant_measurements")
def test_all_stages_are_measured_within_their_budget_shares(
    fake_stages: FakeStages, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of 20 minutes in situ has 5, host 2, the residual 3; kernels also get the share of a GPU's burn-in."""
    _run_command("--for", "tiny.yaml", "-o", "r.json", "--budget", "100s")
    record, output = read_record(Path("r.json")), capsys.readouterr()
    assert (record.in_situ, record.host_launches, record.holdout_steps) == (
        IN_SITU_SAMPLES,
        HOST_SAMPLES,
        HOLDOUT_STEPS,
    )
    assert fake_stages.seconds == {"in_situ": 25.0, "host": 10.0, "holdout": 15.0}
    assert "kernels           50 s" in output.err and "burn_in              -  a CPU needs none" in output.err
    in_situ_factor = (1.8e-3 + 1.2e-3) / (2e-3 + 1e-3)
    assert parts(f"{in_situ_factor:.3g} times ... isolated (2 families)").search(output.out)
    assert parts("holdout step, 2 layers: ... 980 ms ... 1 s (-2.0%)").search(output.out)


@pytest.mark.usefixtures("instant_measurements")
def test_steps_are_predicted_from_all_earlier_samples(fake_stages: FakeStages) -> None:
    _run_command("--for", "tiny.yaml", "-o", "r.json")
    (record,) = fake_stages.records
    assert (record.in_situ, record.host_launches) == (IN_SITU_SAMPLES, HOST_SAMPLES)
    assert record.kernels == read_record(Path("r.json")).kernels


@pytest.mark.usefixtures("instant_measurements")
def test_existing_measurements_are_not_repeated(fake_stages: FakeStages, capsys: pytest.CaptureFixture[str]) -> None:
    _run_command("--for", "tiny.yaml", "-o", "r.json")
    first = read_record(Path("r.json"))
    _run_command("--for", "tiny.yaml", "-o", "r.json")
    assert fake_stages.call_counts == {"in_situ": 1, "host": 1, "holdout": 1}
    assert "r.json has all that was asked for" in capsys.readouterr().err
    second = read_record(Path("r.json"))
    assert (second.kernels, second.holdout_steps, second.in_situ) == (first.kernels, first.holdout_steps, first.in_situ)


@pytest.mark.usefixtures("instant_measurements")
def test_new_kernels_invalidate_in_situ_host_and_step_samples(fake_stages: FakeStages) -> None:
    _run_command("--for", "tiny.yaml", "-o", "r.json")
    _run_command("--for", "tiny.yaml", "--set", "training.microbatch=1", "-o", "r.json")
    assert fake_stages.call_counts == {"in_situ": 2, "host": 2, "holdout": 2}


@pytest.mark.usefixtures("instant_measurements")
def test_kernels_without_a_model_skip_its_stages_and_clear_predictions(
    fake_stages: FakeStages, capsys: pytest.CaptureFixture[str]
) -> None:
    _run_command("--for", "tiny.yaml", "-o", "r.json")
    _run_command("--presets", "llama3-8b", "-o", "r.json")
    assert fake_stages.call_counts == {"in_situ": 1, "host": 1, "holdout": 1}
    assert "layer of which model? name a scenario with --for" in capsys.readouterr().err
    record = read_record(Path("r.json"))
    assert (record.in_situ, record.holdout_steps) == (IN_SITU_SAMPLES, ())


@pytest.mark.usefixtures("instant_measurements")
def test_interrupted_session_resumes_with_the_interrupted_stage(fake_stages: FakeStages) -> None:
    fake_stages.errors["host"] = KeyboardInterrupt()  # type: ignore[assignment]
    with pytest.raises(KeyboardInterrupt):
        _run_command("--for", "tiny.yaml", "-o", "r.json")
    assert read_record(Path("r.json")).in_situ == IN_SITU_SAMPLES
    fake_stages.errors.clear()
    _run_command("--for", "tiny.yaml", "-o", "r.json")
    assert fake_stages.call_counts == {"in_situ": 1, "host": 2, "holdout": 1}


@pytest.mark.usefixtures("instant_measurements")
@pytest.mark.parametrize("reason", [InputError("no such layer"), RuntimeError("CUDNN_STATUS_NOT_SUPPORTED\nat 0x1")])
def test_failed_stage_is_reported_and_others_are_measured(
    reason: Exception, fake_stages: FakeStages, capsys: pytest.CaptureFixture[str]
) -> None:
    fake_stages.errors["in_situ"] = reason
    _run_command("--for", "tiny.yaml", "-o", "r.json")
    record = read_record(Path("r.json"))
    assert (record.in_situ, record.host_launches, record.holdout_steps) == ((), HOST_SAMPLES, HOLDOUT_STEPS)
    assert f"in_situ: not measured: {str(reason).splitlines()[0]}" in capsys.readouterr().err


@pytest.mark.usefixtures("instant_measurements")
def test_lost_device_ends_the_session_with_the_measured_record(
    fake_stages: FakeStages, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One sentence, no traceback, and exit status 2."""
    monkeypatch.setattr(cpu_device.CpuDevice, "is_usable_after", lambda *_: False)
    fake_stages.errors["host"] = RuntimeError("CUDA error: an illegal memory access was encountered\nCompile with ...")
    assert main(["--device", "cpu", "--for", "tiny.yaml", "-o", "r.json"]) == 2
    record = read_record(Path("r.json"))
    assert record.in_situ == IN_SITU_SAMPLES and record.kernels
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("error: host left ")
    assert parts("unusable ... CUDA error: an illegal memory access was encountered; the record").search(last)


@pytest.mark.usefixtures("instant_measurements")
def test_internal_error_is_raised_and_loses_no_sample(fake_stages: FakeStages) -> None:
    fake_stages.errors["host"] = TypeError("forward() takes 2 positional arguments but 3 were given")
    with pytest.raises(TypeError, match="3 were given"):
        main(["--device", "cpu", "--for", "tiny.yaml", "-o", "r.json"])
    record = read_record(Path("r.json"))
    assert record.in_situ == IN_SITU_SAMPLES and record.kernels and not record.host_launches
    fake_stages.errors.clear()
    _run_command("--for", "tiny.yaml", "-o", "r.json")
    assert read_record(Path("r.json")).host_launches == HOST_SAMPLES
    assert fake_stages.call_counts["in_situ"] == 1


def test_kernel_that_loses_the_device_is_skipped_on_resume(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Started again, the same command measures all kernels but the failed one."""
    pending_errors = [RuntimeError("CUDA error: device-side assert triggered")]
    original = pytorch_ops.prepare_kernel

    def prepare(kernel: Kernel, device: Any) -> Any:
        if kernel.name.endswith("mlp.down") and pending_errors:
            raise pending_errors.pop()
        return original(kernel, device)

    monkeypatch.setattr(pytorch_ops, "prepare_kernel", prepare)
    monkeypatch.setattr(cpu_device.CpuDevice, "is_usable_after", lambda *_: False)
    assert main(["--device", "cpu", "--for", "tiny.yaml", "-o", "r.json"]) == 2
    last_line = capsys.readouterr().err.splitlines()[-1]
    failed = next(
        sample for sample in read_record(Path("r.json")).kernels if sample.outcome is MeasurementOutcome.FAILED
    )
    assert last_line.startswith(f"error: {failed.name} left ")
    assert parts("device-side assert triggered ... same command continues").search(last_line)
    assert main(["--device", "cpu", "--for", "tiny.yaml", "-o", "r.json"]) == 0
    outcomes = {sample.signature: sample.outcome for sample in read_record(Path("r.json")).kernels}
    assert outcomes.pop(failed.signature) is MeasurementOutcome.FAILED
    assert set(outcomes.values()) == {MeasurementOutcome.MEASURED}


def test_dry_run_prints_the_plan_and_writes_nothing(
    fake_stages: FakeStages, capsys: pytest.CaptureFixture[str]
) -> None:
    _run_command("--for", "tiny.yaml", "-o", "r.json", "--dry-run")
    _run_command("--for", "tiny.yaml", "-o", "r.json", "--plan-only")
    assert not Path("r.json").exists() and not fake_stages.call_counts
    first, second = capsys.readouterr().out.split("measures ")[1:]
    assert first == second
    assert "(cpu-laptop) for about 20 min 0 s, and writes r.json" in first
    count = len({signature_of(kernel) for kernel in distinct_kernels(Scenario.load("tiny.yaml"))})
    assert f"{count} of {count} kernels of tiny.yaml" in first


def test_other_accelerator_is_measured_with_a_warning(capsys: pytest.CaptureFixture[str]) -> None:
    _run_command("--for", "tiny.yaml", "--set", "cluster={name: dgx-h100, gpus: 8}", "--set", "layout.dp=4", "--set",
         "training.global_batch=8", "-o", "r.json", "--dry-run")  # fmt: skip
    assert parts("warning: --for: ... h100-sxm-80gb").search(capsys.readouterr().err)


@pytest.mark.usefixtures("instant_measurements")
def test_record_of_another_gpu_is_refused() -> None:
    _run_command("--for", "tiny.yaml", "-o", "r.json")
    content = Path("r.json").read_text()
    name = read_record(Path("r.json")).device.name
    Path("r.json").write_text(content.replace(f'"name": "{name}"', '"name": "NVIDIA H100"', 1))
    with pytest.raises(InputError, match=r"r\.json: records of name NVIDIA H100 and of name .* cannot be merged"):
        _run_command("--for", "tiny.yaml", "-o", "r.json")


def test_interrupted_session_loses_nothing_and_resumes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    original, count = session.measure_kernel, 0

    def interrupted_measure(*arguments: Any) -> Any:
        nonlocal count
        count += 1
        if count > 5:
            raise KeyboardInterrupt
        return original(*arguments)

    monkeypatch.setattr(session, "measure_kernel", interrupted_measure)
    with pytest.raises(KeyboardInterrupt):
        _run_command("--for", "tiny.yaml", "-o", "r.json")
    assert "the same command continues with the rest" in capsys.readouterr().err
    first = read_record(Path("r.json")).kernels
    assert len(first) == 5
    monkeypatch.setattr(session, "measure_kernel", original)
    _run_command("--for", "tiny.yaml", "-o", "r.json")
    assert read_record(Path("r.json")).kernels[:5] == first
    assert "5 are there already" in capsys.readouterr().err


def test_exhausted_budget_reports_the_remaining_kernels(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(kernels_part, "measure_within_budget", lambda *_: iter(()))
    _run_command("--for", "tiny.yaml", "-o", "r.json")
    assert parts("budget ... no time ... same command continues").search(capsys.readouterr().err)


def test_grid_is_the_default_request(monkeypatch: pytest.MonkeyPatch) -> None:
    requested: list[Any] = []
    monkeypatch.setattr(
        kernels_part, "measure_within_budget", lambda missing, *_: requested.extend(missing) or iter(())
    )
    _run_command("--budget", "1min")
    assert len(requested) > 50  # small kernels: the rough rates were measured with a matmul of 64 rows
    assert read_record(Path("cpu-laptop.record.json")).kernels == ()


def test_scenario_and_presets_are_measured_together(monkeypatch: pytest.MonkeyPatch) -> None:
    requested: list[Any] = []
    monkeypatch.setattr(
        kernels_part, "measure_within_budget", lambda missing, *_: requested.extend(missing) or iter(())
    )
    _run_command("--for", "tiny.yaml", "--presets", "llama3-8b", "--set", "training.microbatch=1", "-o", "r.json")
    signatures = {signature_of(kernel) for kernel in requested}
    assert signatures > {
        signature_of(kernel) for kernel in distinct_kernels(Scenario.load("tiny.yaml", ["training.microbatch=1"]))
    }
    assert len(requested) > 400


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--budget", "5"), "'5' is not a time"),
        (("--budget", "0s"), "no time to measure in"),
        (("--for", "tiny.yaml", "--budget", "0.1s"), r"kernels takes 50%.*at least 5 s.*10s"),
        (("--for", "nowhere.yaml"), "nowhere.yaml"),
        (("--presets", "lama3-8b"), "did you mean llama3-8b"),
        (("--for", "tiny.yaml", "--formats", "fp8"), r"--formats.*scenario.*--grid"),
        (("--accelerator", "h200"), "did you mean h200-sxm-141gb"),
    ],
)
def test_invalid_input_is_one_sentence(arguments: tuple[str, ...], message: str) -> None:
    with pytest.raises(InputError, match=message):
        _run_command(*arguments, "-o", "r.json")


def test_unwritable_record_is_refused_before_measuring(monkeypatch: pytest.MonkeyPatch) -> None:
    from clustersim.common.errors import OutputError

    monkeypatch.setattr(kernels_part, "measure_device", lambda *_: pytest.fail("measured"))
    with pytest.raises(OutputError, match="there is no directory nowhere"):
        _run_command("--for", "tiny.yaml", "-o", "nowhere/r.json")


def test_truncated_record_is_refused() -> None:
    Path("r.json").write_text('{"version": 1, "device": ')
    with pytest.raises(InputError, match=r"r\.json: is not valid JSON"):
        _run_command("--for", "tiny.yaml", "-o", "r.json")


def test_missing_torch_advises_installation(monkeypatch: pytest.MonkeyPatch) -> None:
    from calibrate import torch_requirement

    monkeypatch.setattr(torch_requirement, "find_spec", lambda _: None)
    with pytest.raises(InputError, match="pip install"):
        _run_command("--for", "tiny.yaml")


def test_recorded_command_is_quoted_as_typed() -> None:
    assert typed_command(["/usr/bin/clustersim", "calibrate", "--for", "a b.yaml"]) == (
        "clustersim calibrate --for 'a b.yaml'"
    )
    assert typed_command(["calibrate/__main__.py", "--grid"]) == "clustersim calibrate --grid"


def test_summary_counts_kernels_by_reason() -> None:
    from clustersim.common.dtypes import DType
    from clustersim.cost.calibration_record import CalibrationRecord, DeviceInfo, KernelSample, MeasurementConditions
    from clustersim.model.kernels import KernelKind, MatmulShape

    sample = KernelSample(
        "a", KernelKind.MATMUL, DType.FP8, MatmulShape(1, 1, 1), 2.0, 3.0, 1, None, MeasurementOutcome.UNSUPPORTED
    )
    samples = tuple(replace(sample, shape=MatmulShape(1, 1, size), source="no fp8") for size in (1, 2))
    record = CalibrationRecord(DeviceInfo("cpu-laptop", "CPU"), MeasurementConditions("", "", ""), kernels=samples)
    assert calibrate_command.summarize_record(record, Path("r.json")).splitlines()[:3] == [
        "r.json: CPU",
        "  kernels: 2 unsupported",
        "    2 x no fp8",
    ]
