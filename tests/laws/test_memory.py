"""What must hold of memory whatever the scenario: one thing changed, and on which side the peak may lie."""

from typing import Any

from hypothesis import assume, given
from hypothesis import strategies as st

from clustersim.common.errors import InputError
from clustersim.memory.footprint import SHARDED_CATEGORIES, MemoryCategory
from clustersim.results.memory_check import memory_timelines, peak_memory
from clustersim.scenario import Scenario
from tests.conftest import examples

ROOM = 1.0 + 1e-9


def _base(draw: st.DrawFn) -> dict[str, Any]:
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
            "release_outputs": draw(st.booleans()),
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


BASES = st.composite(_base)()


def _changed(base: dict[str, Any], *changes: str) -> Scenario:
    """The scenario with some keys changed; an example whose change is not legal says nothing."""
    try:
        return Scenario.from_mapping(base).with_overrides(*changes)
    except InputError:
        assume(False)
        raise


@given(BASES)
@examples(60)
def test_a_larger_microbatch_never_needs_less(base: dict[str, Any]) -> None:
    once, twice = (_changed(base, f"training.microbatch={number}") for number in (2, 4))
    assert peak_memory(twice) * ROOM >= peak_memory(once)


@given(BASES)
@examples(60)
def test_a_longer_sequence_never_needs_less(base: dict[str, Any]) -> None:
    short, long = (_changed(base, f"training.sequence={number}") for number in (512, 1024))
    assert peak_memory(long) * ROOM >= peak_memory(short)


@given(BASES)
@examples(60)
def test_states_of_more_sharding_never_take_more(base: dict[str, Any]) -> None:
    """ZeRO's stages; what buffers and gathered layers take beside is not shared out, so of the states alone."""
    held = []
    for stage in ("ddp", "zero1", "zero2", "fsdp"):
        ledgers = memory_timelines(_changed(base, f"layout.data={stage}"))
        held.append([sum(ledger.resident[use] for use in SHARDED_CATEGORIES) for ledger in ledgers])
    for less, more in zip(held[1:], held, strict=False):
        assert all(a <= b * ROOM for a, b in zip(less, more, strict=True))


@given(BASES, st.sampled_from(["zero1", "fsdp"]))
@examples(60)
def test_more_replicas_that_share_states_never_need_more(base: dict[str, Any], data: str) -> None:
    """As many microbatches of as many tokens; but for the buffers of one group more where there was none."""
    layout = base["layout"]
    few, many = (
        _changed(
            base, f"layout.data={data}", f"layout.dp={dp}", f"cluster.gpus={layout['tp'] * layout['pp'] * dp}",
            f"training.global_batch={dp * 8}",
        ) for dp in (2, 8)
    )  # fmt: skip
    assert peak_memory(many) <= peak_memory(few) * ROOM


@given(BASES)
@examples(60)
def test_recomputing_more_never_keeps_more(base: dict[str, Any]) -> None:
    """At the peak a whole layer is there again, beside what the others keep: no more than if all were kept."""
    none, full = (_changed(base, "schedule=1f1b", f"training.recompute={kind}") for kind in ("none", "full"))
    assert peak_memory(full) <= peak_memory(none) * ROOM


@given(BASES)
@examples(60)
def test_releasing_outputs_never_needs_more(base: dict[str, Any]) -> None:
    held, freed = (_changed(base, f"layout.release_outputs={item}") for item in ("false", "true"))
    assert peak_memory(freed) <= peak_memory(held) * ROOM
    if base["layout"]["pp"] == 1:
        assert peak_memory(freed) == peak_memory(held)


@given(BASES)
@examples(60)
def test_zero_bubble_needs_no_more_than_1f1b_and_one_microbatchs_waiting(base: dict[str, Any]) -> None:
    """ZB-1p keeps p microbatches on every rank, as 1F1B does on its first.

    Beside them there is what one microbatch's waiting may exceed its activations by, and what passes; a last rank of
    1F1B has one microbatch, so the bound is taken with the fullest stage's activations, p times.
    """
    ours = _changed(base, "schedule=zb-1p", "training.recompute=none")
    theirs = _changed(base, "schedule=gpipe", "training.recompute=none", f"training.global_batch={_of_1f1b(base)}")
    ours_peak = max(memory_timeline.peak_activations for memory_timeline in memory_timelines(ours))
    theirs_peak = max(memory_ledger.peak_activations for memory_ledger in memory_timelines(theirs))
    one = memory_timelines(
        _changed(base, "schedule=gpipe", "training.recompute=none", f"training.global_batch={_one(base)}")
    )
    # a single microbatch at its fullest holds what is kept of it and what passes; waiting is at most three times that
    assert ours_peak <= theirs_peak + 3 * max(item.peak_activations for item in one)


def _of_1f1b(base: dict[str, Any]) -> int:
    """A batch of p microbatches, which GPipe keeps all at once on every rank."""
    layout = base["layout"]
    return int(layout["pp"] * layout["dp"] * base["training"]["microbatch"])


def _one(base: dict[str, Any]) -> int:
    return int(base["layout"]["dp"] * base["training"]["microbatch"])


@given(BASES)
@examples(60)
def test_parts_sum_to_the_peak_and_libraries_take_what_the_framework_says(base: dict[str, Any]) -> None:
    scenario = _changed(base)
    for memory_timeline in memory_timelines(scenario):
        parts = memory_timeline.peak_by_category()
        assert abs(sum(parts.values()) - memory_timeline.peak) <= 1e-6 * memory_timeline.peak
        assert parts[MemoryCategory.WORKSPACE] == scenario.framework.workspace_bytes
        assert all(size >= 0.0 for size in parts.values())
