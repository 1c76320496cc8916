"""Kept bytes, FLOP and parameters of layers against closed forms from the papers."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clustersim.common.dtypes import DType
from clustersim.model import layers
from clustersim.model.attention_spec import FullAttention, LatentAttention, SoftmaxAttention
from clustersim.model.flops import model_flops
from clustersim.model.kernels import AttentionShape, Kernel, KernelKind, MatmulShape
from clustersim.model.layer_stack import LayerSpec, MlpSpec, MoeMlp
from clustersim.model.layers import LayerOperators, LayerShard, Operator, ParallelRegion, embedding_layer, head_layer
from clustersim.model.mixer import AttentionFlopConvention, Mixer
from clustersim.model.overheads import Accumulation, Overheads
from clustersim.model.precision_recipe import MatmulFormats, mixed_precision
from clustersim.model.presets import code_presets, load_preset
from clustersim.model.recompute_modules import RecomputeModule
from clustersim.model.training import ALL_FUSED, NONE_FUSED, AttentionBackend, FusedKernel, Training
from clustersim.model.transformer import (
    TransformerModel,
    embedding_parameter_count,
    head_parameter_count,
    layer_parameter_count,
    resize_model,
)
from tests.uniform_models import model_dimensions, uniform_layer

STANDARD = Training(sequence=2048, global_batch=4, microbatch=4, attention=AttentionBackend.STANDARD)
FLASH = replace(STANDARD, attention=AttentionBackend.FLASH)
KORTHIKANTI = ["megatron-22b", "gpt3-175b", "megatron-530b", "megatron-1t"]


def _model_kind(model: TransformerModel) -> tuple[object, ...]:
    """What decides which operators and tensors a model has, independent of its sizes."""
    kinds = frozenset(map(_layer_kind, model.distinct_specs))
    choices = model.norm, model.positions, model.linear_bias, model.tied_embeddings, model.dropout
    return (kinds, *choices, model.embedding_norm, model.final_logit_softcapping)


def _layer_kind(spec: LayerSpec) -> tuple[object, ...]:
    mlp_kind = () if spec.mlp is None else (spec.mlp.form, *_moe_kind(spec.mlp))
    return (spec.block, *_mixer_kind(spec.mixer), *mlp_kind)


def _mixer_kind(mixer: Mixer | None) -> tuple[object, ...]:
    match mixer:
        case LatentAttention(q_lora_rank=rank):
            return LatentAttention, rank is None
        case FullAttention() as attention_spec:
            grouped, windowed = attention_spec.kv_heads < attention_spec.heads, attention_spec.window is not None
            return (
                grouped,
                windowed,
                attention_spec.qkv_bias,
                attention_spec.qk_norm,
                attention_spec.rotary_percent,
                attention_spec.attn_logit_softcapping,
                attention_spec.attention_output_gate,
            )
    return (type(mixer),)


def _moe_kind(mlp: MlpSpec) -> tuple[object, ...]:
    match mlp:
        case MoeMlp() as moe:
            return moe.shared > 0, moe.shared_gate, moe.bias, moe.router.scores
    return ()


TOKEN_PRESETS = [name for name in code_presets() if not (load_preset(name).patches or load_preset(name).encoder)]
"""Those of images are in `test_image_presets`."""
PRESETS_BY_KIND = list({_model_kind(load_preset(name)): name for name in TOKEN_PRESETS}.values())
ATTENTION_BY_KIND = [
    name
    for name in PRESETS_BY_KIND
    if all(
        isinstance(mixer, SoftmaxAttention) and not mixer.saves_by_selection
        for mixer in load_preset(name).distinct_mixers
    )
]
"""Those without linear mixers and selected keys, whose kernels do not compute what the convention counts."""


def _kernels(operator: Operator) -> tuple[Kernel, ...]:
    return operator.forward + operator.input_gradient + operator.weight_gradient


def _flops(sharded_layer: LayerOperators) -> float:
    return sum(kernel.flops for operator in sharded_layer.operators for kernel in _kernels(operator))


def _shard(training: Training, **sharding: int | bool) -> LayerShard:
    return LayerShard(training.microbatch, training.sequence, training.sequence, **sharding)  # type: ignore[arg-type]


class TestKorthikanti:
    """Reducing Activation Recomputation (arXiv:2205.05198), Table 2: bytes of activations per layer."""

    @pytest.mark.parametrize("name", KORTHIKANTI)
    def test_no_parallelism(self, name: str) -> None:
        model = load_preset(name)
        s, b, h, a = 2048, 4, model.hidden, model_dimensions(model).heads
        assert uniform_layer(model, STANDARD, _shard(STANDARD)).saved_bytes == pytest.approx(
            s * b * h * (34 + 5 * a * s / h)
        )

    @pytest.mark.parametrize("name", KORTHIKANTI)
    @pytest.mark.parametrize("t", [2, 8])
    def test_tensor_parallelism(self, name: str, t: int) -> None:
        model = load_preset(name)
        s, b, h, a = 2048, 4, model.hidden, model_dimensions(model).heads
        kept = uniform_layer(model, STANDARD, _shard(STANDARD, tp=t)).saved_bytes
        assert kept == pytest.approx(s * b * h * (10 + 24 / t + 5 * a * s / (h * t)))

    @pytest.mark.parametrize("name", KORTHIKANTI)
    @pytest.mark.parametrize("t", [2, 8])
    def test_tensor_and_sequence_parallelism(self, name: str, t: int) -> None:
        model = load_preset(name)
        s, b, h, a = 2048, 4, model.hidden, model_dimensions(model).heads
        kept = uniform_layer(model, STANDARD, _shard(STANDARD, tp=t, sequence_parallel=True)).saved_bytes
        assert kept == pytest.approx(s * b * h / t * (34 + 5 * a * s / h))

    @pytest.mark.parametrize("name", KORTHIKANTI)
    @pytest.mark.parametrize("t", [1, 8])
    def test_selective_recomputation_drops_the_core(self, name: str, t: int) -> None:
        model = load_preset(name)
        operators = uniform_layer(model, STANDARD, _shard(STANDARD, tp=t, sequence_parallel=True)).operators
        kept = sum(
            operator.saved_bytes
            for operator in operators
            if not operator.is_in_modules({RecomputeModule.CORE_ATTENTION})
        )
        assert kept == pytest.approx(34 * 2048 * 4 * model.hidden / t)

    @pytest.mark.parametrize("t", [1, 8])
    def test_full_recomputation_keeps_the_layers_input(self, t: int) -> None:
        """2sbh (Table 2), split by sequence under sequence parallelism."""
        model = load_preset("megatron-22b")
        shard = _shard(STANDARD, tp=t, sequence_parallel=True)
        assert uniform_layer(model, STANDARD, shard).input_bytes == 2 * 2048 * 4 * model.hidden / t

    def test_embedding_and_head(self) -> None:
        """Section 4.3: sbh/t of dropout mask; 2sbh/t norm, 2sbh/t logits' input, 4sbv/t logits."""
        model = load_preset("megatron-22b")
        s, b, h, v, t = 2048, 4, model.hidden, model.vocab, 8
        shard = _shard(STANDARD, tp=t, sequence_parallel=True)
        assert head_layer(model, STANDARD, shard).saved_bytes == pytest.approx(4 * s * b * h / t * (1 + v / h))
        token_ids = 8 * s * b
        assert embedding_layer(model, STANDARD, shard).saved_bytes == s * b * h / t + token_ids


def test_flash_attention_keeps_a_logarithm_instead_of_scores() -> None:
    model = load_preset("megatron-22b")
    standard, flash = (uniform_layer(model, training, _shard(training)).saved_bytes for training in (STANDARD, FLASH))
    scores = 2048 * 4 * model_dimensions(model).heads * 2048
    assert standard - flash == 5 * scores - 4 * 2048 * 4 * model_dimensions(model).heads


def test_llama_keeps_each_tensor_once() -> None:
    """Per token and layer in BF16 with fused kernels, tp 1.

    Norm inputs 2h, their outputs 2h, q (h) and k, v (2 kv), the core's result h: 6h + 2kv elements; gate, up and
    the product: 3 ffn elements; one FP32 logarithm per head.
    """
    model = load_preset("llama3-8b")
    h, kv, ffn, heads = 4096, 8 * 128, 14336, 32
    per_token = 2 * (6 * h + 2 * kv + 3 * ffn) + 4 * heads
    shard = LayerShard(batch=1, sequence=8192, keys=8192)
    assert uniform_layer(model, FLASH, shard).saved_bytes == 8192 * per_token


@pytest.mark.parametrize("name", PRESETS_BY_KIND)
def test_operators_hold_the_models_parameters(name: str) -> None:
    model, shard = load_preset(name), _shard(FLASH)
    for spec in model.distinct_specs:
        assert layers.transformer_layer(model, spec, FLASH, shard).parameter_count == layer_parameter_count(model, spec)
    assert embedding_layer(model, FLASH, shard).parameter_count == embedding_parameter_count(model)
    tied = model.vocab * model.hidden if model.tied_embeddings else 0
    assert head_layer(model, FLASH, shard).parameter_count == head_parameter_count(model) + tied


@pytest.mark.parametrize("attention", AttentionBackend)
@pytest.mark.parametrize("fused", [True, False])
def test_attention_itself_holds_no_parameters(attention: AttentionBackend, fused: bool) -> None:
    training = replace(FLASH, attention=attention, fused=ALL_FUSED if fused else NONE_FUSED)
    model = load_preset("llama3-8b")
    assert uniform_layer(model, training, _shard(training)).parameter_count == layer_parameter_count(
        model, *model.distinct_specs
    )


@pytest.mark.parametrize("name", ATTENTION_BY_KIND)
@pytest.mark.parametrize("sequence", [1024, 8192])
def test_kernels_with_full_attention_do_the_models_flops(name: str, sequence: int) -> None:
    """The convention counts the full score matrix, which standard attention computes."""
    model = load_preset(name)
    if any(distinct_attention.window is not None for distinct_attention in model.distinct_attentions):
        model = resize_model(model, window=None)
    training = Training(sequence=sequence, global_batch=6, microbatch=2, attention=AttentionBackend.STANDARD)
    shard = _shard(training)
    layer_flops = (
        run.count * _flops(layers.transformer_layer(model, run.spec, training, shard)) for run in model.stack
    )
    executed = sum(layer_flops) + _flops(head_layer(model, training, shard))
    microbatches = 3
    assert microbatches * executed == pytest.approx(model_flops(model, training), rel=1e-12)


def _counted_fraction(kernel: Kernel) -> float:
    """The fraction of a kernel's FLOP that the convention counts."""
    match kernel.kind, kernel.shape:
        case ((KernelKind.MATMUL | KernelKind.STREAMED_MATMULS | KernelKind.ATTENTION_FORWARD), _):
            return 1.0
        case KernelKind.ATTENTION_BACKWARD, AttentionShape() as shape:
            keys, values = shape.head_dim, shape.value_head_dim
            return (2 * keys + 2 * values) / (3 * keys + 2 * values)
    return 0.0


@pytest.mark.parametrize("name", ATTENTION_BY_KIND)
@pytest.mark.parametrize("sequence", [1024, 8192])
def test_causal_model_flops_are_what_flash_attention_does(name: str, sequence: int) -> None:
    """Except for the scores that its backward recomputes: five matmuls, of which by convention four count.

    Three of the five are as long as keys, two as values.
    """
    model = load_preset(name)
    training = Training(sequence=sequence, global_batch=6, microbatch=2, attention=AttentionBackend.FLASH)
    shard = _shard(training)
    counted_layers = ((run.count, layers.transformer_layer(model, run.spec, training, shard)) for run in model.stack)
    executed = sum(
        count * _counted_fraction(kernel) * kernel.flops
        for count, sharded_layer in (*counted_layers, (1, head_layer(model, training, shard)))
        for operator in sharded_layer.operators
        for kernel in _kernels(operator)
    )
    assert 3 * executed == pytest.approx(model_flops(model, training, AttentionFlopConvention.CAUSAL), rel=1e-12)


@pytest.mark.parametrize(("name", "batch"), [("megatron-22b", 4), ("gpt3-175b", 64), ("megatron-1t", 512)])
def test_model_flops_are_korthikantis(name: str, batch: int) -> None:
    """Appendix A: 72 B s L h^2 (1 + s/(6h) + V/(12 L h))."""
    model = load_preset(name)
    s, layers, h, v = 2048, model.layer_count, model.hidden, model.vocab
    expected = 72 * batch * s * layers * h**2 * (1 + s / (6 * h) + v / (12 * layers * h))
    assert model_flops(model, Training(sequence=s, global_batch=batch)) == pytest.approx(expected)


def test_flash_attention_does_three_and_a_half_forwards_of_the_visible_half() -> None:
    model = load_preset("gpt3-175b")
    core = next(
        operator
        for operator in uniform_layer(model, FLASH, _shard(FLASH)).operators
        if operator.is_in_modules({RecomputeModule.CORE_ATTENTION})
    )
    forward, backward = core.forward[0], core.input_gradient[0]
    visible = 4 * sum(range(1, 2049))  # pairs of a query and a key that is not later, four sequences
    assert forward.flops == 4 * visible * model_dimensions(model).heads * model_dimensions(model).head_dim
    assert backward.flops == 2.5 * forward.flops


@given(pieces=st.integers(1, 16), piece=st.integers(1, 64), tp=st.sampled_from([1, 2, 4]))
def test_context_parallel_ranks_have_the_unsharded_flops(pieces: int, piece: int, tp: int) -> None:
    """2 x cp pieces in zigzag: every rank sees the same number of keys, so cp ranks have the FLOP of one unsharded."""
    model = load_preset("llama3-8b")
    cp, keys = pieces, 2 * pieces * piece
    training = Training(sequence=keys, global_batch=1)
    unsharded = uniform_layer(model, training, LayerShard(1, keys, keys, tp))
    rank_shard = uniform_layer(model, training, LayerShard(1, keys // cp, keys, tp))
    assert cp * _flops(rank_shard) == pytest.approx(_flops(unsharded), rel=1e-12)


@pytest.mark.parametrize("name", ["megatron-22b", "llama3-70b", "nemotron4-340b"])
@pytest.mark.parametrize("attention", AttentionBackend)
@pytest.mark.parametrize("tp", [2, 8])
def test_tensor_parallel_ranks_have_the_unsharded_flops(name: str, attention: AttentionBackend, tp: int) -> None:
    model, training = load_preset(name), replace(FLASH, attention=attention)
    for build in (uniform_layer, head_layer):
        unsharded, split = build(model, training, _shard(training)), build(model, training, _shard(training, tp=tp))
        assert tp * _flops(split) == pytest.approx(_flops(unsharded), rel=1e-12)


def test_sequence_parallelism_splits_only_what_tensor_parallelism_replicates() -> None:
    model = load_preset("megatron-22b")
    plain = uniform_layer(model, FLASH, _shard(FLASH, tp=8)).operators
    split = uniform_layer(model, FLASH, _shard(FLASH, tp=8, sequence_parallel=True)).operators
    for before, after in zip(plain, split, strict=True):
        assert before.parameter_count == after.parameter_count
        scale = 8 if before.region is ParallelRegion.REPLICATED else 1
        moved_bytes = [kernel.bytes for kernel in before.forward + before.input_gradient]
        assert moved_bytes == [scale * kernel.bytes for kernel in after.forward + after.input_gradient]


def test_more_ranks_than_key_value_heads_replicate_a_head() -> None:
    model = load_preset("llama3-8b")  # 32 heads, 8 key/value heads
    qkv = next(
        operator
        for operator in uniform_layer(model, FLASH, _shard(FLASH, tp=16)).operators
        if operator.name == "attention.qkv"
    )
    assert qkv.parameter_count == 4096 * (2 + 2 * 1) * 128


@pytest.mark.parametrize("name", ["gpt-tiny", "llama-tiny", "qwen2.5-7b"])
@pytest.mark.parametrize("attention", AttentionBackend)
@pytest.mark.parametrize("fused", [True, False])
def test_kernels_are_hashable_and_move_bytes(name: str, attention: AttentionBackend, fused: bool) -> None:
    model, training = load_preset(name), replace(FLASH, attention=attention, fused=ALL_FUSED if fused else NONE_FUSED)
    for build in (embedding_layer, uniform_layer, head_layer):
        first, second = build(model, training, _shard(training)), build(model, training, _shard(training))
        assert {first: 1}[second] == 1
        for operator in first.operators:
            assert all(kernel.bytes > 0 and kernel.launches >= 1 for kernel in _kernels(operator))
            assert operator.forward


@pytest.mark.parametrize("name", ["gpt-tiny", "llama-tiny"])
def test_unfused_kernels_move_and_keep_more_and_compute_the_same(name: str) -> None:
    model, shard = load_preset(name), _shard(STANDARD)
    fused, unfused = (uniform_layer(model, replace(STANDARD, fused=kinds), shard) for kinds in (ALL_FUSED, NONE_FUSED))
    assert _flops(fused) == _flops(unfused)
    assert fused.saved_bytes <= unfused.saved_bytes
    for fused_operator, unfused_operator in zip(fused.operators, unfused.operators, strict=True):
        assert sum(kernel.bytes for kernel in _kernels(fused_operator)) <= sum(
            kernel.bytes for kernel in _kernels(unfused_operator)
        )


@pytest.mark.parametrize("name", ["gpt-tiny", "llama-tiny"])
def test_kinds_of_fused_kernels_are_independent(name: str) -> None:
    """What each kind of kernel saves when it alone is fused sums to what all of them save."""
    training = replace(STANDARD, overheads=Overheads(accumulation=Accumulation.ADDED))
    model, shard = load_preset(name), _shard(training)

    def moved_bytes(kinds: frozenset[FusedKernel]) -> float:
        layer = uniform_layer(model, replace(training, fused=kinds), shard)
        return sum(kernel.bytes for operator in layer.operators for kernel in _kernels(operator))

    unfused = moved_bytes(NONE_FUSED)
    savings = {kind: unfused - moved_bytes(frozenset({kind})) for kind in FusedKernel}
    assert savings[FusedKernel.OPTIMIZER] == 0.0
    assert min(savings.values()) >= 0.0
    assert sum(savings.values()) == pytest.approx(unfused - moved_bytes(ALL_FUSED))


@pytest.mark.parametrize("bias", [True, False])
def test_linear_layers_are_three_matmuls_of_one_size(bias: bool) -> None:
    model = resize_model(load_preset("gpt-tiny"), linear_bias=bias, qkv_bias=bias)
    for operator in uniform_layer(model, FLASH, _shard(FLASH)).operators:
        if not operator.weight_gradient:
            continue
        matmuls = [kernel for kernel in _kernels(operator) if kernel.kind is KernelKind.MATMUL]
        shapes = [kernel.shape for kernel in matmuls if isinstance(kernel.shape, MatmulShape)]
        assert len(shapes) == 3
        assert all(sorted((s.m, s.n, s.k)) == sorted((shapes[0].m, shapes[0].n, shapes[0].k)) for s in shapes)
        assert all(
            kernel.flops == 2 * shape.m * shape.n * shape.k for kernel, shape in zip(matmuls, shapes, strict=True)
        )
        assert len(operator.weight_gradient) == (2 if bias else 1)


def test_weight_gradients_are_accumulated_in_the_gradient_dtype() -> None:
    """A [8192, 384] and dY [8192, 1536] are read in BF16, the FP32 gradient is read and written."""
    up = next(
        operator
        for operator in uniform_layer(load_preset("gpt-tiny"), FLASH, _shard(FLASH)).operators
        if operator.name == "mlp.up"
    )
    assert up.weight_gradient[0].bytes == 2 * 8192 * (384 + 1536) + 2 * 4 * 384 * 1536


def test_fp8_applies_to_operands_of_linear_layers_only() -> None:
    model = load_preset("llama3-8b")
    fp8 = replace(FLASH, recipe=replace(mixed_precision(), matmul_formats=MatmulFormats.uniform(DType.FP8)))
    pairs = zip(
        uniform_layer(model, FLASH, _shard(FLASH)).operators,
        uniform_layer(model, fp8, _shard(fp8)).operators,
        strict=True,
    )
    for bf16_operator, fp8_operator in pairs:
        linear = bool(bf16_operator.weight_gradient)
        assert fp8_operator.forward[0].dtype is (DType.FP8 if linear else DType.BF16)
        assert (fp8_operator.forward[0].bytes < bf16_operator.forward[0].bytes) is linear
    assert head_layer(model, fp8, _shard(fp8)) == head_layer(model, FLASH, _shard(FLASH))


def test_a_vocabulary_that_tp_does_not_divide_is_rounded_up() -> None:
    model = load_preset("gpt2-small")
    logits = head_layer(model, FLASH, _shard(FLASH, tp=8)).operators[1]
    assert logits.parameter_count == 6283 * 768  # 50257 / 8 = 6282.1
