"""A reference model: its forward, its weights, and what is gathered of them."""

from typing import Any

import pytest

from clustersim import Scenario, simulate
from clustersim.build import build_plan, build_simulation
from clustersim.common.errors import ClusterSimError
from clustersim.memory.footprint import Footprint, MemoryCategory
from clustersim.program.task import CollectiveTask, ComputeTask, WorkType

MODEL = {"name": "small", "layers": 4, "hidden": 1024, "heads": 8, "ffn": 4096, "vocab": 32000}


def scenario(*, reference: bool, lora: Any = "none", **layout: Any) -> Scenario:
    """A small model over 8 GPUs."""
    training = {"sequence": 2048, "global_batch": 8, "reference_model": reference, "lora": lora}
    cluster = {"name": "dgx-h100", "gpus": 8}
    return Scenario.from_mapping({"model": MODEL, "cluster": cluster, "layout": layout, "training": training})


def forward_flops(built: Scenario) -> float:
    """FLOP of the forward kernels of rank 0."""
    program = build_simulation(built).program.programs[0]
    operations = [op for task in program.tasks if isinstance(task, ComputeTask) for op in task.segment.operations]
    forward = (op.kernel for op in operations if op.work_type is WorkType.FORWARD)
    return sum(kernel.flops for kernel in forward if kernel is not None)


def gathered_bytes(built: Scenario) -> float:
    """Bytes of parameters that rank 0 gathers in a step."""
    program = build_simulation(built).program.programs[0]
    tasks = (task for task in program.tasks if isinstance(task, CollectiveTask))
    return sum(task.comm_op.payload for task in tasks if task.comm_op.name.startswith("gather"))


def weight_bytes(built: Scenario) -> float:
    """Bytes of stored weights on a rank."""
    footprint = Footprint(build_plan(built), built.framework, 0.0)
    return footprint.resident_bytes(0)[MemoryCategory.PARAMETERS]


@pytest.mark.parametrize("layout", [{}, {"tp": 2}, {"data": "zero1"}, {"data": "fsdp"}], ids=str)
def test_there_is_a_second_forward_and_a_second_copy_of_the_weights(layout: dict[str, Any]) -> None:
    with_reference, alone = scenario(reference=True, **layout), scenario(reference=False, **layout)
    assert forward_flops(with_reference) == 2 * forward_flops(alone)
    plan = build_plan(alone)
    (group,) = plan.parameter_groups
    shards = group.shard_count if plan.layout.data.shards_parameters else 1
    parameters = sum(plan.parameter_count(stage) for stage in plan.stages)
    assert weight_bytes(with_reference) - weight_bytes(alone) == 2 * parameters / shards
    assert simulate(with_reference).step_time > simulate(alone).step_time


def test_shards_are_gathered_once_more_for_its_forward() -> None:
    """All units forward twice, and again in backward all but the head, which stays."""
    with_reference, alone = (scenario(reference=flag, data="fsdp") for flag in (True, False))
    plan = build_plan(alone)
    model = sum(2.0 * plan.parameter_count(stage) for stage in plan.stages)
    assert gathered_bytes(with_reference) - gathered_bytes(alone) == model


def test_adapters_have_no_second_copy() -> None:
    lora = {"rank": 8}
    with_reference, alone = (scenario(reference=flag, lora=lora, data="fsdp") for flag in (True, False))
    assert weight_bytes(with_reference) == weight_bytes(alone)
    assert forward_flops(with_reference) == 2 * forward_flops(alone)


@pytest.mark.parametrize("layout", [{"pp": 2}, {"data": "deepspeed_zero3"}], ids=str)
def test_where_it_is_not_modelled_it_is_refused(layout: dict[str, Any]) -> None:
    with pytest.raises(ClusterSimError, match="reference_model"):
        simulate(scenario(reference=True, **layout))
