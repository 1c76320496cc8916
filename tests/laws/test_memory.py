"""Monotonicity of peak memory: one setting is changed, and the peak may only move one way."""

from typing import Any

from hypothesis import assume, given
from hypothesis import strategies as st

from clustersim.common.errors import InputError
from clustersim.memory.footprint import SHARDED_CATEGORIES, MemoryCategory
from clustersim.results.memory_check import memory_timelines, peak_memory
from clustersim.scenario import Scenario
from tests.conftest import examples
from tests.varied_scenarios import varied_scenarios

TOLERANCE = 1.0 + 1e-9


def _draw_mapping(draw: st.DrawFn) -> dict[str, Any]:
    tp, pp = draw(st.sampled_from([1, 2, 4])), draw(st.sampled_from([1, 2, 4]))
    dp = draw(st.sampled_from([1, 2, 4]))
    microbatch = draw(st.sampled_from([1, 2]))
    return {
        "model": {
            "layers": draw(st.sampled_from([4, 8, 12])),
            "hidden": 1024, "heads": 8, "kv_heads": draw(st.sampled_from([4, 8])), "ffn": 4096, "vocab": 32000,
            "mlp": draw(st.sampled_from(["swiglu", "gelu"])),
        },
        "cluster": {"name": "dgx-h100", "gpus": tp * pp * dp},
        "layout": {
            "tp": tp, "pp": pp, "dp": dp,
            "sequence_parallel": tp > 1 and draw(st.booleans()),
            "deallocate_pipeline_outputs": draw(st.booleans()),
            "data": draw(st.sampled_from(["ddp", "zero1", "zero2", "fsdp"])),
        },
        "schedule": draw(st.sampled_from(["1f1b", "gpipe", "zb-1p"])),
        "training": {
            "sequence": draw(st.sampled_from([512, 1024])),
            "microbatch": microbatch,
            "global_batch": dp * 8,
            "recompute": draw(st.sampled_from(["none", "selective", "full"])),
            "precision": draw(st.sampled_from(["bf16", "fp16"])),
        },
    }  # fmt: skip


MAPPINGS = st.composite(_draw_mapping)()


def _changed(base: dict[str, Any], *changes: str) -> Scenario:
    """The scenario with some keys changed; examples whose change is invalid are discarded."""
    try:
        return Scenario.from_mapping(base).with_overrides(*changes)
    except InputError:
        assume(False)
        raise


@given(MAPPINGS)
@examples(60)
def test_a_larger_microbatch_never_needs_less_memory(base: dict[str, Any]) -> None:
    smaller, larger = (_changed(base, f"training.microbatch={microbatch}") for microbatch in (2, 4))
    assert peak_memory(larger) * TOLERANCE >= peak_memory(smaller)


@given(MAPPINGS)
@examples(60)
def test_a_longer_sequence_never_needs_less_memory(base: dict[str, Any]) -> None:
    short_scenario, long_scenario = (_changed(base, f"training.sequence={sequence}") for sequence in (512, 1024))
    assert peak_memory(long_scenario) * TOLERANCE >= peak_memory(short_scenario)


@given(MAPPINGS)
@examples(60)
def test_a_higher_zero_stage_never_takes_more_state_memory(base: dict[str, Any]) -> None:
    """ZeRO's stages; buffers and gathered layers are not sharded, so only the model states are compared."""
    state_bytes = []
    for stage in ("ddp", "zero1", "zero2", "fsdp"):
        ledgers = memory_timelines(_changed(base, f"layout.data={stage}"))
        state_bytes.append([sum(ledger.resident[use] for use in SHARDED_CATEGORIES) for ledger in ledgers])
    for more_sharded, less_sharded in zip(state_bytes[1:], state_bytes, strict=False):
        assert all(a <= b * TOLERANCE for a, b in zip(more_sharded, less_sharded, strict=True))


@given(MAPPINGS, st.sampled_from([1, 8]))
@examples(60)
def test_zero_2_beside_a_pipeline_never_needs_more_than_zero_1(base: dict[str, Any], microbatches: int) -> None:
    """Both hold all gradients until the last backward reduces them, even where that is the only one."""
    pp, dp, tp = max(2, base["layout"]["pp"]), base["layout"]["dp"], base["layout"]["tp"]
    batch = "training.microbatch=1", f"training.global_batch={microbatches * dp}", "schedule=1f1b"
    layout = f"layout.pp={pp}", f"cluster.gpus={tp * pp * dp}"
    first, second = (_changed(base, *batch, *layout, f"layout.data={data}") for data in ("zero1", "zero2"))
    assert peak_memory(second) <= peak_memory(first) * TOLERANCE


@given(MAPPINGS, st.sampled_from(["zero1", "fsdp"]))
@examples(60)
def test_more_sharding_replicas_never_need_more_memory(base: dict[str, Any], data: str) -> None:
    """With as many microbatches of as many tokens; from dp 2, so that both have the buffers of the group."""
    layout = base["layout"]
    two_replicas, eight_replicas = (
        _changed(
            base, f"layout.data={data}", f"layout.dp={dp}", f"cluster.gpus={layout['tp'] * layout['pp'] * dp}",
            f"training.global_batch={dp * 8}",
        ) for dp in (2, 8)
    )  # fmt: skip
    assert peak_memory(eight_replicas) <= peak_memory(two_replicas) * TOLERANCE


@given(MAPPINGS)
@examples(60)
def test_full_recompute_never_needs_more_memory(base: dict[str, Any]) -> None:
    """At the peak one full layer is materialized again, plus what the others keep: no more than if all were kept.

    Except that the allocator may reserve more of it, as fragmentation depends on recomputation.
    """
    none, full = (_changed(base, "schedule=1f1b", f"training.recompute={kind}") for kind in ("none", "full"))
    framework = full.framework
    reserved = framework.fragmentation_with(full.training.recompute) / framework.fragmentation
    assert peak_memory(full) <= peak_memory(none) * TOLERANCE * reserved


@given(MAPPINGS)
@examples(60)
def test_releasing_outputs_never_needs_more_memory(base: dict[str, Any]) -> None:
    kept_outputs, released = (
        _changed(base, f"layout.deallocate_pipeline_outputs={deallocate_pipeline_outputs}")
        for deallocate_pipeline_outputs in ("false", "true")
    )
    assert peak_memory(released) <= peak_memory(kept_outputs) * TOLERANCE
    if base["layout"]["pp"] == 1:
        assert peak_memory(released) == peak_memory(kept_outputs)


@given(MAPPINGS)
@examples(60)
def test_zero_bubble_needs_at_most_1f1b_plus_deferred_gradients(base: dict[str, Any]) -> None:
    """ZB-1p keeps p microbatches on every rank, as 1F1B does on its first.

    In addition there is what one microbatch's deferred weight gradients may exceed its activations by, and
    transients; a last rank of 1F1B has one microbatch, so the bound uses the peak-memory stage's activations, p
    times.
    """
    zero_bubble = _changed(base, "schedule=zb-1p", "training.recompute=none")
    gpipe = _changed(
        base, "schedule=gpipe", "training.recompute=none", f"training.global_batch={_pipeline_depth_batch(base)}"
    )
    zero_bubble_peak = max(memory_timeline.peak_activations for memory_timeline in memory_timelines(zero_bubble))
    gpipe_peak = max(memory_ledger.peak_activations for memory_ledger in memory_timelines(gpipe))
    single_microbatch = memory_timelines(
        _changed(
            base, "schedule=gpipe", "training.recompute=none", f"training.global_batch={_single_microbatch_batch(base)}"
        )
    )
    # the peak of a single microbatch has its saved activations and transients; deferred gradients are at most
    # three times that
    assert zero_bubble_peak <= gpipe_peak + 3 * max(item.peak_activations for item in single_microbatch)


def _pipeline_depth_batch(base: dict[str, Any]) -> int:
    """A batch of p microbatches, which GPipe keeps all at once on every rank."""
    layout = base["layout"]
    return int(layout["pp"] * layout["dp"] * base["training"]["microbatch"])


def _single_microbatch_batch(base: dict[str, Any]) -> int:
    return int(base["layout"]["dp"] * base["training"]["microbatch"])


@given(MAPPINGS)
@examples(60)
def test_categories_sum_to_the_peak_and_workspace_is_the_frameworks(base: dict[str, Any]) -> None:
    scenario = _changed(base)
    for ledger in memory_timelines(scenario):
        peak_bytes = ledger.peak_by_category()
        assert abs(sum(peak_bytes.values()) - ledger.peak) <= 1e-6 * ledger.peak
        assert peak_bytes[MemoryCategory.WORKSPACE] == scenario.framework.workspace_bytes
        assert all(size >= 0.0 for size in peak_bytes.values())


RECOMPUTES = st.sampled_from(
    [
        "selective",
        "selective_op",
        "dots_with_no_batch_dims_saveable",
        "full",
        {"layers": 1},
        {"modules": ["mlp", "layernorm"]},
    ]
)


@given(varied_scenarios(), RECOMPUTES)
@examples(80)
def test_recomputation_never_needs_more_memory_of_any_model(scenario: Scenario, recompute: object) -> None:
    """But for what the allocator reserves of it, which depends on recomputation.

    Left out: formats whose inputs a compiler saves in FP8, unless the user says what backward recomputes.
    """
    none, some = (_with(scenario, {"training.recompute": value}) for value in ("none", recompute))
    recipe = scenario.training.recipe
    assume(recipe.saved_input_format(is_recomputed=True) is recipe.saved_input_format(is_recomputed=False))
    framework = some.framework
    reserved = framework.fragmentation_with(some.training.recompute) / framework.fragmentation
    assert peak_memory(some) <= peak_memory(none) * TOLERANCE * max(reserved, 1.0)


@given(varied_scenarios())
@examples(80)
def test_a_higher_zero_stage_never_takes_more_state_memory_of_any_model(scenario: Scenario) -> None:
    state_bytes = []
    for stage in ("ddp", "zero1", "zero2", "fsdp"):
        ledgers = memory_timelines(_with(scenario, {"layout.data": stage}))
        state_bytes.append([sum(ledger.resident[use] for use in SHARDED_CATEGORIES) for ledger in ledgers])
    for more_sharded, less_sharded in zip(state_bytes[1:], state_bytes, strict=False):
        assert all(a <= b * TOLERANCE for a, b in zip(more_sharded, less_sharded, strict=True))


def _with(scenario: Scenario, changes: dict[str, Any]) -> Scenario:
    """The scenario with changes; examples that do not allow them are discarded."""
    try:
        return scenario.changed(changes)
    except InputError:
        assume(False)
        raise
