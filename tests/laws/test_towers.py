"""Laws of models of several towers: an empty encoder is none, and what is frozen costs no more than what is trained."""

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from clustersim import Scenario, simulate
from clustersim.build import build_plan
from clustersim.model.attention_spec import FullAttention
from clustersim.model.cross_attention_spec import CrossAttention
from clustersim.model.image_counts import ImageBatch, ImageCounts, ImageWork, PackedImages, drawn_images
from clustersim.model.layer_stack import LayerSpec
from clustersim.model.layers import transformer_layer
from clustersim.model.mixer import AttentionFlopConvention
from clustersim.model.operators import ENCODER, FROZEN_ENCODER, LayerShard
from clustersim.model.presets import load_preset
from clustersim.model.training import AttentionBackend, Training
from clustersim.model.transformer import parameter_count
from clustersim.parallel.mesh import DATA, PIPELINE
from clustersim.parallel.plan import Plan
from clustersim.program.action import FORWARD
from clustersim.program.task import CollectiveTask, CommOp, ComputeTask
from tests.conftest import examples
from tests.laws.timelines import assert_same_trace

_WORK = ImageWork(per_token=4e9, per_pair=5e5, tokens=16)
_LANGUAGE = {"preset": "llama-tiny"}
_ENCODER = {"preset": "clip-vit-l-14-336", "input_size": 56, "layers": 2}


@st.composite
def tower_mappings(draw: st.DrawFn) -> dict[str, Any]:
    """A small language model behind a small encoder, with any strategy and recomputation."""
    pp = draw(st.sampled_from([1, 2, 4]))
    layout: dict[str, Any] = {
        "tp": draw(st.sampled_from([1, 2])),
        "pp": pp,
        "data": draw(st.sampled_from(["ddp", "zero1", "zero2", "fsdp"])),
    }
    if layout["tp"] > 1:
        layout["sequence_parallel"] = draw(st.booleans())
    return {
        "model": {"language": _LANGUAGE, "encoder": _ENCODER},
        "cluster": {"name": "dgx-h100", "gpus": 8},
        "layout": layout,
        "training": {
            "sequence": 256,
            "global_batch": 32,
            "microbatch": draw(st.sampled_from([1, 2])),
            "recompute": draw(st.sampled_from(["none", "selective", "full"])),
            "attention": draw(st.sampled_from(["flash", "standard"])),
        },
    }


def _with_towers(mapping: dict[str, Any], **towers: Any) -> Scenario:
    return Scenario.from_mapping({**mapping, "model": {**mapping["model"], **towers}})


@given(tower_mappings())
@examples(12)
def test_an_encoder_without_layers_is_none(mapping: dict[str, Any]) -> None:
    empty = simulate(_with_towers(mapping, encoder={**_ENCODER, "layers": 0}))
    alone = simulate(Scenario.from_mapping({**mapping, "model": _LANGUAGE}))
    assert (empty.step_time, empty.model_flops) == (alone.step_time, alone.model_flops)
    assert [ledger.peak for ledger in empty.ledgers] == [ledger.peak for ledger in alone.ledgers]
    assert_same_trace(empty.trace, alone.trace, relative=0.0)


@given(tower_mappings(), st.sampled_from(["encoder", "projector", "language"]))
@examples(24)
def test_a_frozen_tower_takes_no_more_time_and_memory_than_a_trained_one(mapping: dict[str, Any], tower: str) -> None:
    sections = {"encoder": _ENCODER, "projector": {}, "language": _LANGUAGE}
    trained = simulate(_with_towers(mapping))
    frozen = simulate(_with_towers(mapping, **{tower: {**sections[tower], "frozen": True}}))
    assert frozen.step_time <= trained.step_time
    assert frozen.model_flops.model < trained.model_flops.model
    pairs = zip(frozen.ledgers, trained.ledgers, strict=True)
    assert all(frozen_ledger.peak <= trained_ledger.peak for frozen_ledger, trained_ledger in pairs)


@given(tower_mappings())
@examples(12)
def test_more_images_are_never_faster(mapping: dict[str, Any]) -> None:
    one = simulate(_with_towers(mapping))
    two = simulate(_with_towers(mapping, encoder={**_ENCODER, "images": 2}))
    assert two.step_time >= one.step_time * (1 - 1e-12)  # where launches take all the time, as long
    assert two.model_flops.model > one.model_flops.model
    assert two.ledgers[0].peak >= one.ledgers[0].peak


@given(tower_mappings())
@examples(8)
def test_images_that_are_drawn_from_one_number_are_even(mapping: dict[str, Any]) -> None:
    even, drawn = (
        simulate(_with_towers(mapping, encoder={**_ENCODER, "images": images})) for images in (2, {"counts": [2]})
    )
    assert (drawn.step_time, drawn.model_flops) == (even.step_time, even.model_flops)
    assert [ledger.peak for ledger in drawn.ledgers] == [ledger.peak for ledger in even.ledgers]


@given(st.integers(1, 6), st.integers(1, 6), st.integers(1, 4), st.floats(0.1, 3.0), st.integers(0, 9))
@examples(60)
def test_ranks_that_wait_more_often_wait_longer(
    microbatches: int, replicas: int, microbatch: int, variation: float, seed: int
) -> None:
    """Mean <= waiting once a step <= waiting in every microbatch <= the largest microbatch, up to whole images."""
    counts = ImageCounts(mean=4.0, variation=variation, seed=seed)
    sizes = _WORK, 100, microbatches, replicas, microbatch
    once, often = (ImageBatch(counts, *sizes, replicas_wait=waits) for waits in (False, True))
    drawn = drawn_images(counts, microbatches * replicas * microbatch, 100, 16)
    mean = drawn.get(16, 0) / (microbatches * replicas)
    assert mean - 0.5 <= once.busiest.count <= often.busiest.count <= often.largest.count == once.largest.count


def _flops(images: PackedImages) -> float:
    assert images.packed_keys is not None
    return images.count * images.tokens * (_WORK.per_token + _WORK.per_pair * images.packed_keys.full)


@given(st.integers(1, 6), st.integers(1, 6), st.integers(1, 4), st.integers(0, 9))
@examples(60)
def test_sizes_of_images_are_waited_for_as_their_work(
    microbatches: int, replicas: int, microbatch: int, seed: int
) -> None:
    """As above, in FLOP; counts and tokens are whole, so that a microbatch is off by half a token an image."""
    counts = ImageCounts((1, 2, 5), seed=seed, tokens=(640, 2560, 10_240))
    sizes = _WORK, 100, microbatches, replicas, microbatch
    once, often = (ImageBatch(counts, *sizes, replicas_wait=waits) for waits in (False, True))
    drawn = drawn_images(counts, microbatches * replicas * microbatch, 100, 16)
    work = sum(count * tokens * (_WORK.per_token + _WORK.per_pair * tokens) for tokens, count in drawn.items())
    assert work / (microbatches * replicas) <= 1.01 * _flops(once.busiest) <= 1.02 * _flops(often.busiest)
    assert 1.0 <= once.imbalance <= often.imbalance * (1 + 1e-12)
    mean = work / (microbatches * replicas)
    assert often.imbalance * mean == pytest.approx(_flops(often.busiest), rel=0.02)
    assert often.largest == once.largest
    assert often.busiest.count * often.busiest.tokens <= 1.01 * often.largest.count * often.largest.tokens


def test_images_are_dealt_out_to_the_replicas_that_share_a_microbatch() -> None:
    """Five images of one size on two replicas are three on the busiest; no image is lost."""
    sizes = _WORK, 100, 2, 3, 1
    one, two = (ImageBatch(ImageCounts((5,)), *sizes, replicas_wait=True, shares=shares) for shares in (1, 2))
    assert (one.busiest.count, two.busiest.count) == (5, 3)


@given(tower_mappings(), st.sampled_from([28, 56, 84]))
@examples(4)
def test_images_of_one_size_are_images_of_that_input_size(mapping: dict[str, Any], size: int) -> None:
    mapping = {**mapping, "training": {**mapping["training"], "attention": "flash"}}
    usual, listed = (
        simulate(_with_towers(mapping, encoder={**_ENCODER, **keys}))
        for keys in ({"input_size": size, "images": 2}, {"input_size": size, "images": {"mean": 2, "sizes": [size]}})
    )
    assert listed.step_time == pytest.approx(usual.step_time, rel=1e-12)
    assert listed.model_flops.model == pytest.approx(usual.model_flops.model, rel=1e-12)
    assert [ledger.peak for ledger in listed.ledgers] == [ledger.peak for ledger in usual.ledgers]


def test_sizes_keep_the_model_flop_of_their_images() -> None:
    """A step's FLOP are those of all its images, each with its own attention."""
    mapping = {
        "model": {"preset": "qwen3-vl-8b", "encoder": {"images": {"mean": 1, "sizes": [[256, 256], [1024, 768]]}}},
        "cluster": {"name": "dgx-h100", "gpus": 8},
        "layout": {"data": "fsdp"},
        "training": {"sequence": 4096, "global_batch": 64, "microbatch": 8, "recompute": "full"},
        "framework": "ideal",
    }
    scenario = Scenario.from_mapping(mapping)
    encoder = scenario.model.encoder
    assert encoder is not None
    assert encoder.image_tokens == (16 * 16, 64 * 48)
    drawn = encoder.images_by_tokens(64, 4096)
    assert sum(drawn.values()) == 64
    small, large = (
        simulate(Scenario.from_mapping(mapping, [f"model.encoder.images={{counts: [1], sizes: [{size}]}}"]))
        for size in ("[256, 256]", "[1024, 768]")
    )
    share = drawn[64 * 48] / 64
    expected = (1 - share) * small.model_flops.model + share * large.model_flops.model
    mixed = simulate(scenario)
    assert (small.image_imbalance, large.image_imbalance) == (1.0, 1.0)
    assert mixed.image_imbalance is not None
    assert mixed.image_imbalance > 1.0
    assert mixed.model_flops.model == pytest.approx(expected, rel=1e-12)
    assert small.step_time < mixed.step_time < large.step_time


def test_drawn_images_keep_their_mean_and_their_spread() -> None:
    drawn = ImageCounts(mean=3.3, variation=0.7, seed=2).draw(400_000, 1000)
    assert drawn.mean() == pytest.approx(3.3, rel=0.01)
    rounding = 1 / 6  # at most a quarter, a sixth on average, is the variance of rounding up or down at random
    assert drawn.var() == pytest.approx((0.7 * 3.3) ** 2 + rounding, rel=0.02)


@given(tower_mappings(), st.booleans())
@examples(16)
def test_an_encoder_alone_is_the_first_rank_before_the_language_models(mapping: dict[str, Any], frozen: bool) -> None:
    """The other ranks hold what those of the language model alone hold with one rank less."""
    layout = {**mapping["layout"], "pp": 3, "tp": 1, "sequence_parallel": False}
    own_stage = {
        **mapping,
        "layout": {**layout, "encoder_placement": "own_stage"},
        "cluster": {"name": "dgx-h100", "gpus": 24},
    }
    scenario = _with_towers(own_stage, encoder={**_ENCODER, "frozen": frozen}, projector={"frozen": frozen})
    plan = build_plan(scenario)
    language = {
        **mapping,
        "model": _LANGUAGE,
        "layout": {**layout, "pp": 2},
        "cluster": {"name": "dgx-h100", "gpus": 16},
    }
    alone = build_plan(Scenario.from_mapping(language))
    assert [plan.parameter_count(stage) for stage in plan.stages[1:]] == [*map(alone.parameter_count, alone.stages)]
    assert plan.model.encoder is not None
    assert plan.parameter_count(plan.stages[0]) == parameter_count(plan.model.encoder.model)
    tokens = plan.training.microbatch * plan.model.encoder.projected_tokens
    assert plan.sent_bytes(0) == tokens * plan.model.hidden * 2
    assert plan.receives_gradients(0) is not frozen
    result = simulate(scenario)
    fine = simulate(scenario.with_overrides("cost.coalesce=false"))
    assert fine.step_time == pytest.approx(result.step_time, rel=1e-9)


def _own_degree(mapping: dict[str, Any], **keys: Any) -> dict[str, Any]:
    """A mapping with tp 2 and keys of an encoder in its layout, on twice as many GPUs as its pipeline needs."""
    layout = {**mapping["layout"], "tp": 2, **keys}
    gpus = 4 * layout.get("cp", 1) * layout["pp"]
    return {**mapping, "layout": layout, "cluster": {"name": "dgx-h100", "gpus": gpus}}


@given(tower_mappings())
@examples(8)
def test_an_encoder_with_the_degree_of_its_language_model_has_none_of_its_own(mapping: dict[str, Any]) -> None:
    own, shared = (simulate(_with_towers(_own_degree(mapping, **keys))) for keys in ({"encoder_tp": 2}, {}))
    assert_same_trace(own.trace, shared.trace, relative=0.0)
    assert [ledger.peak for ledger in own.ledgers] == [ledger.peak for ledger in shared.ledgers]


@given(tower_mappings(), st.sampled_from([1, 2]), st.sampled_from([1, 2]), st.booleans())
@examples(16)
def test_replicas_of_an_encoder_share_images_and_hold_all_its_weights(
    mapping: dict[str, Any], cp: int, images: int, frozen: bool
) -> None:
    """Each of 2 x cp ranks has its share of the images, rounded up; all ranks of the stage reduce its gradients."""
    mapping = _own_degree(mapping, cp=cp, encoder_tp=1)
    scenario = _with_towers(mapping, encoder={**_ENCODER, "images": images, "frozen": frozen})
    plan = build_plan(scenario)
    assert plan.encoder is not None
    assert plan.model.encoder is not None
    total = plan.training.microbatch * images
    assert plan.encoder.plan.training.microbatch == -(-total // (2 * cp))
    held = sum(plan.parameter_count(plan.stages[0], name) for name in (ENCODER, FROZEN_ENCODER))
    assert held == parameter_count(plan.model.encoder.model)
    sizes = {group.name: group.dp_size for group in plan.parameter_groups}
    assert sizes[ENCODER] == 2 * cp * plan.layout.dp == 2 * sizes["dense"]
    projected = 2 * cp * plan.encoder.plan.training.microbatch * plan.model.encoder.projected_tokens / images
    assert plan.encoder.projected_bytes == projected * plan.model.hidden * 2
    assert not any(name.startswith("encoder_tp") for name in (op.comm_group for op in _comm_ops(scenario)))


def _comm_ops(scenario: Scenario) -> list[CommOp]:
    return [comm_op for program in simulate(scenario).program.programs for comm_op in program.comm_ops]


@given(tower_mappings(), st.booleans())
@examples(8)
def test_folding_and_coalescing_change_no_time(mapping: dict[str, Any], own: bool) -> None:
    mapping = _own_degree(mapping, encoder_tp=1) if own else mapping
    scenario = _with_towers(mapping, encoder={**_ENCODER, "images": 3, "frozen": True})
    folded, unfolded = simulate(scenario), simulate(scenario.with_overrides("cost.symmetry=off"))
    assert_same_trace(folded.trace, unfolded.trace, relative=1e-9)
    fine = simulate(scenario.with_overrides("cost.coalesce=false"))
    assert fine.step_time == pytest.approx(folded.step_time, rel=1e-9)


@given(tower_mappings())
@examples(12)
def test_ranks_hold_all_towers(mapping: dict[str, Any]) -> None:
    """The first stage has the encoder, of which tensor parallelism splits the same as of the language model."""
    scenario = _with_towers({**mapping, "layout": {**mapping["layout"], "tp": 1, "sequence_parallel": False}})
    plan = build_plan(scenario)
    alone = build_plan(Scenario.from_mapping({**mapping, "model": _LANGUAGE}).with_overrides("layout.tp=1"))
    extra = [
        plan.parameter_count(stage) - own.parameter_count(other)
        for stage, own, other in zip(plan.stages, [alone] * len(alone.stages), alone.stages, strict=True)
    ]
    assert extra[0] > 0
    assert not any(extra[1:])


@given(
    st.sampled_from([1, 2, 4]),
    st.integers(1, 8).map(lambda count: 64 * count),
    st.sampled_from(AttentionBackend),
)
@examples(16)
def test_attention_across_to_as_many_keys_has_the_flop_of_bidirectional_attention(
    tp: int, tokens: int, backend: AttentionBackend
) -> None:
    """With as wide keys: model FLOP, and those of all kernels."""
    model = load_preset("vit-l-16")
    within = FullAttention(16, 16, 64, qkv_bias=True, causal=False)
    across = CrossAttention(16, 64, keys=tokens, key_hidden=model.hidden, qkv_bias=True)
    full = AttentionFlopConvention.FULL
    flops = [6 * mixer.matrix_elements(model.hidden) + mixer.mixing_flops(tokens, full) for mixer in (within, across)]
    assert flops[1] == pytest.approx(flops[0], rel=1e-12)
    shard = LayerShard(2, tokens, tokens, tp=tp)
    training = Training(tokens, 2, 2, attention=backend)
    executed = []
    for mixer in (within, across):
        layer = transformer_layer(model, LayerSpec(mixer, None), training, shard)
        kernels = (
            kernel
            for operator in layer.operators
            for kernel in (*operator.forward, *operator.input_gradient, *operator.weight_gradient)
        )
        executed.append(sum(kernel.flops for kernel in kernels))
    assert executed[1] == pytest.approx(executed[0], rel=1e-12)
    counts = [mixer.parameter_count(model.hidden, linear_bias=True) for mixer in (within, across)]
    assert counts[0] == counts[1]


def test_the_encoder_of_a_plan_is_on_the_stage_of_the_embedding() -> None:
    mapping = {
        "model": {"preset": "llava-1.5-7b"},
        "cluster": {"name": "dgx-h100", "gpus": 8},
        "layout": {"pp": 4},
        "training": {"sequence": 2048, "global_batch": 16},
    }
    plan: Plan = build_plan(Scenario.from_mapping(mapping))
    names = [
        [operator.name.partition(".")[0] for unit in plan.stage_units(stage) for operator in unit.operators]
        for stage in plan.stages
    ]
    assert "encoder" in names[0]
    assert not any("encoder" in stage_names for stage_names in names[1:])
    backward_kernels = [
        kernel
        for unit in plan.stage_units(plan.stages[0])
        for operator in unit.operators
        if operator.name.startswith(("encoder.attention", "encoder.mlp"))
        for kernel in (*operator.input_gradient, *operator.weight_gradient)
    ]
    assert not backward_kernels


_OWN_RANKS = [
    {"tp": tp, "cp": cp, "pp": stages + 1, "dp": left // replica, "encoder_tp": encoder_tp, "encoder_dp": encoder_dp}
    for tp, cp, stages, encoder_tp in itertools.product([1, 2], repeat=4)
    for encoder_dp in range(1, 8)
    for replica, left in [(tp * cp * stages, 16 - encoder_tp * encoder_dp)]
    if left > 0 and left % replica == 0
]
"""Degrees of a model and of an encoder with GPUs of its own that take two nodes of eight together."""


@st.composite
def own_ranks(draw: st.DrawFn) -> dict[str, Any]:
    """A layout whose encoder has ranks of its own."""
    degrees = draw(st.sampled_from(_OWN_RANKS))
    order = draw(st.permutations(["tp", "cp", "dp", "pp"]))
    data = draw(st.sampled_from(["ddp", "zero1", "zero2", "fsdp"]))
    return {
        "model": {"language": _LANGUAGE, "encoder": {**_ENCODER, "images": draw(st.integers(1, 3))}},
        "cluster": {"name": "dgx-h100", "gpus": 16},
        "layout": {**degrees, "order": order, "data": data, "encoder_placement": "own_stage"},
        "training": {"sequence": 256, "global_batch": 3 * degrees["dp"], "microbatch": 1},
    }


@given(tower_mappings())
@examples(12)
def test_as_many_ranks_for_the_encoder_as_for_others_are_its_pipeline_rank(mapping: dict[str, Any]) -> None:
    """The gradient norm is left out: it is over all ranks, and without ZeRO's shards over fewer."""
    layout = {**mapping["layout"], "pp": 2, "sequence_parallel": False, "encoder_placement": "own_stage"}
    mapping = {**mapping, "training": {**mapping["training"], "gradient_clipping": False}}
    degrees = {"encoder_tp": layout["tp"], "encoder_dp": 4 // layout["tp"]}
    shared, own = (simulate(Scenario.from_mapping({**mapping, "layout": {**layout, **keys}})) for keys in ({}, degrees))
    assert own.step_time == shared.step_time
    assert own.model_flops == shared.model_flops
    assert [ledger.peak for ledger in own.ledgers] == [ledger.peak for ledger in shared.ledgers]
    np.testing.assert_allclose(own.breakdown.seconds, shared.breakdown.seconds, rtol=1e-9, atol=1e-12)


@given(own_ranks())
@examples(24)
def test_all_images_reach_the_replicas_whose_they_are(mapping: dict[str, Any]) -> None:
    """Each rank of the model's first stage gets its slice of what is made, and returns the gradients of its part."""
    scenario = Scenario.from_mapping(mapping)
    plan, program, layout = build_plan(scenario), simulate(scenario).program, scenario.layout
    assert plan.encoder is not None
    assert plan.model.encoder is not None
    made = layout.encoder_dp * plan.encoder.output_bytes if layout.encoder_dp else 0.0
    images = plan.encoder.plan.training.microbatch
    assert images * layout.encoder_dp >= layout.dp * plan.model.encoder.samples > (images - 1) * layout.encoder_dp
    ops = {op.comm_group: op for op in program.comm_ops if op.comm_group in ("from_encoder", "to_encoder")}
    outward, back = (program.groups[name].members for name in ("from_encoder", "to_encoder"))
    assert len(outward) * ops["from_encoder"].payload == pytest.approx(layout.cp * made)
    assert len(back) * ops["to_encoder"].payload == pytest.approx(made)
    senders, stage = ops["from_encoder"].senders, layout.rank_coordinates(PIPELINE)
    assert sorted(outward[:, :senders].ravel()) == np.flatnonzero(stage == 0).tolist()
    assert sorted(outward[:, senders:].ravel()) == np.flatnonzero(stage == 1).tolist()
    assert [sorted(group) for group in outward.tolist()] == [sorted(group) for group in back.tolist()]
    replica, cells = layout.rank_coordinates(DATA), layout.encoder_cells
    cell = np.where(stage == 0, replica // (layout.encoder_dp // cells), replica // (layout.dp // cells))
    assert (cell[outward] == cell[outward[:, :1]]).all()


@given(own_ranks())
@examples(16)
def test_every_rank_is_in_a_group_of_each_kind_that_it_uses(mapping: dict[str, Any]) -> None:
    """And neither folding nor coalescing changes the step, nor does the vectorized engine."""
    scenario = Scenario.from_mapping(mapping)
    result = simulate(scenario)
    program = result.program
    for index, rank_program in enumerate(program.programs):
        ranks = set(np.flatnonzero(program.program_index == index).tolist())
        for comm_op in rank_program.comm_ops:
            group = program.groups[comm_op.comm_group]
            assert group.ordered or ranks <= set(group.members.ravel().tolist()), comm_op
    for override in ("cost.symmetry=off", "cost.coalesce=false", "cost.network=uncontended"):
        other = simulate(scenario.with_overrides(override))
        assert override.endswith("uncontended") or other.step_time == pytest.approx(result.step_time, rel=1e-9)
    vectorized, folded = (
        simulate(scenario.with_overrides("cost.network=uncontended", *overrides)).step_time
        for overrides in (["cost.symmetry=off"], [])
    )
    assert vectorized == pytest.approx(folded, rel=1e-9)


def test_the_model_waits_for_its_images_and_the_encoder_for_their_gradients() -> None:
    """The first forward begins when the images have arrived; a bottleneck's passes follow each other at once."""
    mapping = {
        "model": {"language": _LANGUAGE, "encoder": {"preset": "clip-vit-l-14-336", "images": 4}},
        "cluster": {"name": "dgx-h100", "gpus": 8},
        "layout": {"pp": 2, "dp": 6, "encoder_placement": "own_stage", "encoder_tp": 2, "encoder_dp": 1},
        "training": {"sequence": 4096, "global_batch": 48, "microbatch": 1},
        "framework": "ideal",
    }
    result = simulate(Scenario.from_mapping(mapping))
    trace, tasks = result.trace, [program.tasks for program in result.program.programs]
    encoder, model = (int(trace.representative[rank]) for rank in (0, 2))

    def spans(rank: int, wanted: Any) -> list[tuple[float, float]]:
        rows = np.flatnonzero(trace.rank == rank)
        own = tasks[int(result.program.program_index[rank])]
        return [(trace.start[row], trace.end[row]) for row in rows if wanted(own[trace.task[row]])]

    def is_forward(task: Any) -> bool:
        return isinstance(task, ComputeTask) and task.action is not None and task.action.kind is FORWARD

    def is_images(task: Any) -> bool:
        return isinstance(task, CollectiveTask) and task.comm_op.comm_group == "from_encoder"

    forwards, sent = sorted(spans(encoder, is_forward)), sorted(spans(encoder, is_images))
    received = sorted(spans(model, is_images))
    assert sent == received
    assert sent[0][0] == forwards[0][1]
    assert min(start for start, _ in spans(model, is_forward)) == received[0][1]
    busy = sum(end - start for start, end in spans(encoder, lambda task: isinstance(task, ComputeTask)))
    assert result.step_time == pytest.approx(busy, rel=0.02)  # 24 images a pass: the model waits for them
