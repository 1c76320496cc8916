"""`clustersim export chakra` writes the execution traces that ASTRA-sim reads, or explains why it cannot."""

import json
from pathlib import Path

import pytest

from clustersim.cli import export_chakra
from tests.cli.conftest import BASE_MAPPING, CommandRunner, write_plan
from tests.interop.execution_traces import COLLECTIVE, decode
from tests.sentences import parts


def test_chakra_files_per_rank_and_groups(clustersim: CommandRunner, plan: Path, tmp_path: Path) -> None:
    done = clustersim("export", "chakra", plan, "--out", "traces")
    assert (done.returncode, done.stderr) == (0, "")
    folder = tmp_path / "traces"
    assert {file.name for file in folder.iterdir()} == {"comm_groups.json", *(f"trace.{rank}.et" for rank in range(8))}
    groups = json.loads((folder / "comm_groups.json").read_text())
    assert done.stdout == f"wrote traces (8 ranks, {len(groups)} groups)\n"
    for rank in range(8):
        _, nodes = decode((folder / f"trace.{rank}.et").read_bytes())
        group_names = {node.attr["pg_name"] for node in nodes if node.type == COLLECTIVE}
        assert group_names
        assert all(rank in groups[name] for name in group_names)


def test_approximations_are_noted(clustersim: CommandRunner, plan: Path) -> None:
    done = clustersim("export", "chakra", plan, "--out", "traces", "--set", "layout.cp=2", "--set", "layout.dp=1")
    assert done.returncode == 0
    assert parts("note: ... ring ... as all-gather\n").fullmatch(done.stderr)


def test_earlier_export_is_replaced_other_directories_rejected(
    clustersim: CommandRunner, plan: Path, tmp_path: Path
) -> None:
    clustersim("export", "chakra", plan, "--out", "traces")
    four_gpus = ("--set", "cluster.gpus=4", "--set", "layout.dp=1")
    assert clustersim("export", "chakra", plan, *four_gpus, "--output", "traces").returncode == 0
    assert len(list((tmp_path / "traces").glob("trace.*.et"))) == 4
    (tmp_path / "traces" / "notes.txt").write_text("mine")
    done = clustersim("export", "chakra", plan, "--out", "traces")
    assert (done.returncode, done.stdout) == (2, "")
    assert parts("traces: holds notes.txt ... new directory").search(done.stderr)
    assert len(list((tmp_path / "traces").glob("trace.*.et"))) == 4


def test_oom_scenario_is_exported_and_exits_3(clustersim: CommandRunner, tmp_path: Path) -> None:
    single = {"model": {"preset": "llama3-8b", "layers": 24}, "cluster": {"name": "dgx-h100", "gpus": 1}, "layout": {}}
    plan = write_plan(tmp_path, {**BASE_MAPPING, **single})
    assert clustersim("export", "chakra", plan, "--out", "traces").returncode == 3
    assert (tmp_path / "traces" / "trace.0.et").stat().st_size > 0


def test_too_large_export_is_rejected_with_its_size(
    clustersim: CommandRunner, plan: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(export_chakra, "MAX_TOTAL_BYTES", 2000)
    done = clustersim("export", "chakra", plan, "--out", "traces")
    assert done.returncode == 2
    assert "traces: all ranks would be about" in done.stderr
    assert not (tmp_path / "traces").exists()
    assert clustersim("export", "chakra", plan, "--out", "traces", "--force").returncode == 0


INVALID_CASES: dict[str, tuple[list[str], str]] = {
    "no directory": (["chakra", "plan.yaml"], "name their directory, such as --out traces"),
    "another program": (["chacra", "plan.yaml", "--out", "traces"], "did you mean chakra?"),
    "a file": (["chakra", "plan.yaml", "--out", "plan.yaml"], "plan.yaml: is a file; name a directory"),
    "nowhere": (["chakra", "plan.yaml", "--out", "no/where"], "there is no directory no"),
    "no scenario": (["chakra", "missing.yaml", "--out", "traces"], "missing.yaml: cannot be read"),
    "an illegal change": (["chakra", "plan.yaml", "--out", "traces", "--set", "layout.tp=3"], "tp 3"),
}


@pytest.mark.parametrize("case", INVALID_CASES)
def test_invalid_chakra_export_has_a_one_line_error(
    clustersim: CommandRunner, plan: Path, tmp_path: Path, case: str
) -> None:
    arguments, message = INVALID_CASES[case]
    done = clustersim("export", *arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: ")
    assert message in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert not (tmp_path / "traces").exists()
    assert plan.exists()
