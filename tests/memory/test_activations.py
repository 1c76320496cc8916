"""Kept activations (Korthikanti et al. 2022, arXiv:2205.05198), and transient memory of backward."""

from dataclasses import replace

import pytest

from clustersim.common.dtypes import DType
from clustersim.memory.activations import ActivationKind, Activations
from clustersim.model.overheads import NO_OVERHEADS
from clustersim.model.precision_recipe import mixed_precision
from clustersim.model.presets import load_preset
from clustersim.model.training import (
    AttentionBackend,
    DotsSaveableRecompute,
    FullRecompute,
    LossImplementation,
    NoRecompute,
    Recompute,
    SelectiveOpRecompute,
    SelectiveRecompute,
    Training,
)
from clustersim.model.transformer import TransformerModel
from clustersim.parallel.data_parallel_strategy import FullyShard
from clustersim.parallel.layer_partition import PipelineStage
from clustersim.parallel.layout import Layout
from clustersim.parallel.plan import Plan
from clustersim.results.memory_check import peak_memory
from clustersim.scenario import Scenario
from clustersim.simulation import simulate
from tests.memory.rank_memory import rank_ledger
from tests.uniform_models import model_dimensions, uniform_stage

FP16 = mixed_precision(compute=DType.FP16, gradients=DType.FP16)
SEQUENCE = 2048
LAYERS = 5
CASES = [("megatron-22b", 4), ("megatron-530b", 1), ("megatron-1t", 1), ("gpt3-175b", 1)]


def layer_activations(
    model: TransformerModel, microbatch: int, layout: Layout, recompute: Recompute | None = None
) -> Activations:
    training = Training(
        SEQUENCE, microbatch, microbatch, recipe=FP16, attention=AttentionBackend.STANDARD,
        recompute=recompute or NoRecompute(),
    )  # fmt: skip
    return Activations(Plan(model, training, layout))


def layer_stage(
    activations: Activations, layers: int = LAYERS, *, embedding: bool = False, head: bool = False
) -> PipelineStage:
    return uniform_stage(activations.plan.model, 0 if embedding else 1, layers, embedding=embedding, head=head)


def kept_bytes(activations: Activations) -> float:
    return activations.saved_bytes(layer_stage(activations))


@pytest.mark.parametrize(("name", "b"), CASES)
@pytest.mark.parametrize(
    ("sequence_parallel", "recompute"),
    [(False, NoRecompute()), (True, NoRecompute()), (False, SelectiveRecompute()), (True, SelectiveRecompute())],
)
def test_table_2(name: str, b: int, sequence_parallel: bool, recompute: Recompute) -> None:
    """Bytes per layer, Table 2: sbh (10 + 24/t + 5as/(ht)), sbh/t (34 + 5as/h), and without 5as/h if selective."""
    model, s, t = load_preset(name), SEQUENCE, 8
    h, a = model.hidden, model_dimensions(model).heads
    core_term = 0 if isinstance(recompute, SelectiveRecompute) else 5 * a * s / h
    per_layer = s * b * h / t * (34 + core_term) if sequence_parallel else s * b * h * (10 + 24 / t + core_term / t)
    activations = layer_activations(model, b, Layout(tp=t, sequence_parallel=sequence_parallel), recompute)
    assert activations.saved_bytes(layer_stage(activations)) == pytest.approx(LAYERS * per_layer, rel=1e-12)


@pytest.mark.parametrize(("name", "b"), CASES)
def test_table_2_full_recomputation_keeps_the_input(name: str, b: int) -> None:
    """2 s b h per layer; with sequence parallelism the input is split as everything else is."""
    model = load_preset(name)
    for sequence_parallel, shard_count in ((False, 1), (True, 8)):
        activations = layer_activations(model, b, Layout(tp=8, sequence_parallel=sequence_parallel), FullRecompute())
        assert (
            activations.saved_bytes(layer_stage(activations)) == LAYERS * 2 * SEQUENCE * b * model.hidden / shard_count
        )


def test_n_recomputed_layers_keep_their_input_and_the_others_everything() -> None:
    model = load_preset("megatron-22b")
    kept_variants = [
        kept_bytes(layer_activations(model, 4, Layout(tp=8), recompute))
        for recompute in (FullRecompute(), NoRecompute(), FullRecompute(2), FullRecompute(99))
    ]
    full, none, two, more_than_all = kept_variants
    assert two == pytest.approx((2 * full + 3 * none) / 5)
    assert more_than_all == full


def test_embedding_and_head_keep_the_bytes_of_section_4_3() -> None:
    """Final norm and logits' input 2sbh/t each, fp32 logits 4sbv/t (4sbh/t (1 + v/h)); the dropout mask sbh/t.

    The paper leaves out the token ids, eight bytes each.
    """
    model, s, b, t = load_preset("megatron-22b"), SEQUENCE, 4, 8
    h, v = model.hidden, model.vocab
    activations = layer_activations(model, b, Layout(tp=t, sequence_parallel=True))
    assert activations.saved_bytes(layer_stage(activations, 0, head=True)) == 4 * s * b * h / t * (1 + v / h)
    assert activations.saved_bytes(layer_stage(activations, 0, embedding=True)) == s * b * h / t + 8 * s * b


@pytest.mark.parametrize(
    ("name", "b", "percent"),
    [("megatron-22b", 4, (66.84, 49.42, 16.18, 7.64)), ("megatron-530b", 1, (58.31, 62.04, 20.27, 9.42))],
)
def test_figure_7(name: str, b: int, percent: tuple[float, ...]) -> None:
    """Sequence parallelism, selective recomputation, both, full, in per cent of the tensor-parallel baseline.

    As digitised by calculon's authors (calculon-ai/calculon, validation.py); read off the figure to some tenths.
    """

    def variant_bytes(*, parallel: bool, recompute: Recompute) -> float:
        return kept_bytes(layer_activations(load_preset(name), b, Layout(tp=8, sequence_parallel=parallel), recompute))

    variants = [
        variant_bytes(parallel=True, recompute=NoRecompute()),
        variant_bytes(parallel=False, recompute=SelectiveRecompute()),
        variant_bytes(parallel=True, recompute=SelectiveRecompute()),
        variant_bytes(parallel=False, recompute=FullRecompute()),
    ]
    baseline = variant_bytes(parallel=False, recompute=NoRecompute())
    assert [100 * variant / baseline for variant in variants] == pytest.approx(percent, abs=0.3)


def test_backward_of_a_recomputed_layer_holds_the_layer() -> None:
    """All activations of the layer without recomputation, less its input, and the largest weight's gradient.

    That is fp16, 4 h^2 / t with a bias of h that is not split. Beside it are gradients of activations: those of the
    MLP's output and of its last matmul's input, h + 4 h / t for each token, less the dropout mask of a byte that
    the residual add has freed, and the residual stream's h.
    """
    model = load_preset("megatron-22b")
    full, none = (
        layer_activations(model, 4, Layout(tp=8), recompute) for recompute in (FullRecompute(), NoRecompute())
    )
    weight = 2 * (4 * model.hidden**2 / 8 + model.hidden)
    layer, its_input = none.saved_bytes(layer_stage(none)) / 5, full.saved_bytes(layer_stage(full)) / 5
    gradients = 4 * SEQUENCE * model.hidden * (2 * (1 + 4 / 8) - 1 + 2)
    assert none.transient_bytes(layer_stage(none)) == weight + gradients
    assert full.transient_bytes(layer_stage(full)) == pytest.approx(weight + gradients + layer - its_input)


def test_kept_layers_are_freed_before_earlier_layers_are_recomputed() -> None:
    """The first two of five layers are recomputed (Megatron's method `block`), when three kept layers are freed."""
    model = load_preset("megatron-22b")
    two, none = (
        layer_activations(model, 4, Layout(tp=8), recompute) for recompute in (FullRecompute(2), NoRecompute())
    )
    assert two.transient_bytes(layer_stage(two)) == none.transient_bytes(layer_stage(none))
    short = uniform_stage(model, 1, 2, embedding=False, head=False)
    assert two.transient_bytes(short) > none.transient_bytes(short)


def test_backward_of_a_selectively_recomputed_layer_holds_the_attention_core() -> None:
    """5 a s^2 b / t bytes: softmax, its dropout mask and result."""
    model, s, b, t = load_preset("megatron-22b"), SEQUENCE, 4, 8
    selective, none = (
        layer_activations(model, b, Layout(tp=t), item) for item in (SelectiveRecompute(), NoRecompute())
    )
    assert (
        selective.transient_bytes(layer_stage(selective)) - none.transient_bytes(layer_stage(none))
        == 5 * model_dimensions(model).heads * s * s * b / t
    )


@pytest.mark.parametrize(
    ("loss", "width"),
    [
        (LossImplementation.VOCAB_PARALLEL, 2),
        (LossImplementation.FUSED, 2),
        (LossImplementation.COMPILED, 2),
        (LossImplementation.TORCH, 8),
        (LossImplementation.TORCH_FP32, 8),
    ],
)
def test_the_loss_needs_gradients_of_the_logits(loss: LossImplementation, width: int) -> None:
    """Megatron: one in bf16. PyTorch: nll_loss_backward and log_softmax_backward allocate one each in fp32.

    The logits of Llama 3 8B on 8,192 tokens outweigh its head matrix (128,256 x 4,096) from 4,096 tokens on.
    """
    training = Training(8192, 1, loss=loss)
    activations = Activations(Plan(load_preset("llama3-8b"), training, Layout()))
    assert activations.transient_bytes(layer_stage(activations, 32, embedding=True, head=True)) == 8192 * 128256 * width


def test_a_chunked_loss_computes_logit_gradients_in_place() -> None:
    """Logits are kept with two bytes each, and there are two gradients of an eighth of them at a time."""
    training = Training(8192, 1, loss=LossImplementation.CHUNKED)
    chunked, logits = Activations(Plan(load_preset("llama3-8b"), training, Layout())), 8192 * 128256
    assert (chunked.bytes_of(ActivationKind.LOSS_GRADIENT), chunked.bytes_of(ActivationKind.CAST_GRADIENT)) == (
        2 * logits / 8,
        0,
    )
    fused = Activations(Plan(load_preset("llama3-8b"), replace(training, loss=LossImplementation.FUSED), Layout()))
    assert fused.bytes_of(ActivationKind.HEAD_SAVED) - chunked.bytes_of(ActivationKind.HEAD_SAVED) == 2 * logits


@pytest.mark.parametrize(
    ("loss", "bytes_per_logit"),
    [
        (LossImplementation.TORCH_FP32, 8),
        (LossImplementation.TORCH, 4),
        (LossImplementation.COMPILED, 2),
        (LossImplementation.FUSED_LINEAR, 0),
    ],
)
def test_what_a_loss_saves_of_each_logit(loss: LossImplementation, bytes_per_logit: int) -> None:
    """FP32 logits and log-softmax; the log-softmax alone; the logits in bf16; nothing. Beside 4 s b h of the head."""
    training = Training(8192, 1, loss=loss)
    activations = Activations(Plan(load_preset("llama3-8b"), training, Layout()))
    head, hidden = activations.bytes_of(ActivationKind.HEAD_SAVED), 8192 * 4096
    assert head == bytes_per_logit * 8192 * 128256 + 4 * hidden


def test_a_loss_with_its_matmul_has_an_eighth_of_the_logits_and_of_their_gradient() -> None:
    """2 x 2 bytes for each logit of a chunk, beside the gradient of the output matrix."""
    training = Training(8192, 1, loss=LossImplementation.FUSED_LINEAR)
    activations = Activations(Plan(load_preset("llama3-8b"), training, Layout()))
    chunk, matrix = 4 * 8192 * 128256 / 8, 2 * 128256 * 4096
    assert activations.transient_bytes(layer_stage(activations, 1, head=True)) == chunk + matrix


def test_liger_computes_gradients_of_logits_and_of_gate_and_up_in_their_place() -> None:
    """A 32nd of the logits once; its release 0.8.0 has the output matrix' gradient in bf16 and FP32 as well.

    Of a layer's gradients those of the MLP's activation are the most, 2 x 14,336 wide beyond what it has freed; in
    place, those of the last matrix are, 14,336 and 4,096 wide. Both with the residual stream's.
    """
    liger, old = (Training(8192, 1, loss=LossImplementation(name)) for name in ("liger", "liger_fp32_sum"))
    in_place = replace(liger, overheads=replace(NO_OVERHEADS, activation_in_place=True))
    model = load_preset("llama3-8b")
    plain, summed, placed = (Activations(Plan(model, training, Layout())) for training in (liger, old, in_place))
    assert plain.bytes_of(ActivationKind.LOSS_GRADIENT) == 2 * 256 * 128256
    assert summed.loss_accumulation_bytes == (2 + 4) * 128256 * 4096
    assert plain.layer_gradient_bytes(model.distinct_specs[0]) == 2 * 8192 * (2 * 14336 + 4096)
    assert placed.layer_gradient_bytes(model.distinct_specs[0]) == 2 * 8192 * (14336 + 2 * 4096)


def test_the_head_gradient_is_allocated_after_the_softmax_is_freed() -> None:
    """1,024 tokens: 2 bytes of gradient and no longer 4 of softmax per logit, and 2 for each weight of the matrix."""
    activations = Activations(Plan(load_preset("llama3-8b"), Training(1024, 1), Layout()))
    assert activations.transient_bytes(layer_stage(activations, 32, embedding=True, head=True)) == 128256 * (
        4096 * 2 - 1024 * 2
    )


def test_the_embedding_gradient_is_allocated_after_layer_activations_are_freed() -> None:
    activations = Activations(Plan(load_preset("llama3-8b"), Training(16, 1), Layout()))
    first, layers = layer_stage(activations, 8, embedding=True), layer_stage(activations, 8)
    assert activations.transient_bytes(first) == 2 * 128256 * 4096 - activations.saved_bytes(layers)


def test_zero_3_counts_gradients_of_weights_with_its_gathered_units() -> None:
    """So a layer has those of its activations: 3 f for a gated MLP that has freed f, and h of the residual stream."""
    plan = Plan(load_preset("llama3-8b"), Training(8192, 8), Layout(dp=8, data=FullyShard()))
    gradients = 2 * 8192 * (2 * 14336 + 4096)
    assert Activations(plan).transient_bytes(uniform_stage(plan.model, 1, 8, embedding=False, head=False)) == gradients


@pytest.mark.parametrize(("name", "b"), CASES)
@pytest.mark.parametrize("recompute", [NoRecompute(), SelectiveRecompute(), FullRecompute()])
def test_deferred_weight_gradients_keep_32_sbh(name: str, b: int, recompute: Recompute) -> None:
    """Qi et al. 2023 (arXiv:2401.10241), section 2.3.

    Inputs take 14 s b h bytes and gradients of outputs 18 s b h bytes. Queries, keys and values read 2 and
    write 6, the attention output 2 and 2, the MLP 2 and 8, and 8 and 2.
    """
    model = load_preset(name)
    activations = layer_activations(model, b, Layout(), recompute)
    assert activations.wgrad_bytes(layer_stage(activations)) == LAYERS * 32 * SEQUENCE * b * model.hidden


def test_tensor_parallelism_shards_deferred_weight_gradient_inputs() -> None:
    """Of 32: 6 + 2 + 8 + 8 = 24 split over tp.

    With sequence parallelism also the 2 + 2 read by column-parallel layers.
    """
    model = load_preset("megatron-22b")
    for sequence_parallel, unsharded in ((False, 8), (True, 4)):
        activations = layer_activations(model, 1, Layout(tp=8, sequence_parallel=sequence_parallel))
        per_layer = unsharded + (32 - unsharded) / 8
        assert activations.wgrad_bytes(layer_stage(activations)) == LAYERS * per_layer * SEQUENCE * model.hidden


@pytest.mark.parametrize(
    ("name", "columns"),
    [
        ("llama3-8b", 4096 + (4096 + 1024) + 4096 + 14336 + 4096),  # input; q, v; attention; gate; down
        ("gpt3-175b", 12288 + 2 * 12288 + 12288 + 4 * 12288),  # input; q, v; attention; up
    ],
)
def test_selective_op_recompute_keeps_input_attention_and_half_the_matmuls(name: str, columns: int) -> None:
    """Two bytes of each, and the FP32 logarithms of flash attention's sums, one for each token and head."""
    model = load_preset(name)
    training = Training(SEQUENCE, 1, recompute=SelectiveOpRecompute())
    activations = Activations(Plan(model, training, Layout()))
    assert activations.saved_bytes(layer_stage(activations)) == LAYERS * SEQUENCE * (
        2 * columns + 4 * model_dimensions(model).heads
    )


@pytest.mark.parametrize(
    ("name", "columns"),
    [
        ("llama3-8b", 4096 + (4096 + 2 * 1024) + 4096 + 2 * 14336),  # input; q, k, v; output; gate, up
        ("gpt3-175b", 12288 + 3 * 12288 + 12288 + 4 * 12288),  # input; q, k, v; output; up
    ],
)
def test_where_dots_are_saveable_all_but_the_last_product_with_weights_is_kept(name: str, columns: int) -> None:
    """Two bytes of each; nothing in backward reads the result of the down projection."""
    training = Training(SEQUENCE, 1, recompute=DotsSaveableRecompute())
    activations = Activations(Plan(load_preset(name), training, Layout()))
    assert activations.saved_bytes(layer_stage(activations)) == LAYERS * SEQUENCE * 2 * columns


@pytest.mark.parametrize("name", ["llama3-8b", "gpt3-175b", "qwen2.5-7b"])
@pytest.mark.parametrize("layout", [Layout(), Layout(tp=4), Layout(tp=4, sequence_parallel=True), Layout(cp=2)])
def test_selective_op_recompute_is_between_full_and_none(name: str, layout: Layout) -> None:
    kept_by_mode, transient_by_mode = [], []
    for recompute in (FullRecompute(), SelectiveOpRecompute(), NoRecompute()):
        activations = Activations(Plan(load_preset(name), Training(SEQUENCE, 1, recompute=recompute), layout))
        kept_by_mode.append(activations.saved_bytes(layer_stage(activations)))
        transient_by_mode.append(activations.transient_bytes(layer_stage(activations)))
    assert kept_by_mode == sorted(set(kept_by_mode))
    assert transient_by_mode == sorted(set(transient_by_mode), reverse=True), (
        "what was not kept is there while its layer's backward runs"
    )


@pytest.mark.parametrize(("split", "shards"), [(False, 1), (True, 8)])
def test_unreleased_outputs_are_held_for_every_microbatch_in_flight(split: bool, shards: int) -> None:
    """Korthikanti et al. 2022, appendix B: 530B saves 2 s b h p bytes on its first stage, 2.73 GiB (p 35, s 2048, b 1).

    Rank r of 1F1B has p - r microbatches in flight; where the sequence is split, so is each output. The last stage
    sends nothing.
    """
    layout = Layout(tp=8, pp=35, sequence_parallel=split, deallocate_pipeline_outputs=False)
    holds = Plan(load_preset("megatron-530b"), Training(SEQUENCE, 40), layout)
    frees = replace(holds, layout=replace(layout, deallocate_pipeline_outputs=True))
    for rank in (0, 5, 34):
        in_flight = 35 - rank if rank < 34 else 0
        additional_bytes = rank_ledger(holds, rank).peak - rank_ledger(frees, rank).peak
        assert additional_bytes == pytest.approx(in_flight * 2 * SEQUENCE * 20480 / shards)
    published_bytes = 35 * 2 * SEQUENCE * 20480
    assert published_bytes == pytest.approx(2.73 * 2**30, rel=2e-3)


def test_output_release_defaults_to_the_framework_setting() -> None:
    base = {
        "model": "gpt3-175b",
        "layout": {"tp": 8, "pp": 8},
        "cluster": {"name": "dgx-a100", "gpus": 64},
        "training": {"sequence": 2048, "global_batch": 8},
    }
    by_framework = [Scenario.from_mapping(base | {"framework": name}) for name in ("pytorch", "megatron-2021")]
    assert [scenario.layout.deallocate_pipeline_outputs for scenario in by_framework] == [True, False]
    stated = by_framework[1].with_overrides("layout.deallocate_pipeline_outputs=true")
    assert stated.layout.deallocate_pipeline_outputs
    assert peak_memory(stated) < peak_memory(by_framework[1])
    reloaded = Scenario.from_mapping(simulate(stated).to_json()["scenario"])
    assert reloaded.layout == stated.layout
