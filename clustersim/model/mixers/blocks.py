"""Operators that mixers with a recurrence share: projections, short convolutions, gated norms, exchanges.

Tensor parallelism splits heads: the projections into a mixer are column-parallel, the one out of it row-parallel.
Context parallelism either exchanges tokens for heads, so that a rank mixes all tokens of a part of its heads
(`ContextRule.HEAD_EXCHANGE`), or each rank mixes its own tokens and states are gathered (STATE_GATHER).
"""

from dataclasses import dataclass, replace

from clustersim.model import memory_bound
from clustersim.model.kernels import MemoryBoundShape
from clustersim.model.linear import LinearLayer
from clustersim.model.memory_bound import MemoryBoundSpec
from clustersim.model.mixer import ContextRule
from clustersim.model.operators import (
    Operator,
    ParallelRegion,
    ShardAxis,
    TpCollective,
    TpCollectives,
    TpCombine,
)
from clustersim.model.sharded_layer import RankContext, linear_operator, memory_bound_operator
from clustersim.model.training import FusedKernel

_ALIGNED_COLUMNS = 8  # 16 bytes in 16-bit formats, below which matmul kernels are much slower


@dataclass(frozen=True, slots=True)
class MixerShard:
    """What one rank mixes: `sequence` tokens of each of `batch` sequences, and one of `shards` parts of the heads."""

    rank: RankContext
    rule: ContextRule

    @property
    def cp(self) -> int:
        """Context-parallel ranks."""
        return self.rank.shard.keys // self.rank.shard.sequence

    @property
    def exchanges(self) -> bool:
        """Whether tokens are exchanged for heads."""
        return self.cp > 1 and self.rule is ContextRule.HEAD_EXCHANGE

    @property
    def gathers(self) -> bool:
        """Whether states are gathered."""
        return self.cp > 1 and self.rule is ContextRule.STATE_GATHER

    @property
    def sequence(self) -> int:
        """Tokens of each sequence that this rank mixes."""
        return self.rank.shard.keys if self.exchanges else self.rank.shard.sequence

    @property
    def tokens(self) -> int:
        """Tokens of all sequences that this rank mixes."""
        return self.rank.shard.batch * self.sequence

    @property
    def shards(self) -> int:
        """Parts that the heads are split into."""
        return self.rank.shard.tp * (self.cp if self.exchanges else 1)

    def exchange(self, width: int, name: str) -> TpCollectives:
        """The all-to-all behind an operator whose result has `width` columns on a tensor-parallel rank, if any."""
        if not self.exchanges:
            return TpCollectives()
        full_bytes = float(self.rank.shard.tokens * width * self.rank.dtype.bytes)
        collective = TpCollective(TpCombine.EXCHANGE, full_bytes, name, ShardAxis.CONTEXT)
        return TpCollectives(after_forward=(collective,), before_backward=(collective,))

    def state_gather(self, state_elements: int) -> TpCollectives:
        """The gathers of all ranks' states [batch, heads, ...], FP32, before a scan and before its backward, if any."""
        if not self.gathers:
            return TpCollectives()
        full_bytes = float(self.cp * self.rank.shard.batch * state_elements * 4)
        collective = TpCollective(TpCombine.GATHER, full_bytes, "states", ShardAxis.CONTEXT)
        return TpCollectives(after_forward=(collective,), before_backward=(collective,))


def input_projection(rank: RankContext, name: str, outputs: int, *, after_norm: bool) -> Operator:
    """The column-parallel projection of the layer's input; outputs: on this rank."""
    linear = LinearLayer(name, rank.shard.tokens, rank.model.hidden, outputs, rank.matmul_formats)
    input_bytes = rank.saved_input_bytes(rank.residual_elements)
    return linear_operator(rank, linear, input_bytes, after_norm=after_norm)


def input_projections(rank: RankContext, channels: int, head_columns: int, *, after_norm: bool) -> list[Operator]:
    """Projections of the input to `channels` channels and to `head_columns` scalars of heads, on this rank.

    One matrix has both, unless its rows would not be aligned: the scalars then have one of their own.
    """
    if (channels + head_columns) % _ALIGNED_COLUMNS == 0:
        return [input_projection(rank, "mixer.in_proj", channels + head_columns, after_norm=after_norm)]
    heads = LinearLayer(
        "mixer.head_proj", rank.shard.tokens, rank.model.hidden, head_columns, rank.matmul_formats
    )  # its input is the one that the other saves
    return [
        input_projection(rank, "mixer.in_proj", channels, after_norm=after_norm),
        linear_operator(rank, heads, 0.0, after_norm=after_norm),
    ]


def output_projection(rank: RankContext, name: str, inputs: int) -> Operator:
    """The row-parallel projection back to the residual stream; inputs: on this rank."""
    tokens = rank.shard.tokens
    bias_tokens = rank.shard.residual_tokens if rank.model.linear_bias else 0
    linear = LinearLayer(
        name, tokens, inputs, rank.model.hidden, rank.matmul_formats, bias_tokens=bias_tokens, row_parallel=True
    )
    return linear_operator(rank, linear, rank.saved_input_bytes(tokens * inputs))


def convolution(
    shard: MixerShard, spec: MemoryBoundSpec, channels: int, *, taps: int, parameter_count: int
) -> Operator:
    """A causal convolution of `channels` channels with SiLU, which saves its input; spec: one of CAUSAL_CONV1D*."""
    shape = spec.shape_for(shard.tokens, channels, table=taps)
    return pass_operator(shard, "mixer.conv1d", spec, shape, parameter_count=parameter_count)


def gated_rmsnorm_spec(rank: RankContext) -> MemoryBoundSpec:
    """An RMSNorm times an activation of a gate: one kernel where norms are fused."""
    return memory_bound.gated_rmsnorm_spec(fused=rank.training.fuses(FusedKernel.NORM))


def gate_spec(rank: RankContext) -> MemoryBoundSpec:
    """A product with the activation of a gate: one kernel where activations are fused."""
    return memory_bound.gate_spec(fused=rank.training.fuses(FusedKernel.ACTIVATION))


def pass_operator(
    shard: MixerShard, name: str, spec: MemoryBoundSpec, shape: MemoryBoundShape, *, parameter_count: int = 0
) -> Operator:
    """A memory-bound operator between the projections of a mixer."""
    operator = memory_bound_operator(ParallelRegion.SHARDED, name, shard.rank.dtype, spec, (shape,))
    return replace(operator, parameter_count=parameter_count)
