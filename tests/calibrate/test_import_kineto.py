"""Collectives of a profiled step become samples of a record."""

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
from tests.interop.synthetic_profiles import ALL_REDUCE_ARGS, GEMM, NCCL, SyntheticProfile
from tests.interop.test_host_kernels import FIRST, gloo, operator, write_trace
from tests.report.small_trace import SMALL_MAPPING, simulated

UNCONTENDED = ("cost.interference=0", "cost.network=uncontended", "training.attention=flash")
"""With the library that records are taken to have timed."""


@pytest.fixture
def import_traces(tmp_path: Path) -> Callable[..., CalibrationRecord]:
    """Import traces into a record."""

    def run(traces: Path, cluster: str = "dgx-h100") -> CalibrationRecord:
        output = tmp_path / "record.json"
        assert main(["import-kineto", str(traces), "--cluster", cluster, "-o", str(output)]) == 0
        return read_record(output)

    return run


@pytest.fixture
def import_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """The error message of a refused import, which writes nothing."""

    def run(traces: Path, cluster: str = "dgx-h100") -> str:
        output = tmp_path / "none.json"
        assert main(["import-kineto", str(traces), "--cluster", cluster, "-o", str(output)]) == 2
        assert not output.exists()
        error = capsys.readouterr().err
        assert len(error.splitlines()) == 1
        return error

    return run


def two_ranks(folder: Path, first: float, second: float, **changes: object) -> Path:
    """Traces of an all-reduce with these microseconds on two ranks."""
    folder.mkdir(exist_ok=True)
    for rank, duration in enumerate((first, second)):
        profile = SyntheticProfile(rank, 2).add_step(0, 0.0, 100.0).add_step(1, 100.0, 100.0)
        for begin in (0.0, 100.0):
            profile.add_kernel(GEMM, begin, begin + 1.0, 90.0)
            profile.add_kernel(NCCL, begin + 2.0, begin + 10.0, duration, stream=20, **{**ALL_REDUCE_ARGS, **changes})
        profile.write(folder / f"{rank}.json")
    return folder


@pytest.mark.parametrize("overrides", [(), ("layout.pp=1", "layout.dp=4", "layout.data=zero3")])
def test_samples_of_a_simulated_step_are_its_collective_times(
    tmp_path: Path, import_traces: Callable[..., CalibrationRecord], overrides: tuple[str, ...]
) -> None:
    result = simulated(*UNCONTENDED, *overrides)
    write_kineto_files(result, tmp_path / "traces", range(8))
    seconds_by_call = {
        (
            sample.call.collective,
            sample.call.ranks,
            round(sample.call.payload / 2 / sample.call.ranks),
        ): sample.time.seconds
        for sample in import_traces(tmp_path / "traces").collectives
    }
    comm_ops = [op for op in result.program.comm_ops if not isinstance(op, HostOp)]
    assert len(comm_ops) > 3
    for comm_op in comm_ops:
        size = result.program.groups[comm_op.comm_group].members.shape[1]
        seconds = seconds_by_call[comm_op.collective, size, round(comm_op.payload / 2 / size)]
        assert seconds == pytest.approx(float(result.cost.comm_timing_by_group(comm_op).seconds[0]), abs=2e-9)


def test_step_time_is_reproduced_with_the_record_of_its_trace(
    tmp_path: Path, import_traces: Callable[..., CalibrationRecord]
) -> None:
    result = simulated(*UNCONTENDED)
    write_kineto_files(result, tmp_path / "traces", range(8))
    import_traces(tmp_path / "traces")
    record_overrides = (*UNCONTENDED, f"cost.record={tmp_path / 'record.json'}")
    second = simulate(Scenario.from_mapping(SMALL_MAPPING, default_name="small", overrides=list(record_overrides)))
    assert second.step_time == pytest.approx(result.step_time, rel=1e-4)
    assert second.provenance_shares["measured"] > 0.0


def test_collective_time_is_the_shortest_kernel_of_its_members(
    tmp_path: Path, import_traces: Callable[..., CalibrationRecord]
) -> None:
    record = import_traces(two_ranks(tmp_path / "traces", 40.0, 25.0))
    (sample,) = record.collectives
    assert sample.call == CollectiveCall(CollectiveType.ALL_REDUCE, 2048.0, 2, 1, DType.BF16)
    assert sample.time.seconds == pytest.approx(25e-6)
    assert sample.time.repetitions == 2
    assert (record.device.accelerator, record.device.name) == ("h100-sxm-80gb", "NVIDIA H100 80GB HBM3")


def test_collectives_of_cpus_are_read(tmp_path: Path, import_traces: Callable[..., CalibrationRecord]) -> None:
    """Gloo's, where the cluster is of CPUs."""
    (tmp_path / "traces").mkdir()
    for rank in range(2):
        events = [operator("aten::mm", 10.0, 50.0, [[8, 8], [8, 8]]), gloo(100.0, 1000, FIRST)]
        write_trace(tmp_path / "traces" / f"{rank}.json", events, rank)
    record = import_traces(tmp_path / "traces", "laptop")
    (sample,) = record.collectives
    assert sample.call == CollectiveCall(CollectiveType.ALL_REDUCE, 4000.0, 2, 1, DType.FP32)
    assert sample.time.seconds == pytest.approx(30e-6)
    assert record.device.threads > 0


def test_missing_ranks_are_reported(
    tmp_path: Path, import_traces: Callable[..., CalibrationRecord], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = two_ranks(tmp_path / "traces", 40.0, 25.0)
    (folder / "1.json").unlink()
    assert import_traces(folder).collectives[0].time.seconds == pytest.approx(40e-6)
    assert "2 of 2 collectives have no traces of some members" in capsys.readouterr().err


def test_node_count_follows_from_ranks(tmp_path: Path, import_traces: Callable[..., CalibrationRecord]) -> None:
    group = {"Process Group Ranks": "[0, 8]"}
    record = import_traces(two_ranks(tmp_path / "traces", 40.0, 25.0, **group))
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
def test_unusable_kernels_are_skipped_with_a_reason(
    tmp_path: Path, import_error: Callable[..., str], changes: dict[str, object], why: str
) -> None:
    error = import_error(two_ranks(tmp_path / "traces", 40.0, 25.0, **changes))
    assert "has no collective of a known group and payload" in error
    assert why in error


def test_wrong_gpu_unknown_cluster_and_missing_trace_are_refused(
    tmp_path: Path, import_error: Callable[..., str]
) -> None:
    folder = two_ranks(tmp_path / "traces", 40.0, 25.0)
    assert "ran on NVIDIA H100 80GB HBM3, but dgx-a100 has a100-sxm-80gb" in import_error(folder, "dgx-a100")
    assert "there is no cluster 'dgx-h10'" in import_error(folder, "dgx-h10")
    assert "cannot be read" in import_error(tmp_path / "none.json.gz")
