"""Collectives of a measured step become rows of a record."""

from collections.abc import Callable
from pathlib import Path

import pytest

from calibrate.command import main
from clustersim.common.dtypes import DType
from clustersim.cost.calibration_record import CalibrationRecord, CollectiveCall
from clustersim.cost.record_file import read_record
from clustersim.program.task import CollectiveType, HostOp
from clustersim.report.export.write_traces import write_kineto_files
from clustersim.scenario import Scenario
from clustersim.simulation import simulate
from tests.interop.synthetic_profiles import GEMM, NCCL, REDUCED, Profile
from tests.report.small_trace import SMALL, simulated

ALONE = ("cost.interference=0", "cost.network=uncontended")


@pytest.fixture
def take_over(tmp_path: Path) -> Callable[..., CalibrationRecord]:
    """Import traces into a record."""

    def run(traces: Path, cluster: str = "dgx-h100") -> CalibrationRecord:
        output = tmp_path / "record.json"
        assert main(["import-kineto", str(traces), "--cluster", cluster, "-o", str(output)]) == 0
        return read_record(output)

    return run


@pytest.fixture
def refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Why an import is refused; nothing is written then."""

    def run(traces: Path, cluster: str = "dgx-h100") -> str:
        output = tmp_path / "none.json"
        assert main(["import-kineto", str(traces), "--cluster", cluster, "-o", str(output)]) == 2
        assert not output.exists()
        error = capsys.readouterr().err
        assert len(error.splitlines()) == 1
        return error

    return run


def two_ranks(folder: Path, first: float, second: float, **changes: object) -> Path:
    """An all-reduce that lasts so many microseconds on each."""
    folder.mkdir(exist_ok=True)
    for rank, lasting in enumerate((first, second)):
        profile = Profile(rank, 2).step(0, 0.0, 100.0).step(1, 100.0, 100.0)
        for begin in (0.0, 100.0):
            profile.kernel(GEMM, begin, begin + 1.0, 90.0)
            profile.kernel(NCCL, begin + 2.0, begin + 10.0, lasting, stream=20, **{**REDUCED, **changes})
        profile.write(folder / f"{rank}.json")
    return folder


@pytest.mark.parametrize("overrides", [(), ("layout.pp=1", "layout.dp=4", "layout.data=zero3")])
def test_rows_of_a_simulated_step_are_what_its_collectives_take(
    tmp_path: Path, take_over: Callable[..., CalibrationRecord], overrides: tuple[str, ...]
) -> None:
    result = simulated(*ALONE, *overrides)
    write_kineto_files(result, tmp_path / "traces", range(8))
    rows = {
        (row.call.collective, row.call.ranks, round(row.call.payload / 2 / row.call.ranks)): row.time.seconds
        for row in take_over(tmp_path / "traces").collectives
    }
    asked = [comm_op for comm_op in result.program.comm_ops if not isinstance(comm_op, HostOp)]
    assert len(asked) > 3
    for exchange in asked:
        size = result.program.groups[exchange.comm_group].members.shape[1]
        found = rows[exchange.collective, size, round(exchange.payload / 2 / size)]
        assert found == pytest.approx(float(result.cost.comm_timing_by_group(exchange).seconds[0]), abs=2e-9)


def test_a_step_with_the_record_of_its_own_trace_takes_as_long(
    tmp_path: Path, take_over: Callable[..., CalibrationRecord]
) -> None:
    result = simulated(*ALONE)
    write_kineto_files(result, tmp_path / "traces", range(8))
    take_over(tmp_path / "traces")
    recorded = (*ALONE, f"cost.record={tmp_path / 'record.json'}")
    again = simulate(Scenario.from_mapping(SMALL, default_name="small", overrides=list(recorded)))
    assert again.step_time == pytest.approx(result.step_time, rel=1e-4)
    assert again.provenance_shares["measured"] > 0.0


def test_the_shortest_of_the_members_kernels_counts(
    tmp_path: Path, take_over: Callable[..., CalibrationRecord]
) -> None:
    record = take_over(two_ranks(tmp_path / "traces", 40.0, 25.0))
    (row,) = record.collectives
    assert row.call == CollectiveCall(CollectiveType.ALL_REDUCE, 2048.0, 2, 1, DType.BF16)
    assert row.time.seconds == pytest.approx(25e-6)
    assert row.time.repetitions == 2
    assert (record.device.accelerator, record.device.name) == ("h100-sxm-80gb", "NVIDIA H100 80GB HBM3")


def test_ranks_that_are_missing_are_said(
    tmp_path: Path, take_over: Callable[..., CalibrationRecord], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = two_ranks(tmp_path / "traces", 40.0, 25.0)
    (folder / "1.json").unlink()
    assert take_over(folder).collectives[0].time.seconds == pytest.approx(40e-6)
    assert "2 of 2 collectives have no traces of some members" in capsys.readouterr().err


def test_nodes_follow_from_ranks(tmp_path: Path, take_over: Callable[..., CalibrationRecord]) -> None:
    group = {"Process Group Ranks": "[0, 8]"}
    record = take_over(two_ranks(tmp_path / "traces", 40.0, 25.0, **group))
    assert (record.collectives[0].call.ranks, record.collectives[0].call.nodes) == (2, 2)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"In msg nelems": 0, "Out msg nelems": 0}, "no payload in the trace: 4 kernels"),
        ({"dtype": "ComplexDouble"}, "no payload in the trace: 4 kernels"),
        ({"Process Group Ranks": "[0, 1, 5, ..., 7]", "Group size": 6}, "members that the trace does not say"),
        ({"Process Group Ranks": "[0, 1, 8]", "Group size": 3}, "groups that lie unevenly on nodes"),
        (
            {"Collective name": "send", "Process Group Ranks": "[0, 1, 2]", "Group size": 3},
            "messages in a group of more than two",
        ),
    ],
)
def test_what_no_row_can_be_made_of_is_left_out_and_said(
    tmp_path: Path, refused: Callable[..., str], changes: dict[str, object], why: str
) -> None:
    error = refused(two_ranks(tmp_path / "traces", 40.0, 25.0, **changes))
    assert "has no collective of a known group and payload" in error
    assert why in error


def test_another_gpu_and_no_trace_are_refused(tmp_path: Path, refused: Callable[..., str]) -> None:
    folder = two_ranks(tmp_path / "traces", 40.0, 25.0)
    assert "ran on NVIDIA H100 80GB HBM3, but dgx-a100 has a100-sxm-80gb" in refused(folder, "dgx-a100")
    assert "there is no cluster 'dgx-h10'" in refused(folder, "dgx-h10")
    assert "cannot be read" in refused(tmp_path / "none.json.gz")
