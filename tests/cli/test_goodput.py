"""`clustersim goodput`: printed and written output, and error messages."""

import json
import re
from pathlib import Path

import pytest

from tests.cli.conftest import CommandRunner
from tests.sentences import parts

FEW_RUNS = ("--tokens", "1T", "--runs", "4", "--workers", "1")
FREQUENT_FAILURES = ("--set", "reliability.rates=50")
LLAMA_3 = ("--set", "reliability=llama3-2024")


def test_goodput_prints_duration_and_time_breakdown(clustersim: CommandRunner, plan: Path) -> None:
    done = clustersim("goodput", plan, *FEW_RUNS, *FREQUENT_FAILURES)
    assert done.returncode == 0
    assert "1T tokens take " in done.stdout
    for text in ("goodput", "ETTR", "checkpoint every", "Young", "Daly", "spare nodes", "productive work", "gpu-hbm"):
        assert text in done.stdout
    for text in ("half the failures", "twice the storage bandwidth", "every restart in 2 minutes"):
        assert text in done.stdout
    assert parts("rates ... preset typical ... other clusters").search(" ".join(done.stdout.split()))


def test_goodput_json_losses_sum_to_total(clustersim: CommandRunner, plan: Path) -> None:
    goodput = json.loads(clustersim("goodput", plan, *FEW_RUNS, *LLAMA_3, "--json", "-").stdout)
    assert {"goodput", "ettr", "days", "failures", "loss_s", "checkpoint_interval_s", "young_s", "daly_s", "cost"} <= {
        *goodput
    }
    assert {*goodput["days"]} == {"p5", "p10", "p50", "p90", "p95", "mean"} < {*goodput["cost"]["list"]}
    losses = sum(seconds for name, seconds in goodput["loss_s"].items() if name != "spares")
    assert goodput["ideal_days"] * 86400.0 + losses == pytest.approx(goodput["days"]["mean"] * 86400.0)
    assert goodput["goodput"] == pytest.approx(goodput["ideal_days"] / goodput["days"]["mean"])
    assert sum(goodput["failures"]["by_component"].values()) == pytest.approx(goodput["failures"]["mean"])
    assert goodput["states"]["healthy"]["step_time_s"] == goodput["step_time_s"]
    assert goodput["runs"] == goodput["finished"] == 4


def test_goodput_is_deterministic_per_seed(clustersim: CommandRunner, plan: Path) -> None:
    def goodput_json(seed: int) -> dict[str, object]:
        content: dict[str, object] = json.loads(
            clustersim(
                "goodput", plan, *FEW_RUNS, *FREQUENT_FAILURES, "--runs", "2", "--seed", str(seed), "--json", "-"
            ).stdout
        )
        return content | {"wall_s": 0.0}

    first = goodput_json(1)
    assert goodput_json(1) == first
    assert goodput_json(2)["days"] != first["days"]


def test_the_page_shows_one_run_and_curves(clustersim: CommandRunner, plan: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    done = clustersim("goodput", plan, *FEW_RUNS, *FREQUENT_FAILURES, "--html", page)
    assert done.returncode == 0
    text = page.read_text(encoding="utf-8")
    for title in (
        "Where the time goes",
        "One run",
        "Checkpoint interval",
        "Spare nodes",
        "Failures",
        "Table 5",
    ):
        assert title in text or title == "Table 5"
    assert "table 5" in text  # the source of the failure rates


def test_goodput_without_failures_is_one(clustersim: CommandRunner, plan: Path) -> None:
    goodput = json.loads(clustersim("goodput", plan, *FEW_RUNS, "--set", "reliability.rates=0", "--json", "-").stdout)
    assert goodput["days"]["mean"] == pytest.approx(goodput["ideal_days"], rel=1e-3)
    assert goodput["mttf_s"] is None
    assert goodput["failures"]["mean"] == 0.0
    assert goodput["goodput"] > 0.999


def test_goodput_refuses_a_job_that_does_not_fit_as_run_does(clustersim: CommandRunner, plan: Path) -> None:
    huge = ("--set", "model=llama3-70b", "--set", "cluster.gpus=8")
    done = clustersim("goodput", plan, *FEW_RUNS, *huge, "--json", "-")
    assert done.returncode == clustersim("run", plan, *huge).returncode == 3
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1
    for words in (
        "does not fit in memory",
        "neither a duration nor a cost",
        "GiB on the peak-memory GPU",
        "use more GPUs",
    ):
        assert words in done.stderr


def test_goodput_says_that_a_job_may_not_fit(clustersim: CommandRunner, plan: Path) -> None:
    """70B on 64 A100 with 5 of 80 GiB left had been priced without a word."""
    settings = (
        "model=llama3-70b", "cluster={name: dgx-a100, gpus: 64}", "framework=megatron",
        "layout={tp: 8, pp: 2, dp: 4, sequence_parallel: true, data: zero1}",
        "training={sequence: 12288, global_batch: 8}",
    )  # fmt: skip
    arguments = [argument for setting in settings for argument in ("--set", setting)]
    done = clustersim("goodput", plan, *FEW_RUNS, *arguments, "--json", "-")
    assert done.returncode == 0
    (note,) = (note for note in json.loads(done.stdout)["warnings"] if "fits in memory" in note)
    assert re.search(r"with a probability of \d\d% only", note)
    assert "; --set training.recompute" in note


@pytest.mark.parametrize("columns", [80, 60])
def test_the_table_is_readable_on_a_narrow_terminal(
    clustersim: CommandRunner, plan: Path, monkeypatch: pytest.MonkeyPatch, columns: int
) -> None:
    """No line is wider than the terminal, and explanations get half of it."""
    monkeypatch.setenv("COLUMNS", str(columns))
    lines = clustersim("goodput", plan, *FEW_RUNS, *LLAMA_3).stdout.splitlines()
    assert max(map(len, lines)) <= columns
    (goodput_line,) = (line for line in lines if line.startswith("goodput "))
    assert goodput_line.index("of the wall time") <= 0.6 * columns


def test_unreachable_token_target_is_reported(clustersim: CommandRunner, plan: Path) -> None:
    rate = "reliability={failures: {it: {rate: 1 per job-hour, failure_domain: nothing}}, restart: {drain: 5 h}}"
    done = clustersim("goodput", plan, *FEW_RUNS, "--runs", "2", "--set", rate)
    assert "1T tokens are not reached" in done.stdout
    assert "did not reach their tokens" in " ".join(done.stdout.split())


def test_resume_continues_a_journal(clustersim: CommandRunner, plan: Path, tmp_path: Path) -> None:
    store = tmp_path / "store"
    reference = json.loads(clustersim("goodput", plan, *FEW_RUNS, "--json", "-").stdout)
    clustersim("goodput", plan, "--tokens", "1T", "--runs", "2", "--workers", "1", "--resume", store, "-q")
    journal = store / "runs.jsonl"
    lines = journal.read_text(encoding="utf-8").splitlines()
    assert len(lines) == 3
    journal.write_text("\n".join([*lines, lines[-1][:40]]), encoding="utf-8")  # a truncated line
    resumed = json.loads(clustersim("goodput", plan, *FEW_RUNS, "--resume", store, "--json", "-").stdout)
    assert resumed | {"wall_s": 0.0} == reference | {"wall_s": 0.0}
    completed = json.loads(clustersim("goodput", plan, *FEW_RUNS, "--resume", store, "--json", "-").stdout)
    assert completed | {"wall_s": 0.0} == reference | {"wall_s": 0.0}
    other_seed = clustersim("goodput", plan, *FEW_RUNS, "--seed", "3", "--resume", store)
    assert other_seed.returncode == 2
    assert "is of another calculation" in other_seed.stderr


def test_checkpoint_interval_above_mttf_warns(clustersim: CommandRunner, plan: Path) -> None:
    changes = ("--set", "reliability.checkpoint.interval=30 d", "--set", "reliability.rates=100")
    done = clustersim("goodput", plan, "--tokens", "1T", "--runs", "1", "--workers", "1", *changes)
    assert "checkpoints come every 30 d 0 h, and something breaks every" in " ".join(done.stdout.split())


@pytest.mark.parametrize(
    ("change", "expected_words"),
    [
        ("failures.gpu.rate=6.5", ["reliability.failures.gpu.rate: 6.5 has no unit", "per 1000 node-days"]),
        ("failures.gpu.rate=6.5 per day", ["'6.5 per day' is not a rate"]),
        ("failures.gpu.rate=6.5 per 1000 nde-days", ["'nde' is no component; did you mean node?"]),
        ("failures.gpu.rate=6.5 per gpu-fortnight", ["'fortnight', which is no time"]),
        ("failures.gpu.rate=-1 per gpu-day", ["is not a finite rate from zero up"]),
        ("failures.gpu.rte=1 per gpu-day", ["reliability.failures.gpu.rte: ... rate?"]),
        ("failures.gpus=null", ["failures.gpus: there is none to leave out; did you mean gpu?"]),
        ("failures.mine.detection=1 s", ["failures.mine: needs a rate or a trace, and not both"]),
        ("failures.gpu.effect=slow", ["failures.gpu: gpu or nic says what is left"]),
        ("failures.gpu.effect=corrupt", ["failures.gpu: latent_detection is missing"]),
        ("failures.gpu.effect=explode", ["'explode' ... corrupt, hang, planned, slow, stop"]),
        ("preset=llama", ["reliability.preset: there is no reliability preset 'llama'", "llama3-2024"]),
        ("spares=400", ["reliability.spares.nodes: 400 ... more than the 1 nodes"]),
        ("spares=some", ["reliability.spares", "'some' is not a number of nodes", "or best"]),
        ("checkpoint.bandwidth=0 GB/s", ["'0 GB/s' is not a finite bandwidth above zero"]),
        ("checkpoint.interval=30", ["reliability.checkpoint.interval: 30 has no unit", "best, young, daly"]),
        ("restart.drain={median: 3 s}", ["reliability.restart.drain", "{median: 222 s, mean: 2334 s}"]),
        ("repair={median: 3 h, mean: 1 h}", ["the mean of a lognormal duration is not below its median"]),
        ("maintenance={every: 1 h, lasts: 2 h}", ["maintenance: every is not longer than it lasts"]),
        ("spread=0.5", ["reliability.spread", "the smallest legal value is 1"]),
    ],
)
def test_invalid_reliability_has_a_one_line_error(
    clustersim: CommandRunner, plan: Path, change: str, expected_words: list[str]
) -> None:
    done = clustersim("goodput", plan, *FEW_RUNS, "--set", f"reliability.{change}")
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1
    for word in expected_words:
        assert parts(word).search(done.stderr)


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        ("15", "economics.tokens: 15 ... 8,192 ... 15T or 300B"),
        ("15Q", "'15Q' is not a number of tokens above zero"),
    ],
)
def test_tokens_need_a_unit(clustersim: CommandRunner, plan: Path, tokens: str, message: str) -> None:
    done = clustersim("goodput", plan, "--tokens", tokens)
    assert done.returncode == 2
    assert parts(message).search(done.stderr)


def test_tokens_option_is_required(clustersim: CommandRunner, plan: Path) -> None:
    assert "goodput: --tokens 15T" in clustersim("goodput", plan).stderr


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ("time_h\n1\n5\n3\n", "line 4: 3 comes after a later time; sort the rows by time"),
        ("hour\n1\n", "one column ... unit: time_s, time_h, time_d"),
        ("time_h\n1\nsoon\n", "line 3: 'soon' is no time from zero up"),
        ("time_h,what\n0,\n", "has no failure after its beginning"),
    ],
)
def test_invalid_failure_trace_is_rejected(
    clustersim: CommandRunner, plan: Path, tmp_path: Path, rows: str, message: str
) -> None:
    (tmp_path / "trace.csv").write_text(rows, encoding="utf-8")
    done = clustersim("goodput", plan, *FEW_RUNS, "--set", f"reliability.failures.gpu.trace={tmp_path / 'trace.csv'}")
    assert done.returncode == 2
    assert parts(message).search(done.stderr)


def test_failure_trace_replaces_the_rate(clustersim: CommandRunner, plan: Path, tmp_path: Path) -> None:
    """Two failures per 100 hours, and no others."""
    (tmp_path / "trace.csv").write_text("time_h,what\n10,fan\n50,fan\n100,end\n", encoding="utf-8")
    override = f"reliability={{failures: {{fan: {{trace: {tmp_path / 'trace.csv'}, failure_domain: nothing}}}}}}"
    done = clustersim("goodput", plan, *FEW_RUNS, "--set", override, "--json", "-")
    goodput = json.loads(done.stdout)
    wall_hours = goodput["days"]["mean"] * 24.0
    assert goodput["failures"]["by_component"]["fan"] == pytest.approx(wall_hours / 50.0, abs=1.0)


def test_goodput_never_overwrites_the_scenario(clustersim: CommandRunner, plan: Path) -> None:
    assert "is one of the files that are read" in clustersim("goodput", plan, *FEW_RUNS, "--json", plan).stderr
