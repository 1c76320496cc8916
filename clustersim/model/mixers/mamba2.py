"""Mamba 2: a state space layer, as a scan over states [state_dim, head_dim] of each head.

Dao and Gu 2024, arXiv:2405.21060, sections 6 and 7: one projection produces gate z, values x, the input and
output maps B and C of `groups` groups, and a step size per head; x, B and C pass a short convolution with SiLU;
the scan (state space dual, SSD) follows; its output is normalized by group with the gate, and projected back.

Kernels are those of state-spaces/mamba (mamba_ssm/ops/triton/ssd_combined.py, `mamba_split_conv1d_scan_combined`),
which Megatron-Core runs (megatron/core/ssm/mamba_mixer.py, `use_mem_eff_path`): chunks of 128; the states of
all chunks in FP32, handed on in a pass of their own; C B^T once per group. Backward runs the convolution again and
computes the chunks' states again, so saved are the projection's result, the scan's output and the norm's.

Model FLOP of the scan: 7 per channel and state dimension, forward (Megatron-LM, megatron/training/training.py,
`mamba_layer_flops`), three times that with backward; the convolution is not counted. Context parallelism
exchanges tokens for heads (megatron/core/ssm/mamba_context_parallel.py); with fewer groups than ranks each
rank of a group has its B and C.
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
    gate_spec,
    gated_rmsnorm_spec,
    input_projection,
    output_projection,
    pass_operator,
)
from clustersim.model.operators import Operator
from clustersim.model.scan import FP32_BYTES, Scan, ScanStage
from clustersim.model.sharded_layer import RankContext

_CHUNK = 128  # mamba_mixer.py, chunk_size


@dataclass(frozen=True, slots=True)
class Mamba2(Mixer):
    """A Mamba 2 mixer. groups: of B and C; conv_taps: of the convolution; gated_norm: its output is normalized."""

    label: ClassVar[str] = "Mamba 2"
    context_rule: ClassVar[ContextRule] = ContextRule.HEAD_EXCHANGE

    heads: int
    head_dim: int
    state_dim: int
    groups: int = 1
    conv_taps: int = 4
    conv_bias: bool = True
    gated_norm: bool = True

    @property
    def inner(self) -> int:
        """Channels of all heads."""
        return self.heads * self.head_dim

    @property
    def conv_channels(self) -> int:
        """Channels that the convolution passes: x, B and C."""
        return self.inner + 2 * self.groups * self.state_dim

    @property
    def projected(self) -> int:
        """Outputs of the input projection: z, x, B, C and the step sizes."""
        return self.inner + self.conv_channels + self.heads

    def matrix_elements(self, hidden: int) -> int:
        """Input and output projection."""
        return hidden * (self.projected + self.inner)

    def parameter_count(self, hidden: int, *, linear_bias: bool) -> int:
        """Matrices, convolution, three constants per head (step bias, decay, skip), the norm."""
        convolution_count = self.conv_channels * (self.conv_taps + self.conv_bias)
        norm = self.inner if self.gated_norm else 0
        return self.matrix_elements(hidden) + convolution_count + 3 * self.heads + norm + (hidden if linear_bias else 0)

    def mixing_flops(self, sequence: int, convention: AttentionFlopConvention) -> Flop:  # noqa: ARG002 - linear in both
        """Seven per channel and state dimension in forward."""
        return 3.0 * 7 * self.inner * self.state_dim

    @property
    def sharded_sizes(self) -> tuple[ShardedSize, ...]:
        """Heads and groups."""
        return ShardedSize("mamba_num_heads", self.heads), ShardedSize("mamba_num_groups", self.groups)


def mamba2_operators(rank: RankContext, mixer: Mamba2, *, after_norm: bool) -> list[Operator]:
    """The operators between the norm and the residual add."""
    shard, tp = MixerShard(rank, Mamba2.context_rule), rank.shard.tp
    inner, channels = mixer.inner // shard.shards, _local_channels(mixer, shard)
    local_parameters = mixer.conv_channels // tp * (mixer.conv_taps + mixer.conv_bias) + 3 * mixer.heads // tp
    projection = input_projection(rank, "mixer.in_proj", mixer.projected // tp, after_norm=after_norm)
    conv = convolution(
        shard, memory_bound.CAUSAL_CONV1D_CUDA, channels, taps=mixer.conv_taps, parameter_count=local_parameters
    )
    conv = replace(conv, input_gradient=(*conv.forward, *conv.input_gradient))  # run again for the scan's backward
    norm_spec = gated_rmsnorm_spec(rank) if mixer.gated_norm else gate_spec(rank)
    groups = max(1, mixer.groups // shard.shards)
    norm = pass_operator(
        *(shard, "mixer.gated_norm", norm_spec),
        norm_spec.shape_for(shard.tokens * groups, inner // groups),
        parameter_count=mixer.inner // tp if mixer.gated_norm else 0,
    )
    return [
        replace(projection, tp_collectives=shard.exchange(mixer.projected // tp, "projections")),
        conv,
        ssd_scan(mixer, shard).operator(rank, "mixer.scan"),
        replace(norm, tp_collectives=shard.exchange(mixer.inner // tp, "heads")),
        output_projection(rank, "mixer.out_proj", mixer.inner // tp),
    ]


def _local_channels(mixer: Mamba2, shard: MixerShard) -> int:
    """Channels of the convolution on one rank, which has at least one group's B and C."""
    return mixer.inner // shard.shards + 2 * max(1, mixer.groups // shard.shards) * mixer.state_dim


def ssd_scan(mixer: Mamba2, shard: MixerShard) -> Scan:
    """The scan; bytes of B and C are shared by the heads of a group.

    Forward: cumulative sums of the steps; chunk_state; state_passing; bmm_chunk (C B^T); chunk_scan, half of whose
    products of C x C are masked. Backward: these but the last again; gradients of the states that a chunk starts
    with; their passing; gradients of x, of B, of C, of C B^T, of B and C through it, of the steps.
    """
    chunk, n, p, width = min(_CHUNK, shard.sequence), mixer.state_dim, mixer.head_dim, shard.rank.dtype.bytes
    heads = mixer.heads // shard.shards
    group = max(1, mixer.groups // shard.shards) / heads  # groups per head
    states, shared = FP32_BYTES * n * p / chunk, width * n * group  # of each token; B or C
    scores = FP32_BYTES * chunk * group
    steps = ScanStage("steps", 0.0, width + 2 * FP32_BYTES)
    chunk_state = ScanStage("chunk_state", 2.0 * n * p, width * p + shared + states + 2 * FP32_BYTES)
    passing = ScanStage("state_passing", 0.0, 2 * states)
    products = ScanStage("bmm_chunk", 2.0 * chunk * n * group, 2 * shared + scores)
    forward = (
        *(steps, chunk_state, passing, products),
        ScanStage("chunk_scan", chunk * p + 2.0 * n * p, 3 * width * p + shared + scores + states),
    )
    backward = (
        *(steps, chunk_state, passing, products),
        ScanStage("states_gradient", 2.0 * n * p, width * p + shared + states),
        ScanStage("state_passing_gradient", 0.0, 4 * states),
        ScanStage("x_gradient", chunk * p + 2.0 * n * p, 3 * width * p + shared + scores + states),
        ScanStage("b_gradient", 2.0 * n * p, width * p + states + FP32_BYTES * n * group),
        ScanStage("c_gradient", 2.0 * n * p, width * p + states + FP32_BYTES * n * group),
        ScanStage("cb_gradient", chunk * p, 2 * width * p + scores),
        ScanStage("bc_gradient", 4.0 * chunk * n * group, 2 * scores + 4 * shared),
        ScanStage("steps_gradient", chunk * p, 2 * width * p + scores),
    )
    shape = ScanShape(ScanRoutine.SSD, shard.rank.shard.batch, shard.sequence, heads, n, p, chunk)
    saved_bytes = float(shard.tokens * heads * (width + FP32_BYTES))  # steps, and their cumulative sums with the decay
    return Scan(shape, forward, backward, saved_bytes)
