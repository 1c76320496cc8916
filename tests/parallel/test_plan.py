"""Quantities derived in a plan."""

from dataclasses import replace

from clustersim.common.dtypes import DType
from clustersim.model.overheads import Accumulation, Overheads
from clustersim.model.precision_recipe import mixed_precision
from clustersim.model.presets import load_preset
from clustersim.model.training import Training
from clustersim.parallel.layout import Layout
from clustersim.parallel.plan import Plan


def plan(layout: Layout, training: Training) -> Plan:
    return Plan(load_preset("llama3-8b"), training, layout)


def test_microbatches_are_the_replica_batch_over_the_microbatch_size() -> None:
    """256 sequences over 8 replicas are 32 each, in microbatches of 2 that are 16."""
    assert plan(Layout(tp=2, dp=8, pp=2), Training(1024, 256, microbatch=2)).microbatches == 16


def test_context_parallel_ranks_hold_the_same_weights() -> None:
    (dense,) = plan(Layout(dp=4, cp=2), Training(1024, 4)).parameter_groups
    assert dense.dp_size == 8


def test_context_parallelism_splits_queries_and_not_keys() -> None:
    shard = plan(Layout(cp=4), Training(4096, 2, microbatch=2)).layer_shard
    assert (shard.batch, shard.sequence, shard.keys) == (2, 1024, 4096)


def test_the_activation_between_layers_is_batch_x_sequence_x_hidden() -> None:
    """2 x 4096 / 4 x 4096 elements of two bytes, not sharded over the tensor-parallel ranks."""
    assert plan(Layout(cp=4, tp=2), Training(4096, 2, microbatch=2)).activation_bytes == 2 * 1024 * 4096 * 2


def test_the_cp_ring_sends_keys_and_values_of_the_ranks_heads() -> None:
    """8 key/value heads over tp 2 are 4 of 128; keys and values of 4096 tokens, two bytes each."""
    sharding = plan(Layout(cp=4, tp=2), Training(4096, 1)).layer_sharding(*load_preset("llama3-8b").distinct_specs)
    assert sharding.kv_bytes == 2 * 4096 * 4 * 128 * 2


def test_key_value_heads_are_replicated_if_fewer_than_tp() -> None:
    sharding = plan(Layout(cp=2, tp=16), Training(4096, 1)).layer_sharding(*load_preset("llama3-8b").distinct_specs)
    assert sharding.kv_bytes == 2 * 4096 * 1 * 128 * 2


def accumulate_bytes(microbatches: int, overheads: Overheads, gradients: DType = DType.BF16) -> float:
    """Bytes that one layer moves to accumulate its weight gradients, in its products' format or in FP32."""
    recipe = mixed_precision(gradients=gradients)
    built = plan(Layout(), Training(1024, microbatches, recipe=recipe, overheads=overheads))
    (spec,) = built.model.distinct_specs
    return sum(
        kernel.bytes
        for operator in built.layer_by_spec[spec].operators
        for kernel in operator.weight_gradient
        if kernel.name.endswith(".accumulate")
    )


def test_autograd_adds_nothing_to_the_only_gradient() -> None:
    """Its format or a conversion: a gradient of two bytes becomes the sum, or is rewritten in FP32 (2 + 4).

    With two microbatches each is added, 2 read and the sum read and written, and so is the only one to a buffer of
    zeros.
    """
    added = Overheads(accumulation=Accumulation.ADDED)
    weights = 4096 * (4096 + 2 * 1024) + 4096 * 4096 + 3 * 4096 * 14336
    assert accumulate_bytes(1, added) == 0.0
    assert accumulate_bytes(1, added, DType.FP32) == (2 + 4) * weights
    assert accumulate_bytes(2, added) == (2 + 2 * 2) * weights
    assert accumulate_bytes(1, replace(added, zero_grad=True)) == (2 + 2 * 2) * weights


def test_the_plan_says_how_gradients_are_accumulated() -> None:
    added = Overheads(accumulation=Accumulation.ADDED)
    one, two = (plan(Layout(), Training(1024, count, overheads=added)).accumulation for count in (1, 2))
    assert (one, two) == (Accumulation.ASSIGNED, Accumulation.ADDED)
    fused = replace(added, accumulation=Accumulation.FUSED)
    assert plan(Layout(), Training(1024, 1, overheads=fused)).accumulation is Accumulation.FUSED
