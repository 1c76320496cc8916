"""Laws of records of profiled steps: a dry run says nothing of collectives; what is extrapolated adds up."""

from dataclasses import replace

import numpy as np
import pytest

from clustersim.build import PreparedSimulation, build_simulation
from clustersim.cost.calibration_record import CalibrationRecord, signature_of
from clustersim.program.task import ComputeTask
from clustersim.scenario import Scenario
from clustersim.simulation import simulate
from tests.calibrate.profiled_steps import llama, profile_of, scenario_of

DRY_RUN = "h200_llama2_7b_4_layers_fake_fsdp2"
TRACE = "h200_llama2_7b_4_layers"


def with_record(scenario: Scenario, record: CalibrationRecord | None) -> Scenario:
    return replace(scenario, cost=replace(scenario.cost, record=record))


@pytest.mark.parametrize("changes", [(), ("cluster.gpus=64", "layout.dp=64", "training.global_batch=128")])
def test_a_dry_run_changes_no_collective(changes: tuple[str, ...]) -> None:
    """Neither of its own layout nor of others: a fake process group moves nothing."""
    record = profile_of(DRY_RUN).record
    assert record.collectives == ()
    scenario = scenario_of(DRY_RUN) if not changes else llama("layout.data=fsdp", *changes)
    bare, anchored = (build_simulation(with_record(scenario, each)) for each in (None, record))
    assert bare.program.comm_ops
    for comm_op in bare.program.comm_ops:
        modelled, recorded = (each.cost.comm_timing_by_group(comm_op) for each in (bare, anchored))
        assert np.array_equal(modelled.seconds, recorded.seconds)


@pytest.mark.parametrize(
    "changes",
    [(), ("training.sequence=2048",), ("training.microbatch=1",), ("model.layers=8",), ("model.vocab=64000",)],
)
def test_what_is_extrapolated_sums_to_the_share_that_is_said(changes: tuple[str, ...]) -> None:
    """Seconds of the step's kernels that have no sample, over those of all of its kernels: they are the whole step."""
    scenario, record = with_record(llama(*changes), profile_of(TRACE).record), profile_of(TRACE).record
    sampled = {sample.signature for sample in record.kernels}
    prepared = build_simulation(scenario)
    total = extrapolated = 0.0
    for signature, seconds in kernel_seconds(prepared):
        total += seconds
        extrapolated += 0.0 if signature in sampled else seconds
    shares = simulate(scenario).provenance_shares
    assert sum(shares.values()) == pytest.approx(1.0)
    assert 1.0 - shares["measured"] == pytest.approx(extrapolated / total, abs=1e-6)
    assert (extrapolated > 0.0) is bool(changes)


def kernel_seconds(prepared: PreparedSimulation) -> list[tuple[object, float]]:
    """Signature and seconds of each kernel of rank 0's step, without waiting for the host."""
    seconds: list[tuple[object, float]] = []
    for task in prepared.program.programs[0].tasks:
        if isinstance(task, ComputeTask):
            timing = prepared.cost.time_segment(0, task.segment)
            durations = (timing.kernel_seconds - timing.launch_stalls).tolist()
            seconds += [
                (signature_of(operation.kernel), duration)
                for operation, duration in zip(task.segment.operations, durations, strict=True)
                if operation.kernel is not None
            ]
    return seconds
