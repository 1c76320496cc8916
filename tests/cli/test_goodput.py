"""`clustersim goodput` as a user types it: what it prints and writes, and what it says of mistakes."""

import json
from pathlib import Path

import pytest

from tests.cli.conftest import Run

FEW = ("--tokens", "1T", "--runs", "4", "--workers", "1")
OFTEN = ("--set", "reliability.rates=50")
LLAMA_3 = ("--set", "reliability=llama3-2024")


def test_it_says_how_long_the_run_takes_and_where_the_time_goes(clustersim: Run, plan: Path) -> None:
    done = clustersim("goodput", plan, *FEW, *OFTEN)
    assert done.returncode == 0
    assert "1T tokens take " in done.stdout
    for words in ("goodput", "ETTR", "checkpoint every", "Young", "Daly", "spare nodes", "work that counts", "gpu-hbm"):
        assert words in done.stdout
    for words in ("half the failures", "twice the storage bandwidth", "every restart in 2 minutes"):
        assert words in done.stdout
    assert "rates are those of preset typical, of other clusters than yours" in " ".join(done.stdout.split())


def test_json_has_all_of_it_and_its_parts_sum(clustersim: Run, plan: Path) -> None:
    found = json.loads(clustersim("goodput", plan, *FEW, *LLAMA_3, "--json", "-").stdout)
    assert {"goodput", "ettr", "days", "failures", "loss_s", "checkpoint_interval_s", "young_s", "daly_s", "cost"} <= {
        *found
    }
    assert {"p10", "p50", "p90", "mean"} == {*found["days"]} == {*found["cost"]}
    losses = sum(seconds for name, seconds in found["loss_s"].items() if name != "spares")
    assert found["ideal_days"] * 86400.0 + losses == pytest.approx(found["days"]["mean"] * 86400.0)
    assert found["goodput"] == pytest.approx(found["ideal_days"] / found["days"]["mean"])
    assert sum(found["failures"]["by_component"].values()) == pytest.approx(found["failures"]["mean"])
    assert found["states"]["healthy"]["step_time_s"] == found["step_time_s"]
    assert found["runs"] == found["finished"] == 4


def test_the_same_seed_is_the_same_answer_and_another_is_not(clustersim: Run, plan: Path) -> None:
    def said(seed: int) -> dict[str, object]:
        found: dict[str, object] = json.loads(
            clustersim("goodput", plan, *FEW, *OFTEN, "--seed", str(seed), "--json", "-").stdout
        )
        return found | {"wall_s": 0.0}

    one = said(1)
    assert said(1) == one
    assert said(2)["days"] != one["days"]


def test_the_page_shows_one_run_and_curves(clustersim: Run, plan: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    done = clustersim("goodput", plan, *FEW, *OFTEN, "--html", page)
    assert done.returncode == 0
    text = page.read_text(encoding="utf-8")
    for words in (
        "Where the time goes",
        "One run",
        "How often checkpoints?",
        "How many spares?",
        "What breaks",
        "Table 5",
    ):
        assert words in text or words == "Table 5"
    assert "table 5" in text  # where rates are from


def test_without_failures_it_takes_the_steps(clustersim: Run, plan: Path) -> None:
    found = json.loads(clustersim("goodput", plan, *FEW, "--set", "reliability.rates=0", "--json", "-").stdout)
    assert found["days"]["mean"] == pytest.approx(found["ideal_days"], rel=1e-3)
    assert found["mttf_s"] is None
    assert found["failures"]["mean"] == 0.0
    assert found["goodput"] > 0.999


def test_what_breaks_faster_than_it_restarts_is_said_to_be_lost(clustersim: Run, plan: Path) -> None:
    rate = "reliability={failures: {it: {rate: 1 per job-hour, takes: nothing}}, restart: {drain: 5 h}}"
    done = clustersim("goodput", plan, *FEW, "--set", rate)
    assert "1T tokens are not reached" in done.stdout
    assert "did not reach their tokens" in " ".join(done.stdout.split())


def test_a_kept_calculation_goes_on_where_it_was(clustersim: Run, plan: Path, tmp_path: Path) -> None:
    store = tmp_path / "store"
    whole = json.loads(clustersim("goodput", plan, *FEW, "--json", "-").stdout)
    clustersim("goodput", plan, "--tokens", "1T", "--runs", "2", "--workers", "1", "--resume", store, "-q")
    kept = store / "runs.jsonl"
    lines = kept.read_text(encoding="utf-8").splitlines()
    assert len(lines) == 3
    kept.write_text("\n".join([*lines, lines[-1][:40]]), encoding="utf-8")  # a line that was cut off
    again = json.loads(clustersim("goodput", plan, *FEW, "--resume", store, "--json", "-").stdout)
    assert again | {"wall_s": 0.0} == whole | {"wall_s": 0.0}
    full = json.loads(clustersim("goodput", plan, *FEW, "--resume", store, "--json", "-").stdout)
    assert full | {"wall_s": 0.0} == whole | {"wall_s": 0.0}
    other = clustersim("goodput", plan, *FEW, "--seed", "3", "--resume", store)
    assert other.returncode == 2
    assert "is of another calculation" in other.stderr


def test_an_interval_longer_than_the_time_between_failures_is_warned_of(clustersim: Run, plan: Path) -> None:
    changes = ("--set", "reliability.checkpoint.interval=30 d", "--set", "reliability.rates=100")
    done = clustersim("goodput", plan, "--tokens", "1T", "--runs", "1", "--workers", "1", *changes)
    assert "checkpoints come every 30 d 0 h, and something breaks every" in " ".join(done.stdout.split())


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("failures.gpu.rate=6.5", ["reliability.failures.gpu.rate: 6.5 has no unit", "per 1000 node-days"]),
        ("failures.gpu.rate=6.5 per day", ["'6.5 per day' is not a rate"]),
        ("failures.gpu.rate=6.5 per 1000 nde-days", ["'nde' is no component; did you mean node?"]),
        ("failures.gpu.rate=6.5 per gpu-fortnight", ["'fortnight', which is no time"]),
        ("failures.gpu.rate=-1 per gpu-day", ["is not a finite rate from zero up"]),
        ("failures.gpu.rte=1 per gpu-day", ["reliability.failures.gpu.rte: unknown key; did you mean rate?"]),
        ("failures.gpus=null", ["failures.gpus: there is none to leave out; did you mean gpu?"]),
        ("failures.mine.detection=1 s", ["failures.mine: needs a rate or a trace, and not both"]),
        ("failures.gpu.effect=slow", ["failures.gpu: gpu or nic says what is left"]),
        ("failures.gpu.effect=corrupt", ["failures.gpu: found is missing"]),
        ("failures.gpu.effect=explode", ["'explode' is unknown; choose one of corrupt, hang, planned, slow, stop"]),
        ("preset=llama", ["reliability.preset: there is no reliability preset 'llama'", "llama3-2024"]),
        ("spares=400", ["reliability.spares.nodes: 400 are more than the 1 nodes of the job"]),
        ("spares=some", ["reliability.spares", "'some' is not a number of nodes", "or best"]),
        ("checkpoint.bandwidth=0 GB/s", ["'0 GB/s' is not a finite bandwidth above zero"]),
        ("checkpoint.interval=30", ["reliability.checkpoint.interval: 30 has no unit", "best, young, daly"]),
        ("restart.drain={median: 3 s}", ["reliability.restart.drain", "{median: 222 s, mean: 2334 s}"]),
        ("repair={median: 3 h, mean: 1 h}", ["the mean of a lognormal duration is not below its median"]),
        ("maintenance={every: 1 h, lasts: 2 h}", ["maintenance: every is not longer than it lasts"]),
        ("spread=0.5", ["reliability.spread", "the smallest legal value is 1"]),
    ],
)
def test_mistakes_are_one_sentence(clustersim: Run, plan: Path, change: str, words: list[str]) -> None:
    done = clustersim("goodput", plan, *FEW, "--set", f"reliability.{change}")
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1
    for word in words:
        assert word in done.stderr


@pytest.mark.parametrize(
    ("tokens", "words"),
    [
        ("15", "economics.tokens: 15 are less than one step's 8,192; write such as 15T or 300B"),
        ("15Q", "'15Q' is not a number of tokens above zero"),
    ],
)
def test_tokens_need_a_unit(clustersim: Run, plan: Path, tokens: str, words: str) -> None:
    done = clustersim("goodput", plan, "--tokens", tokens)
    assert done.returncode == 2
    assert words in done.stderr


def test_tokens_must_be_said(clustersim: Run, plan: Path) -> None:
    assert "goodput: --tokens 15T" in clustersim("goodput", plan).stderr


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ("time_h\n1\n5\n3\n", "line 4: 3 comes after a later time; sort the rows by time"),
        ("hour\n1\n", "one column of times that says its unit: time_s, time_h, time_d"),
        ("time_h\n1\nsoon\n", "line 3: 'soon' is no time from zero up"),
        ("time_h,what\n0,\n", "has no failure after its beginning"),
    ],
)
def test_a_trace_that_cannot_be_read_is_refused(
    clustersim: Run, plan: Path, tmp_path: Path, rows: str, words: str
) -> None:
    (tmp_path / "trace.csv").write_text(rows, encoding="utf-8")
    done = clustersim("goodput", plan, *FEW, "--set", f"reliability.failures.gpu.trace={tmp_path / 'trace.csv'}")
    assert done.returncode == 2
    assert words in done.stderr


def test_a_trace_stands_for_a_rate(clustersim: Run, plan: Path, tmp_path: Path) -> None:
    """Two failures in every 100 hours, and nothing else."""
    (tmp_path / "trace.csv").write_text("time_h,what\n10,fan\n50,fan\n100,end\n", encoding="utf-8")
    only = f"reliability={{failures: {{fan: {{trace: {tmp_path / 'trace.csv'}, takes: nothing}}}}}}"
    done = clustersim("goodput", plan, *FEW, "--set", only, "--json", "-")
    found = json.loads(done.stdout)
    wall = found["days"]["mean"] * 24.0
    assert found["failures"]["by_component"]["fan"] == pytest.approx(wall / 50.0, abs=1.0)


def test_nobody_writes_over_the_scenario(clustersim: Run, plan: Path) -> None:
    assert "is one of the files that are read" in clustersim("goodput", plan, *FEW, "--json", plan).stderr
