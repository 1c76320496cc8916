"""Activations that are kept (Korthikanti et al. 2022, arXiv:2205.05198), and what backward needs for a moment."""

from dataclasses import replace

import pytest

from clustersim.common.dtypes import DType
from clustersim.memory.activations import ActivationKind, Activations
from clustersim.model.precision_recipe import mixed_precision
from clustersim.model.presets import load_preset
from clustersim.model.training import (
    AttentionBackend,
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
from tests.memory.rank_memory import ledger_of
from tests.uniform_models import sizes, stage

FP16 = mixed_precision(compute=DType.FP16, gradients=DType.FP16)
SEQUENCE = 2048
LAYERS = 5
CASES = [("megatron-22b", 4), ("megatron-530b", 1), ("megatron-1t", 1), ("gpt3-175b", 1)]


def activations(
    model: TransformerModel, microbatch: int, layout: Layout, recompute: Recompute | None = None
) -> Activations:
    training = Training(
        SEQUENCE, microbatch, microbatch, recipe=FP16, attention=AttentionBackend.STANDARD,
        recompute=recompute or NoRecompute(),
    )  # fmt: skip
    return Activations(Plan(model, training, layout))


def part(made: Activations, layers: int = LAYERS, *, embedding: bool = False, head: bool = False) -> PipelineStage:
    return stage(made.plan.model, 0 if embedding else 1, layers, embedding=embedding, head=head)


def kept_by(made: Activations) -> float:
    return made.saved_bytes(part(made))


@pytest.mark.parametrize(("name", "b"), CASES)
@pytest.mark.parametrize(
    ("sequence_parallel", "recompute"),
    [(False, NoRecompute()), (True, NoRecompute()), (False, SelectiveRecompute()), (True, SelectiveRecompute())],
)
def test_table_2(name: str, b: int, sequence_parallel: bool, recompute: Recompute) -> None:
    """Bytes per layer, Table 2: sbh (10 + 24/t + 5as/(ht)), sbh/t (34 + 5as/h), and without 5as/h if selective."""
    model, s, t = load_preset(name), SEQUENCE, 8
    h, a = model.hidden, sizes(model).heads
    core = 0 if isinstance(recompute, SelectiveRecompute) else 5 * a * s / h
    per_layer = s * b * h / t * (34 + core) if sequence_parallel else s * b * h * (10 + 24 / t + core / t)
    made = activations(model, b, Layout(tp=t, sequence_parallel=sequence_parallel), recompute)
    assert made.saved_bytes(part(made)) == pytest.approx(LAYERS * per_layer, rel=1e-12)


@pytest.mark.parametrize(("name", "b"), CASES)
def test_table_2_full_recomputation_keeps_the_input(name: str, b: int) -> None:
    """2 s b h per layer; with sequence parallelism the input is split as everything else is."""
    model = load_preset(name)
    for sequence_parallel, parts in ((False, 1), (True, 8)):
        made = activations(model, b, Layout(tp=8, sequence_parallel=sequence_parallel), FullRecompute())
        assert made.saved_bytes(part(made)) == LAYERS * 2 * SEQUENCE * b * model.hidden / parts


def test_n_recomputed_layers_keep_their_input_and_the_others_everything() -> None:
    model = load_preset("megatron-22b")
    kept = [
        kept_by(activations(model, 4, Layout(tp=8), recompute))
        for recompute in (FullRecompute(), NoRecompute(), FullRecompute(2), FullRecompute(99))
    ]
    full, none, two, all_of_them = kept
    assert two == pytest.approx((2 * full + 3 * none) / 5)
    assert all_of_them == full


def test_embedding_and_head_keep_what_section_4_3_says() -> None:
    """Final norm and logits' input 2sbh/t each, fp32 logits 4sbv/t (4sbh/t (1 + v/h)); the dropout mask sbh/t.

    The paper leaves out the token numbers, eight bytes each.
    """
    model, s, b, t = load_preset("megatron-22b"), SEQUENCE, 4, 8
    h, v = model.hidden, model.vocab
    made = activations(model, b, Layout(tp=t, sequence_parallel=True))
    assert made.saved_bytes(part(made, 0, head=True)) == 4 * s * b * h / t * (1 + v / h)
    assert made.saved_bytes(part(made, 0, embedding=True)) == s * b * h / t + 8 * s * b


@pytest.mark.parametrize(
    ("name", "b", "percent"),
    [("megatron-22b", 4, (66.84, 49.42, 16.18, 7.64)), ("megatron-530b", 1, (58.31, 62.04, 20.27, 9.42))],
)
def test_figure_7(name: str, b: int, percent: tuple[float, ...]) -> None:
    """Sequence parallelism, selective recomputation, both, full, in per cent of the tensor-parallel baseline.

    As digitised by calculon's authors (calculon-ai/calculon, validation.py); read off the figure to some tenths.
    """

    def kept(*, parallel: bool, recompute: Recompute) -> float:
        return kept_by(activations(load_preset(name), b, Layout(tp=8, sequence_parallel=parallel), recompute))

    choices = [
        kept(parallel=True, recompute=NoRecompute()),
        kept(parallel=False, recompute=SelectiveRecompute()),
        kept(parallel=True, recompute=SelectiveRecompute()),
        kept(parallel=False, recompute=FullRecompute()),
    ]
    baseline = kept(parallel=False, recompute=NoRecompute())
    assert [100 * choice / baseline for choice in choices] == pytest.approx(percent, abs=0.3)


def test_backward_of_a_recomputed_layer_holds_the_layer() -> None:
    """All that the layer would have kept, less its input, and the largest weight's gradient.

    That is fp16, 4 h^2 / t with a bias of h that is not split.
    """
    model = load_preset("megatron-22b")
    full, none = (activations(model, 4, Layout(tp=8), recompute) for recompute in (FullRecompute(), NoRecompute()))
    weight = 2 * (4 * model.hidden**2 / 8 + model.hidden)
    layer, its_input = none.saved_bytes(part(none)) / 5, full.saved_bytes(part(full)) / 5
    assert none.transient_bytes(part(none)) == weight
    assert full.transient_bytes(part(full)) == pytest.approx(weight + layer - its_input)


def test_layers_that_are_kept_are_freed_before_those_before_them_are_recomputed() -> None:
    """The first two of five layers are recomputed (Megatron's method `block`), when three whole layers are gone."""
    model = load_preset("megatron-22b")
    two, none = (activations(model, 4, Layout(tp=8), recompute) for recompute in (FullRecompute(2), NoRecompute()))
    assert two.transient_bytes(part(two)) == none.transient_bytes(part(none))
    short = stage(model, 1, 2, embedding=False, head=False)
    assert two.transient_bytes(short) > none.transient_bytes(short)


def test_backward_of_a_selectively_recomputed_layer_holds_the_attention_core() -> None:
    """5 a s^2 b / t bytes: softmax, its dropout mask and result."""
    model, s, b, t = load_preset("megatron-22b"), SEQUENCE, 4, 8
    selective, none = (activations(model, b, Layout(tp=t), item) for item in (SelectiveRecompute(), NoRecompute()))
    assert (
        selective.transient_bytes(part(selective)) - none.transient_bytes(part(none))
        == 5 * sizes(model).heads * s * s * b / t
    )


@pytest.mark.parametrize(
    ("loss", "width"),
    [(LossImplementation.VOCAB_PARALLEL, 2), (LossImplementation.FUSED, 2), (LossImplementation.TORCH, 8)],
)
def test_the_loss_needs_gradients_of_the_logits(loss: LossImplementation, width: int) -> None:
    """Megatron: one in bf16. PyTorch: nll_loss_backward and log_softmax_backward make one each in fp32.

    The logits of Llama 3 8B on 8,192 tokens outweigh its logits matrix (128,256 x 4,096) from 4,096 tokens on.
    """
    training = Training(8192, 1, loss=loss)
    made = Activations(Plan(load_preset("llama3-8b"), training, Layout()))
    assert made.transient_bytes(part(made, 32, embedding=True, head=True)) == 8192 * 128256 * width


def test_a_chunked_loss_keeps_logits_and_makes_their_gradients_in_their_place() -> None:
    """Two bytes each are kept, and of an eighth of them at a time are two gradients."""
    training = Training(8192, 1, loss=LossImplementation.CHUNKED)
    made, logits = Activations(Plan(load_preset("llama3-8b"), training, Layout())), 8192 * 128256
    assert (made.bytes_of(ActivationKind.LOSS_GRADIENT), made.bytes_of(ActivationKind.CAST_GRADIENT)) == (
        2 * logits / 8,
        0,
    )
    fused = Activations(Plan(load_preset("llama3-8b"), replace(training, loss=LossImplementation.FUSED), Layout()))
    assert fused.bytes_of(ActivationKind.HEAD_SAVED) - made.bytes_of(ActivationKind.HEAD_SAVED) == 2 * logits


def test_the_logits_matrix_has_a_gradient_while_the_softmax_is_gone() -> None:
    """1,024 tokens: 2 bytes of gradient and no longer 4 of softmax per logit, and 2 for each weight of the matrix."""
    made = Activations(Plan(load_preset("llama3-8b"), Training(1024, 1), Layout()))
    assert made.transient_bytes(part(made, 32, embedding=True, head=True)) == 128256 * (4096 * 2 - 1024 * 2)


def test_the_embeddings_gradient_comes_when_the_layers_activations_are_gone() -> None:
    made = Activations(Plan(load_preset("llama3-8b"), Training(16, 1), Layout()))
    first, layers = part(made, 8, embedding=True), part(made, 8)
    assert made.transient_bytes(first) == 2 * 128256 * 4096 - made.saved_bytes(layers)


def test_zero_3_counts_gradients_with_its_gathered_units() -> None:
    plan = Plan(load_preset("llama3-8b"), Training(8192, 8), Layout(dp=8, data=FullyShard()))
    assert Activations(plan).transient_bytes(stage(plan.model, 1, 8, embedding=False, head=False)) == 0.0


@pytest.mark.parametrize(("name", "b"), CASES)
@pytest.mark.parametrize("recompute", [NoRecompute(), SelectiveRecompute(), FullRecompute()])
def test_weight_gradients_wait_for_32_sbh(name: str, b: int, recompute: Recompute) -> None:
    """Qi et al. 2023 (arXiv:2401.10241), section 2.3: inputs of 14 s b h and gradients of outputs of 18 s b h bytes.

    Queries, keys and values read 2 and make 6, the attention output 2 and 2, the MLP 2 and 8, and 8 and 2.
    """
    model = load_preset(name)
    made = activations(model, b, Layout(), recompute)
    assert made.wgrad_bytes(part(made)) == LAYERS * 32 * SEQUENCE * b * model.hidden


def test_tensor_parallelism_splits_what_column_parallel_layers_make_and_row_parallel_ones_read() -> None:
    """Of 32: 6 + 2 + 8 + 8 = 24 split over tp; with sequence parallelism the 2 + 2 that columns read are too."""
    model = load_preset("megatron-22b")
    for sequence_parallel, whole in ((False, 8), (True, 4)):
        made = activations(model, 1, Layout(tp=8, sequence_parallel=sequence_parallel))
        per_layer = whole + (32 - whole) / 8
        assert made.wgrad_bytes(part(made)) == LAYERS * per_layer * SEQUENCE * model.hidden


@pytest.mark.parametrize(
    ("name", "columns"),
    [
        ("llama3-8b", 4096 + (4096 + 1024) + 4096 + 14336 + 4096),  # input; q, v; attention; gate; down
        ("gpt3-175b", 12288 + 2 * 12288 + 12288 + 4 * 12288),  # input; q, v; attention; up
    ],
)
def test_selective_operations_keep_the_input_attention_and_every_second_product(name: str, columns: int) -> None:
    """Two bytes of each, and the FP32 logarithms of flash attention's sums, one for each token and head."""
    model = load_preset(name)
    training = Training(SEQUENCE, 1, recompute=SelectiveOpRecompute())
    made = Activations(Plan(model, training, Layout()))
    assert made.saved_bytes(part(made)) == LAYERS * SEQUENCE * (2 * columns + 4 * sizes(model).heads)


@pytest.mark.parametrize("name", ["llama3-8b", "gpt3-175b", "qwen2.5-7b"])
@pytest.mark.parametrize("layout", [Layout(), Layout(tp=4), Layout(tp=4, sequence_parallel=True), Layout(cp=2)])
def test_selective_operations_keep_less_than_all_and_more_than_the_input(name: str, layout: Layout) -> None:
    kept, passing = [], []
    for recompute in (FullRecompute(), SelectiveOpRecompute(), NoRecompute()):
        made = Activations(Plan(load_preset(name), Training(SEQUENCE, 1, recompute=recompute), layout))
        kept.append(made.saved_bytes(part(made)))
        passing.append(made.transient_bytes(part(made)))
    assert kept == sorted(set(kept))
    assert passing == sorted(set(passing), reverse=True), "what was not kept is there while its layer's backward runs"


@pytest.mark.parametrize(("split", "shards"), [(False, 1), (True, 8)])
def test_outputs_that_are_not_released_are_there_for_every_microbatch_in_flight(split: bool, shards: int) -> None:
    """Korthikanti et al. 2022, appendix B: 530B saves 2 s b h p bytes on its first stage, 2.73 GiB (p 35, s 2048, b 1).

    Rank r of 1F1B has p - r microbatches in flight; where the sequence is split, so is each output. The last stage
    sends nothing.
    """
    layout = Layout(tp=8, pp=35, sequence_parallel=split, release_outputs=False)
    holds = Plan(load_preset("megatron-530b"), Training(SEQUENCE, 40), layout)
    frees = replace(holds, layout=replace(layout, release_outputs=True))
    for rank in (0, 5, 34):
        in_flight = 35 - rank if rank < 34 else 0
        more = ledger_of(holds, rank).peak - ledger_of(frees, rank).peak
        assert more == pytest.approx(in_flight * 2 * SEQUENCE * 20480 / shards)
    of_the_paper = 35 * 2 * SEQUENCE * 20480
    assert of_the_paper == pytest.approx(2.73 * 2**30, rel=2e-3)


def test_outputs_are_the_frameworks_habit_unless_the_scenario_says_it() -> None:
    base = {
        "model": "gpt3-175b",
        "layout": {"tp": 8, "pp": 8},
        "cluster": {"name": "dgx-a100", "gpus": 64},
        "training": {"sequence": 2048, "global_batch": 8},
    }
    by_framework = [Scenario.from_mapping(base | {"framework": name}) for name in ("pytorch", "megatron-2021")]
    assert [scenario.layout.release_outputs for scenario in by_framework] == [True, False]
    stated = by_framework[1].with_overrides("layout.release_outputs=true")
    assert stated.layout.release_outputs
    assert peak_memory(stated) < peak_memory(by_framework[1])
    again = Scenario.from_mapping(simulate(stated).to_json()["scenario"])
    assert again.layout == stated.layout
