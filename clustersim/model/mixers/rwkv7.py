"""RWKV-7's time mixing: linear attention whose state decays by channel and is corrected by a generalized delta rule.

Peng et al. 2025, arXiv:2503.14456, section 4: S_t = S_{t-1} (diag(w_t) + a_t^T b_t) + v_t^T k_t, o_t = S_t r_t. Each of
six inputs is the token mixed with the one before it; receptance r, key and value are projected; decay w, in-context
learning rate a, gate g and the share of the first layer's values (in all layers but that one) come from matrices of low
rank.

Operators are those of flash-linear-attention (fla/layers/rwkv7.py; fla/ops/generalized_delta_rule/dplr/chunk.py), in
chunks of 16: sums of decays, the four products of a chunk's tokens in FP32 and 16 bit, their triangular inverse,
states chunk after chunk, the output. Backward does all this again: saved are r, w, k, v, a, b. Around the scan are
PyTorch's elementwise kernels and a few fused ones, counted as passes over [tokens, channels]. Model FLOP: 8 per state
element forward, as of the other delta rules. How context parallelism would split it is not known.
"""

from dataclasses import dataclass, replace
from typing import ClassVar, Final

from clustersim.common.units import Flop
from clustersim.model import memory_bound
from clustersim.model.kernels import Kernel, ScanRoutine, ScanShape
from clustersim.model.linear import LinearLayer
from clustersim.model.mixer import AttentionFlopConvention, ContextRule, Mixer, ShardedSize
from clustersim.model.mixers.blocks import MixerShard, output_projection
from clustersim.model.operators import (
    Operator,
    ParallelRegion,
    TpCollective,
    TpCollectives,
    TpCombine,
    join_operators,
)
from clustersim.model.scan import FP32_BYTES, Scan, ScanStage
from clustersim.model.sharded_layer import RankContext, linear_operator

_CHUNK: Final = 16  # fla/ops/generalized_delta_rule/dplr/chunk.py, chunk_size
_INPUTS: Final = 6  # of r, w, k, v, a and g
_MIX_PASSES: Final = (10, 14)  # shift (2) and six sums at once (8); backward: 9, the shift's 2, and a sum of gradients
_PREPARE_PASSES: Final = (
    24,
    56,
)  # decay 4 and 5, values 6 and 10, a 2 and 3, keys 12 and 20, sums of gradients 0 and 18
_PREPARE_LAUNCHES: Final = (10, 22)
_CORRECT_PASSES: Final = (8, 13)  # norm by head (2, 2 besides what it shares), bonus and gate in one kernel (6, 11)


@dataclass(frozen=True, slots=True)
class Rwkv7(Mixer):
    """RWKV-7's time mixing. Ranks: of decay, gate, in-context learning rate, value (0 in the first layer)."""

    label: ClassVar[str] = "RWKV-7"
    context_rule: ClassVar[ContextRule] = ContextRule.NONE
    reads_first_layer: ClassVar[bool] = True

    heads: int
    head_dim: int
    decay_rank: int
    gate_rank: int
    rate_rank: int
    value_rank: int

    @property
    def width(self) -> int:
        """Channels of all heads."""
        return self.heads * self.head_dim

    @property
    def ranks(self) -> tuple[int, ...]:
        """Ranks of the matrices of low rank that the layer has."""
        return tuple(rank for rank in (self.decay_rank, self.gate_rank, self.rate_rank, self.value_rank) if rank)

    @property
    def constants(self) -> int:
        """Parameters of each channel: of k twice, of r, biases of low ranks but the gate's, and the norm's two."""
        return 3 + len(self.ranks) - 1 + 2

    def matrix_elements(self, hidden: int) -> int:
        """Receptance, key, value and output; both matrices of each low rank."""
        return 4 * hidden * self.width + sum(self.ranks) * (hidden + self.width)

    def parameter_count(self, hidden: int, *, linear_bias: bool) -> int:
        """Matrices, constants of channels, and the mixtures of six inputs."""
        output_bias = hidden if linear_bias else 0
        return self.matrix_elements(hidden) + self.constants * self.width + _INPUTS * hidden + output_bias

    def mixing_flops(self, sequence: int, convention: AttentionFlopConvention) -> Flop:  # noqa: ARG002 - linear in both
        """Eight per state element in forward."""
        return 3.0 * 8 * self.width * self.head_dim

    @property
    def sharded_sizes(self) -> tuple[ShardedSize, ...]:
        """Heads."""
        return (ShardedSize("num_heads", self.heads),)


def rwkv7_operators(rank: RankContext, mixer: Rwkv7, *, after_norm: bool) -> list[Operator]:
    """The operators between the norm and the residual add; after_norm: not used, as no matrix reads the norm."""
    del after_norm
    shard, local = MixerShard(rank, Rwkv7.context_rule), mixer.width // rank.shard.tp
    prepare = _passes_operator(rank, "mixer.prepare", local, _PREPARE_PASSES)
    launches = zip((prepare.forward, prepare.input_gradient), _PREPARE_LAUNCHES, strict=True)
    forward, backward = (tuple(replace(one, launches=count) for one in kernels) for kernels, count in launches)
    channel_bytes = float(rank.shard.tokens * local * rank.dtype.bytes)
    correct = _passes_operator(rank, "mixer.gated_norm", local, _CORRECT_PASSES)
    return [
        token_mix(rank, "mixer.token_shift", _INPUTS, _MIX_PASSES),
        *(_projection(rank, f"mixer.{name}_proj", local) for name in ("receptance", "key", "value")),
        *(_low_rank(rank, f"mixer.low_rank_{index}", size, local) for index, size in enumerate(mixer.ranks)),
        # saved: results of low ranks, keys before their norm, and values before they are mixed
        replace(prepare, forward=forward, input_gradient=backward, saved_bytes=(len(mixer.ranks) + 2) * channel_bytes),
        dplr_scan(mixer, shard).operator(rank, "mixer.scan"),
        # its output, the norm's, and the gate
        replace(correct, parameter_count=mixer.constants * local, saved_bytes=3 * channel_bytes),
        output_projection(rank, "mixer.out_proj", local),
    ]


def token_mix(rank: RankContext, name: str, inputs: int, passes: tuple[int, int]) -> Operator:
    """Each token mixed with the one before it, in `inputs` ways; saved are the token and the difference of both."""
    hidden = rank.model.hidden
    saved = float(2 * rank.shard.tokens * hidden * rank.dtype.bytes)
    operator = _passes_operator(rank, name, hidden, passes)
    return replace(operator, parameter_count=inputs * hidden, saved_bytes=saved)


def _passes_operator(rank: RankContext, name: str, width: int, passes: tuple[int, int]) -> Operator:
    """Passes over [tokens, width] in both directions."""
    forward, backward = (
        _passes(rank, one, width, count) for one, count in zip((name, f"{name}.input_gradient"), passes, strict=True)
    )
    return Operator(name, ParallelRegion.SHARDED, (forward,), (backward,))


def _passes(rank: RankContext, name: str, width: int, count: int) -> Kernel:
    copy = memory_bound.copy_kernel(name, rank.dtype, rank.shard.tokens * width)  # a read and a write
    return replace(copy, bytes=copy.bytes * count / 2)


def _projection(rank: RankContext, name: str, outputs: int) -> Operator:
    """A column-parallel projection of an input of its own, which it saves."""
    tokens, hidden = rank.shard.tokens, rank.model.hidden
    linear = LinearLayer(name, tokens, hidden, outputs, rank.matmul_formats)
    return linear_operator(rank, linear, rank.saved_input_bytes(tokens * hidden))


def _low_rank(rank: RankContext, name: str, size: int, outputs: int) -> Operator:
    """Both matrices of a low rank: the first on every tensor-parallel rank, which sum the gradients of its result."""
    tokens = rank.shard.tokens
    first = _projection(rank, f"{name}.down", size)
    linear = LinearLayer(f"{name}.up", tokens, size, outputs, rank.matmul_formats)
    second = linear_operator(rank, linear, rank.saved_input_bytes(tokens * size))
    summed = (TpCollective(TpCombine.SUM, float(tokens * size * rank.dtype.bytes), "gradient"),)
    return replace(
        join_operators((first, second), second),
        name=name,
        input_gradient=second.input_gradient + first.input_gradient,
        tp_collectives=TpCollectives(after_input_gradient=summed if rank.shard.tp > 1 else ()),
    )


def dplr_scan(mixer: Rwkv7, shard: MixerShard) -> Scan:
    """The scan, per token and head: c tokens of a chunk, k = v channels."""
    c, k, width = min(_CHUNK, shard.sequence), mixer.head_dim, shard.rank.dtype.bytes
    v, state, decays = k, width * k * k / c, 2 * FP32_BYTES * k  # sums of decays with and without a token's own
    squares = FP32_BYTES * 2 * c  # products of a with b and k
    again = (
        ScanStage("decay_sums", 0.0, width * k + decays),
        ScanStage("intra", 8.0 * c * k, width * (8 * k + 2 * c) + decays + squares),
        ScanStage("wy", 2.0 * c * (k + v) + 4.0 * c * c, width * (2 * k + 2 * v) + squares + FP32_BYTES * c),
        ScanStage("states", 6.0 * k * v, width * (3 * k + 3 * v) + state),
    )
    output = ScanStage("output", 2.0 * k * v + 4.0 * c * v, width * (k + 3 * v + 2 * c) + state)
    backward = (
        *again,
        ScanStage("local_gradient", 6.0 * c * v, width * (4 * v + c) + squares),
        ScanStage("states_gradient", 6.0 * k * v, width * (3 * k + 3 * v) + state),
        ScanStage("value_gradient", 2.0 * k * v + 2.0 * c * v, width * (k + 2 * v + c) + state),
        ScanStage("output_gradient", 8.0 * k * v, width * (7 * k + 4 * v) + 2 * state),
        ScanStage("wy_gradient", 4.0 * c * k + 6.0 * c * v + 6.0 * c * c, width * (3 * k + 4 * v) + 2 * squares),
        ScanStage("intra_gradient", 16.0 * c * k, width * 12 * k + 1.5 * decays + 2 * squares),
    )
    heads = mixer.heads // shard.shards
    shape = ScanShape(ScanRoutine.DPLR, shard.rank.shard.batch, shard.sequence, heads, k, v, c)
    return Scan(shape, (*again, output), backward, float(shard.tokens * heads * width * (5 * k + v)))
