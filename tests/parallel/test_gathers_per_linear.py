"""Column-parallel layers that gather their inputs each for itself, and gathered logits (DTensor's plans)."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace

import pytest

from clustersim.model.framework_files import load_framework
from clustersim.model.overheads import Overheads
from clustersim.model.presets import load_preset
from clustersim.model.training import COMPILER_FUSED, FullRecompute, LossImplementation, Training
from clustersim.parallel.layout import Layout
from clustersim.parallel.plan import Plan
from clustersim.parallel.tensor_parallel import backward_operations, forward_operations, recomputed_forward
from clustersim.program.task import CollectiveType, CommOp, CommOverlap, Operation

T, TP = 64, 4
LLAMA = load_preset("llama3-8b")
GATHERED = Overheads(gathers_per_linear=True, gathers_logits=True, keeps_gathered_inputs=True)


def llama_plan(overheads: Overheads, *, compiled: bool = False, tp: int = TP, sequence_parallel: bool = True) -> Plan:
    training = Training(T, 1, overheads=overheads, fused=COMPILER_FUSED if compiled else frozenset())
    training = replace(training, loss=LossImplementation.TORCH, recompute=FullRecompute())
    return Plan(LLAMA, training, Layout(tp=tp, sequence_parallel=sequence_parallel and tp > 1))


def collectives(operations: Iterable[Operation]) -> Counter[CollectiveType]:
    bodies = (operation.body for operation in operations)
    comm_ops = (body.comm_op if isinstance(body, CommOverlap) else body for body in bodies)
    return Counter(comm_op.collective for comm_op in comm_ops if isinstance(comm_op, CommOp))


def layer_collectives(plan: Plan) -> list[Counter[CollectiveType]]:
    """Collectives of a layer's forward, its recomputation and its backward."""
    (spec,) = plan.model.distinct_specs
    layer, sharding = plan.layer_by_spec[spec], plan.layer_sharding(spec)
    recomputed = recomputed_forward(layer, sharding, early_stop=True)
    return [
        collectives(part)
        for part in (forward_operations(layer, sharding), recomputed, backward_operations(layer, sharding))
    ]


def test_eager_layers_have_the_collectives_of_a_published_profile() -> None:
    """8 reduce-scatters and 12 all-gathers of a layer.

    KempnerForge's profile of 13B counts 6,420 and 9,679 in 20 microbatches of 40 layers, with those of the head.
    """
    total = sum(layer_collectives(llama_plan(GATHERED)), Counter[CollectiveType]())
    assert total == {CollectiveType.ALL_GATHER: 12, CollectiveType.REDUCE_SCATTER: 8}
    assert [round(calls / (20 * 40)) for calls in (9_679, 6_420)] == [12, 8]


def test_a_compiler_merges_gathers_of_one_tensor_but_no_reductions() -> None:
    """As the graphs that aot_autograd makes of three such layers (PyTorch 2.13)."""
    forward, recomputed, backward = layer_collectives(llama_plan(GATHERED, compiled=True))
    assert [part[CollectiveType.ALL_GATHER] for part in (forward, recomputed, backward)] == [2, 2, 2]
    assert backward[CollectiveType.REDUCE_SCATTER] == 5


def test_without_sequence_parallelism_each_gradient_is_all_reduced() -> None:
    forward, _, backward = layer_collectives(llama_plan(GATHERED, sequence_parallel=False))
    assert forward == {CollectiveType.ALL_REDUCE: 2}
    assert backward == {CollectiveType.ALL_REDUCE: 5}


def test_logits_are_gathered_once_and_the_loss_reads_the_whole_vocabulary() -> None:
    plan, alone = llama_plan(GATHERED), llama_plan(GATHERED, tp=1)
    by_name = {operator.name: operator for operator in plan.head.operators}
    (gather,) = by_name["head.logits"].tp_collectives.after_forward
    assert gather.full_bytes == T * LLAMA.vocab * plan.training.recipe.activations.bytes
    whole = {operator.name: operator for operator in alone.head.operators}["head.loss"]
    assert by_name["head.loss"] == whole
    assert plan.layer_sharding().vocab_parallel_loss(T) == []


@pytest.mark.parametrize("overheads", [GATHERED, Overheads()])
def test_one_rank_gathers_nothing(overheads: Overheads) -> None:
    assert layer_collectives(llama_plan(overheads, tp=1)) == 3 * [Counter()]


def test_kempnerforge_does_so() -> None:
    overheads = load_framework("kempnerforge").overheads
    assert overheads.gathers_per_linear
    assert overheads.gathers_logits
