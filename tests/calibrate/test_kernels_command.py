"""The command, from a scenario to a record, and what goes wrong on the way."""

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from clustersim.assembly import kernels_of
from clustersim.cost.record import Outcome, signature
from clustersim.cost.record_file import read_record
from clustersim.errors import InputError
from clustersim.scenario import Scenario

torch = pytest.importorskip("torch")
kernels = pytest.importorskip("calibrate.kernels.command")
from calibrate.devices import cpu as cpu_device  # noqa: E402 - after torch is known to be there
from calibrate.kernels import beside, copies, session  # noqa: E402
from calibrate.kernels import run as kernel_session  # noqa: E402

TINY = """
model: {preset: llama-tiny, layers: 1, hidden: 64, ffn: 96, heads: 4, kv_heads: 2, head_dim: 16, vocab: 128}
cluster: {name: laptop, gpus: 2}
layout: {tp: 2}
training: {sequence: 32, global_batch: 2, microbatch: 2, precision: fp32, fused: false, loss: torch}
"""


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """One thread, a small cache, small copies, short samples, and a fit that takes no time."""
    monkeypatch.setattr(cpu_device, "_CACHES", tmp_path)
    monkeypatch.setattr(cpu_device, "_USUAL_CACHE", 2.0**18)
    monkeypatch.setattr(copies, "_SIZES", (2**16,))
    monkeypatch.setattr(beside, "_COPIED", 2**20)
    monkeypatch.setitem(beside.SIZES, "cpu", 64)
    monkeypatch.setattr(kernel_session, "fitted", lambda record, _accelerator: record)
    monkeypatch.setattr(session, "_LONGEST", 0.01)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny.yaml").write_text(TINY)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def _run(*words: str) -> None:
    parser = argparse.ArgumentParser()
    kernels.add_arguments(parser)
    kernels.command(parser.parse_args(["--device", "cpu", *words]))


def test_a_record_of_a_scenario_has_every_kernel_of_its_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    _run("--for", "tiny.yaml", "-o", "r.json")
    record = read_record(Path("r.json"))
    expected = {signature(kernel) for kernel in kernels_of(Scenario.load("tiny.yaml"))}
    assert {row.signature for row in record.kernels} == expected
    assert all(row.outcome is Outcome.MEASURED for row in record.kernels)
    assert record.launch_interval is not None
    assert [(row.route, row.bytes) for row in record.copies] == [("device", 2.0**16)]
    assert [row.beside for row in record.beside] == ["copy"]
    assert record.device.accelerator == "cpu-laptop"
    assert record.conditions.command.startswith("clustersim calibrate")
    assert record.conditions.method and record.conditions.before and record.conditions.after
    assert "use: cost: {record: r.json}" in capsys.readouterr().out


def test_an_interrupted_session_loses_nothing_and_goes_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    whole, many = session.row, 0

    def interrupted(*given: Any) -> Any:
        nonlocal many
        many += 1
        if many > 5:
            raise KeyboardInterrupt
        return whole(*given)

    monkeypatch.setattr(session, "row", interrupted)
    with pytest.raises(KeyboardInterrupt):
        _run("--for", "tiny.yaml", "-o", "r.json")
    assert "the same command goes on with the rest" in capsys.readouterr().err
    first = read_record(Path("r.json")).kernels
    assert len(first) == 5
    monkeypatch.setattr(session, "row", whole)
    _run("--for", "tiny.yaml", "-o", "r.json")
    assert read_record(Path("r.json")).kernels[:5] == first
    assert "r.json has 5 of" in capsys.readouterr().err


def test_a_budget_that_is_spent_says_what_is_left(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(kernel_session, "measured", lambda *_: iter(()))
    _run("--for", "tiny.yaml", "-o", "r.json")
    assert "kernels that the budget had no time for; the same command goes on with them" in capsys.readouterr().err


def test_the_grid_is_measured_where_nothing_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(kernel_session, "measured", lambda missing, *_: asked.extend(missing) or iter(()))
    _run("--budget", "1min")
    assert len(asked) > 50  # small ones: the pace was seen by a product of 64 rows
    assert read_record(Path("cpu-laptop.record.json")).kernels == ()


def test_all_that_is_asked_for_is_measured_together(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(kernel_session, "measured", lambda missing, *_: asked.extend(missing) or iter(()))
    _run("--for", "tiny.yaml", "--presets", "llama3-8b", "--set", "training.microbatch=1", "-o", "r.json")
    found = {signature(kernel) for kernel in asked}
    assert found > {signature(kernel) for kernel in kernels_of(Scenario.load("tiny.yaml", ["training.microbatch=1"]))}
    assert len(asked) > 400


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--budget", "5"), "'5' is not a time"),
        (("--budget", "0s"), "no time to measure in"),
        (("--for", "nowhere.yaml"), "nowhere.yaml"),
        (("--presets", "lama3-8b"), "did you mean llama3-8b"),
        (("--accelerator", "h200"), "did you mean h200-sxm-141gb"),
    ],
)
def test_bad_input_is_one_sentence(words: tuple[str, ...], message: str) -> None:
    with pytest.raises(InputError, match=message):
        _run(*words, "-o", "r.json")


def test_a_record_that_cannot_be_written_is_said_before_anything_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    from clustersim.errors import OutputError

    monkeypatch.setattr(kernel_session, "measure_machine", lambda *_: pytest.fail("measured"))
    with pytest.raises(OutputError, match="cannot be written"):
        _run("--for", "tiny.yaml", "-o", "nowhere/r.json")


def test_a_truncated_record_is_refused() -> None:
    Path("r.json").write_text('{"version": 1, "device": ')
    with pytest.raises(InputError, match=r"r\.json: is not valid JSON"):
        _run("--for", "tiny.yaml", "-o", "r.json")


def test_without_torch_it_is_said_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    from calibrate import torch_door

    monkeypatch.setattr(torch_door, "find_spec", lambda _: None)
    with pytest.raises(InputError, match="pip install"):
        _run("--for", "tiny.yaml")


def test_the_command_is_kept_as_it_is_typed() -> None:
    assert kernels._typed(["/usr/bin/clustersim", "calibrate", "--for", "a b.yaml"]) == (
        "clustersim calibrate --for 'a b.yaml'"
    )
    assert kernels._typed(["calibrate/__main__.py", "--grid"]) == "clustersim calibrate --grid"


def test_why_kernels_are_missing_is_summed_up() -> None:
    from dataclasses import replace

    from clustersim.cost.record import Conditions, Device, KernelRow, Record
    from clustersim.dtypes import DType
    from clustersim.workload.kernels import KernelKind, MatmulShape

    row = KernelRow("a", KernelKind.MATMUL, DType.FP8, MatmulShape(1, 1, 1), 2.0, 3.0, 1, None, Outcome.UNSUPPORTED)
    rows = tuple(replace(row, shape=MatmulShape(1, 1, size), source="no fp8") for size in (1, 2))
    record = Record(Device("cpu-laptop", "CPU"), Conditions("", "", ""), kernels=rows)
    assert kernels.summary(record, Path("r.json")).splitlines()[:2] == [
        "r.json: kernels of CPU: 2 unsupported",
        "  2 x no fp8",
    ]
