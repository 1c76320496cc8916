"""`clustersim validate` on small tables and on some packaged cases."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from clustersim import Scenario, simulate
from clustersim.validation.cases import PUBLISHED_FOLDER
from tests.cli.conftest import CommandRunner
from tests.sentences import parts
from tests.validation.sample_cases import step_row, write_rows

KORTH_CASE = "korth-T5-22B-present"
SKIPPED_CASE = "card-gpt-oss-20b-peft-H100-1"  # its batch size is not stated
STATISTICS = {"n", "skipped", "mape", "median_ape", "bias", "worst", "covered"}


@pytest.fixture
def table(tmp_path: Path) -> Path:
    """Two predictable cases of two sources, an invalid layout, and a non-numeric cell."""
    table_rows = [
        step_row(case_id="one"),
        step_row(case_id="two", tp="1", dp="4", source="somebody"),
        step_row(case_id="impossible", tp="3"),
        step_row(case_id="words", step_time_s="fast"),
    ]
    return write_rows(tmp_path / "mine.csv", *table_rows)


def parse_strict_json(stdout: str) -> Any:
    """Printed JSON, without NaN."""

    def reject_constant(constant: str) -> None:
        raise ValueError(constant)

    return json.loads(stdout, parse_constant=reject_constant)


def test_user_table_is_predicted_with_skip_reasons(clustersim: CommandRunner, table: Path) -> None:
    done = clustersim("validate", "steps", table, "--json", "-")
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    report = parse_strict_json(done.stdout)
    assert report["kind"] == "steps"
    assert report["overall"]["n"] == 2
    assert report["overall"]["skipped"] == 2
    assert {name: statistics["n"] for name, statistics in report["by_source"].items()} == {"nobody": 1, "somebody": 1}
    assert set(report["overall"]) == STATISTICS
    cases = {case["case_id"]: case for case in report["cases"]}
    for name in ("one", "two"):
        assert cases[name]["error"] == pytest.approx(cases[name]["predicted"] / cases[name]["measured"] - 1)
        assert cases[name]["skipped_reason"] is None
    assert "tp 3 x cp 1 x pp 2 x dp 2 = 12 ranks" in cases["impossible"]["skipped_reason"]
    assert cases["impossible"]["predicted"] is None
    assert "'fast' is not a number" in cases["words"]["skipped_reason"]
    assert cases["words"]["measured"] is None
    assert [cases[name]["fits"] for name in ("one", "two", "impossible", "words")] == [True, True, None, None]
    assert report["ran_but_does_not_fit"] == []
    errors = [abs(cases[name]["error"]) for name in ("one", "two")]
    assert report["overall"]["mape"] == pytest.approx(sum(errors) / 2)
    assert report["macro"]["mape"] == pytest.approx(sum(errors) / 2)


def test_validate_prints_tables_and_writes_files(clustersim: CommandRunner, table: Path, tmp_path: Path) -> None:
    done = clustersim("validate", "steps", table, "--json", "out.json", "--html", "page.html")
    assert done.returncode == 0, done.stderr
    assert "ran, but would not fit in memory as predicted: 0 of 2 runs" in done.stdout
    for expected in ("nobody", "somebody", "all cases", "macro mean, 2 sources", "by gpu", "skipped", "coverage"):
        assert expected in done.stdout
    assert "wrote page.html" in done.stdout
    assert parse_strict_json((tmp_path / "out.json").read_text())["overall"]["n"] == 2
    page = (tmp_path / "page.html").read_text()
    assert "impossible" in page
    assert "https://" not in page.split("<script>")[0]


def test_quiet_prints_nothing(clustersim: CommandRunner, table: Path) -> None:
    done = clustersim("validate", "steps", table, "--quiet")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_only_selects_cases_by_id(clustersim: CommandRunner) -> None:
    done = clustersim("validate", "steps", "--only", KORTH_CASE, "--json", "-")
    assert [case["case_id"] for case in parse_strict_json(done.stdout)["cases"]] == [KORTH_CASE]


def test_simulated_reference_is_not_labelled_measured(clustersim: CommandRunner) -> None:
    """The single-node table of vTrain contains its own predictions."""
    shown = clustersim("validate", "show", "vtrain-single-1000").stdout
    assert "  simulated  212.6 ms" in shown
    assert "  step_time_origin simulated by vTrain" in shown
    assert "measured" not in shown[shown.rindex("vtrain-single-1000") :]
    listed = clustersim("validate", "steps", "--only", "vtrain-single-1000").stdout
    assert "not measured: simulated, vtrain" in " ".join(listed.split())
    assert "212.6 ms" in listed
    assert "coverage" not in listed


def test_validate_without_kind_covers_all_kinds(clustersim: CommandRunner) -> None:
    done = clustersim("validate", "--only", KORTH_CASE, "--json", "-")
    assert done.returncode == 0, done.stderr
    report = parse_strict_json(done.stdout)
    assert report["overall"]["n"] == 1
    for kind in ("memory", "collectives", "kernels"):
        assert report[kind]["kind"] == kind
        assert set(report[kind]["overall"]) == STATISTICS
    assert set(report) >= {"by_source", "by_factor", "macro", "subsets", "coverage", "cases", "layouts"}


def test_show_prints_the_predicted_scenario(clustersim: CommandRunner, tmp_path: Path) -> None:
    done = clustersim("validate", "show", KORTH_CASE)
    assert done.returncode == 0, done.stderr
    text, _, comparison = done.stdout.partition("\n\n")
    (tmp_path / "shown.yaml").write_text(text)
    result = simulate(Scenario.load(tmp_path / "shown.yaml"))
    case_json = parse_strict_json(clustersim("validate", "show", KORTH_CASE, "--json", "-").stdout)
    assert case_json["predicted"] == pytest.approx(result.step_time)
    assert yaml.safe_load(text) == case_json["scenario"]
    for expected in ("step time", "measured", "predicted", "error", "korthikanti-2022", "critical path"):
        assert expected in comparison


def test_show_skipped_case_with_the_reason(clustersim: CommandRunner) -> None:
    done = clustersim("validate", "show", SKIPPED_CASE)
    assert done.returncode == 0
    assert "skipped" in done.stdout
    rejected = clustersim("validate", "show", SKIPPED_CASE, "--html", "page.html")
    assert rejected.returncode == 2
    assert "no prediction to draw" in rejected.stderr


@pytest.mark.parametrize("kind", ["memory", "collectives", "kernels"])
def test_packaged_tables_work_as_user_tables(clustersim: CommandRunner, tmp_path: Path, kind: str) -> None:
    """The header and first lines of each packaged table, as a user's file."""
    lines = (PUBLISHED_FOLDER / f"{kind}.csv").read_text().splitlines(keepends=True)[:4]
    (tmp_path / "theirs.csv").write_text("".join(lines))
    done = clustersim("validate", kind, "theirs.csv", "--json", "-")
    assert done.returncode == 0, done.stderr
    report = parse_strict_json(done.stdout)
    assert report["kind"] == kind
    assert len(report["cases"]) == 3
    assert report["overall"]["n"] + report["overall"]["skipped"] == 3
    name = report["cases"][0]["case_id"]
    shown = clustersim("validate", "show", name)
    assert shown.returncode == 0, shown.stderr
    assert name in shown.stdout
    for kind_arguments in ((), (kind,)):
        user_output = clustersim("validate", "show", *kind_arguments, "theirs.csv", name)
        assert user_output.stdout
        assert user_output.stdout in shown.stdout  # the packaged case may have more table rows than the first three


def test_show_case_of_a_user_file(clustersim: CommandRunner, table: Path) -> None:
    """With the prediction that `validate` gives for the file."""
    listed = {
        case["case_id"]: case
        for case in parse_strict_json(clustersim("validate", "steps", table, "--json", "-").stdout)["cases"]
    }
    case_json = parse_strict_json(clustersim("validate", "show", table, "two", "--json", "-").stdout)
    assert case_json["predicted"] == listed["two"]["predicted"]
    assert case_json["scenario"]["layout"]["dp"] == 4


def test_ambiguous_table_needs_a_kind(clustersim: CommandRunner, tmp_path: Path) -> None:
    """Step time and memory of the same runs in one file."""
    ambiguous_row = step_row(case_id="both", quantity="peak_allocated", rank="max", bytes="2e10", model="somebody's")
    write_rows(tmp_path / "both.csv", ambiguous_row)
    rejected = clustersim("validate", "show", "both.csv", "both")
    assert rejected.returncode == 2
    assert parts("steps or memory ... clustersim validate show steps both.csv").search(rejected.stderr)
    assert "18.63 GiB" in clustersim("validate", "show", "memory", "both.csv", "both").stdout  # 2e10 bytes


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("stps", "mine.csv"), "did you mean steps?"),
        (("mine.csv",), "clustersim validate steps mine.csv"),
        (("steps", "mine.csv", "more"), "not also 'more'"),
        (("steps", "none.csv"), "none.csv: cannot be read"),
        (("steps", "."), "cannot be read"),
        (("show",), "needs the id of one case"),
        (("show", "korth-T5-22B-presen"), f"did you mean {KORTH_CASE}"),
        (("show", "?"), "such as"),
        (("show", KORTH_CASE, "--only", "x"), "takes one id"),
        (("show", "mine.csv"), "cases ... clustersim validate show mine.csv CASE_ID"),
        (("show", "one", "mine.csv"), "file comes first ... clustersim validate show mine.csv one"),
        (("show", "mine.csv", "ones"), "mine.csv: has no case 'ones'; did you mean one?"),
        (("show", "mine.csv", "?"), "clustersim validate steps mine.csv --json - lists them"),
        (("show", "none.csv", "one"), "none.csv: cannot be read"),
        (("show", "step", "mine.csv", "one"), "there is no such kind; did you mean steps?"),
        (("show", "memory", "mine.csv", "one"), "mine.csv: missing columns model, quantity, rank, bytes"),
        (("show", "mine.csv", "one", "--json", "mine.csv"), "is one of the files that are read"),
        (("steps", "mine.csv", "--only", "nowhere"), "no case id contains it"),
        (("steps", "mine.csv", "--json", "mine.csv"), "is one of the files that are read"),
        (("steps", "mine.csv", "--html", "mine.csv"), "is one of the files that are read"),
        (("steps", "mine.csv", "--json", "none/out.json"), "there is no directory"),
        (("steps", "mine.csv", "--html", "-"), "needs the name of a file"),
        (("steps", "mine.csv", "--json", "same", "--html", "same"), "need different files"),
        (("steps", "mine.csv", "--workers", "0"), "--workers"),
    ],
)
def test_invalid_validate_has_a_one_line_error(
    clustersim: CommandRunner, table: Path, arguments: tuple[str, ...], message: str
) -> None:
    before = table.read_bytes()
    done = clustersim("validate", *arguments)
    assert done.returncode == 2
    assert parts(message).search(done.stderr)
    assert done.stdout == ""
    assert table.read_bytes() == before


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "missing columns case_id"),
        (b"case_id,source\nx,y\n", "missing columns gpu"),
        (bytes(range(256)), "not UTF-8 text"),
        (b'"', "is not a CSV table"),
    ],
)
@pytest.mark.parametrize("kind", ["steps", "memory", "collectives", "kernels"])
def test_broken_table_has_a_one_line_error(
    clustersim: CommandRunner, tmp_path: Path, kind: str, content: bytes, message: str
) -> None:
    (tmp_path / "broken.csv").write_bytes(content)
    done = clustersim("validate", kind, "broken.csv")
    assert done.returncode == 2
    assert "broken.csv" in done.stderr
    assert (message if kind == "steps" else message.split(" col")[0]) in done.stderr


def test_fp8_over_bf16_speedup_pairs(clustersim: CommandRunner, tmp_path: Path) -> None:
    """The ratios of the measured and of the predicted step times."""
    hopper = {"gpu": "h100-sxm-80gb", "year": "2024"}
    bf16_row, fp8_row = step_row(**hopper), step_row(**hopper, case_id="in-fp8", precision="fp8", step_time_s="0.08")
    table = write_rows(tmp_path / "both.csv", bf16_row, fp8_row)
    done = clustersim("validate", "steps", str(table), "--json", str(tmp_path / "both.json"))
    assert "speed-up over bf16" in done.stdout
    report = json.loads((tmp_path / "both.json").read_text())
    (pair,) = report["pairs"]["formats"]["list"]
    first, second = report["cases"]
    assert (pair["first"], pair["second"]) == ("made-up", "in-fp8")
    assert pair["measured"] == pytest.approx(0.1 / 0.08)
    assert pair["predicted"] == pytest.approx(first["predicted"] / second["predicted"])
    assert report["coverage"]["dense in low precision, quality A and B"] == {
        "predicted": 1,
        "expressible": 1,
        "share": 1.0,
    }
