"""`clustersim search` as a user types it: what it prints and writes, and what it says of mistakes."""

import json
import re
import shlex
from pathlib import Path

import pytest

from tests.cli.conftest import Run

FEW = ("--vary", "layout.tp=1,2,4", "--vary", "layout.data=ddp,zero1", "--fix", "layout.pp=1", "--fix", "schedule=1f1b",
       "--fix", "training.microbatch=1", "--fix", "training.recompute=none",
       "--fix", "layout.sequence_parallel=false")  # fmt: skip


def test_it_says_which_layout_to_take_and_how_to_run_it(clustersim: Run, plan: Path, tmp_path: Path) -> None:
    done = clustersim("search", plan, *FEW, "--set", "training.sequence=2048", "--html", "page.html")
    assert done.returncode == 0
    assert "best layout: " in done.stdout
    assert "against the file's own layout" in done.stdout
    assert re.search(
        r"6 combinations: 0 set aside, \d cannot be among the best .*, \d simulated", " ".join(done.stdout.split())
    )
    (command,) = re.findall(r"^to run it: clustersim (.*)$", done.stdout, re.MULTILINE)
    again = clustersim(*shlex.split(command))
    assert again.returncode == 0
    (told,) = re.findall(r"best layout: ([\d.]+ m?s)", done.stdout)
    assert told in again.stdout
    commands = re.findall(r"<code>clustersim (.*?)</code>", (tmp_path / "page.html").read_text())
    assert command in commands
    assert all("--set training.sequence=2048" in item for item in commands)


def test_json_says_what_every_layout_is_and_why(clustersim: Run, plan: Path) -> None:
    done = clustersim("search", plan, *FEW, "--json", "-", "--top", "3")
    found = json.loads(done.stdout)
    assert found["complete"]
    assert found["given"] == []
    assert found["candidates"] == 6
    assert found["simulated"] + found["bounded"] + sum(found["pruned"].values()) == 6
    assert len(found["best"]) == 3
    times = [item["step_time_s"] for item in found["best"]]
    assert times == sorted(times)
    for element in found["best"]:
        sets = [word for override in element["overrides"] for word in ("--set", override)]
        run = json.loads(clustersim("run", plan, *sets, "--json", "-").stdout)
        assert run["step_time_s"] == element["step_time_s"]
        assert run["mfu"] == element["mfu"]
        assert run["economics"]["cost_per_trillion_tokens"] == element["cost_per_trillion_tokens"]
        low, high = element["step_time_band_s"]
        assert low < element["step_time_s"] < high
    assert set(found["why"]) == {"runner_up", "first_guess"}
    longer = sum(found["why"]["runner_up"].values())
    second = next(entry for place, entry in enumerate(found["best"]) if place != found["preferred"])
    assert longer == pytest.approx(second["step_time_s"] - found["best"][found["preferred"]]["step_time_s"], abs=1e-9)
    assert len(found["sensitivity"]) == 5


def test_a_page_and_a_folder_are_written(clustersim: Run, plan: Path, tmp_path: Path) -> None:
    done = clustersim("search", plan, *FEW, "--html", "page.html", "--resume", "found")
    assert done.returncode == 0
    page = (tmp_path / "page.html").read_text()
    for title in ("The best layouts", "Time against memory", "Which values are fast", "Why this and not that",
                  "Does it stay the best?", "What became of all layouts"):  # fmt: skip
        assert title in page
    assert (tmp_path / "found" / "layouts.jsonl").is_file()
    other = clustersim("search", plan, *FEW, "--set", "training.sequence=512", "--resume", "found")
    assert other.returncode == 2
    assert "is of another search" in other.stderr


def test_sizes_and_clusters_are_compared(clustersim: Run, plan: Path) -> None:
    done = clustersim("search", plan, *FEW, "--gpus", "8,16", "--batch-per-gpu", "--clusters", "dgx-h100,dgx-a100",
                      "--objective", "cost", "--json", "-")  # fmt: skip
    found = json.loads(done.stdout)
    assert [(item["cluster"], item["gpus"]) for item in found["best_of_jobs"]] == [
        ("dgx-h100", 8), ("dgx-h100", 16), ("dgx-a100", 8), ("dgx-a100", 16),
    ]  # fmt: skip
    costs = [element["cost_per_trillion_tokens"] for element in found["best"]]
    assert costs == sorted(costs)
    table = clustersim("search", plan, *FEW, "--gpus", "8,16", "--batch-per-gpu").stdout
    assert "the best on each" in table
    assert "16 GPUs" in table


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--vary", "layout.tpp=1,2"], "layout.tpp: unknown key; did you mean tp"),
        (["--vary", "layout.tp"], "--vary layout.tp: write a dotted key and a value, such as --vary layout.tp=1,2,4"),
        (["--fix", "=2"], "--fix =2: write a dotted key and a value, such as --fix layout.tp=8"),
        (
            ["--vary", "layout.cp=1", "--vary", "layout.cp=2,4"],
            "layout.cp: is given twice; all values go into one: --vary layout.cp=1,2,4",
        ),
        (["--vary", "schedule={interleaved"], "--vary schedule={interleaved: "),
        (["--objective", "speed"], "objective: 'speed' is unknown"),
        (["--gpus", "8,many"], "--gpus 8,many: 'many' is not a number of GPUs; write such as --gpus 4096,8192"),
        (["--clusters", "dgx-h1000"], "dgx-h100"),
        (["--workers", "0"], "--workers"),
        (["--top", "0"], "--top"),
        (["--executor", "slurm://here"], "executor: 'slurm://here' is unknown; local or dask://HOST:PORT fits"),
        (
            ["--fix", "layout.tp=16"],
            "none of 1 layouts is left; most, 1, are set aside for this: degrees do not divide",
        ),
        (["--set", "economics.price_per_gpu_hour=2.49"], "2.49 has no currency"),
        (["--html", "-"], "--html needs the name of a file"),
    ],
)
def test_mistakes_are_one_sentence(clustersim: Run, plan: Path, arguments: list[str], sentence: str) -> None:
    given = arguments if "layout.tp=16" not in arguments else [*arguments, *FEW[4:]]
    if "layout.tp=16" in arguments:
        given += ["--vary", "layout.data=ddp"]
    done = clustersim("search", plan, *given)
    assert done.returncode == 2
    assert sentence in " ".join(done.stderr.split())
    assert "Traceback" not in done.stderr


def test_the_run_with_what_breaks_is_an_objective(clustersim: Run, plan: Path) -> None:
    """Days are more than steps take, the fastest layout is the best of one size, and the answer says how it is run."""
    run = ("--objective", "days", "--set", "economics.tokens=1T", "--set", "reliability.rates=50", "--json", "-")
    found = json.loads(clustersim("search", plan, *FEW, *run).stdout)
    for item in found["best"]:
        ideal = 1e12 / (8 * 1024) * item["step_time_s"] / 86400.0
        assert item["run"]["days"] * item["run"]["goodput"] == pytest.approx(ideal, rel=1e-3)
        assert {"interval", "nodes", "spare_nodes"} <= {*item["run"]}
    assert [element["run"]["days"] for element in found["best"]] == sorted(
        entry["run"]["days"] for entry in found["best"]
    )
    done = clustersim("search", plan, *FEW, "--objective", "run-cost", *run[2:6])
    assert "USD for the run" in done.stdout
    assert "days with what breaks, goodput" in done.stdout


def test_a_run_needs_its_tokens(clustersim: Run, plan: Path) -> None:
    assert "economics.tokens=15T" in clustersim("search", plan, *FEW, "--objective", "days").stderr
