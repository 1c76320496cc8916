"""Gated delta net: linear attention whose state is corrected, not only added to, and decays by a gate per head.

Yang et al. 2024, arXiv:2412.06464; the layer as Qwen3-Next and Megatron-Core have it (megatron/core/ssm/
gated_delta_net): one projection produces queries, keys, values, an output gate, and beta and alpha per value
head; queries, keys and values pass a short convolution with SiLU; queries and keys are normalized by head and
repeated for the value heads that share them; the output is normalized by head with the gate, and projected back.

Kernels are those of flash-linear-attention (fla/ops/gated_delta_rule/chunk.py): chunks of 64; the WY
representation (K K^T, its triangular inverse, W and U) in one kernel, states chunk after chunk, the output.
Backward computes W, U and the states again: saved are queries, keys, values, gates and the inverse.

Model FLOP: 8 per state element (K K^T, V K^T, the correction and the query) and the convolution's, forward
(Megatron-LM, megatron/training/training.py, `gdn_layer_flops`), three times that with backward.
"""

from dataclasses import dataclass, replace
from typing import ClassVar

from clustersim.common.units import Flop
from clustersim.model import memory_bound
from clustersim.model.kernels import ScanRoutine, ScanShape
from clustersim.model.mixer import AttentionFlopConvention, ContextRule, Mixer, ShardedSize
from clustersim.model.mixers.blocks import (
    MixerShard,
    convolution,
    gated_rmsnorm_spec,
    input_projections,
    output_projection,
    pass_operator,
)
from clustersim.model.operators import Operator
from clustersim.model.scan import FP32_BYTES, Scan, ScanStage
from clustersim.model.sharded_layer import RankContext

_CHUNK = 64  # fla/ops/gated_delta_rule/chunk.py, chunk_size


@dataclass(frozen=True, slots=True)
class GatedDeltaNet(Mixer):
    """A gated delta net. key_heads: of queries and of keys, each shared by value_heads / key_heads value heads."""

    label: ClassVar[str] = "gated delta net"
    context_rule: ClassVar[ContextRule] = ContextRule.HEAD_EXCHANGE

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    conv_taps: int = 4

    @property
    def key_width(self) -> int:
        """Channels of queries, and of keys."""
        return self.key_heads * self.key_dim

    @property
    def value_width(self) -> int:
        """Channels of values, and of the output gate."""
        return self.value_heads * self.value_dim

    @property
    def conv_channels(self) -> int:
        """Channels that the convolution passes: queries, keys and values."""
        return 2 * self.key_width + self.value_width

    @property
    def projected(self) -> int:
        """Outputs of the input projection."""
        return self.conv_channels + self.value_width + 2 * self.value_heads

    def matrix_elements(self, hidden: int) -> int:
        """Input and output projection."""
        return hidden * (self.projected + self.value_width)

    def parameter_count(self, hidden: int, *, linear_bias: bool) -> int:
        """Matrices, convolution, two constants per value head, and the norm of a head."""
        constants = self.conv_channels * self.conv_taps + 2 * self.value_heads + self.value_dim
        return self.matrix_elements(hidden) + constants + (hidden if linear_bias else 0)

    def mixing_flops(self, sequence: int, convention: AttentionFlopConvention) -> Flop:  # noqa: ARG002 - linear in both
        """Eight per state element, and two per tap and channel of the convolution, in forward."""
        state = self.value_heads * self.key_dim * self.value_dim
        return 3.0 * (8 * state + 2 * self.conv_taps * self.conv_channels)

    @property
    def sharded_sizes(self) -> tuple[ShardedSize, ...]:
        """Heads of values, and of queries and keys."""
        return (
            ShardedSize("linear_num_value_heads", self.value_heads),
            ShardedSize("linear_num_key_heads", self.key_heads),
        )


def gated_delta_net_operators(rank: RankContext, mixer: GatedDeltaNet, *, after_norm: bool) -> list[Operator]:
    """The operators between the norm and the residual add."""
    shard, tp = MixerShard(rank, GatedDeltaNet.context_rule), rank.shard.tp
    head_columns = 2 * mixer.value_heads // tp
    *projections, last = input_projections(
        rank, mixer.projected // tp - head_columns, head_columns, after_norm=after_norm
    )
    local_parameters = mixer.conv_channels // tp * mixer.conv_taps + 2 * mixer.value_heads // tp
    conv = convolution(
        *(shard, memory_bound.CAUSAL_CONV1D, mixer.conv_channels // shard.shards),
        taps=mixer.conv_taps,
        parameter_count=local_parameters,
    )
    value_rows = shard.tokens * (mixer.value_heads // shard.shards)
    norm_spec = gated_rmsnorm_spec(rank)
    norm = pass_operator(
        *(shard, "mixer.gated_norm", norm_spec),
        norm_spec.shape_for(value_rows, mixer.value_dim),
        parameter_count=mixer.value_dim,
    )
    return [
        *projections,
        replace(last, tp_collectives=shard.exchange(mixer.projected // tp, "projections")),
        conv,
        _split_operator(mixer, shard),
        delta_rule_scan(mixer, shard).operator(rank, "mixer.scan"),
        replace(norm, tp_collectives=shard.exchange(mixer.value_width // tp, "heads")),
        output_projection(rank, "mixer.out_proj", mixer.value_width // tp),
    ]


def _split_operator(mixer: GatedDeltaNet, shard: MixerShard) -> Operator:
    """Parts of the projection and of the convolution's result as tensors of their own, and norms of queries and keys.

    Queries and keys are repeated for the value heads that share them, values and gates copied (`contiguous`, in
    the layer or in the kernels' wrapper); backward concatenates the gradients of the parts, once behind the
    convolution and once behind the projection (autograd of `split`).
    """
    name, dtype, shard_count = "mixer.split", shard.rank.dtype, shard.shards
    rows = 2 * shard.tokens * (mixer.value_heads // shard_count)
    copied = rows * mixer.key_dim + 2 * shard.tokens * mixer.value_width // shard_count
    concatenated = shard.tokens * (mixer.conv_channels + mixer.projected) // shard_count
    norm = pass_operator(shard, name, memory_bound.L2NORM, memory_bound.L2NORM.shape_for(rows, mixer.key_dim))
    copy = memory_bound.copy_kernel(f"{name}.copy", dtype, copied)
    concatenate = memory_bound.copy_kernel(f"{name}.concatenate_gradients", dtype, concatenated)
    return replace(norm, forward=(copy, *norm.forward), input_gradient=(*norm.input_gradient, concatenate))


def delta_rule_scan(mixer: GatedDeltaNet, shard: MixerShard) -> Scan:
    """The scan, per token and value head: c tokens of a chunk, key dimension k, value dimension v."""
    c, k, v, width = min(_CHUNK, shard.sequence), mixer.key_dim, mixer.value_dim, shard.rank.dtype.bytes
    state, gates = width * k * v / c, 2 * FP32_BYTES
    chunk_states = ScanStage("states", 4.0 * k * v, width * (2 * k + 2 * v) + state + gates)
    forward = (
        ScanStage("gate_sums", 0.0, gates),
        ScanStage("wy", 4.0 * c * k + 2.0 * c * v, width * (2 * k + 2 * v + c) + gates),
        chunk_states,
        ScanStage("output", 2.0 * k * v + 2.0 * c * (k + v), width * (2 * k + 2 * v) + state + gates),
    )
    backward = (
        ScanStage("wy_again", 2.0 * c * (k + v), width * (2 * k + 2 * v + c)),
        chunk_states,
        ScanStage("local_value_gradient", 2.0 * c * (k + v), width * (2 * k + 2 * v)),
        ScanStage("states_gradient", 6.0 * k * v, width * (3 * k + 3 * v) + state),
        ScanStage(
            "query_key_gradient", 6.0 * k * v + 2.0 * c * v + 4.0 * c * k, width * (6 * k + 3 * v) + 2 * state + gates
        ),
        ScanStage("wy_gradient", 8.0 * c * k + 4.0 * c * v + 4.0 * c * c, width * (3 * k + 3 * v + c) + gates),
        ScanStage("key_gradient_sum", 0.0, width * 3 * k),
    )
    heads = mixer.value_heads // shard.shards
    shape = ScanShape(ScanRoutine.GATED_DELTA_RULE, shard.rank.shard.batch, shard.sequence, heads, k, v, c)
    saved_bytes = float(shard.tokens * heads * (width * (2 * k + v + c + 1) + 3 * FP32_BYTES))
    return Scan(shape, forward, backward, saved_bytes)
