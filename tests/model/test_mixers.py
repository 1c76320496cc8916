"""Mixers: closed forms of parameters, FLOP and saved activations; sharding; every kind is registered."""

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clustersim.model.attention_spec import FullAttention
from clustersim.model.kernels import Kernel, KernelKind, ScanShape
from clustersim.model.layer_stack import DenseMlp, LayerGroup, LayerSpec, MlpType
from clustersim.model.layers import LayerOperators, transformer_layer
from clustersim.model.mixer import AttentionFlopConvention, ContextRule, Mixer
from clustersim.model.mixers.blocks import MixerShard
from clustersim.model.mixers.gated_delta_net import GatedDeltaNet, delta_rule_scan
from clustersim.model.mixers.kimi_delta_attention import KimiDeltaAttention, kda_scan
from clustersim.model.mixers.lightning_attention import LightningAttention, lightning_scan
from clustersim.model.mixers.mamba1 import Mamba1
from clustersim.model.mixers.mamba2 import Mamba2, ssd_scan
from clustersim.model.mixers.registry import registered_mixers
from clustersim.model.mixers.rwkv7 import Rwkv7, dplr_scan
from clustersim.model.operators import LayerShard, ParallelRegion
from clustersim.model.parallel_mixers import ParallelMixers
from clustersim.model.presets import load_preset
from clustersim.model.scan import Scan
from clustersim.model.sharded_layer import RankContext
from clustersim.model.training import Training
from clustersim.model.transformer import TransformerModel, layer_parameter_count
from tests.conftest import examples

HIDDEN, TOKENS = 1024, 4096
MAMBA2 = Mamba2(heads=32, head_dim=64, state_dim=128, groups=8)
DELTA = GatedDeltaNet(key_heads=8, value_heads=16, key_dim=64, value_dim=128)
KDA = KimiDeltaAttention(heads=8, key_dim=64, value_dim=128, rank=128)
LIGHTNING = LightningAttention(heads=8, head_dim=128)
MAMBA1 = Mamba1(inner=2048, state_dim=16, step_rank=64, inner_norms=True)
RWKV7 = Rwkv7(heads=16, head_dim=64, decay_rank=64, gate_rank=128, rate_rank=64, value_rank=32)
LINEAR: list[Mixer] = [MAMBA2, DELTA, KDA, LIGHTNING, MAMBA1, RWKV7]
ATTENTION = FullAttention(heads=8, kv_heads=8, head_dim=128)
ALL: list[Mixer] = [*LINEAR, ATTENTION, ParallelMixers(ATTENTION, MAMBA2)]


def _label(mixer: Mixer) -> str:
    return mixer.label


def _model(mixer: Mixer | None, mlp: DenseMlp | None = None) -> TransformerModel:
    spec = LayerSpec(mixer, mlp)
    return replace(load_preset("llama-tiny"), hidden=HIDDEN, stack=(LayerGroup(spec, 1),))


def _layer(mixer: Mixer | None, shard: LayerShard | None = None, mlp: DenseMlp | None = None) -> LayerOperators:
    model = _model(mixer, mlp)
    return transformer_layer(model, model.stack[0].spec, Training(TOKENS, 1), shard or LayerShard(1, TOKENS, TOKENS))


def _kernels(layer: LayerOperators, kind: KernelKind) -> list[Kernel]:
    operators = layer.operators
    return [
        kernel
        for operator in operators
        for kernel in (*operator.forward, *operator.input_gradient, *operator.weight_gradient)
        if kernel.kind is kind
    ]


def test_every_kind_is_registered_and_says_what_it_is() -> None:
    assert {type(mixer) for mixer in ALL} <= set(registered_mixers())
    assert len({mixer.label for mixer in registered_mixers()}) == len(registered_mixers())


@pytest.mark.parametrize("mixer", ALL, ids=_label)
def test_operators_hold_the_parameters_that_the_mixer_states(mixer: Mixer) -> None:
    norm = HIDDEN
    assert _layer(mixer).parameter_count == mixer.parameter_count(HIDDEN, linear_bias=False) + norm


@pytest.mark.parametrize("mixer", ALL, ids=_label)
def test_matmuls_are_six_flop_per_weight_and_token(mixer: Mixer) -> None:
    flops = sum(kernel.flops for kernel in _kernels(_layer(mixer), KernelKind.MATMUL))
    assert flops == 6.0 * TOKENS * mixer.matrix_elements(HIDDEN)


PARAMETERS = {
    # in_proj of z, x, B, C and dt; out_proj; taps and bias; A, D and dt bias of each head; the norm
    "Mamba 2": 1024 * (2 * 2048 + 2 * 8 * 128 + 32) + 2048 * 1024 + (2048 + 2048) * 5 + 3 * 32 + 2048,
    # q, k, v, gate, beta, alpha; out; taps; A and dt bias of each value head; the norm of a head
    "gated delta net": 1024 * (2 * 512 + 2 * 2048 + 2 * 16) + 2048 * 1024 + (2 * 512 + 2048) * 4 + 2 * 16 + 128,
    # q, k, v, beta; decay and gate through a vector of 128; out; taps; A of each head, dt bias of each channel; norm
    "Kimi delta attention": 1024 * (512 + 512 + 1024 + 8)
    + (1024 * 128 + 128 * 512)
    + (1024 * 128 + 128 * 1024)
    + 1024 * 1024
    + (2 * 512 + 1024) * 4
    + 8
    + 512
    + 128,
    "lightning attention": 1024 * 3 * 1024 + 1024 * 1024 + 1024 * 1024 + 1024,
    # in_proj; x_proj; dt_proj and its bias; out_proj; taps and bias; A, D; norms of dt, B and C
    "Mamba 1": 1024 * 2 * 2048
    + 2048 * (64 + 2 * 16)
    + 2048 * (64 + 1)
    + 2048 * 1024
    + 2048 * 5
    + 2048 * 17
    + (64 + 2 * 16),
    # r, k, v, out; both matrices of each low rank; mixtures of six inputs; of each channel k_k, k_a, r_k, three biases
    # and the norm's weight and bias
    "RWKV-7": 4 * 1024**2 + (64 + 128 + 64 + 32) * 2 * 1024 + 6 * 1024 + (3 + 3 + 2) * 1024,
}


@pytest.mark.parametrize("mixer", LINEAR, ids=_label)
def test_parameters_are_those_of_the_layers_modules(mixer: Mixer) -> None:
    assert mixer.parameter_count(HIDDEN, linear_bias=False) == PARAMETERS[mixer.label]


MIXING_FLOPS = {
    "Mamba 2": 3 * 7 * 2048 * 128,  # Megatron-LM: 7 x inner x state
    "gated delta net": 3 * 2 * (4 * 16 * 64 * 128 + 4 * (2 * 512 + 2048)),  # four products of the state; the taps
    "Kimi delta attention": 3 * 2 * (4 * 8 * 64 * 128 + 4 * (2 * 512 + 1024)),
    "lightning attention": 3 * 2 * (2 * 8 * 128 * 128),  # K^T V and Q S
    "Mamba 1": 3 * 7 * 2048 * 16,
    "RWKV-7": 3 * 2 * (4 * 16 * 64 * 64),  # S a, its product with b, v k and S r
}


@pytest.mark.parametrize("mixer", LINEAR, ids=_label)
@pytest.mark.parametrize("sequence", [1024, 65536])
def test_model_flops_are_the_conventions_and_do_not_grow_with_the_sequence(mixer: Mixer, sequence: int) -> None:
    for convention in AttentionFlopConvention:
        assert mixer.mixing_flops(sequence, convention) == MIXING_FLOPS[mixer.label]


SCANS: dict[str, Callable[[int], Scan]] = {
    "ssd": lambda sequence: ssd_scan(MAMBA2, _shard(sequence)),
    "gated delta rule": lambda sequence: delta_rule_scan(DELTA, _shard(sequence)),
    "kda": lambda sequence: kda_scan(KDA, _shard(sequence)),
    "lightning": lambda sequence: lightning_scan(LIGHTNING, _shard(sequence)),
}


def _shard(sequence: int) -> MixerShard:
    shard = LayerShard(1, sequence, sequence)
    return MixerShard(RankContext(_model(MAMBA2), Training(sequence, 1), shard), ContextRule.NONE)


def _forward_flops(scan: Scan) -> float:
    return sum(stage.flops for stage in scan.forward)


STATE_FLOPS = {  # products with a state of [key_dim, value_dim], of one token and head, in forward
    "ssd": 4 * 128 * 64,  # B^T x, C S
    "gated delta rule": 6 * 64 * 128,  # W S, K^T V, Q S
    "kda": 6 * 64 * 128,
    "lightning": 4 * 128 * 128,
}
PAIR_FLOPS = {  # products of a chunk's tokens with each other, of one token, head and other token
    "ssd": 64 + 2 * 128 * 8 / 32,  # half of (C B^T) x; C B^T once per group of four heads
    "gated delta rule": 4 * 64 + 2 * 128 + 2 * (64 + 128),  # K K^T, W, U; Q K^T, its product with V
    "kda": 6 * 64 + 2 * 128 + 2 * 128,  # Q K^T, K K^T, W, U; the product with V
    "lightning": 4 * 128,
}


@pytest.mark.parametrize("name", SCANS)
@pytest.mark.parametrize("sequence", [1, 16, 64, 4096])
def test_a_scan_is_its_recurrence_and_the_products_within_chunks(name: str, sequence: int) -> None:
    """With chunks of one token hardly more than the recurrence is left; a chunk of all is attention without softmax."""
    scan = SCANS[name](sequence)
    chunk = min(sequence, 128 if name == "ssd" else 64)
    assert scan.shape.chunk == chunk
    assert _forward_flops(scan) == pytest.approx(STATE_FLOPS[name] + chunk * PAIR_FLOPS[name])


@pytest.mark.parametrize("sequence", [1, 8, 4096])
def test_the_scan_of_rwkv7_is_its_recurrence_and_the_products_within_chunks(sequence: int) -> None:
    """States: W S, K^T V, B^T U and R S; chunks: A B, A K, R K and R B; W and U by the inverse of A B; both outputs."""
    scan = dplr_scan(RWKV7, _shard(sequence))
    chunk = min(sequence, 16)
    pairs = 4 * 2 * 64 + 2 * (64 + 64) + 2 * 2 * chunk + 2 * 2 * 64
    assert scan.shape.chunk == chunk
    assert _forward_flops(scan) == 4 * 2 * 64 * 64 + chunk * pairs
    again = {stage.name for stage in scan.forward} - {"output"}
    assert again <= {stage.name for stage in scan.backward}


@pytest.mark.parametrize("name", SCANS)
def test_states_are_written_once_per_chunk(name: str) -> None:
    """So fewer and longer chunks move fewer bytes, and no pass moves fewer than its tokens have."""
    short, long = SCANS[name](16), SCANS[name](64)
    moved = [sum(stage.bytes for stage in scan.forward) for scan in (short, long)]
    assert moved[1] < moved[0]


SAVED = {  # bytes of bf16 per token: inputs of matmuls, of the convolution, of the scan and of the norm; FP32: 4
    # the layer's input twice (norm, projection); x, B, C; steps and their sums; y and z; the normalized output
    "Mamba 2": 2 * (2 * 1024) + 2 * 4096 + 32 * (2 + 4) + 2 * (2 * 2048) + 2 * 2048,
    # q, k, v; normalized and repeated q and k, v, the inverse, beta, two statistics and a decay; y and the gate; output
    "gated delta net": 2 * (2 * 1024) + 2 * 3072 + 16 * (2 * (2 * 64 + 128 + 64 + 1) + 12) + 2 * (2 * 2048) + 2 * 2048,
    "lightning attention": 2 * (2 * 1024) + 2 * 3072 + 2 * 3072 + 2 * 1024 + 2 * 2 * 1024 + 2 * 1024,
    # the layer's input; the token and its difference; inputs of seven matrices and between four; low ranks' results, k
    # and v; r, w, k, v, a, b; the scan's output, the norm's, and the gate; the corrected output
    "RWKV-7": 2 * 1024 * (1 + 2 + 7 + 6 + 6 + 3 + 1) + 2 * (64 + 128 + 64 + 32),
}


@pytest.mark.parametrize("mixer", [MAMBA2, DELTA, LIGHTNING, RWKV7], ids=_label)
def test_saved_activations_are_what_backward_reads(mixer: Mixer) -> None:
    assert _layer(mixer).saved_bytes == TOKENS * SAVED[mixer.label]


@pytest.mark.parametrize("mixer", ALL, ids=_label)
@pytest.mark.parametrize("tp", [2, 8])
def test_tensor_parallel_ranks_share_scans_and_matmuls(mixer: Mixer, tp: int) -> None:
    """Heads are split evenly; what is low-rank, or of a head's own size, is on every rank."""
    whole, part = _layer(mixer), _layer(mixer, LayerShard(1, TOKENS, TOKENS, tp=tp))
    scans = [sum(kernel.flops for kernel in _kernels(layer, KernelKind.SCAN)) for layer in (whole, part)]
    assert scans[0] == pytest.approx(tp * scans[1])
    assert whole.parameter_count <= tp * part.parameter_count < 1.6 * whole.parameter_count


@pytest.mark.parametrize("mixer", [mixer for mixer in ALL if mixer.context_rule is not ContextRule.NONE], ids=_label)
def test_context_parallel_ranks_share_the_scan(mixer: Mixer) -> None:
    """By heads of all tokens, or by tokens with one more pass for a rank's own states."""
    whole, part = _layer(mixer), _layer(mixer, LayerShard(1, TOKENS // 4, TOKENS))
    scans = [sum(kernel.flops for kernel in _kernels(layer, KernelKind.SCAN)) for layer in (whole, part)]
    extra = mixer.context_rule is ContextRule.STATE_GATHER
    assert scans[0] <= 4 * scans[1] <= (1.5 if extra else 1.0) * scans[0] * (1 + 1e-12)
    collectives = [collective for operator in part.operators for collective in operator.tp_collectives.after_forward]
    assert bool(collectives) is (mixer.context_rule is not ContextRule.KV_RING)


def test_exchanges_carry_each_tensor_once() -> None:
    """What is projected, and what is handed to the output projection, [tokens of the rank, columns]."""
    operators = _layer(DELTA, LayerShard(1, TOKENS // 4, TOKENS)).operators
    sizes = [collective.full_bytes for operator in operators for collective in operator.tp_collectives.after_forward]
    assert sizes == [TOKENS / 4 * 2 * DELTA.projected, TOKENS / 4 * 2 * DELTA.value_width]


def test_gathered_states_are_of_all_ranks() -> None:
    """A state and a transition of [key_dim, value_dim] and [key_dim, key_dim] in FP32, of each head and rank."""
    operators = _layer(KDA, LayerShard(1, TOKENS // 4, TOKENS)).operators
    sizes = [collective.full_bytes for operator in operators for collective in operator.tp_collectives.after_forward]
    assert sizes == [4 * 8 * 64 * (64 + 128) * 4]


def test_layers_without_a_mixer_or_an_mlp_are_the_halves_of_one_with_both() -> None:
    mlp = DenseMlp(4096, MlpType.SWIGLU)
    both, mixer_only, mlp_only = _layer(ATTENTION, mlp=mlp), _layer(ATTENTION), _layer(None, mlp=mlp)
    assert (*mixer_only.operators, *mlp_only.operators) == both.operators
    models = [_model(ATTENTION, mlp), _model(ATTENTION), _model(None, mlp)]
    counts = [layer_parameter_count(model, model.stack[0].spec) for model in models]
    assert counts[0] == counts[1] + counts[2]


def test_an_output_gate_is_a_projection_as_wide_as_the_queries_and_a_product() -> None:
    gated = replace(ATTENTION, attention_output_gate=True)
    width = ATTENTION.query_width
    assert gated.matrix_elements(HIDDEN) - ATTENTION.matrix_elements(HIDDEN) == HIDDEN * width
    # the gate, and the product that the output projection reads
    assert _layer(gated).saved_bytes - _layer(ATTENTION).saved_bytes == 2 * TOKENS * 2 * width


def test_attention_without_a_mask_computes_the_full_matrix() -> None:
    masked, full = _layer(ATTENTION), _layer(replace(ATTENTION, causal=False))
    flops = [sum(kernel.flops for kernel in _kernels(layer, KernelKind.ATTENTION_FORWARD)) for layer in (masked, full)]
    assert flops[1] == pytest.approx(flops[0] * 2 * TOKENS / (TOKENS + 1))
    conventions = [
        replace(ATTENTION, causal=False).mixing_flops(TOKENS, convention) for convention in AttentionFlopConvention
    ]
    assert conventions[0] == conventions[1] == ATTENTION.mixing_flops(TOKENS, AttentionFlopConvention.FULL)


def test_mixers_side_by_side_save_their_input_once_and_sum_once() -> None:
    both = _layer(ParallelMixers(ATTENTION, MAMBA2))
    single = [_layer(mixer).saved_bytes for mixer in (ATTENTION, MAMBA2)]
    layer_input = TOKENS * HIDDEN * 2
    assert both.saved_bytes == sum(single) - 2 * layer_input  # the input of norm and projection
    regions = [operator.region for operator in both.operators]
    first, last = regions.index(ParallelRegion.SHARDED), len(regions) - regions[::-1].index(ParallelRegion.SHARDED)
    assert set(regions[first:last]) == {ParallelRegion.SHARDED}


@examples(30)
@given(
    heads=st.integers(1, 8).map(lambda power: 8 * power),
    state=st.sampled_from([16, 64, 128]),
    tokens=st.integers(1, 64).map(lambda count: 128 * count),
)
def test_scans_grow_with_tokens_and_heads_alone(heads: int, state: int, tokens: int) -> None:
    mixer = Mamba2(heads, 64, state, groups=heads // 8)
    reference = ssd_scan(replace(mixer, heads=8, groups=1), _shard(128))
    scan = ssd_scan(mixer, _shard(tokens))
    assert scan.token_heads == tokens * heads
    assert _forward_flops(scan) == pytest.approx(_forward_flops(reference))


@pytest.mark.parametrize("mixer", LINEAR, ids=_label)
def test_scan_kernels_have_the_shape_of_their_states(mixer: Mixer) -> None:
    shapes = {kernel.shape for kernel in _kernels(_layer(mixer), KernelKind.SCAN)}
    assert all(isinstance(shape, ScanShape) for shape in shapes)
    assert {shape.backward for shape in shapes if isinstance(shape, ScanShape)} == {False, True}


@pytest.mark.parametrize(
    "mixer",
    [replace(DELTA, key_heads=2, value_heads=6), replace(KDA, heads=6)],
    ids=_label,
)
def test_scalars_of_heads_have_a_matrix_of_their_own_where_they_would_misalign_the_others(mixer: Mixer) -> None:
    layer = _layer(mixer)
    widths = {op.name: op.linear.outputs for op in layer.operators if op.linear is not None}
    per_head = 2 if isinstance(mixer, GatedDeltaNet) else 1
    assert widths["mixer.head_proj"] == 6 * per_head
    assert widths["mixer.in_proj"] % 8 == 0
    assert layer.parameter_count == mixer.parameter_count(HIDDEN, linear_bias=False) + HIDDEN
    aligned = {op.name for op in _layer(DELTA).operators}
    assert "mixer.head_proj" not in aligned
