"""Output of nccl-tests becomes a record, for all versions of its format; runs with errors are refused.

The files in nccl/ have invented numbers in the form of nccl-tests' own format strings (NVIDIA/nccl-tests:
src/common.cu and src/all_gather.cu of v2.10, src/common.cu of v2.13.9, src/util.cu of v2.19.6).
"""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from calibrate.command import main
from calibrate.nccl_tests.command import read_runs
from clustersim.common.dtypes import DType
from clustersim.cost.calibration_record import CalibrationRecord, CollectiveCall
from clustersim.cost.record_file import read_record
from clustersim.program.task import CollectiveType
from tests.sentences import parts

FILES = Path(__file__).parent / "nccl"
ALL_GATHER, ALL_REDUCE = "all_gather_v2.10_a100.txt", "all_reduce_v2.13_h100_2_nodes.txt"
SEND_RECV, REDUCE_SCATTER, ALL_TO_ALL = "sendrecv_v2.13_h100.txt", "v2.19_h200.txt", "alltoall_v2.19_h200.json"


@pytest.fixture
def import_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., CalibrationRecord]:
    """Import files of nccl/ (or paths) into a record."""

    def run(*arguments: str | Path, output: str = "record.json") -> CalibrationRecord:
        status = main(["import-nccl-tests", *(str(argument) for argument in arguments), "-o", str(tmp_path / output)])
        assert status == 0, capsys.readouterr().err
        return read_record(tmp_path / output)

    return run


@pytest.fixture
def import_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """The error message of a refused import, which writes nothing."""

    def run(*arguments: str | Path) -> str:
        output = tmp_path / "none.json"
        assert main(["import-nccl-tests", *(str(argument) for argument in arguments), "-o", str(output)]) == 2
        assert not output.exists()
        return capsys.readouterr().err

    return run


@pytest.fixture
def edit_file(tmp_path: Path) -> Callable[..., Path]:
    """A copy of a file with text replaced."""

    def write(name: str, *changes: tuple[str, str], output_name: str | None = None) -> Path:
        text = (FILES / name).read_text(encoding="utf-8")
        for old, new in changes:
            assert old in text
            text = text.replace(old, new)
        path = tmp_path / (output_name or name)
        path.write_text(text, encoding="utf-8")
        return path

    return write


def seconds_by_call(record: CalibrationRecord) -> dict[CollectiveCall, float]:
    return {sample.call: sample.time.seconds for sample in record.collectives}


def test_v2_10_table_without_root_column(import_files: Callable[..., CalibrationRecord]) -> None:
    record = import_files(FILES / ALL_GATHER, "--cluster", "dgx-a100")
    assert seconds_by_call(record)[CollectiveCall(CollectiveType.ALL_GATHER, 67108864.0, 8, 1)] == pytest.approx(
        401.2e-6
    )
    assert len(record.collectives) == 5
    assert record.device.accelerator == "a100-sxm-80gb"
    assert record.device.name == "A100-SXM4-80GB"
    sample = record.collectives[0]
    assert (sample.source, sample.time.repetitions) == (f"{ALL_GATHER}, means of 20 iterations", 1), (
        "how far they lie apart is not printed"
    )


def test_ranks_and_nodes_are_read_from_the_rank_lines(import_files: Callable[..., CalibrationRecord]) -> None:
    """Despite mpirun's prefix and an NCCL line between the rows."""
    record = import_files(FILES / ALL_REDUCE, "--cluster", "dgx-h100")
    assert seconds_by_call(record) == {
        CollectiveCall(CollectiveType.ALL_REDUCE, 2.0**20, 16, 2): pytest.approx(121.5e-6),
        CollectiveCall(CollectiveType.ALL_REDUCE, 2.0**23, 16, 2): pytest.approx(189.4e-6),
        CollectiveCall(CollectiveType.ALL_REDUCE, 2.0**26, 16, 2): pytest.approx(508.8e-6),
        CollectiveCall(CollectiveType.ALL_REDUCE, 2.0**29, 16, 2): pytest.approx(2851.0e-6),
    }
    assert record.device.collectives == "nccl 2.19.3"
    assert [(fit.ranks, fit.nodes) for fit in record.collective_fits] == [(16, 2)]


def test_reductions_keep_their_format_and_other_collectives_move_bytes(
    import_files: Callable[..., CalibrationRecord], edit_file: Callable[..., Path], import_error: Callable[..., str]
) -> None:
    low_precision = import_files(edit_file(ALL_REDUCE, ("   float", "bfloat16")), "--cluster", "dgx-h100")
    assert {call.dtype for call in seconds_by_call(low_precision)} == {DType.BF16}
    assert {fit.dtype for fit in low_precision.collective_fits} == {DType.BF16}
    both = import_files(FILES / ALL_REDUCE, "--cluster", "dgx-h100")
    assert {(fit.ranks, fit.dtype) for fit in both.collective_fits} == {(16, DType.BF16), (16, DType.FP32)}
    moved = import_files(edit_file(ALL_GATHER, ("   float", "  double")), "--cluster", "dgx-a100", output="b.json")
    assert {call.dtype for call in seconds_by_call(moved)} == {DType.FP32}
    message = import_error(edit_file(ALL_REDUCE, ("   float", "  double")), "--cluster", "dgx-h100")
    assert parts("line 25: ... 'double' ... -d float or bfloat16").search(message)


NCCL_WARNING = (
    "[2025-07-01 12:00:00] h100-001:4101:4188 [0] misc/ibvwrap.cc:95 NCCL WARN Call to ibv_open_device failed"
)
STDOUT_PREFIX = "[1,0]<stdout>:"


@pytest.mark.parametrize(
    "prefix",
    [
        "",
        "0: ",
        "[prterun-h100-001-4090@1,0]<stdout>:",
        "Tue Jul  1 12:00:00 2025<stdout>:",
        "2025-07-01T12:00:00.123456789Z ",
        "[2025-07-01 12:00:00,123] [1,0]<stdout>:",
        "[0] ",
        "node1: ",
        "h100-001:",
        "[rank0]: ",
        "(worker-0, pid=4101) ",
        "12:00:00.123 h100-001 | ",
    ],
)
def test_table_is_read_with_line_prefixes(
    import_files: Callable[..., CalibrationRecord], edit_file: Callable[..., Path], prefix: str
) -> None:
    expected = seconds_by_call(import_files(FILES / ALL_REDUCE, "--cluster", "dgx-h100"))
    assert (
        seconds_by_call(
            import_files(edit_file(ALL_REDUCE, (STDOUT_PREFIX, prefix)), "--cluster", "dgx-h100", output="b.json")
        )
        == expected
    )


@pytest.mark.parametrize(
    ("begun", "then"),
    [
        ("", ""),
        (f"{STDOUT_PREFIX}    67108864      16777216     float     sum      -1", STDOUT_PREFIX),
        ("    67108864      16777216     float     sum      -1", ""),
    ],
)
def test_nccl_warning_is_reported_and_does_not_end_the_table(
    import_files: Callable[..., CalibrationRecord],
    edit_file: Callable[..., Path],
    capsys: pytest.CaptureFixture[str],
    begun: str,
    then: str,
) -> None:
    """Also in the middle of a row, when NCCL connects ranks lazily, and with an empty line."""
    expected = seconds_by_call(import_files(FILES / ALL_REDUCE, "--cluster", "dgx-h100"))
    line = f"{STDOUT_PREFIX}    67108864      16777216     float     sum      -1    508.8"
    remaining_line = "    508.8" if begun else line
    interrupted = edit_file(
        ALL_REDUCE,
        (line, f"{begun}{NCCL_WARNING}\n{STDOUT_PREFIX}{NCCL_WARNING} 2\n{STDOUT_PREFIX}\n{then}{remaining_line}"),
    )
    assert seconds_by_call(import_files(interrupted, "--cluster", "dgx-h100", output="b.json")) == expected
    assert parts("line 1: NCCL warned 2 times ... Call to ibv_open_device failed\n").search(capsys.readouterr().err)


def test_v2_19_table_with_statistics_and_timestamps(
    import_files: Callable[..., CalibrationRecord],
) -> None:
    """The line of size 0, whose payload is too small to be divided among the ranks, is skipped."""
    record = import_files(FILES / REDUCE_SCATTER, "--cluster", "hgx-h200")
    assert {call.collective for call in seconds_by_call(record)} == {CollectiveType.REDUCE_SCATTER}
    assert [call.payload for call in seconds_by_call(record)] == [512.0, 32768.0, 2097152.0, 134217728.0]
    assert record.device.collectives == "nccl 2.28.7"


def test_json_equals_the_table(import_files: Callable[..., CalibrationRecord]) -> None:
    record = import_files(FILES / ALL_TO_ALL, "--cluster", "hgx-h200")
    assert seconds_by_call(record)[CollectiveCall(CollectiveType.ALL_TO_ALL, 2.0**24, 8, 1)] == pytest.approx(82.42e-6)
    assert record.conditions.date == "2026-07-10"
    assert record.device.collectives == "nccl 2.28.7"


def test_json_of_one_process_with_several_gpus(import_files: Callable[..., CalibrationRecord], tmp_path: Path) -> None:
    content = json.loads((FILES / ALL_TO_ALL).read_text(encoding="utf-8"))
    content["config"]["ngpus"], content["config"]["devices"] = 8, content["config"]["devices"][:1]
    path = tmp_path / "one_process.json"
    path.write_text(json.dumps(content), encoding="utf-8")
    assert {call.ranks for call in seconds_by_call(import_files(path, "--cluster", "hgx-h200"))} == {8}


def test_json_versions_1_to_3_are_read(
    import_files: Callable[..., CalibrationRecord], edit_file: Callable[..., Path]
) -> None:
    for version in (1, 2, 3):
        path = edit_file(ALL_TO_ALL, ('"version": 3', f'"version": {version}'))
        assert len(import_files(path, "--cluster", "hgx-h200", output=f"{version}.json").collectives) == 3


def test_sendrecv_pairs_cross_nodes_if_the_rank_ring_does(
    import_files: Callable[..., CalibrationRecord], edit_file: Callable[..., Path]
) -> None:
    record = import_files(FILES / SEND_RECV, "--cluster", "dgx-h100")
    assert {(call.ranks, call.nodes) for call in seconds_by_call(record)} == {(2, 1)}
    two_nodes = [(f"on   h100-001 device  {gpu} ", f"on   h100-002 device  {gpu} ") for gpu in (4, 5, 6, 7)]
    record = import_files(edit_file(SEND_RECV, *two_nodes), "--cluster", "dgx-h100", output="two.json")
    assert {(call.ranks, call.nodes) for call in seconds_by_call(record)} == {(2, 2)}


def test_in_place_option_selects_in_place_times(import_files: Callable[..., CalibrationRecord]) -> None:
    record = import_files(FILES / ALL_GATHER, "--cluster", "dgx-a100", "--in-place")
    assert seconds_by_call(record)[CollectiveCall(CollectiveType.ALL_GATHER, 67108864.0, 8, 1)] == pytest.approx(
        399.7e-6
    )
    assert "in-place" in record.conditions.method


def test_split_runs_are_recorded_by_group(
    import_files: Callable[..., CalibrationRecord], edit_file: Callable[..., Path]
) -> None:
    """NCCL_TESTS_SPLIT="MOD 8" on two nodes: eight groups of two ranks, one on each node."""
    split = [(f"Rank {rank:2d} Group  0", f"Rank {rank:2d} Group {rank % 8:2d}") for rank in range(16)]
    record = import_files(edit_file(ALL_REDUCE, *split), "--cluster", "dgx-h100")
    assert {(call.ranks, call.nodes) for call in seconds_by_call(record)} == {(2, 2)}


def test_repeated_runs_are_repetitions_of_one_sample(
    import_files: Callable[..., CalibrationRecord], edit_file: Callable[..., Path]
) -> None:
    paths = [
        edit_file(ALL_GATHER, ("401.2", time), output_name=f"all_gather_{time}.txt")
        for time in ("401.2", "405.2", "409.2")
    ]
    record = import_files(*paths, "--cluster", "dgx-a100")
    candidate = next(sample for sample in record.collectives if sample.call.payload == 67108864.0)
    assert candidate.time.seconds == pytest.approx(405.2e-6)
    assert candidate.time.p5 < candidate.time.seconds < candidate.time.p95
    assert candidate.time.repetitions == 3


def test_several_runs_in_one_log(import_files: Callable[..., CalibrationRecord], tmp_path: Path) -> None:
    text = (FILES / REDUCE_SCATTER).read_text(encoding="utf-8")
    path = tmp_path / "all.log"
    path.write_text(text + text.replace("reduce_scatter_perf", "broadcast_perf"), encoding="utf-8")
    record = import_files(path, "--cluster", "hgx-h200")
    assert {call.collective for call in seconds_by_call(record)} == {
        CollectiveType.REDUCE_SCATTER,
        CollectiveType.BROADCAST,
    }


def test_files_are_added_to_an_existing_record(import_files: Callable[..., CalibrationRecord]) -> None:
    import_files(FILES / REDUCE_SCATTER, "--cluster", "hgx-h200")
    record = import_files(FILES / ALL_TO_ALL, "--cluster", "hgx-h200")
    assert {fit.collective for fit in record.collective_fits} == {
        CollectiveType.REDUCE_SCATTER,
        CollectiveType.ALL_TO_ALL,
    }
    assert len(record.collectives) == 7


def test_record_of_another_device_is_not_modified(
    import_files: Callable[..., CalibrationRecord], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    original = import_files(FILES / ALL_TO_ALL, "--cluster", "hgx-h200")
    output = tmp_path / "record.json"
    assert main(["import-nccl-tests", str(FILES / SEND_RECV), "--cluster", "dgx-h100", "-o", str(output)]) == 2
    assert parts("h200-sxm-141gb ... h100-sxm-80gb cannot be merged").search(capsys.readouterr().err)
    assert read_record(output) == original


def test_rank_options_replace_missing_rank_lines(
    import_files: Callable[..., CalibrationRecord], import_error: Callable[..., str], edit_file: Callable[..., Path]
) -> None:
    without_ranks = edit_file(SEND_RECV, ("#  Rank", "#  Rnk"))
    assert parts("lists no GPUs ... --ranks N --nodes N").search(import_error(without_ranks, "--cluster", "dgx-h100"))
    record = import_files(without_ranks, "--cluster", "dgx-h100", "--ranks", "8", "--nodes", "1")
    assert record.device.name == ""
    assert len(record.collectives) == 4


def test_collective_option_replaces_an_uninformative_file_name(
    import_files: Callable[..., CalibrationRecord], import_error: Callable[..., str], edit_file: Callable[..., Path]
) -> None:
    nameless = edit_file(ALL_GATHER, output_name="log.txt")
    assert "add --collective NAME" in import_error(nameless, "--cluster", "dgx-a100")
    record = import_files(nameless, "--cluster", "dgx-a100", "--collective", "all_gather")
    assert {call.collective for call in seconds_by_call(record)} == {CollectiveType.ALL_GATHER}


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--collective", "broadcast"), "is reduce_scatter_perf, not the --collective broadcast"),
        (("--collective", "all_redcue"), "--collective: ... 'all_redcue' ... all_reduce"),
        (("--ranks", "4"), "has 8 ranks, not the --ranks 4"),
        (("--nodes", "2"), "has 1 nodes, not the --nodes 2"),
        (("--cluster", "dgx-h100"), "ran on NVIDIA H200, but dgx-h100 has h100-sxm-80gb"),
        (("--cluster", "dgx-h2000"), "there is no cluster 'dgx-h2000'"),
        (("--cluster", "gb200-nvl72"), "8 ranks on a node, but 4 GPUs in gb200-nvl72"),
    ],
)
def test_options_that_contradict_the_log_are_refused(
    import_error: Callable[..., str], arguments: tuple[str, ...], sentence: str
) -> None:
    assert parts(sentence).search(import_error(FILES / REDUCE_SCATTER, "--cluster", "hgx-h200", *arguments))


@pytest.mark.parametrize(
    ("name", "change", "sentence"),
    [
        (ALL_REDUCE, ("247.31      0", "247.31     12"), "12 wrong values at size 67,108,864 B, count 16,777,216"),
        (ALL_REDUCE, ("values : 0 OK", "values : 3 FAILED"), "line 1: the run found 3 values out of bounds"),
        (ALL_REDUCE, ("NCCL version", "h100: Test NCCL failure common.cu:1005"), "line 20: the run had an error"),
        (ALL_REDUCE, ("# Avg bus bandwidth", "Killed"), "line 33: the run that starts in line 1 has no"),
        (ALL_REDUCE, ("     -1    508.8  131.90", "     -1"), "line 28: 11 values under 13 columns"),
        (ALL_REDUCE, ("508.8", "5o8.8"), "line 28: '5o8.8' is not a number"),
        (ALL_REDUCE, ("16777216 ", "1677721b "), "line 28: '1677721b' is not a number of bytes or elements"),
        (ALL_REDUCE, ("508.8", "0.000"), "line 28: there is no out-of-place time above zero"),
        (ALL_REDUCE, ("#       size ", "#       sice "), "line 1: the run has no table"),
        (ALL_REDUCE, ("     time ", "  cputime "), "line 23: cputime is what launching takes"),
        (ALL_REDUCE, ("   time ", "   tine "), "line 23: 0 columns are called time, not 2"),
        (ALL_REDUCE, (" #wrong     time", " #wron      time"), "line 23: 1 columns are called #wrong, not 2"),
        (ALL_REDUCE, ("16777216 ", "1677721\u00b2 "), "line 28: '1677721\u00b2' is not a number of bytes"),
        (ALL_REDUCE, ("# nThread", "# nTread"), "has no run of nccl-tests"),
        (ALL_REDUCE, ("h100-002 device  7", "h100-001 device  8"), "7 to 9 ranks on a node"),
        (ALL_REDUCE, ("2 Group  0", "2 Group  1"), "groups differ, 2 ranks on 2 nodes ... 14 ranks on 2 nodes"),
        (ALL_REDUCE, ("HBM3\n[1,0]<stdout>:NCCL", "HBM2\n[1,0]<stdout>:NCCL"), "HBM2, but NVIDIA H100 80GB HBM3"),
        (REDUCE_SCATTER, ("reduce_scatter_perf", "alltoallv_perf"), "alltoallv_perf tests nothing that clustersim has"),
    ],
)  # fmt: skip
def test_untrustworthy_table_is_refused_with_its_line(
    import_error: Callable[..., str], edit_file: Callable[..., Path], name: str, change: tuple[str, str], sentence: str
) -> None:
    message = import_error(edit_file(name, change), "--cluster", "dgx-h100" if name == ALL_REDUCE else "hgx-h200")
    assert parts(sentence).search(message)
    assert message.startswith("error: ")
    assert message.count("\n") == 1


def _remove_out_of_bounds(content: dict[str, Any]) -> None:
    del content["out_of_bounds"]


def _add_wrong_values(content: dict[str, Any]) -> None:
    content["results"][1]["out_of_place"]["nwrong"] = 5.0


def _replace_time_by_cpu_time(content: dict[str, Any]) -> None:
    content["results"][1]["in_place"]["cpu_time"] = content["results"][1]["in_place"].pop("time")


def _remove_first_result(content: dict[str, Any]) -> None:
    content["results"][0]["out_of_place"] = None


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (_remove_out_of_bounds, "out_of_bounds: is missing, so the run broke off"),
        (_add_wrong_values, "results[1]: 5 wrong values at size 16,777,216 B"),
        (_replace_time_by_cpu_time, "results[1]: cpu_time is what launching takes"),
        (_remove_first_result, "results[0]: there is no out-of-place time above zero"),
        (lambda content: content.update(version=4), "version is 4"),
        (lambda content: content.update(errors=["unhandled system error"]), "errors: the run had an error"),
        (lambda content: content["out_of_bounds"].update(count=2), "the run found 2 values out of bounds"),
        (lambda content: content["results"][2].pop("size"), "results[2].size: "),
        (lambda content: content.update(results=[]), "no size is above 0 bytes"),
    ],
)
def test_untrustworthy_json_is_refused_with_its_key(
    import_error: Callable[..., str], tmp_path: Path, change: Callable[[dict[str, Any]], object], sentence: str
) -> None:
    content = json.loads((FILES / ALL_TO_ALL).read_text(encoding="utf-8"))
    change(content)
    path = tmp_path / "alltoall.json"
    path.write_text(json.dumps(content), encoding="utf-8")
    assert sentence in import_error(path, "--cluster", "hgx-h200")


def test_unreadable_files_are_refused(import_error: Callable[..., str], tmp_path: Path) -> None:
    path = tmp_path / "all_reduce.json"
    path.write_text((FILES / ALL_TO_ALL).read_text(encoding="utf-8")[:900], encoding="utf-8")
    assert "is not valid JSON, or truncated" in import_error(path, "--cluster", "hgx-h200")
    path.write_text(" \n", encoding="utf-8")
    assert "is empty" in import_error(path, "--cluster", "hgx-h200")
    path.write_bytes(b"\xff\xfe\x00")
    assert "not UTF-8" in import_error(path, "--cluster", "hgx-h200")
    assert "cannot be read" in import_error(tmp_path / "absent.txt", "--cluster", "hgx-h200")


def test_single_rank_run_is_refused(import_error: Callable[..., str], edit_file: Callable[..., Path]) -> None:
    text = (FILES / SEND_RECV).read_text(encoding="utf-8")
    other_lines = re.findall(r"#  Rank  [1-7].*\n", text)
    single_rank = edit_file(SEND_RECV, *((line, "") for line in other_lines))
    assert "1 ranks on 1 nodes are not two or more" in import_error(single_rank, "--cluster", "dgx-h100")


def test_importing_a_file_twice_changes_nothing(import_files: Callable[..., CalibrationRecord]) -> None:
    first = import_files(FILES / ALL_TO_ALL, "--cluster", "hgx-h200")
    assert import_files(FILES / ALL_TO_ALL, "--cluster", "hgx-h200") == first


def test_samples_have_their_file_location() -> None:
    (run,) = read_runs(FILES / REDUCE_SCATTER)
    assert run.samples[1].location.endswith("v2.19_h200.txt: line 20")
    assert len(run.gpus) == 8
