"""What the commands answer, where, and with which exit status."""

import json
from pathlib import Path

import pytest

from clustersim.cli.outputs import Outputs
from clustersim.cli.run import run_scenario
from clustersim.common import data_files
from clustersim.report.export import write_traces
from clustersim.scenario.validation_rules import warnings
from tests.cli.conftest import TWO_TIERS, Run
from tests.report.small_trace import slices

KEYS = """
    step_time_s tokens_per_s tokens_per_s_per_gpu model_tflops_per_gpu mfu mfu_causal hfu bubble_fraction
    exposed_communication_fraction peak_memory_bytes memory_capacity_bytes fits breakdown_s provenance_share ranks
    simulated_ranks spans simulate_wall_s warnings not_modelled
"""


def test_run_prints_a_table_that_leads_with_the_step_time(clustersim: Run, plan: Path) -> None:
    done = clustersim("run", plan)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("step time ")
    assert "fits" in done.stdout


def test_json_on_stdout_is_nothing_but_json_and_holds_every_promised_key(clustersim: Run, plan: Path) -> None:
    done = clustersim("run", plan, "--json", "-")
    answer = json.loads(done.stdout)
    assert set(KEYS.split()) <= set(answer)
    assert sum(answer["breakdown_s"].values()) == pytest.approx(answer["step_time_s"])
    assert sum(answer["provenance_share"].values()) == pytest.approx(1)
    assert (answer["ranks"], answer["fits"], done.stderr) == (8, True, "")


def test_files_are_written_and_named_and_quiet_prints_nothing(clustersim: Run, plan: Path, tmp_path: Path) -> None:
    outputs = ["--json", "a.json", "--html", "a.html", "--trace", "a.pftrace"]
    loud = clustersim("run", plan, *outputs)
    assert [line for line in loud.stdout.splitlines() if line.startswith("wrote ")] == [
        "wrote a.json",
        "wrote a.html",
        "wrote a.pftrace",
    ]
    assert json.loads((tmp_path / "a.json").read_text())["ranks"] == 8
    assert (tmp_path / "a.html").read_text().lower().startswith("<!doctype html>")
    assert (tmp_path / "a.pftrace").stat().st_size > 0
    quiet = clustersim("run", plan, "--quiet", *outputs)
    assert (quiet.returncode, quiet.stdout, quiet.stderr) == (0, "", "")


def test_of_more_ranks_than_anyone_reads_the_trace_has_some_and_says_so(clustersim: Run, plan: Path) -> None:
    many = ["--set", "cluster.gpus=72", "--set", "layout.dp=18", "--set", "training.global_batch=36"]
    done = clustersim("run", plan, *many, "--set", "disturbances.jitter=1%", "--trace", "a.pftrace")
    assert "wrote a.pftrace (2 of 72 simulated ranks)" in done.stdout


@pytest.mark.parametrize(("least", "table", "said"), [(1, True, True), (10**6, True, False), (1, False, False)])
def test_a_long_trace_is_announced_with_its_spans(
    plan: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    *,
    least: int,
    table: bool,
    said: bool,
) -> None:
    monkeypatch.setattr(write_traces, "LARGE_SPAN_COUNT", least)
    file = plan.parent / "a.pftrace"
    assert run_scenario(plan, [], Outputs(trace=str(file), table=table))
    spans = len(slices(file))
    assert capsys.readouterr().err == (f"writing about {spans:,} spans to {file}\n" if said else "")


def test_steps_and_what_is_disturbed_are_said(clustersim: Run, plan: Path) -> None:
    done = clustersim("run", plan, "--set", "steps=3", "--set", "disturbances.slow={gpu: 1, speed: 0.5}")
    assert "disturbed: GPU 1 at 50 % speed" in done.stdout
    assert "mean of 3 steps: min " in done.stdout
    assert "straggler: rank 1 (stage 0): kernels take 100.0% longer than is usual there" in done.stdout


def test_what_does_not_fit_is_answered_and_exits_3(clustersim: Run, plan: Path) -> None:
    huge = ["--set", "model=llama3-70b", "--set", "cluster.gpus=8"]
    run, check = clustersim("run", plan, *huge), clustersim("check", plan, *huge)
    assert (run.returncode, check.returncode) == (3, 3)
    assert run.stdout.startswith("step time ")
    assert "DOES NOT FIT" in run.stdout
    assert "does not fit" in check.stdout


def test_check_says_that_a_scenario_is_legal_and_fits(clustersim: Run, plan: Path) -> None:
    done = clustersim("check", plan)
    assert (done.returncode, done.stderr) == (0, "")
    assert "legal and fits" in done.stdout


def test_presets_lists_every_shelf(clustersim: Run) -> None:
    done = clustersim("presets")
    assert done.returncode == 0
    for name in ("llama3-405b", "gpt3-175b", "dgx-h100", "h100-sxm-80gb", "interleaved"):
        assert name in done.stdout


def test_presets_list_recipes_of_number_formats(clustersim: Run) -> None:
    lines = clustersim("presets").stdout.splitlines()
    recipes = lines[next(at for at, line in enumerate(lines) if line.startswith("recipe of number formats")) :]
    for name in data_files.list_names("recipes"):
        assert any(line.startswith(f"{name} ") for line in recipes)


def test_presets_say_what_a_token_meets(clustersim: Run) -> None:
    (mixtral,) = [line for line in clustersim("presets").stdout.splitlines() if line.startswith("mixtral-8x7b ")]
    assert mixtral.split()[1:5] == ["46.70", "B", "12.88", "B"]


def test_topology_shows_tiers_and_draws_a_picture(clustersim: Run, tmp_path: Path) -> None:
    done = clustersim("topology", "dgx-h100", "--gpus", "64", "--html", "fabric.html")
    assert (done.returncode, done.stderr) == (0, "")
    for word in ("GPU", "NVLink domain", "NIC", "leaf switch", "64", "wrote fabric.html"):
        assert word in done.stdout
    assert (tmp_path / "fabric.html").read_text().lower().startswith("<!doctype html>")
    assert clustersim("topology", "dgx-h100", "--gpus", "1000000000").returncode == 2


def test_topology_of_a_graph_names_its_switches_from_below_and_how_far_they_are_oversubscribed(
    clustersim: Run, tmp_path: Path
) -> None:
    (tmp_path / "two.json").write_text(json.dumps(TWO_TIERS))
    lines = [line.split() for line in clustersim("topology", "two.json").stdout.splitlines()]
    assert ["switch", "1", "2", "100", "GB/s", "1:2"] in lines  # 4 x 50 GB/s below, 100 GB/s above
    assert ["switch", "2", "1", "200", "GB/s"] in lines
    nodes, edges = TWO_TIERS["nodes"], TWO_TIERS["edges"]
    (tmp_path / "one.json").write_text(json.dumps({**TWO_TIERS, "nodes": nodes[:4] + nodes[8:9], "edges": edges[:4]}))
    one = clustersim("topology", "one.json").stdout
    assert "oversubscribed" not in one
    assert "switch switch" not in one


def test_what_would_fit_is_called_a_suggestion(clustersim: Run, plan: Path) -> None:
    huge = ["--set", "model=llama3-70b", "--set", "cluster.gpus=8"]
    for command in ("run", "check"):
        lines = clustersim(command, plan, *huge).stdout.splitlines()
        assert any(line.lstrip().startswith("suggestion: ") for line in lines)


def test_what_a_file_says_of_itself_is_printed_as_it_stands(clustersim: Run, tmp_path: Path) -> None:
    about = {"accelerator": "h100-sxm-80gb", "description": "for the [/red] team [bold]"}
    (tmp_path / "graph.json").write_text(json.dumps({**TWO_TIERS, "graph": about}))
    done = clustersim("topology", "graph.json")
    assert (done.returncode, done.stderr) == (0, "")
    assert "for the [/red] team [bold]" in done.stdout


def test_what_takes_long_is_said_before_it_begins(
    plan: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A degraded NIC puts a tensor-parallel group out of step, on a shared network; any number of tasks is too many."""
    monkeypatch.setattr(warnings, "WARN_DESYNC_TP_TASKS", 0.0)
    changes = ["cost.network=shared", "disturbances.nics={gpu: 0, bandwidth: 0.5}"]
    run_scenario(plan, changes, Outputs())
    said = capsys.readouterr()
    assert "out of step" in said.err and "out of step" in said.out
    run_scenario(plan, changes, Outputs(table=False))
    assert not capsys.readouterr().err


def test_a_job_on_a_part_of_each_domain_is_set_checked_run_and_drawn(
    clustersim: Run, plan: Path, tmp_path: Path
) -> None:
    placed = ["--set", "cluster.placement.per_domain=4", "--set", "cost.nccl.NCCL_ALGO=Ring"]
    assert clustersim("check", plan, *placed).returncode == 0
    done = clustersim("run", plan, *placed, "--html", "a.html", "--json", "a.json")
    assert (done.returncode, done.stderr) == (0, "")
    assert "placed on 2 of 2 nodes, 4 of the 8 GPUs of each" in done.stdout
    assert "placed on 2 of 2 nodes" in (tmp_path / "a.html").read_text()
    said = json.loads((tmp_path / "a.json").read_text())["scenario"]
    assert (said["cluster"]["placement"], said["cost"]["nccl"]) == ({"per_domain": 4}, {"NCCL_ALGO": "Ring"})
    assert "8 x h100-sxm-80gb, 8 per node, on 2 of 2 nodes" in clustersim("topology", plan, *placed).stdout


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("cluster.placement.per_domain=9", "cluster.placement.per_domain: 9, but an NVLink domain has 8 GPUs"),
        ("cluster.placement.order=[0-6, 3]", "cluster.placement.order: GPU 3 comes twice; keep one"),
        ("cost.nccl.NCCL_ALGO=Rings", "cost.nccl.NCCL_ALGO: 'rings' is none of NCCL's; did you mean ring?"),
        ("cost.nccl.NCCL_ALGO=allreduce:PAT", "nothing is left of nccl for all_reduce, which the step needs"),
    ],
)
def test_placements_and_switches_that_cannot_be_are_errors(
    clustersim: Run, plan: Path, override: str, sentence: str
) -> None:
    done = clustersim("run", plan, "--set", "layout.data=ddp", "--set", override)
    assert done.returncode == 2
    assert sentence in " ".join(done.stderr.split())
