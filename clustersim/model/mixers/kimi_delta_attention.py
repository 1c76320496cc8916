"""Kimi Delta Attention (KDA): a gated delta net whose decay differs by key dimension.

Kimi Team 2025, arXiv:2510.26692, section 3; layers as in flash-linear-attention (fla/layers/kda.py) and
moonshotai/Kimi-Linear-48B-A3B-Instruct, modeling_kimi.py: queries, keys, values and beta are projected, the decay and
the output gate through a vector of one head's size (low-rank); queries, keys and values pass short
convolutions with SiLU; the output is normalized by head, with the gate's sigmoid, and projected back.

Kernels are those of fla/ops/kda: chunks of 64; decays of every key dimension in FP32; a pass for both matrices
of a chunk (Q K^T and the inverse of K K^T), W, U and decayed keys; states; output. Backward computes W, U and
states again: saved are queries, keys, values, decays, and both matrices.

Model FLOP as of a gated delta net (`gated_delta_net`). Context parallelism gathers states and transitions
(fla/ops/cp), of which every rank computes its own in one more pass over its states.
"""

from dataclasses import dataclass, replace
from typing import ClassVar

from clustersim.common.units import Flop
from clustersim.model import memory_bound
from clustersim.model.kernels import ScanRoutine, ScanShape
from clustersim.model.linear import LinearLayer
from clustersim.model.mixer import AttentionFlopConvention, ContextRule, Mixer, ShardedSize
from clustersim.model.mixers.blocks import (
    MixerShard,
    convolution,
    gated_rmsnorm_spec,
    input_projections,
    output_projection,
    pass_operator,
)
from clustersim.model.operators import Operator, TpCollective, TpCollectives, TpCombine
from clustersim.model.scan import FP32_BYTES, Scan, ScanStage
from clustersim.model.sharded_layer import RankContext, linear_operator

_CHUNK = 64  # fla/ops/kda/chunk.py, chunk_size


@dataclass(frozen=True, slots=True)
class KimiDeltaAttention(Mixer):
    """A KDA mixer. rank: of the projections of decay and gate; gate_bias: the second one of the gate has a bias."""

    label: ClassVar[str] = "Kimi delta attention"
    context_rule: ClassVar[ContextRule] = ContextRule.STATE_GATHER

    heads: int
    key_dim: int
    value_dim: int
    rank: int
    conv_taps: int = 4
    gate_bias: bool = False

    @property
    def key_width(self) -> int:
        """Channels of queries, of keys, and of decays."""
        return self.heads * self.key_dim

    @property
    def value_width(self) -> int:
        """Channels of values, and of the output gate."""
        return self.heads * self.value_dim

    @property
    def conv_channels(self) -> int:
        """Channels that the convolutions pass: queries, keys and values."""
        return 2 * self.key_width + self.value_width

    def matrix_elements(self, hidden: int) -> int:
        """Queries, keys, values, beta and output; decay and gate in two steps each."""
        low_rank = 2 * hidden * self.rank + self.rank * (self.key_width + self.value_width)
        return hidden * (self.conv_channels + self.heads + self.value_width) + low_rank

    def parameter_count(self, hidden: int, *, linear_bias: bool) -> int:
        """Matrices, convolutions, one decay per head, one bias per key channel, the norm of a head."""
        constants = self.conv_channels * self.conv_taps + self.heads + self.key_width + self.value_dim
        constants += self.value_width if self.gate_bias else 0
        return self.matrix_elements(hidden) + constants + (hidden if linear_bias else 0)

    def mixing_flops(self, sequence: int, convention: AttentionFlopConvention) -> Flop:  # noqa: ARG002 - linear in both
        """Eight per state element, and two per tap and channel of the convolution, in forward."""
        state = self.heads * self.key_dim * self.value_dim
        return 3.0 * (8 * state + 2 * self.conv_taps * self.conv_channels)

    @property
    def sharded_sizes(self) -> tuple[ShardedSize, ...]:
        """Heads."""
        return (ShardedSize("linear_num_heads", self.heads),)


def kimi_delta_attention_operators(rank: RankContext, mixer: KimiDeltaAttention, *, after_norm: bool) -> list[Operator]:
    """The operators between the norm and the residual add."""
    shard, tp = MixerShard(rank, KimiDeltaAttention.context_rule), rank.shard.tp
    columns = mixer.conv_channels // tp + 2 * mixer.rank  # low-rank inputs are on every rank
    constants = mixer.conv_channels // tp * mixer.conv_taps + (mixer.heads + mixer.key_width) // tp
    conv = convolution(
        *(shard, memory_bound.CAUSAL_CONV1D, mixer.conv_channels // tp), taps=mixer.conv_taps, parameter_count=constants
    )
    rows, heads = shard.tokens, mixer.heads // tp
    query_key = memory_bound.L2NORM.shape_for(2 * rows * heads, mixer.key_dim)
    norm_spec = gated_rmsnorm_spec(rank)
    norm = pass_operator(
        *(shard, "mixer.gated_norm", norm_spec),
        norm_spec.shape_for(rows * heads, mixer.value_dim),
        parameter_count=mixer.value_dim + (mixer.value_width // tp if mixer.gate_bias else 0),
    )
    return [
        *input_projections(rank, columns, mixer.heads // tp, after_norm=after_norm),
        conv,
        pass_operator(shard, "mixer.query_key_norm", memory_bound.L2NORM, query_key),
        _low_rank(rank, "mixer.decay_proj", mixer.rank, mixer.key_width // tp),
        *_local_states(mixer, shard),
        kda_scan(mixer, shard).operator(rank, "mixer.scan"),
        _low_rank(rank, "mixer.gate_proj", mixer.rank, mixer.value_width // tp),
        norm,
        output_projection(rank, "mixer.out_proj", mixer.value_width // tp),
    ]


def _low_rank(rank: RankContext, name: str, inputs: int, outputs: int) -> Operator:
    """The second projection of decay or gate, from a vector that every tensor-parallel rank has."""
    gradient_bytes = float(rank.shard.tokens * inputs * rank.dtype.bytes)
    gradient_sum = (TpCollective(TpCombine.SUM, gradient_bytes, "gradient"),) if rank.shard.tp > 1 else ()
    linear = LinearLayer(name, rank.shard.tokens, inputs, outputs, rank.matmul_formats)
    return replace(
        linear_operator(rank, linear, rank.saved_input_bytes(rank.shard.tokens * inputs)),
        linear=None,
        tp_collectives=TpCollectives(after_input_gradient=gradient_sum),
    )


def _local_states(mixer: KimiDeltaAttention, shard: MixerShard) -> list[Operator]:
    """With context parallelism: each rank's own state and transition, which are gathered before the scan."""
    if not shard.gathers:
        return []
    scan, heads = kda_scan(mixer, shard), mixer.heads // shard.shards
    states = {stage.name: stage for stage in (*scan.forward, *scan.backward)}
    local = replace(scan, forward=(states["states"],), backward=(states["states_gradient"],), saved_bytes=0.0)
    gather = shard.state_gather(heads * mixer.key_dim * (mixer.key_dim + mixer.value_dim))
    return [local.operator(shard.rank, "mixer.local_states", gather)]


def kda_scan(mixer: KimiDeltaAttention, shard: MixerShard) -> Scan:
    """The scan, per token and head: c tokens of a chunk, key dimension k, value dimension v."""
    c, k, v, width = min(_CHUNK, shard.sequence), mixer.key_dim, mixer.value_dim, shard.rank.dtype.bytes
    state, decays = width * k * v / c, FP32_BYTES * k
    gate_sums = ScanStage("gate_sums", 0.0, width * k + decays)
    chunk_states = ScanStage("states", 4.0 * k * v, width * (2 * k + 2 * v) + state + decays)
    forward = (
        gate_sums,
        ScanStage("wy", 6.0 * c * k + 2.0 * c * v, width * (4 * k + 2 * v + 2 * c) + decays),
        chunk_states,
        ScanStage("output", 2.0 * k * v + 2.0 * c * v, width * (k + 2 * v + c) + state + decays),
    )
    backward = (
        gate_sums,
        ScanStage("wy_again", 2.0 * c * (k + v), width * (5 * k + 2 * v + c) + decays),
        chunk_states,
        ScanStage("local_value_gradient", 4.0 * c * v, width * (3 * v + c) + FP32_BYTES * c),
        ScanStage("states_gradient", 6.0 * k * v, width * (3 * k + 3 * v) + state + decays),
        ScanStage(
            "query_key_gradient",
            6.0 * k * v + 4.0 * c * (k + v) + 4.0 * c * c,
            width * (2 * k + 5 * v + c) + 2 * state + decays + FP32_BYTES * (3 * k + c),
        ),
        ScanStage("intra_gradient", 8.0 * c * k, width * 2 * k + decays + FP32_BYTES * (6 * k + 2 * c)),
        ScanStage("gate_gradient", 0.0, 2 * decays + decays + 2 * width * k),
    )
    heads = mixer.heads // shard.shards
    shape = ScanShape(ScanRoutine.KDA, shard.rank.shard.batch, shard.sequence, heads, k, v, c)
    saved_bytes = float(shard.tokens * heads * (width * (3 * k + v + 2 * c + 1) + 2 * FP32_BYTES))
    return Scan(shape, forward, backward, saved_bytes)
