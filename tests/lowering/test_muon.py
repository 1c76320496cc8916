"""Muon with no matrix of its own is Adam; how its matrices are distributed changes who works, not on what."""

from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from clustersim import Scenario, simulate
from clustersim.build import build_plan, build_simulation
from clustersim.common.errors import ClusterSimError
from clustersim.memory.footprint import Footprint
from clustersim.model.framework import Framework
from clustersim.model.newton_schulz import newton_schulz_flops
from clustersim.model.optimizers import Muon, MuonDistribution, MuonTensorParallel, Optimizer
from clustersim.parallel.data_parallel_strategy import NaiveDataParallel
from clustersim.program.task import ComputeTask, WorkType
from clustersim.scenario.validation_rules.consistency import find_problems
from tests.laws.timelines import assert_same_trace
from tests.strategies import scenarios

SCENARIO = {
    "model": {"name": "small", "layers": 8, "hidden": 1024, "heads": 8, "ffn": 4096, "vocab": 32000},
    "cluster": {"name": "dgx-h100", "gpus": 8},
    "layout": {"data": "zero1"},
    "training": {"sequence": 2048, "global_batch": 8},
}


def with_optimizer(scenario: Scenario, optimizer: Muon | Optimizer) -> Scenario:
    """The scenario with another optimizer."""
    return replace(scenario, training=replace(scenario.training, optimizer=optimizer))


def small(data: str, optimizer: object, **layout: object) -> Scenario:
    """A small scenario."""
    training = {**SCENARIO["training"], "optimizer": optimizer}
    return Scenario.from_mapping({**SCENARIO, "layout": {"data": data, **layout}, "training": training})


@given(scenarios().filter(lambda scenario: not isinstance(scenario.layout.data, NaiveDataParallel)))
def test_muon_for_no_matrix_is_adam(scenario: Scenario) -> None:
    adam = with_optimizer(scenario, Optimizer.ADAM)
    muon = with_optimizer(scenario, Muon(dense=False, experts=False))
    assume(not find_problems(muon))
    assert_same_trace(simulate(muon).trace, simulate(adam).trace)
    footprints = [Footprint(build_plan(each), each.framework, 0.0) for each in (muon, adam)]
    assert footprints[0].checkpoint_bytes() == footprints[1].checkpoint_bytes()


@given(scenarios().filter(lambda scenario: not isinstance(scenario.layout.data, NaiveDataParallel)), st.booleans())
def test_muon_runs_in_every_layout_and_keeps_less(scenario: Scenario, overlap: bool) -> None:
    """One moment of each matrix, not two; its step is not shorter than the passes alone."""
    muon = with_optimizer(scenario, Muon(overlap=overlap))
    assume(not find_problems(muon))
    adam = with_optimizer(scenario, Optimizer.ADAM)
    footprints = [Footprint(build_plan(each), each.framework, 0.0) for each in (muon, adam)]
    assert footprints[0].checkpoint_bytes() < footprints[1].checkpoint_bytes()
    assert simulate(muon).step_time > 0


def iteration_flops(scenario: Scenario) -> float:
    """FLOP of Newton-Schulz products that rank 0 executes."""
    program = build_simulation(scenario).program.programs[0]
    return sum(
        operation.kernel.flops
        for task in program.tasks
        if isinstance(task, ComputeTask)
        for operation in task.segment.operations
        if operation.work_type is WorkType.OPTIMIZER and operation.kernel is not None
    )


def model_flops(scenario: Scenario) -> float:
    """FLOP of five steps on every matrix of the model: of the 7 of each layer."""
    plan = build_plan(scenario)
    operators = (op for spec in plan.model.distinct_specs for op in plan.layer_by_spec[spec].operators)
    return plan.model.layer_count * sum(newton_schulz_flops(matrix, 5) for op in operators for matrix in op.matrices)


@pytest.mark.parametrize(
    ("data", "distribution", "share"),
    [
        ("ddp", MuonDistribution.REPLICATED, 1),
        ("zero1", MuonDistribution.LAYER_WISE, 8),
        ("zero1", MuonDistribution.GATHER, 8),
        ("zero2", MuonDistribution.LAYER_WISE, 8),
        ("fsdp", MuonDistribution.ALL_TO_ALL, 8),
        ("fsdp", MuonDistribution.GATHER, 1),
    ],
)
def test_each_rank_has_its_share_of_the_iterations(data: str, distribution: MuonDistribution, share: int) -> None:
    """Eight equal layers on eight ranks."""
    scenario = small(data, {"distribution": distribution.value})
    assert iteration_flops(scenario) == pytest.approx(model_flops(small("ddp", "muon")) / share)


@pytest.mark.parametrize(("mode", "share"), [("duplicated", 1), ("blockwise", 8)])
def test_tensor_parallel_ranks_do_everything_or_their_shard(mode: str, share: int) -> None:
    scenario = small("ddp", {"tensor_parallel": mode}, tp=8)
    flops = iteration_flops(scenario)
    if MuonTensorParallel(mode) is MuonTensorParallel.DUPLICATED:
        assert flops == pytest.approx(model_flops(small("ddp", "muon")))
    else:
        assert flops < model_flops(small("ddp", "muon")) / share


@pytest.mark.parametrize("distribution", ["all_to_all", "gather"])
def test_messages_of_one_matrix_overlap_the_iteration_of_another(distribution: str) -> None:
    overlapped, alone = (
        simulate(small("fsdp", {"distribution": distribution, "overlap": flag})).step_time for flag in (True, False)
    )
    assert overlapped < alone


def test_symmetric_kernels_help() -> None:
    symmetric, full = (iteration_flops(small("ddp", {"symmetric": flag})) for flag in (True, False))
    assert symmetric < 0.8 * full


@pytest.mark.parametrize(
    ("training", "layout", "words"),
    [
        ({"optimizer": {"distribution": "gather"}}, {"data": "ddp"}, "does not fit how layout.data"),
        ({"optimizer": {"distribution": "layer_wise"}}, {"data": "fsdp"}, "all_to_all or gather does"),
        ({"optimizer": {"name": "adam", "steps": 5}}, {}, "is a key of muon"),
        ({"optimizer": "moun"}, {}, "did you mean muon"),
        ({"optimizer": {"steps": 0}}, {}, "too small"),
        ({"optimizer": "muon", "lora": {"rank": 8}}, {}, "does not run with training.lora"),
        ({"optimizer": "muon", "offload": {"optimizer": True}}, {}, "does not run with training.offload"),
        ({"optimizer_in_backward": True}, {"data": "fsdp"}, "gradient_clipping"),
        ({"optimizer_in_backward": True, "gradient_clipping": False}, {"data": "ddp"}, "write layout.data: fsdp"),
        (
            {"optimizer_in_backward": True, "gradient_clipping": False, "global_batch": 16},
            {"data": "fsdp"},
            "2 microbatches",
        ),
    ],
)
def test_bad_optimizers_are_refused(training: dict[str, object], layout: dict[str, object], words: str) -> None:
    mapping = {**SCENARIO, "layout": layout, "training": {**SCENARIO["training"], **training}}
    with pytest.raises(ClusterSimError, match=words):
        simulate(Scenario.from_mapping(mapping))


def test_an_optimizer_in_backward_takes_as_long_and_less_memory() -> None:
    training = {**SCENARIO["training"], "gradient_clipping": False}
    mapping = {**SCENARIO, "layout": {"data": "fsdp"}, "training": training, "framework": "pytorch"}
    at_the_end = simulate(Scenario.from_mapping(mapping))
    in_backward = simulate(Scenario.from_mapping({**mapping, "training": training | {"optimizer_in_backward": True}}))
    assert in_backward.step_time == at_the_end.step_time
    assert in_backward.peak_memory <= at_the_end.peak_memory


@pytest.mark.parametrize("optimizer", ["muon", "dion", "soap"])
def test_loops_over_matrices_launch_without_modules(optimizer: str) -> None:
    """However long a kernel of a layer takes the host, operations of an optimizer's loop over matrices take it a call.

    They run under torch.no_grad, outside of modules (`step` in NVIDIA-NeMo/Emerging-Optimizers,
    orthogonalized_optimizer.py): slower launches of layers do not slow them, slower calls do.
    """
    stalls = {
        host: _matrix_stalls(optimizer, replace(small("ddp", optimizer).framework, **seconds))
        for host, seconds in {
            "layers": {"launch_seconds": 1.0, "eager_call_seconds": 0.0},
            "calls": {"launch_seconds": 0.0, "eager_call_seconds": 1.0},
        }.items()
    }
    assert stalls["layers"] == 0 < stalls["calls"]


def _matrix_stalls(optimizer: str, framework: Framework) -> float:
    """Seconds for which rank 0 waits for its host while it updates matrices one by one."""
    simulation = build_simulation(replace(small("ddp", optimizer), framework=framework))
    (program, *_) = simulation.program.programs
    return sum(
        float(simulation.cost.time_segment(0, task.segment).launch_stalls.sum())
        for task in program.tasks
        if isinstance(task, ComputeTask) and " x " in task.segment.name
    )
