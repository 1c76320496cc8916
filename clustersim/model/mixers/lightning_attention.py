"""Lightning attention: linear attention with one constant decay per head.

Qin et al. 2024, arXiv:2405.17381; MiniMax-01, arXiv:2501.08313, section 2.2, whose layer this is
(MiniMaxAI/MiniMax-Text-01, modeling_minimax_text_01.py, `MiniMaxText01LightningAttention`): queries, keys and
values are projected and pass SiLU; the output is normalized over all heads, times the sigmoid of a gate that is
projected from the layer's input, and projected back.

Kernels are those of flash-linear-attention (fla/ops/lightning_attn, which are those of fla/ops/simple_gla):
chunks of 64; states, then the output, which has Q K^T; backward computes states again, in FP32, their gradients,
and the gradients of queries and keys, and of values. Saved are queries, keys and values.

Model FLOP: 4 per state element (K^T V and Q S) in forward, three times that with backward. Context
parallelism gathers the ranks' states (LASP-2, arXiv:2502.07563).
"""

from dataclasses import dataclass, replace
from typing import ClassVar

from clustersim.common.units import Flop
from clustersim.model import memory_bound
from clustersim.model.kernels import ScanRoutine, ScanShape
from clustersim.model.mixer import AttentionFlopConvention, ContextRule, Mixer, ShardedSize
from clustersim.model.mixers.blocks import MixerShard, gate_spec, input_projection, output_projection, pass_operator
from clustersim.model.operators import Operator
from clustersim.model.scan import FP32_BYTES, Scan, ScanStage
from clustersim.model.sharded_layer import RankContext, model_norm_spec

_CHUNK = 64  # fla/ops/lightning_attn/chunk.py, chunk_size


@dataclass(frozen=True, slots=True)
class LightningAttention(Mixer):
    """Lightning attention of MiniMax-Text-01."""

    label: ClassVar[str] = "lightning attention"
    context_rule: ClassVar[ContextRule] = ContextRule.STATE_GATHER

    heads: int
    head_dim: int

    @property
    def inner(self) -> int:
        """Channels of all heads."""
        return self.heads * self.head_dim

    def matrix_elements(self, hidden: int) -> int:
        """Queries, keys, values, gate and output."""
        return 5 * hidden * self.inner

    def parameter_count(self, hidden: int, *, linear_bias: bool) -> int:
        """Matrices and the norm over all heads."""
        return self.matrix_elements(hidden) + self.inner + (hidden if linear_bias else 0)

    def mixing_flops(self, sequence: int, convention: AttentionFlopConvention) -> Flop:  # noqa: ARG002 - linear in both
        """Four per state element in forward."""
        return 3.0 * 4 * self.heads * self.head_dim**2

    @property
    def sharded_sizes(self) -> tuple[ShardedSize, ...]:
        """Heads."""
        return (ShardedSize("linear_num_heads", self.heads),)


def lightning_attention_operators(rank: RankContext, mixer: LightningAttention, *, after_norm: bool) -> list[Operator]:
    """The operators between the norm and the residual add."""
    shard, tp = MixerShard(rank, LightningAttention.context_rule), rank.shard.tp
    inner = mixer.inner // tp
    silu, norm, gate = memory_bound.SILU, model_norm_spec(rank), gate_spec(rank)
    return [
        input_projection(rank, "mixer.in_proj", 4 * inner, after_norm=after_norm),
        pass_operator(shard, "mixer.silu", silu, silu.shape_for(shard.tokens, 3 * inner)),
        *_local_states(mixer, shard),
        lightning_scan(mixer, shard).operator(rank, "mixer.scan"),
        pass_operator(shard, "mixer.norm", norm, norm.shape_for(shard.tokens, inner), parameter_count=inner),
        pass_operator(shard, "mixer.gate", gate, gate.shape_for(shard.tokens, inner)),
        output_projection(rank, "mixer.out_proj", inner),
    ]


def _local_states(mixer: LightningAttention, shard: MixerShard) -> list[Operator]:
    """With context parallelism: each rank's own state, which is gathered before the scan."""
    if not shard.gathers:
        return []
    scan = lightning_scan(mixer, shard)
    local = replace(scan, forward=scan.forward[:1], backward=scan.backward[1:2], saved_bytes=0.0)
    gather = shard.state_gather(mixer.heads // shard.shards * mixer.head_dim**2)
    return [local.operator(shard.rank, "mixer.local_states", gather)]


def lightning_scan(mixer: LightningAttention, shard: MixerShard) -> Scan:
    """The scan, per token and head: c tokens of a chunk, head dimension d."""
    c, d, width = min(_CHUNK, shard.sequence), mixer.head_dim, shard.rank.dtype.bytes
    elements = d * d / c  # of the state, of each token
    state, exact_state = width * elements, FP32_BYTES * elements
    forward = (
        ScanStage("states", 2.0 * d * d, width * 2 * d + state),
        ScanStage("output", 2.0 * d * d + 4.0 * c * d, width * 4 * d + state),
    )
    backward = (
        ScanStage("states_again", 2.0 * d * d, width * 2 * d + exact_state),
        ScanStage("states_gradient", 2.0 * d * d, width * 2 * d + exact_state),
        ScanStage("query_key_gradient", 4.0 * d * d + 6.0 * c * d, width * 6 * d + 2 * exact_state),
        ScanStage("value_gradient", 2.0 * d * d + 4.0 * c * d, width * 4 * d + exact_state),
    )
    heads = mixer.heads // shard.shards
    shape = ScanShape(ScanRoutine.LIGHTNING, shard.rank.shard.batch, shard.sequence, heads, d, d, c)
    return Scan(shape, forward, backward, saved_bytes=float(shard.tokens * heads * width * 3 * d))
