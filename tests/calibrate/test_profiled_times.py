"""Waiting of ranks for each other recurs with collectives; a step without a profiler is predicted from its time."""

from dataclasses import replace
from pathlib import Path

import pytest

from calibrate.profile.collective_times import CollectiveTime
from calibrate.profile.plan_kernels import PassKind
from calibrate.profile.profiled_times import ProfiledTimes
from calibrate.profile.record import record_from_profile
from calibrate.profile.samples import MatchedSteps
from clustersim.common.errors import InputError
from clustersim.common.units import Seconds
from clustersim.cost.calibration_record import CalibrationRecord, CollectiveCall, TimeStatistics, reduction_dtype
from clustersim.interop.kineto import read_traces
from clustersim.report.export.write_traces import write_kineto_files
from clustersim.results.simulation_result import SimulationResult
from clustersim.scenario import Scenario
from clustersim.simulation import simulate
from tests.calibrate.profiled_steps import TRACES, scenario_of
from tests.report.small_trace import simulated

TENSOR_PARALLEL = ("layout.pp=1", "layout.tp=8", "layout.dp=1", "cost.interference=0")
TINY_CPU = Path(__file__).parents[2] / "examples" / "tiny_cpu.yaml"
WAITING = 40e-6


def profiled_times(result: SimulationResult, folder: Path) -> ProfiledTimes:
    """Of an exported trace, as if each member of a collective had waited for the last one."""
    write_kineto_files(result, folder, range(result.rank_count))
    record = record_from_profile(read_traces(folder), result.scenario).record
    times = []
    for comm_op in result.program.comm_ops:
        seconds = float(result.cost.comm_timing_by_group(comm_op).seconds.max())
        ranks = result.program.groups[comm_op.comm_group].members.shape[1]
        call = CollectiveCall(comm_op.collective, comm_op.payload, ranks, 1, reduction_dtype(comm_op))
        times.append(CollectiveTime(call, TimeStatistics(seconds, seconds, seconds, 1), WAITING, "a trace"))
    waiting = dict.fromkeys(PassKind, 0.0)
    return ProfiledTimes(record, result.scenario, MatchedSteps(), (), waiting, tuple(times))


@pytest.mark.parametrize("share", [0.0, 0.25, 0.9])
def test_the_waiting_of_a_step_is_in_its_collectives(tmp_path: Path, share: float) -> None:
    """As much of it as the step takes longer than the simulation; what no collective has waited for, once in a step."""
    times = profiled_times(simulated(*TENSOR_PARALLEL), tmp_path)
    none, all_of_it = (replace(times, waiting_share=each).predicted() for each in (0.0, 1.0))
    assert all_of_it > none
    step_time = none + share * (all_of_it - none)
    fitted = times.with_waiting_of(step_time)
    assert fitted.waiting_share == pytest.approx(share, abs=1e-3)
    assert fitted.predicted() == pytest.approx(step_time, rel=1e-4)
    more = times.with_waiting_of(all_of_it + 1e-3)
    assert (more.waiting_share, more.waiting[PassKind.OPTIMIZER]) == (1.0, pytest.approx(1e-3))
    assert more.predicted() == pytest.approx(all_of_it + 1e-3, rel=1e-4)


def test_every_layer_waits_as_long_as_every_other(tmp_path: Path) -> None:
    """In steps of other depths, too, which a record predicts."""
    times = profiled_times(simulated(*TENSOR_PARALLEL), tmp_path)
    records = [replace(times, waiting_share=share).record() for share in (0.0, 1.0)]
    added = []
    for layers in (4, 8, 12):
        scenario = simulated(*TENSOR_PARALLEL, f"model.layers={layers}").scenario
        without, with_it = (step_time(scenario, record) for record in records)
        added.append(with_it - without)
    assert added[1] - added[0] > 4 * WAITING
    assert added[2] - added[1] == pytest.approx(added[1] - added[0], rel=1e-6)


def step_time(scenario: Scenario, record: CalibrationRecord) -> Seconds:
    return simulate(replace(scenario, cost=replace(scenario.cost, record=record))).step_time


@pytest.mark.parametrize("factor", [0.3, 0.95, 1.0])
def test_a_cpu_that_computes_is_slowed_with_its_kernels(tmp_path: Path, factor: float) -> None:
    """The record predicts the time without a profiler, whatever that is."""
    result = simulate(Scenario.load(TINY_CPU))
    write_kineto_files(result, tmp_path, [0])
    record = record_from_profile(read_traces(tmp_path), result.scenario, factor * result.step_time).record
    assert step_time(result.scenario, record) == pytest.approx(factor * result.step_time, rel=1e-3)
    assert record.profile is not None
    assert record.profile.kernel_scale == pytest.approx(factor, rel=1e-3)


def test_a_gpu_is_not_faster_without_a_profiler() -> None:
    trace = "h200_llama2_7b_4_layers"
    with pytest.raises(InputError, match=r"without the profiler in 10 ms: its kernels .* take 107.* ms in the trace"):
        record_from_profile(read_traces(TRACES / f"{trace}.json.gz"), scenario_of(trace), 0.01)
