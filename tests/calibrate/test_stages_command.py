"""The command, from a scenario to a record, and what goes wrong on the way."""

import argparse
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from clustersim.build import distinct_kernels
from clustersim.common.errors import InputError
from clustersim.cost.calibration_record import (
    CalibrationRecord,
    CopySample,
    InterferenceSample,
    KernelSample,
    MeasurementOutcome,
    TimeStatistics,
    signature_of,
)
from clustersim.cost.record_file import read_record
from clustersim.model.kernels import Kernel
from clustersim.scenario import Scenario

torch = pytest.importorskip("torch")
kernels = pytest.importorskip("calibrate.stages.command")
from calibrate.command import main  # noqa: E402 - after torch is known to be there
from calibrate.devices import cpu as cpu_device  # noqa: E402
from calibrate.devices.cpu import CpuDevice  # noqa: E402
from calibrate.kernels import copy_benchmark, copy_interference, pytorch_ops, session  # noqa: E402
from calibrate.kernels.copy_interference import typical_kernel  # noqa: E402
from calibrate.kernels.kernel_grid import DEFAULT_RATES  # noqa: E402
from calibrate.stages import holdout_stage as residual_part  # noqa: E402
from calibrate.stages import kernel_stage as kernels_part  # noqa: E402
from calibrate.stages import run as parts_run  # noqa: E402
from tests.calibrate.fake_stages import CHAIN, HOST, STEPS, StandIns  # noqa: E402

ONCE = TimeStatistics(1e-3, 1e-3, 1e-3, 5)
TINY = """
model: {preset: llama-tiny, layers: 1, hidden: 64, ffn: 96, heads: 4, kv_heads: 2, head_dim: 16, vocab: 128}
cluster: {name: laptop, gpus: 2}
layout: {tp: 2}
training: {sequence: 32, global_batch: 2, microbatch: 2, precision: fp32, fused: false, loss: torch}
"""


@pytest.fixture(autouse=True)
def others(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[StandIns]:
    """One thread, a small cache, small copies, short samples, a fit that takes no time, and no real layers."""
    monkeypatch.setattr(cpu_device, "_CACHE_FOLDER", tmp_path)
    monkeypatch.setattr(cpu_device, "_DEFAULT_CACHE_BYTES", 2.0**18)
    monkeypatch.setattr(copy_benchmark, "_SIZES", (2**16,))
    monkeypatch.setattr(copy_interference, "_COPY_BYTES", 2**20)
    monkeypatch.setitem(copy_interference.MATMUL_SIZES, "cpu", 64)
    for module in (parts_run, residual_part):
        monkeypatch.setattr(module, "fitted", lambda record, _accelerator: record)
    monkeypatch.setattr(session, "_MAX_SAMPLE_SECONDS", 0.01)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny.yaml").write_text(TINY)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield StandIns().install(monkeypatch)
    torch.set_num_threads(threads)


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels and copies take no time to measure."""

    def measured(kernels: Any, *_: Any) -> Iterator[KernelSample]:
        for kernel in kernels:
            known = (kernel.name, kernel.kind, kernel.dtype, kernel.shape, kernel.flops, kernel.bytes, kernel.launches)
            yield KernelSample(*known, ONCE)

    def machine(made: session.KernelSession, *_: Any) -> None:
        rows = CalibrationRecord(made.record.device, made.record.conditions, launch_interval=1e-6)
        kernel = next(measured([typical_kernel(CpuDevice())]))
        made.extend(
            replace(
                rows, copies=(CopySample("device", 2.0**20, ONCE),), beside=(InterferenceSample(kernel, "copy", ONCE),)
            )
        )

    monkeypatch.setattr(kernels_part, "measure_within_budget", measured)
    monkeypatch.setattr(kernels_part, "measure_device", machine)
    monkeypatch.setattr(kernels_part, "measure_rough_rates", lambda *_: DEFAULT_RATES)


def _run(*words: str) -> None:
    parser = argparse.ArgumentParser()
    kernels.add_arguments(parser)
    kernels.command(parser.parse_args(["--device", "cpu", *words]))


def test_a_record_of_a_scenario_has_every_kernel_of_its_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    _run("--for", "tiny.yaml", "-o", "r.json")
    record = read_record(Path("r.json"))
    expected = {signature_of(kernel) for kernel in distinct_kernels(Scenario.load("tiny.yaml"))}
    assert {row.signature for row in record.kernels} == expected
    assert all(row.outcome is MeasurementOutcome.MEASURED for row in record.kernels)
    assert record.launch_interval is not None
    assert [(row.route, row.bytes) for row in record.copies] == [("device", 2.0**16)]
    assert [row.beside for row in record.beside] == ["copy"]
    assert record.device.accelerator == "cpu-laptop"
    assert record.conditions.command.startswith("clustersim calibrate")
    assert record.conditions.method and record.conditions.before and record.conditions.after
    assert "use: clustersim run SCENARIO.yaml --set cost.record=r.json" in capsys.readouterr().out


@pytest.mark.usefixtures("at_once")
def test_all_parts_are_measured_each_in_its_share_of_the_budget(
    others: StandIns, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of 20 minutes chain has 5, host 2, the residual 3, and kernels what a GPU would have for its soak, too."""
    _run("--for", "tiny.yaml", "-o", "r.json", "--budget", "100s")
    record, said = read_record(Path("r.json")), capsys.readouterr()
    assert (record.chain, record.host, record.steps) == (CHAIN, HOST, STEPS)
    assert others.seconds == {"chain": 25.0, "host": 10.0, "residual": 15.0}
    assert "kernels           50 s" in said.err and "soak                 -  a CPU needs none" in said.err
    in_step = (1.8e-3 + 1.2e-3) / (2e-3 + 1e-3)
    assert f"in a step kernels take {in_step:.3g} times what they take alone (2 families)" in said.out
    assert "unseen step, 2 layers: predicted 980 ms, measured 1 s (-2.0%)" in said.out


@pytest.mark.usefixtures("at_once")
def test_steps_are_predicted_from_all_rows_before_them(others: StandIns) -> None:
    _run("--for", "tiny.yaml", "-o", "r.json")
    (seen,) = others.records
    assert (seen.chain, seen.host) == (CHAIN, HOST)
    assert seen.kernels == read_record(Path("r.json")).kernels


@pytest.mark.usefixtures("at_once")
def test_what_is_there_is_not_measured_again(others: StandIns, capsys: pytest.CaptureFixture[str]) -> None:
    _run("--for", "tiny.yaml", "-o", "r.json")
    first = read_record(Path("r.json"))
    _run("--for", "tiny.yaml", "-o", "r.json")
    assert others.asked == {"chain": 1, "host": 1, "residual": 1}
    assert "r.json has all that was asked for" in capsys.readouterr().err
    second = read_record(Path("r.json"))
    assert (second.kernels, second.steps, second.chain) == (first.kernels, first.steps, first.chain)


@pytest.mark.usefixtures("at_once")
def test_new_kernels_make_a_layer_and_steps_due_again(others: StandIns) -> None:
    _run("--for", "tiny.yaml", "-o", "r.json")
    _run("--for", "tiny.yaml", "--set", "training.microbatch=1", "-o", "r.json")
    assert others.asked == {"chain": 2, "host": 2, "residual": 2}


@pytest.mark.usefixtures("at_once")
def test_kernels_alone_leave_out_what_needs_a_model_and_clear_what_was_predicted(
    others: StandIns, capsys: pytest.CaptureFixture[str]
) -> None:
    _run("--for", "tiny.yaml", "-o", "r.json")
    _run("--presets", "llama3-8b", "-o", "r.json")
    assert others.asked == {"chain": 1, "host": 1, "residual": 1}
    assert "layer of which model? name a scenario with --for" in capsys.readouterr().err
    record = read_record(Path("r.json"))
    assert (record.chain, record.steps) == (CHAIN, ())


@pytest.mark.usefixtures("at_once")
def test_killed_in_a_part_it_goes_on_with_that_part(others: StandIns) -> None:
    others.fails["host"] = KeyboardInterrupt()  # type: ignore[assignment]
    with pytest.raises(KeyboardInterrupt):
        _run("--for", "tiny.yaml", "-o", "r.json")
    assert read_record(Path("r.json")).chain == CHAIN
    others.fails.clear()
    _run("--for", "tiny.yaml", "-o", "r.json")
    assert others.asked == {"chain": 1, "host": 2, "residual": 1}


@pytest.mark.usefixtures("at_once")
@pytest.mark.parametrize("reason", [InputError("no such layer"), RuntimeError("CUDNN_STATUS_NOT_SUPPORTED\nat 0x1")])
def test_a_part_that_cannot_be_measured_is_said_and_the_others_are(
    reason: Exception, others: StandIns, capsys: pytest.CaptureFixture[str]
) -> None:
    others.fails["chain"] = reason
    _run("--for", "tiny.yaml", "-o", "r.json")
    record = read_record(Path("r.json"))
    assert (record.chain, record.host, record.steps) == ((), HOST, STEPS)
    assert f"chain: not measured: {str(reason).splitlines()[0]}" in capsys.readouterr().err


@pytest.mark.usefixtures("at_once")
def test_a_device_that_is_lost_ends_the_session_with_what_was_measured(
    others: StandIns, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A sentence, no traceback, and exit status 2."""
    monkeypatch.setattr(cpu_device.CpuDevice, "is_usable_after", lambda *_: False)
    others.fails["host"] = RuntimeError("CUDA error: an illegal memory access was encountered\nCompile with ...")
    assert main(["--device", "cpu", "--for", "tiny.yaml", "-o", "r.json"]) == 2
    record = read_record(Path("r.json"))
    assert record.chain == CHAIN and record.kernels
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("error: host left ")
    assert "unusable for this process: CUDA error: an illegal memory access was encountered; the record has" in last


@pytest.mark.usefixtures("at_once")
def test_an_error_of_our_own_shows_and_loses_no_row(others: StandIns) -> None:
    others.fails["host"] = TypeError("forward() takes 2 positional arguments but 3 were given")
    with pytest.raises(TypeError, match="3 were given"):
        main(["--device", "cpu", "--for", "tiny.yaml", "-o", "r.json"])
    record = read_record(Path("r.json"))
    assert record.chain == CHAIN and record.kernels and not record.host
    others.fails.clear()
    _run("--for", "tiny.yaml", "-o", "r.json")
    assert read_record(Path("r.json")).host == HOST
    assert others.asked["chain"] == 1


def test_a_kernel_that_loses_the_device_ends_the_session_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Started again, the same command measures all but it."""
    lose = [RuntimeError("CUDA error: device-side assert triggered")]
    usual = pytorch_ops.prepare_kernel

    def prepare(kernel: Kernel, device: Any) -> Any:
        if kernel.name.endswith("mlp.down") and lose:
            raise lose.pop()
        return usual(kernel, device)

    monkeypatch.setattr(pytorch_ops, "prepare_kernel", prepare)
    monkeypatch.setattr(cpu_device.CpuDevice, "is_usable_after", lambda *_: False)
    assert main(["--device", "cpu", "--for", "tiny.yaml", "-o", "r.json"]) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    lost = next(row for row in read_record(Path("r.json")).kernels if row.outcome is MeasurementOutcome.FAILED)
    assert said.startswith(f"error: {lost.name} left ")
    assert said.endswith("device-side assert triggered; its row says so, and the same command goes on without it")
    assert main(["--device", "cpu", "--for", "tiny.yaml", "-o", "r.json"]) == 0
    rows = {row.signature: row.outcome for row in read_record(Path("r.json")).kernels}
    assert rows.pop(lost.signature) is MeasurementOutcome.FAILED
    assert set(rows.values()) == {MeasurementOutcome.MEASURED}


def test_a_dry_run_says_it_all_and_writes_nothing(others: StandIns, capsys: pytest.CaptureFixture[str]) -> None:
    _run("--for", "tiny.yaml", "-o", "r.json", "--dry-run")
    _run("--for", "tiny.yaml", "-o", "r.json", "--plan-only")
    assert not Path("r.json").exists() and not others.asked
    first, second = capsys.readouterr().out.split("measures ")[1:]
    assert first == second
    assert "(cpu-laptop) for about 20 min 0 s, and writes r.json" in first
    many = len({signature_of(kernel) for kernel in distinct_kernels(Scenario.load("tiny.yaml"))})
    assert f"{many} of {many} kernels of tiny.yaml" in first


def test_a_scenario_of_another_accelerator_is_measured_with_a_warning(capsys: pytest.CaptureFixture[str]) -> None:
    _run("--for", "tiny.yaml", "--set", "cluster={name: dgx-h100, gpus: 8}", "--set", "layout.dp=4", "--set",
         "training.global_batch=8", "-o", "r.json", "--dry-run")  # fmt: skip
    assert "warning: --for: the scenario runs on h100-sxm-80gb, and this is" in capsys.readouterr().err


@pytest.mark.usefixtures("at_once")
def test_a_record_of_another_gpu_is_not_gone_on_with() -> None:
    _run("--for", "tiny.yaml", "-o", "r.json")
    content = Path("r.json").read_text()
    name = read_record(Path("r.json")).device.name
    Path("r.json").write_text(content.replace(f'"name": "{name}"', '"name": "NVIDIA H100"', 1))
    with pytest.raises(InputError, match=r"r\.json: records of name NVIDIA H100 and of name .* cannot be merged"):
        _run("--for", "tiny.yaml", "-o", "r.json")


def test_an_interrupted_session_loses_nothing_and_goes_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    whole, many = session.measure_kernel, 0

    def interrupted(*given: Any) -> Any:
        nonlocal many
        many += 1
        if many > 5:
            raise KeyboardInterrupt
        return whole(*given)

    monkeypatch.setattr(session, "measure_kernel", interrupted)
    with pytest.raises(KeyboardInterrupt):
        _run("--for", "tiny.yaml", "-o", "r.json")
    assert "the same command goes on with the rest" in capsys.readouterr().err
    first = read_record(Path("r.json")).kernels
    assert len(first) == 5
    monkeypatch.setattr(session, "measure_kernel", whole)
    _run("--for", "tiny.yaml", "-o", "r.json")
    assert read_record(Path("r.json")).kernels[:5] == first
    assert "5 are there already" in capsys.readouterr().err


def test_a_budget_that_is_spent_says_what_is_left(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(kernels_part, "measure_within_budget", lambda *_: iter(()))
    _run("--for", "tiny.yaml", "-o", "r.json")
    assert "left that the budget had no time for; the same command goes on with them" in capsys.readouterr().err


def test_the_grid_is_measured_where_nothing_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(kernels_part, "measure_within_budget", lambda missing, *_: asked.extend(missing) or iter(()))
    _run("--budget", "1min")
    assert len(asked) > 50  # small ones: the pace was seen by a product of 64 rows
    assert read_record(Path("cpu-laptop.record.json")).kernels == ()


def test_all_that_is_asked_for_is_measured_together(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(kernels_part, "measure_within_budget", lambda missing, *_: asked.extend(missing) or iter(()))
    _run("--for", "tiny.yaml", "--presets", "llama3-8b", "--set", "training.microbatch=1", "-o", "r.json")
    found = {signature_of(kernel) for kernel in asked}
    assert found > {
        signature_of(kernel) for kernel in distinct_kernels(Scenario.load("tiny.yaml", ["training.microbatch=1"]))
    }
    assert len(asked) > 400


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--budget", "5"), "'5' is not a time"),
        (("--budget", "0s"), "no time to measure in"),
        (("--for", "tiny.yaml", "--budget", "0.1s"), "too little: kernels takes 50% of it, and at least 5 s; give 10s"),
        (("--for", "nowhere.yaml"), "nowhere.yaml"),
        (("--presets", "lama3-8b"), "did you mean llama3-8b"),
        (("--for", "tiny.yaml", "--formats", "fp8"), "--formats are of the grid, a scenario has its own; add --grid"),
        (("--accelerator", "h200"), "did you mean h200-sxm-141gb"),
    ],
)
def test_bad_input_is_one_sentence(words: tuple[str, ...], message: str) -> None:
    with pytest.raises(InputError, match=message):
        _run(*words, "-o", "r.json")


def test_a_record_that_cannot_be_written_is_said_before_anything_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    from clustersim.common.errors import OutputError

    monkeypatch.setattr(kernels_part, "measure_device", lambda *_: pytest.fail("measured"))
    with pytest.raises(OutputError, match="there is no directory nowhere"):
        _run("--for", "tiny.yaml", "-o", "nowhere/r.json")


def test_a_truncated_record_is_refused() -> None:
    Path("r.json").write_text('{"version": 1, "device": ')
    with pytest.raises(InputError, match=r"r\.json: is not valid JSON"):
        _run("--for", "tiny.yaml", "-o", "r.json")


def test_without_torch_it_is_said_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    from calibrate import torch_requirement

    monkeypatch.setattr(torch_requirement, "find_spec", lambda _: None)
    with pytest.raises(InputError, match="pip install"):
        _run("--for", "tiny.yaml")


def test_the_command_is_kept_as_it_is_typed() -> None:
    assert kernels._command_as_typed(["/usr/bin/clustersim", "calibrate", "--for", "a b.yaml"]) == (
        "clustersim calibrate --for 'a b.yaml'"
    )
    assert kernels._command_as_typed(["calibrate/__main__.py", "--grid"]) == "clustersim calibrate --grid"


def test_why_kernels_are_missing_is_summed_up() -> None:
    from clustersim.common.dtypes import DType
    from clustersim.cost.calibration_record import CalibrationRecord, DeviceInfo, KernelSample, MeasurementConditions
    from clustersim.model.kernels import KernelKind, MatmulShape

    row = KernelSample(
        "a", KernelKind.MATMUL, DType.FP8, MatmulShape(1, 1, 1), 2.0, 3.0, 1, None, MeasurementOutcome.UNSUPPORTED
    )
    rows = tuple(replace(row, shape=MatmulShape(1, 1, size), source="no fp8") for size in (1, 2))
    record = CalibrationRecord(DeviceInfo("cpu-laptop", "CPU"), MeasurementConditions("", "", ""), kernels=rows)
    assert kernels.summarize_record(record, Path("r.json")).splitlines()[:3] == [
        "r.json: CPU",
        "  kernels: 2 unsupported",
        "    2 x no fp8",
    ]
