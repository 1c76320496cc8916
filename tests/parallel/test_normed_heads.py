"""Normalized queries and keys that tensor-parallel ranks gather, as torchtitan's Qwen3 did (its issue 1867)."""

from dataclasses import replace

import pytest

from clustersim.model.attention_spec import QkNorm
from clustersim.model.framework_files import load_framework
from clustersim.model.overheads import Overheads
from clustersim.model.presets import load_preset
from clustersim.model.training import Training
from clustersim.parallel.layout import Layout
from clustersim.parallel.plan import Plan
from clustersim.parallel.tensor_parallel import backward_operations, forward_operations
from clustersim.program.task import CommOp, Operation
from tests.parallel.operation_listing import comparable_operations

T, HEADS, KV_HEADS, HEAD_DIM = 64, 64, 8, 128
QWEN3 = load_preset("qwen3-32b")


def layer_operations(tp: int, *, gathers: bool) -> tuple[list[Operation], list[Operation]]:
    training = Training(T, 1, overheads=Overheads(gathers_normed_heads=gathers))
    plan = Plan(QWEN3, training, Layout(tp=tp, sequence_parallel=tp > 1))
    (spec,) = plan.model.distinct_specs
    layer, sharding = plan.layer_by_spec[spec], plan.layer_sharding(spec)
    return forward_operations(layer, sharding), backward_operations(layer, sharding)


def rotary_bytes(operations: list[Operation]) -> float:
    kernels = [operation.kernel for operation in operations]
    return sum(kernel.bytes for kernel in kernels if kernel is not None and kernel.name == "attention.rotary")


@pytest.mark.parametrize("tp", [2, 8])
def test_every_rank_rotates_the_heads_of_all_behind_two_gathers_and_copies(tp: int) -> None:
    """Gathered and copied are 2 bytes of every element of queries and keys; rotated as on one rank."""
    forward, _ = layer_operations(tp, gathers=True)
    comm_ops = [operation.body for operation in forward if isinstance(operation.body, CommOp)]
    payloads = {comm_op.name: comm_op.payload for comm_op in comm_ops}
    copied = [kernel.bytes for op in forward if (kernel := op.kernel) and kernel.name == "attention.rotary.gathered"]
    sizes = [2 * T * heads * HEAD_DIM for heads in (HEADS, KV_HEADS)]
    assert [payloads["gather queries"], payloads["gather keys"]] == sizes
    assert copied == [2 * size for size in sizes]
    assert rotary_bytes(forward) == rotary_bytes(layer_operations(1, gathers=False)[0])


def test_backward_and_a_single_rank_are_as_without_gathers() -> None:
    (forward, backward), (plain_forward, plain_backward) = (layer_operations(8, gathers=g) for g in (True, False))
    assert comparable_operations(backward) == comparable_operations(plain_backward)
    assert len(forward) == len(plain_forward) + 4
    alone, plain_alone = layer_operations(1, gathers=True)[0], layer_operations(1, gathers=False)[0]
    assert comparable_operations(alone) == comparable_operations(plain_alone)


def test_models_without_norms_of_queries_gather_none() -> None:
    assert QWEN3.distinct_specs[0].attention.qk_norm is QkNorm.PER_HEAD
    training = Training(T, 1, overheads=Overheads(gathers_normed_heads=True))
    plan = Plan(load_preset("llama3-8b"), training, Layout(tp=8, sequence_parallel=True))
    plain = Plan(plan.model, replace(training, overheads=Overheads()), plan.layout)
    (spec,) = plan.model.distinct_specs
    assert plan.layer_by_spec[spec] == plain.layer_by_spec[spec]


def test_torchtitan_gathered_them_for_eight_weeks() -> None:
    versions = {"2025-08-01": False, "2025-08-18": True, "2025-09-17": True, "2025-10-13": True, "2025-10-14": False}
    assert {version: load_framework("torchtitan", version).overheads.gathers_normed_heads for version in versions} == (
        versions
    )
