"""`clustersim search`: printed and written output, and error messages."""

import json
import re
import shlex
from pathlib import Path

import pytest

from tests.cli.conftest import CommandRunner
from tests.sentences import parts

SMALL_SPACE = (
    "--vary",
    "layout.tp=1,2,4",
    "--vary",
    "layout.data=ddp,zero1",
    "--fix",
    "layout.pp=1",
    "--fix",
    "schedule=1f1b",
    "--fix",
    "training.microbatch=1",
    "--fix",
    "training.recompute=none",
    "--fix",
    "layout.sequence_parallel=false",
)


def test_search_prints_best_layout_and_run_command(clustersim: CommandRunner, plan: Path, tmp_path: Path) -> None:
    done = clustersim("search", plan, *SMALL_SPACE, "--set", "training.sequence=2048", "--html", "page.html")
    assert done.returncode == 0
    assert "best layout: " in done.stdout
    assert "against the file's own layout" in done.stdout
    assert re.search(
        r"6 combinations: 0 pruned, \d excluded by their bounds, \d simulated", " ".join(done.stdout.split())
    )
    (command,) = re.findall(r"^to run it: clustersim (.*)$", done.stdout, re.MULTILINE)
    rerun = clustersim(*shlex.split(command))
    assert rerun.returncode == 0
    (best_time,) = re.findall(r"best layout: ([\d.]+ m?s)", done.stdout)
    assert best_time in rerun.stdout
    commands = re.findall(r"<code>clustersim (.*?)</code>", (tmp_path / "page.html").read_text())
    assert command in commands
    assert all("--set training.sequence=2048" in printed_command for printed_command in commands)


def test_search_json(clustersim: CommandRunner, plan: Path) -> None:
    done = clustersim("search", plan, *SMALL_SPACE, "--json", "-", "--top", "3")
    search = json.loads(done.stdout)
    assert search["complete"]
    assert search["base_overrides"] == []
    assert search["candidates"] == 6
    assert search["simulated"] + search["bounded"] + sum(search["pruned"].values()) == 6
    assert len(search["best"]) == 3
    times = [layout["step_time_s"] for layout in search["best"]]
    assert times == sorted(times)
    for layout in search["best"]:
        sets = [word for override in layout["overrides"] for word in ("--set", override)]
        run = json.loads(clustersim("run", plan, *sets, "--json", "-").stdout)
        assert run["step_time_s"] == layout["step_time_s"]
        assert run["mfu"] == layout["mfu"]
        assert run["economics"]["cost_per_trillion_tokens"] == layout["cost_per_trillion_tokens"]
        low, high = layout["step_time_interval_s"]
        assert low < layout["step_time_s"] < high
    assert set(search["category_differences_s"]) == {"runner_up", "first_guess"}
    slowdown_seconds = sum(search["category_differences_s"]["runner_up"].values())
    second = next(layout for index, layout in enumerate(search["best"]) if index != search["preferred"])
    assert slowdown_seconds == pytest.approx(
        second["step_time_s"] - search["best"][search["preferred"]]["step_time_s"], abs=1e-9
    )
    assert len(search["sensitivity"]) == 5


def test_search_writes_page_and_journal(clustersim: CommandRunner, plan: Path, tmp_path: Path) -> None:
    done = clustersim("search", plan, *SMALL_SPACE, "--html", "page.html", "--resume", "found")
    assert done.returncode == 0
    page = (tmp_path / "page.html").read_text()
    for title in ("The best layouts", "Time against memory", "Which values are fast", "Comparison with alternatives",
                  "Sensitivity of the ranking", "Pruned, bounded and simulated layouts"):  # fmt: skip
        assert title in page
    assert (tmp_path / "found" / "layouts.jsonl").is_file()
    other_search = clustersim("search", plan, *SMALL_SPACE, "--set", "training.sequence=512", "--resume", "found")
    assert other_search.returncode == 2
    assert "is of another search" in other_search.stderr


def test_search_over_sizes_and_clusters(clustersim: CommandRunner, plan: Path) -> None:
    done = clustersim(
        "search",
        plan,
        *SMALL_SPACE,
        "--gpus",
        "8,16",
        "--batch-per-gpu",
        "--clusters",
        "dgx-h100,dgx-a100",
        "--objective",
        "cost",
        "--json",
        "-",
    )
    search = json.loads(done.stdout)
    assert [(best["cluster"], best["gpus"]) for best in search["best_of_jobs"]] == [
        ("dgx-h100", 8), ("dgx-h100", 16), ("dgx-a100", 8), ("dgx-a100", 16),
    ]  # fmt: skip
    costs = [best["cost_per_trillion_tokens"] for best in search["best"]]
    assert costs == sorted(costs)
    table = clustersim("search", plan, *SMALL_SPACE, "--gpus", "8,16", "--batch-per-gpu").stdout
    assert "the best on each" in table
    assert "16 GPUs" in table


def test_impossible_size_is_set_aside_and_the_others_are_searched(clustersim: CommandRunner, plan: Path) -> None:
    done = clustersim("search", plan, *SMALL_SPACE, "--gpus", "8,12")
    assert done.returncode == 0
    output = " ".join(done.stdout.split())
    assert "12 GPUs" in output
    assert "not a multiple of the 8 per node" in output
    assert "best layout: " in output


def test_quiet_search_prints_the_choice_only(
    clustersim: CommandRunner, plan: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("clustersim.cli.progress.LINE_INTERVAL_SECONDS", 0.001)
    loud, quiet = (clustersim("search", plan, *SMALL_SPACE, "--html", "page.html", *more) for more in ((), ("-q",)))
    assert "bounding step times" in loud.stderr
    assert quiet.stderr == ""
    assert "best layout: " in quiet.stdout
    assert "to run it: " in quiet.stdout
    for words in ("90% interval", "combinations", "runner-up", "wrote"):
        assert words in loud.stdout
        assert words not in quiet.stdout


def test_headroom_is_stated_and_can_be_waived(clustersim: CommandRunner, plan: Path) -> None:
    found = json.loads(clustersim("search", plan, *SMALL_SPACE, "--json", "-").stdout)
    for layout in found["best"]:
        assert layout["leaves_headroom"]
        assert layout["memory_headroom_bytes"] / layout["peak_memory_bytes"] >= layout["required_headroom"] >= 0.05
        assert 0.8 <= layout["fit_probability"] < 1.0
        sets = [word for override in layout["overrides"] for word in ("--set", override)]
        run = json.loads(clustersim("run", plan, *sets, "--json", "-").stdout)
        assert run["fit_probability"] == layout["fit_probability"]
        assert f"(probability {int(100 * layout['fit_probability'])}%)" in clustersim("check", plan, *sets).stdout
    for text, share in (("0", 0.0), ("0.25", 0.25), ("25%", 0.25)):
        waived = json.loads(clustersim("search", plan, *SMALL_SPACE, "--headroom", text, "--json", "-").stdout)
        assert {layout["required_headroom"] for layout in waived["best"]} == {share}
    assert "unsafe" in clustersim("search", plan, *SMALL_SPACE, "--headroom", "99.9%").stdout


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--headroom", "much"], "--headroom much: ... --headroom 10%"),
        (["--headroom", "100%"], "--headroom 100%: is no share of a device"),
        (["--vary", "layout.tpp=1,2"], "layout.tpp: unknown key; did you mean tp"),
        (["--vary", "layout.tp"], "--vary layout.tp: ... a value ... --vary layout.tp=1,2,4"),
        (["--fix", "=2"], "--fix =2: ... key ... --fix layout.tp=8"),
        (["--vary", "layout.cp=1", "--vary", "layout.cp=2,4"], "layout.cp: ... twice ... --vary layout.cp=1,2,4"),
        (["--vary", "schedule={interleaved"], "--vary schedule={interleaved: "),
        (["--objective", "speed"], "objective: 'speed' is unknown"),
        (["--gpus", "8,many"], "--gpus 8,many: 'many' ... --gpus 4096,8192"),
        (["--clusters", "dgx-h1000"], "dgx-h100"),
        (["--workers", "0"], "--workers"),
        (["--top", "0"], "--top"),
        (["--executor", "slurm://here"], "executor: 'slurm://here' ... local or dask://HOST:PORT"),
        (["--fix", "layout.tp=16"], "none of 1 layouts ... 1 ... pruned ... degrees do not divide"),
        (["--set", "economics.price_per_gpu_hour=2.49"], "2.49 has no currency"),
        (["--html", "-"], "--html needs the name of a file"),
    ],
)
def test_invalid_search_has_a_one_line_error(
    clustersim: CommandRunner, plan: Path, arguments: list[str], sentence: str
) -> None:
    options = arguments if "layout.tp=16" not in arguments else [*arguments, *SMALL_SPACE[4:]]
    if "layout.tp=16" in arguments:
        options += ["--vary", "layout.data=ddp"]
    done = clustersim("search", plan, *options)
    assert done.returncode == 2
    assert parts(sentence).search(" ".join(done.stderr.split()))
    assert "Traceback" not in done.stderr


def test_run_objectives_include_failures(clustersim: CommandRunner, plan: Path) -> None:
    """With failures the run takes more days than its steps; the output contains the settings of the run."""
    run = ("--objective", "days", "--set", "economics.tokens=1T", "--set", "reliability.rates=50", "--json", "-")
    search = json.loads(clustersim("search", plan, *SMALL_SPACE, *run).stdout)
    for layout in search["best"]:
        ideal = 1e12 / (8 * 1024) * layout["step_time_s"] / 86400.0
        assert layout["run"]["days"] * layout["run"]["goodput"] == pytest.approx(ideal, rel=1e-3)
        assert {"interval", "nodes", "spare_nodes"} <= {*layout["run"]}
    assert [layout["run"]["days"] for layout in search["best"]] == sorted(
        layout["run"]["days"] for layout in search["best"]
    )
    done = clustersim("search", plan, *SMALL_SPACE, "--objective", "run-cost", *run[2:6])
    assert "USD (list price) for the run" in done.stdout
    assert "days with failures, goodput" in done.stdout


def test_run_objectives_need_tokens(clustersim: CommandRunner, plan: Path) -> None:
    assert "economics.tokens=15T" in clustersim("search", plan, *SMALL_SPACE, "--objective", "days").stderr
