"""Mamba 1: a selective state space, one state of `state_dim` per channel.

Gu and Dao 2023, arXiv:2312.00752, section 3; the layer as Jamba has it (arXiv:2403.19887; transformers,
models/jamba/modeling_jamba.py): one projection produces x and a gate; x passes a short convolution with SiLU; a
second projection makes step size (of low rank), B and C from it, which are normalized if `inner_norms`; the scan runs
over all tokens of a sequence, channel by channel, in one kernel that holds the state in registers and applies the
gate (state-spaces/mamba, csrc/selective_scan): it multiplies on vector units, 9 FLOP per channel and state dimension
(exponential, products and sum of the discretized recurrence and of the output), and reads steps, x, gate, B and C.
Backward runs the recurrence again and saves nothing but inputs.

Tensor parallelism splits channels; step size, B and C are then sums over the ranks (one all-reduce). No rule is
known for context parallelism. Model FLOP of the scan: 7 per channel and state dimension in forward, as of Mamba 2.
"""

from dataclasses import dataclass, replace
from typing import ClassVar

from clustersim.common.units import Flop
from clustersim.model import memory_bound
from clustersim.model.kernels import ScanRoutine, ScanShape
from clustersim.model.linear import LinearLayer
from clustersim.model.mixer import AttentionFlopConvention, ContextRule, Mixer, ShardedSize
from clustersim.model.mixers.blocks import MixerShard, convolution, input_projection, output_projection, pass_operator
from clustersim.model.operators import Operator, TpCollective, TpCollectives, TpCombine
from clustersim.model.scan import Scan, ScanStage
from clustersim.model.sharded_layer import RankContext, linear_operator

_SCAN_FLOPS = 9.0


@dataclass(frozen=True, slots=True)
class Mamba1(Mixer):
    """A Mamba 1 mixer. step_rank: of the step sizes; inner_norms: step sizes, B and C are normalized (Jamba)."""

    label: ClassVar[str] = "Mamba 1"
    context_rule: ClassVar[ContextRule] = ContextRule.NONE

    inner: int
    state_dim: int
    step_rank: int
    conv_taps: int = 4
    conv_bias: bool = True
    inner_norms: bool = False

    @property
    def selection_width(self) -> int:
        """Outputs of the projection of step sizes, B and C."""
        return self.step_rank + 2 * self.state_dim

    def matrix_elements(self, hidden: int) -> int:
        """Projections into and out of the layer, of step sizes, B and C, and of the step sizes' channels."""
        return self.inner * (3 * hidden + self.selection_width + self.step_rank)

    def parameter_count(self, hidden: int, *, linear_bias: bool) -> int:
        """Matrices, convolution, the step sizes' bias, decays of every state, skips, and inner norms."""
        constants = self.inner * (self.conv_taps + self.conv_bias + 2 + self.state_dim)
        norms = self.selection_width if self.inner_norms else 0
        return self.matrix_elements(hidden) + constants + norms + (hidden if linear_bias else 0)

    def mixing_flops(self, sequence: int, convention: AttentionFlopConvention) -> Flop:  # noqa: ARG002 - linear in both
        """Seven per channel and state dimension in forward."""
        return 3.0 * 7 * self.inner * self.state_dim

    @property
    def sharded_sizes(self) -> tuple[ShardedSize, ...]:
        """Channels."""
        return (ShardedSize("mamba_channels", self.inner),)


def mamba1_operators(rank: RankContext, mixer: Mamba1, *, after_norm: bool) -> list[Operator]:
    """The operators between the norm and the residual add."""
    shard, tp = MixerShard(rank, Mamba1.context_rule), rank.shard.tp
    inner, tokens = mixer.inner // tp, rank.shard.tokens
    constants = inner * (mixer.conv_taps + mixer.conv_bias + 2 + mixer.state_dim)
    constants += mixer.selection_width if mixer.inner_norms else 0
    selection = LinearLayer("mixer.x_proj", tokens, inner, mixer.selection_width, rank.matmul_formats)
    steps = LinearLayer("mixer.dt_proj", tokens, mixer.step_rank, inner, rank.matmul_formats)
    total_bytes = float(tokens * mixer.selection_width * rank.dtype.bytes)
    total = (TpCollective(TpCombine.SUM, total_bytes, "step sizes, B and C"),) if tp > 1 else ()
    selection_operator = linear_operator(rank, selection, rank.saved_input_bytes(tokens * inner))
    return [
        input_projection(rank, "mixer.in_proj", 2 * inner, after_norm=after_norm),
        convolution(shard, memory_bound.CAUSAL_CONV1D_CUDA, inner, taps=mixer.conv_taps, parameter_count=constants),
        replace(selection_operator, linear=None, tp_collectives=TpCollectives(after_forward=total)),
        *_inner_norms(rank, mixer),
        replace(
            linear_operator(rank, steps, rank.saved_input_bytes(tokens * mixer.step_rank)),
            linear=None,
            tp_collectives=TpCollectives(after_input_gradient=total),
        ),
        _scan(mixer, shard).operator(rank, "mixer.scan"),
        output_projection(rank, "mixer.out_proj", inner),
    ]


def _inner_norms(rank: RankContext, mixer: Mamba1) -> list[Operator]:
    """Norms of step sizes, B and C, whose parameters are counted with the convolution's."""
    if not mixer.inner_norms:
        return []
    spec = memory_bound.norm_spec(rank.model.norm, fused=True)
    shard = MixerShard(rank, Mamba1.context_rule)
    shape = spec.shape_for(rank.shard.tokens, mixer.selection_width)
    return [pass_operator(shard, "mixer.inner_norms", spec, shape)]


def _scan(mixer: Mamba1, shard: MixerShard) -> Scan:
    """The scan, per token and channel; B and C are read once for all channels."""
    channels, n, width = mixer.inner // shard.shards, mixer.state_dim, shard.rank.dtype.bytes
    shared = 2 * width * n / channels
    forward = (ScanStage("selective_scan", _SCAN_FLOPS * n, 5 * width + shared),)
    backward = (ScanStage("selective_scan", 3 * _SCAN_FLOPS * n, 9 * width + 2 * shared),)
    batch, sequence = shard.rank.shard.batch, shard.sequence
    shape = ScanShape(ScanRoutine.SELECTIVE_SCAN, batch, sequence, channels, n, value_dim=1, chunk=sequence)
    saved_bytes = float(shard.tokens * (channels * 3 + 2 * n) * width)  # steps, gate, output; x by the projection
    return Scan(shape, forward, backward, saved_bytes)
