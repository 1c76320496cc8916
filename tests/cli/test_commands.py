"""Output, streams and exit status of the commands."""

import json
import re
import shlex
from pathlib import Path

import pytest
import yaml

from clustersim import cli
from clustersim.cli.outputs import Outputs
from clustersim.cli.run import run_scenario
from clustersim.common import data_files
from clustersim.report.export import write_traces
from clustersim.results import timing_sensitivity
from clustersim.scenario.validation_rules import warnings
from tests.cli.conftest import TWO_TIERS, CommandRunner
from tests.report.small_trace import slices
from tests.sentences import parts

JSON_KEYS = """
    step_time_s tokens_per_s tokens_per_s_per_gpu model_tflops_per_gpu mfu mfu_causal hfu bubble_fraction
    exposed_communication_fraction peak_memory_bytes memory_capacity_bytes fits breakdown_s provenance_share ranks
    simulated_ranks spans simulate_wall_s warnings not_modelled
"""


def test_run_prints_the_step_time_first(clustersim: CommandRunner, plan: Path) -> None:
    done = clustersim("run", plan)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("step time ")
    assert "fits" in done.stdout


def test_arguments_of_what_helps_are_whole_on_a_narrow_terminal(
    clustersim: CommandRunner, plan: Path, tmp_path: Path
) -> None:
    """They are on one line, however long, to be copied; other lines are wrapped."""
    settings = ("layout.pp=1", "layout.dp=4", "training.fused=false", "training.attention=standard")
    changes = [argument for setting in settings for argument in ("--set", setting)]
    printed = clustersim("run", plan, *changes, "--what-if", "--json", "a.json", COLUMNS="60").stdout.splitlines()
    report = json.loads((tmp_path / "a.json").read_text())["what_ifs"]
    arguments = [line.strip() for line in printed if line.startswith("  --set ")]
    assert max(map(len, arguments)) > 60
    expected = [case["set"] for case in (*report["cases"], report["combined"]) if case]
    assert {tuple(shlex.split(line)[1::2]) for line in arguments} <= set(map(tuple, expected))
    assert all(len(line) <= 60 for line in printed if not line.startswith("  --set "))


def test_json_on_stdout_has_all_documented_keys(clustersim: CommandRunner, plan: Path) -> None:
    done = clustersim("run", plan, "--json", "-")
    result_json = json.loads(done.stdout)
    assert set(JSON_KEYS.split()) <= set(result_json)
    assert sum(result_json["breakdown_s"].values()) == pytest.approx(result_json["step_time_s"])
    assert sum(result_json["provenance_share"].values()) == pytest.approx(1)
    assert (result_json["ranks"], result_json["fits"], done.stderr) == (8, True, "")


def test_output_files_are_listed_and_quiet_prints_nothing(
    clustersim: CommandRunner, plan: Path, tmp_path: Path
) -> None:
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


def test_trace_of_large_runs_has_selected_ranks(clustersim: CommandRunner, plan: Path) -> None:
    overrides = ["--set", "cluster.gpus=72", "--set", "layout.dp=18", "--set", "training.global_batch=36"]
    done = clustersim("run", plan, *overrides, "--set", "degradations.jitter=1%", "--trace", "a.pftrace")
    assert "wrote a.pftrace (2 of 72 simulated ranks)" in done.stdout


@pytest.mark.parametrize(
    ("min_size", "table", "is_announced"), [(1, True, True), (10**6, True, False), (1, False, False)]
)
def test_large_trace_is_announced_with_span_count(
    plan: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    *,
    min_size: int,
    table: bool,
    is_announced: bool,
) -> None:
    monkeypatch.setattr(write_traces, "LARGE_SPAN_COUNT", min_size)
    file = plan.parent / "a.pftrace"
    assert run_scenario(plan, [], Outputs(trace=str(file), table=table))
    spans = len(slices(file))
    assert capsys.readouterr().err == (f"writing about {spans:,} spans to {file}\n" if is_announced else "")


def test_steps_and_degradations_are_printed(clustersim: CommandRunner, plan: Path) -> None:
    done = clustersim("run", plan, "--set", "steps=3", "--set", "degradations.slow={gpu: 1, speed: 0.5}")
    assert "degraded: GPU 1 at 50 % speed" in done.stdout
    assert "mean of 3 steps: min " in done.stdout
    straggler_line = "straggler: rank 1 (stage 0): ... 100.0% longer ... its stage"
    assert parts(straggler_line).search(" ".join(done.stdout.split()))


def test_oom_scenario_is_simulated_and_exits_3(clustersim: CommandRunner, plan: Path) -> None:
    huge = ["--set", "model=llama3-70b", "--set", "cluster.gpus=8"]
    run, check = clustersim("run", plan, *huge), clustersim("check", plan, *huge)
    assert (run.returncode, check.returncode) == (3, 3)
    assert run.stdout.startswith("step time ")
    assert "DOES NOT FIT" in run.stdout
    assert "does not fit" in check.stdout


def test_check_of_valid_fitting_scenario(clustersim: CommandRunner, plan: Path) -> None:
    done = clustersim("check", plan)
    assert (done.returncode, done.stderr) == (0, "")
    assert "valid and fits" in done.stdout


def test_quiet_check_prints_nothing_but_problems(clustersim: CommandRunner, plan: Path) -> None:
    done = clustersim("check", plan, "--quiet")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    huge = clustersim("check", plan, "-q", "--set", "model=llama3-70b", "--set", "cluster.gpus=8")
    assert huge.returncode == 3
    assert "does not fit" in huge.stdout
    warned = ("--set", "training.recompute=full", "--set", "cost.network=uncontended")
    loud, quiet = clustersim("check", plan, *warned), clustersim("check", plan, *warned, "--quiet")
    assert ("warning: " in loud.stdout) == ("warning: " in quiet.stdout)


def test_presets_lists_all_registries(clustersim: CommandRunner) -> None:
    done = clustersim("presets")
    assert done.returncode == 0
    for name in ("llama3-405b", "gpt3-175b", "dgx-h100", "h100-sxm-80gb", "interleaved"):
        assert name in done.stdout


def test_presets_mark_projections_and_accelerators_without_measurements(clustersim: CommandRunner) -> None:
    lines = clustersim("presets").stdout.splitlines()
    for name, mark in {
        "rubin": "PROJECTED",
        "mi455x": "PROJECTED",
        "h20-sxm-96gb": "assumed",
        "gb200": "derived",
    }.items():
        assert any(line.startswith(f"{name} ") and mark in line for line in lines), name
    for name in ("vera-rubin-nvl144", "helios-mi455x"):
        assert any(line.startswith(f"{name} ") and "PROJECTION" in line for line in lines), name


def test_presets_lists_precision_recipes(clustersim: CommandRunner) -> None:
    lines = clustersim("presets").stdout.splitlines()
    recipes = lines[next(index for index, line in enumerate(lines) if line.startswith("recipe of number formats")) :]
    for name in data_files.list_names("recipes"):
        assert any(line.startswith(f"{name} ") for line in recipes)


def test_presets_show_active_parameters(clustersim: CommandRunner) -> None:
    (mixtral,) = [line for line in clustersim("presets").stdout.splitlines() if line.startswith("mixtral-8x7b ")]
    assert mixtral.split()[1:5] == ["46.70", "B", "12.88", "B"]


def test_topology_shows_tiers_and_draws_a_picture(clustersim: CommandRunner, tmp_path: Path) -> None:
    done = clustersim("topology", "dgx-h100", "--gpus", "64", "--html", "fabric.html")
    assert (done.returncode, done.stderr) == (0, "")
    for word in ("GPU", "NVLink domain", "NIC", "leaf switch", "64", "wrote fabric.html"):
        assert word in done.stdout
    assert (tmp_path / "fabric.html").read_text().lower().startswith("<!doctype html>")
    assert clustersim("topology", "dgx-h100", "--gpus", "1000000000").returncode == 2


def test_topology_of_a_graph_lists_switches_and_oversubscription(clustersim: CommandRunner, tmp_path: Path) -> None:
    (tmp_path / "two.json").write_text(json.dumps(TWO_TIERS))
    lines = [line.split() for line in clustersim("topology", "two.json").stdout.splitlines()]
    assert ["switch", "1", "2", "100", "GB/s", "1:2"] in lines  # 4 x 50 GB/s below, 100 GB/s above
    assert ["switch", "2", "1", "200", "GB/s"] in lines
    nodes, edges = TWO_TIERS["nodes"], TWO_TIERS["edges"]
    (tmp_path / "one.json").write_text(json.dumps({**TWO_TIERS, "nodes": nodes[:4] + nodes[8:9], "edges": edges[:4]}))
    single_switch = clustersim("topology", "one.json").stdout
    assert "oversubscribed" not in single_switch
    assert "switch switch" not in single_switch


def test_fitting_settings_are_suggested(clustersim: CommandRunner, plan: Path) -> None:
    huge = ["--set", "model=llama3-70b", "--set", "cluster.gpus=8"]
    for command in ("run", "check"):
        lines = clustersim(command, plan, *huge).stdout.splitlines()
        assert any(line.lstrip().startswith("suggestion: ") for line in lines)


@pytest.mark.parametrize(
    "command",
    [
        ("run",), ("check",), ("explain", "--measured", "50 ms"),
        ("diff", "--set", "layout.tp=1", "--set", "layout.dp=4"),
        ("search", "--vary", "layout.tp=1,2", "--fix", "layout.pp=2", "--fix", "training.recompute=none",
         "--workers", "1"),
        ("goodput", "--tokens", "1B", "--runs", "2", "--workers", "1"),
    ],
    ids=lambda command: command[0],
)  # fmt: skip
def test_traps_are_named_by_every_command_that_predicts(
    clustersim: CommandRunner, plan: Path, command: tuple[str, ...]
) -> None:
    """NVLink of both directions made a cluster 8 % faster, and only `run` and `check` said so."""
    mapping = yaml.safe_load(plan.read_text())
    mapping["cluster"]["node"] = {"nvlink": {"bandwidth": "900 GB/s"}}
    plan.write_text(yaml.safe_dump(mapping))
    done = clustersim(command[0], plan, *command[1:])
    assert done.returncode == 0, done.stderr
    assert "more than the 450 GB/s per direction" in " ".join(done.stdout.split())


def test_every_command_prints_through_the_console_that_escapes_text() -> None:
    """That of diloco made one of rich's own, whose colours were escaped where they were written."""
    commands = Path(cli.__file__).parent
    makers = {path.name for path in commands.glob("*.py") if re.search(r"import Console\b", path.read_text())}
    assert makers == {"terminal.py"}


def test_descriptions_are_printed_verbatim(clustersim: CommandRunner, tmp_path: Path) -> None:
    graph_attributes = {"accelerator": "h100-sxm-80gb", "description": "for the [/red] team [bold]"}
    (tmp_path / "graph.json").write_text(json.dumps({**TWO_TIERS, "graph": graph_attributes}))
    done = clustersim("topology", "graph.json")
    assert (done.returncode, done.stderr) == (0, "")
    assert "for the [/red] team [bold]" in done.stdout


def test_run_says_how_far_a_chaotic_step_moves(
    clustersim: CommandRunner, plan: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without thresholds every step counts as chaotic: kernels slower by parts in 10^12 move it by about as much."""
    command = ("run", plan, "--json", "run.json", "--html", "run.html")
    quiet = clustersim(*command)
    assert json.loads((tmp_path / "run.json").read_text())["timing_sensitivity"] is None
    assert "chaotic" not in quiet.stdout + _shown_text(tmp_path / "run.html")
    monkeypatch.setattr(timing_sensitivity, "MIN_DELAYED_OPERATIONS", 0)
    monkeypatch.setattr(timing_sensitivity, "MIN_REPORTED_SPREAD", 0.0)
    chaotic = clustersim(*command)
    low, high = json.loads((tmp_path / "run.json").read_text())["timing_sensitivity"]
    assert 1.0 - 1e-11 < low <= 1.0 < high < 1.0 + 1e-11
    assert re.search(r"^chaotic +[+-]0\.00% to \+0\.00%", chaotic.stdout, re.MULTILINE)
    assert "chaotic step" in _shown_text(tmp_path / "run.html")


def _shown_text(page: Path) -> str:
    """The text of a page without its scripts."""
    return re.sub(r"<script.*?</script>", "", page.read_text(), flags=re.DOTALL)


def test_slow_simulation_is_announced_first(
    plan: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A degraded NIC desynchronizes a TP group on a shared network; the task limit is set to zero."""
    monkeypatch.setattr(warnings, "WARN_DESYNC_TP_TASKS", 0.0)
    changes = ["cost.network=shared", "degradations.nics={gpu: 0, bandwidth: 0.5}"]
    run_scenario(plan, changes, Outputs())
    captured = capsys.readouterr()
    assert "out of step" in captured.err and "out of step" in captured.out
    run_scenario(plan, changes, Outputs(table=False))
    assert not capsys.readouterr().err


def test_partial_domain_placement_in_all_commands(clustersim: CommandRunner, plan: Path, tmp_path: Path) -> None:
    overrides = ["--set", "cluster.placement.per_domain=4", "--set", "cost.nccl.NCCL_ALGO=Ring"]
    assert clustersim("check", plan, *overrides).returncode == 0
    done = clustersim("run", plan, *overrides, "--html", "a.html", "--json", "a.json")
    assert (done.returncode, done.stderr) == (0, "")
    assert "placed on 2 of 2 nodes, 4 of the 8 GPUs of each" in done.stdout
    assert "placed on 2 of 2 nodes" in (tmp_path / "a.html").read_text()
    scenario_json = json.loads((tmp_path / "a.json").read_text())["scenario"]
    assert (scenario_json["cluster"]["placement"], scenario_json["cost"]["nccl"]) == (
        {"per_domain": 4},
        {"NCCL_ALGO": "Ring"},
    )
    assert "8 x h100-sxm-80gb, 8 per node, on 2 of 2 nodes" in clustersim("topology", plan, *overrides).stdout


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("cluster.placement.per_domain=9", "cluster.placement.per_domain: 9 ... NVLink domain has 8 GPUs"),
        ("cluster.placement.order=[0-6, 3]", "cluster.placement.order: GPU 3 comes twice; keep one"),
        ("cost.nccl.NCCL_ALGO=Rings", "cost.nccl.NCCL_ALGO: 'rings' ... ring?"),
        ("cost.nccl.NCCL_ALGO=allreduce:PAT", "nothing is left of nccl for all_reduce, which the step needs"),
    ],
)
def test_invalid_placement_and_nccl_settings_are_errors(
    clustersim: CommandRunner, plan: Path, override: str, sentence: str
) -> None:
    done = clustersim("run", plan, "--set", "layout.data=ddp", "--set", override)
    assert done.returncode == 2
    assert parts(sentence).search(" ".join(done.stderr.split()))
