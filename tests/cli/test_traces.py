"""`clustersim run --trace --kineto --spans --ranks --force`: written files, output and error messages."""

import csv
import sys
from pathlib import Path

import pytest

from clustersim.cli.outputs import Outputs, TraceOptions, announce_file
from clustersim.cli.run import run_scenario
from clustersim.common.errors import InputError, OutputError
from clustersim.report.export import write_traces
from tests.cli.conftest import CommandRunner
from tests.report.small_trace import slices


def test_traces_of_selected_ranks_are_written(clustersim: CommandRunner, plan: Path, tmp_path: Path) -> None:
    options = ["--trace", "a.pftrace", "--spans", "a.csv", "--kineto", "traces", "--ranks", "1,stage:1"]
    done = clustersim("run", plan, *options)
    assert (done.returncode, done.stderr) == (0, "")
    assert [line for line in done.stdout.splitlines() if line.startswith("wrote ")] == [
        "wrote a.pftrace (5 of 8 ranks)",
        "wrote a.csv (5 of 8 ranks)",
        "wrote traces (5 of 8 ranks)",
    ]
    ranks = [1, 4, 5, 6, 7]
    assert sorted(file.name for file in (tmp_path / "traces").iterdir()) == [f"rank-{rank}.json" for rank in ranks]
    drawn = slices(tmp_path / "a.pftrace")
    assert sorted({drawn_slice.rank for drawn_slice in drawn}) == ranks
    with (tmp_path / "a.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert sorted({int(row["rank"]) for row in rows}) == ranks
    assert len(drawn) == len(rows)


@pytest.mark.usefixtures("unsimulated")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--ranks", "0"], "--ranks and --force say how traces are written"),
        (["--force", "--html", "a.html"], "--ranks and --force say how traces are written"),
        (["--trace", "a.pftrace", "--ranks", "0:9"], "0:9 does not name ranks from 0 to 7"),
        (["--spans", "a.csv", "--ranks", "stage:2"], "stage:1 (all ranks of a pipeline rank, 0 to 1)"),
        (["--kineto", "a", "--ranks", "slowest:9"], "slowest:4 (at most 8)"),
        (["--spans", "a.xlsx"], "name a file that ends in .csv, .parquet or .arrow"),
        (["--spans", "-"], "name a file that ends in .csv, .parquet or .arrow"),
        (["--spans", "no/a.csv"], "there is no directory no"),
        (["--kineto", ""], "--kineto needs the name of a directory"),
        (["--kineto", "plan.yaml"], "plan.yaml: is a file; name a directory"),
        (["--kineto", "."], "holds plan.yaml, which is no trace that clustersim wrote"),
        (["--kineto", "no/a"], "there is no directory no"),
        (["--spans", "plan.csv", "--json", "plan.csv"], "need different files"),
    ],
)
def test_invalid_trace_options_are_rejected_before_simulation(
    clustersim: CommandRunner, plan: Path, tmp_path: Path, arguments: list[str], message: str
) -> None:
    done = clustersim("run", plan, *arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert message in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["plan.yaml"]


def test_output_in_the_trace_directory_is_rejected(plan: Path, tmp_path: Path) -> None:
    (tmp_path / "traces").mkdir()
    outputs = Outputs(kineto=str(tmp_path / "traces"), html=str(tmp_path / "traces" / "a.html"))
    with pytest.raises(InputError, match=r"--html .*lies in --kineto"):
        outputs.check_writable([plan])


@pytest.mark.usefixtures("unsimulated")
def test_missing_pyarrow_is_rejected_before_simulation(
    clustersim: CommandRunner, plan: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    done = clustersim("run", plan, "--spans", "a.parquet")
    assert done.returncode == 2
    assert "pip install 'clustersim[table]'" in done.stderr
    assert ".csv" in done.stderr


@pytest.mark.parametrize("option", ["trace", "kineto", "spans"])
def test_too_large_traces_need_force(plan: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, option: str) -> None:
    monkeypatch.setattr(write_traces, "MAX_FILE_BYTES", 1000)
    name = str(tmp_path / {"trace": "a.pftrace", "kineto": "traces", "spans": "a.csv"}[option])
    with pytest.raises(OutputError, match=r"above 1000 B; .*--ranks.*--force"):
        run_scenario(plan, [], Outputs(**{option: name}, table=False))  # type: ignore[arg-type]
    assert not Path(name).exists()
    forced = TraceOptions("0", force=True)
    assert run_scenario(plan, [], Outputs(**{option: name}, trace_options=forced, table=False))  # type: ignore[arg-type]
    assert Path(name).exists()


def test_file_names_are_terminal_hyperlinks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "a [b] é.html"
    announce_file(path, " (2 of 3)")
    assert capsys.readouterr().out == f"wrote {path} (2 of 3)\n"
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    announce_file(path, " (2 of 3)")
    shown = capsys.readouterr().out
    assert f";{path.as_uri()}\x1b\\{path}\x1b]8;;\x1b\\ (2 of 3)\n" in shown  # OSC 8 hyperlinks
