"""Programs of LoRA models: no gradient of a frozen weight, and the adapters' collectives."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clustersim.common.dtypes import DType
from clustersim.lowering.training_step import lower_step
from clustersim.memory.footprint import MemoryCategory
from clustersim.model.kernels import Kernel, KernelKind
from clustersim.model.lora import Lora, LoraTarget
from clustersim.model.operators import ADAPTERS, DENSE
from clustersim.model.precision_recipe import mixed_precision
from clustersim.model.training import FullRecompute, SelectiveOpRecompute, Training
from clustersim.model.transformer import adapter_parameter_count, parameter_count, resize_model
from clustersim.parallel.data_parallel_strategy import (
    DataParallelStrategy,
    DdpStrategy,
    FullyShard,
    NaiveDataParallel,
    Zero1,
    Zero2,
)
from clustersim.parallel.layout import Layout
from clustersim.parallel.plan import Plan
from clustersim.program.action import ActionKind
from clustersim.program.program import Program, RankProgram
from clustersim.program.task import CollectiveTask, CollectiveType, ComputeTask, Operation
from clustersim.schedules.registry import build_schedule
from tests.conftest import examples
from tests.lowering.plans import SMALL, lower_plan, operations
from tests.memory.rank_memory import resident_bytes

B = ActionKind.BACKWARD
RANK = 4
TARGETS = (LoraTarget.Q, LoraTarget.K, LoraTarget.V, LoraTarget.O, LoraTarget.UP, LoraTarget.DOWN)
LORA = Lora(RANK, TARGETS, alpha=8.0)
TRAINING = Training(sequence=64, global_batch=8, lora=LORA)
H, WIDE, T = 64, 128, 64
"""hidden and all heads, the MLP's width, tokens of a microbatch"""

STRATEGIES: list[DataParallelStrategy] = [
    DdpStrategy(),
    DdpStrategy(overlap=False),
    Zero1(),
    Zero1(overlap=False),
    Zero2(),
    FullyShard(),
    NaiveDataParallel(),
]


def lora_plan(layout: Layout, lora: Lora = LORA, **changes: object) -> Plan:
    return Plan(SMALL, replace(TRAINING, lora=lora, **changes), layout)  # type: ignore[arg-type]


def all_operations(program: Program) -> Iterator[Operation]:
    for rank in program.programs:
        for task in rank.tasks:
            if isinstance(task, ComputeTask):
                yield from task.segment.operations


def reduced_gradient_bytes(rank: RankProgram) -> float:
    """Bytes of gradients that a rank reduces over its replicas."""
    kinds = (CollectiveType.ALL_REDUCE, CollectiveType.REDUCE_SCATTER, CollectiveType.REDUCE)
    comm_ops = (task.comm_op for task in rank.tasks if isinstance(task, CollectiveTask))
    return sum(
        comm_op.payload for comm_op in comm_ops if comm_op.collective in kinds and comm_op.name != "gradient norm"
    )


def is_weight_gradient(kernel: Kernel) -> bool:
    names = (".weight_gradient", ".accumulate", ".bias_gradient")
    return kernel.name.endswith(names)


@pytest.mark.parametrize("base", [None, DType.NF4])
@pytest.mark.parametrize("data", STRATEGIES, ids=repr)
def test_no_frozen_weight_has_a_gradient(data: DataParallelStrategy, base: DType | None) -> None:
    """No kernel computes one, no operation completes one, and only adapters' gradients are reduced, in FP32.

    ZeRO-2 and ZeRO-3 reduce those of each of the four microbatches, and so does torch.nn.DataParallel.
    """
    plan = lora_plan(Layout(dp=2, data=data), replace(LORA, base=base))
    program = lower_plan(plan)
    kernels = [operation.kernel for operation in all_operations(program)]
    gradients = [kernel.name for kernel in kernels if kernel is not None and is_weight_gradient(kernel)]
    assert gradients and all(".lora_" in name for name in gradients)
    assert {
        all_operation.parameter_group for all_operation in all_operations(program) if all_operation.gradient_count
    } == {ADAPTERS}
    reduction_count = plan.microbatches if isinstance(data, Zero2 | FullyShard | NaiveDataParallel) else 1
    assert reduced_gradient_bytes(program.programs[0]) == 4 * adapter_parameter_count(SMALL, LORA) * reduction_count


@pytest.mark.parametrize("name", ["1f1b", "gpipe", "interleaved", "zb-1p"])
@pytest.mark.parametrize("tp", [1, 2])
def test_all_schedules_update_and_reduce_adapters_only(name: str, tp: int) -> None:
    order = build_schedule(name, 2) if name == "interleaved" else build_schedule(name)
    layout = Layout(tp=tp, pp=2, dp=2, sequence_parallel=tp > 1)
    plan = Plan(resize_model(SMALL, tied_embeddings=True), TRAINING, layout, order.placement)
    program = lower_step(plan, order.order(2, plan.microbatches))
    kernels = [operation.kernel for operation in all_operations(program)]
    assert all(".lora_" in kernel.name for kernel in kernels if kernel is not None and is_weight_gradient(kernel))
    adapter_bytes = 4 * adapter_parameter_count(SMALL, LORA) / tp
    assert sum(map(reduced_gradient_bytes, program.programs)) == pytest.approx(adapter_bytes)
    updated = sum(kernel.bytes for kernel in kernels if kernel is not None and kernel.name == "optimizer.step")
    # masters and moments are read and written in FP32, gradients read, the copies in BF16 written
    assert updated == pytest.approx((6 * 4 + 4 + 2) * adapter_parameter_count(SMALL, LORA) / tp)


@pytest.mark.parametrize(
    ("stage", "shards"),
    [(DdpStrategy(), (1, 1, 1)), (Zero1(), (1, 1, 4)), (Zero2(), (1, 4, 4)), (FullyShard(), (4, 4, 4))],
)
@pytest.mark.parametrize("base", [None, DType.NF4])
def test_memory_of_lora_model_states(
    stage: DataParallelStrategy, shards: tuple[int, int, int], base: DType | None
) -> None:
    """Frozen: 2 bytes of each, or 4.127 bits of the layers' matrices; adapters: 2, gradients 4, states 12 bytes."""
    plan = lora_plan(Layout(dp=4, data=stage), replace(LORA, base=base))
    memory, adapters = resident_bytes(plan), adapter_parameter_count(SMALL, LORA)
    matrices = 4 * (4 * H * H + 2 * H * WIDE + (3 * H + H) + WIDE + H)  # biases are counted with their matrix
    stored = 2 if base is None else (4 + 8 / 64 + 32 / (64 * 256)) / 8
    frozen = 2 * (parameter_count(SMALL) - matrices) + stored * matrices
    assert memory[MemoryCategory.PARAMETERS] == pytest.approx((frozen + 2 * adapters) / shards[0])
    assert memory[MemoryCategory.GRADIENTS] == 4 * adapters / shards[1]
    assert memory[MemoryCategory.OPTIMIZER] == 12 * adapters / shards[2]


@pytest.mark.parametrize("base", [None, DType.NF4])
def test_a_unit_is_gathered_in_one_collective_in_its_stored_format(base: DType | None) -> None:
    """Frozen weights and adapters in one collective, forward and again backward; quantized ones stay quantized."""
    plan = lora_plan(Layout(dp=2, data=FullyShard()), replace(LORA, base=base), global_batch=2)
    program = lower_plan(plan).programs[0]
    gathers = [task.comm_op for task in program.tasks if isinstance(task, CollectiveTask)]
    layers = [gather for gather in gathers if gather.name == "gather layer"]
    matrices = 4 * H * H + 2 * H * WIDE + (3 * H + H) + WIDE + H
    stored = 2 if base is None else (4 + 8 / 64 + 32 / (64 * 256)) / 8
    assert len(layers) == 2 * 4
    for layer in layers:  # matrices with their biases, two norms of weight and bias, adapters
        assert layer.payload == pytest.approx(
            stored * matrices + 2 * 4 * H + 2 * adapter_parameter_count(SMALL, LORA) / 4
        )


def test_frozen_parameters_are_not_gathered_after_a_step() -> None:
    """ZeRO-1 gathers what its ranks have updated."""
    program = lower_plan(lora_plan(Layout(dp=2, data=Zero1()))).programs[0]
    gathered = [task.comm_op for task in program.tasks if isinstance(task, CollectiveTask)]
    payload = sum(comm_op.payload for comm_op in gathered if comm_op.name == "gather parameters")
    assert payload == 2 * adapter_parameter_count(SMALL, LORA)


@examples(40)
@given(
    rank=st.sampled_from([4, 8, 16]),
    tp=st.sampled_from([1, 2, 4]),
    pp=st.integers(1, 4),
    dp=st.sampled_from([1, 2, 8]),
    data=st.sampled_from(STRATEGIES[:-1]),
    targets=st.sets(st.sampled_from(TARGETS), min_size=1).map(lambda chosen: tuple(sorted(chosen, key=TARGETS.index))),
)
def test_all_ranks_of_a_replica_hold_the_adapters_once(
    rank: int, tp: int, pp: int, dp: int, data: DataParallelStrategy, targets: tuple[LoraTarget, ...]
) -> None:
    """Frozen counts are those of the model for any adapters; adapter states are 12 bytes, each once."""
    lora = Lora(rank, targets, 16.0)
    plan = lora_plan(Layout(tp=tp, pp=pp, dp=dp, data=data), lora, global_batch=8)
    full_plan = Plan(SMALL, replace(TRAINING, lora=None), plan.layout)
    adapters = [plan.parameter_count(stage, ADAPTERS) for stage in plan.stages]
    assert sum(adapters) * tp == adapter_parameter_count(SMALL, lora)
    assert [plan.parameter_count(stage, DENSE) for stage in plan.stages] == list(
        map(full_plan.parameter_count, full_plan.stages)
    )
    states = sum(resident_bytes(plan, stage)[MemoryCategory.OPTIMIZER] for stage in range(pp))
    assert states * tp * (dp if data.zero_stage else 1) == pytest.approx(12 * adapter_parameter_count(SMALL, lora))


def adapter_collectives(sequence_parallel: bool) -> dict[ActionKind, list[tuple[str, float]]]:
    """Collectives of a layer with adapters on the queries and the output, and their bytes."""
    lora = Lora(RANK, (LoraTarget.Q, LoraTarget.O), 8.0)
    layout = Layout(tp=2, sequence_parallel=sequence_parallel, layers_per_stage=(1,))
    plan = Plan(resize_model(SMALL, layers=1), replace(TRAINING, lora=lora), layout)
    program = lower_plan(plan).programs[0]
    return {
        kind: [
            (operation.comm_op.collective.value, operation.comm_op.payload)
            for operation in operations(program, kind)
            if operation.comm_op is not None and operation.comm_op.name.endswith("adapter")
        ]
        for kind in (ActionKind.FORWARD, ActionKind.BACKWARD)
    }


@pytest.mark.parametrize("split", [False, True])
def test_collectives_of_split_adapters(split: bool) -> None:
    """Megatron-Bridge's ParallelLinearAdapter.

    Queries: the rank's columns are gathered, backward their gradients summed. Output: the rank's terms are
    summed, B's columns gathered; backward the gradients of the first are summed, and under sequence parallelism
    the gradient of the second is gathered before.
    """
    rank, hidden = 2.0 * T * RANK, 2.0 * T * H
    by_pass = adapter_collectives(split)
    assert by_pass[ActionKind.FORWARD] == [("all_gather", rank), ("all_reduce", rank), ("all_gather", hidden)]
    output_gather = [("all_gather", hidden)] if split else []
    assert by_pass[ActionKind.BACKWARD] == [*output_gather, ("all_reduce", rank), ("all_reduce", rank)]


@pytest.mark.parametrize(("recompute", "forwards"), [(FullRecompute(), 2), (SelectiveOpRecompute(), 2)])
def test_recomputation_runs_adapters_again(recompute: FullRecompute | SelectiveOpRecompute, forwards: int) -> None:
    layout = Layout(tp=2, sequence_parallel=True)
    plan = lora_plan(layout, recompute=recompute)
    program = lower_plan(plan).programs[0]
    backward = [
        operation.comm_op.name
        for operation in operations(program, ActionKind.BACKWARD)
        if operation.comm_op is not None
    ]
    forward = [item.comm_op.name for item in operations(program, ActionKind.FORWARD) if item.comm_op is not None]
    adapter_count = len([name for name in forward if name.endswith("adapter")])
    without_recompute = lower_plan(lora_plan(layout)).programs[0]
    plain_backward = [
        element.comm_op.name
        for element in operations(without_recompute, ActionKind.BACKWARD)
        if element.comm_op is not None
    ]
    assert backward.count("gather adapter") + backward.count("sum adapter") == adapter_count * (forwards - 1) + sum(
        name.endswith("adapter") for name in plain_backward
    )


def test_inputs_are_not_gathered_again_where_no_weight_gradient_reads_them() -> None:
    """Frozen matrices have none, and A keeps its full input."""
    program = lower_plan(lora_plan(Layout(tp=2, sequence_parallel=True))).programs[0]
    names = [
        operation.comm_op.name
        for operation in operations(program, ActionKind.BACKWARD)
        if operation.comm_op is not None
    ]
    assert "gather input again" not in names and "reduce input gradient" in names


def test_a_stage_without_adapters_has_nothing_to_update() -> None:
    """The embedding only: its rank's optimizer moves no bytes, and its backward runs no operations."""
    layout = Layout(pp=3, dp=2, layers_per_stage=(0, 2, 2))
    plan = lora_plan(layout)
    first = lower_plan(plan).programs[0]
    assert reduced_gradient_bytes(first) == 0.0
    assert not any(operations(first, ActionKind.BACKWARD))


def test_formats_of_adapters_are_those_of_the_training() -> None:
    bf16_recipe = mixed_precision(gradients=DType.BF16, master=None, moments=DType.BF16)
    plan = lora_plan(Layout(), recipe=bf16_recipe)
    memory = resident_bytes(plan)
    assert memory[MemoryCategory.GRADIENTS] == 2 * adapter_parameter_count(SMALL, LORA)
    assert memory[MemoryCategory.OPTIMIZER] == 4 * adapter_parameter_count(SMALL, LORA)


def test_norm_and_loss_backward_are_unchanged() -> None:
    kinds = (KernelKind.LOSS, KernelKind.NORM)

    def counts(training: Training) -> list[int]:
        backward = [
            operation.kernel for operation in operations(lower_plan(Plan(SMALL, training, Layout())).programs[0], B)
        ]
        return [sum(kernel is not None and kernel.kind is kind for kernel in backward) for kind in kinds]

    assert counts(TRAINING) == counts(replace(TRAINING, lora=None)) != [0, 0]
