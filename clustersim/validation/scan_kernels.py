"""The kernels of a published row of linear attention, a state space, or what is next to them in a layer."""

from collections.abc import Callable, Mapping
from typing import Final

from clustersim.common.dtypes import DType
from clustersim.model import memory_bound
from clustersim.model.kernels import Kernel
from clustersim.model.memory_bound import MemoryBoundSpec
from clustersim.model.mixer import ContextRule
from clustersim.model.mixers.blocks import MixerShard
from clustersim.model.mixers.gated_delta_net import GatedDeltaNet, delta_rule_scan
from clustersim.model.mixers.kimi_delta_attention import KimiDeltaAttention, kda_scan
from clustersim.model.mixers.lightning_attention import LightningAttention, lightning_scan
from clustersim.model.mixers.mamba2 import Mamba2, ssd_scan
from clustersim.model.operators import LayerShard
from clustersim.model.presets import load_preset
from clustersim.model.scan import Scan
from clustersim.model.sharded_layer import RankContext
from clustersim.model.training import Training
from clustersim.validation.cases import ValidationCase


def _gated_delta(case: ValidationCase, shard: MixerShard) -> Scan:
    heads, values = case.positive_int("heads"), case.positive_int("v_head_dim")
    key_heads = case.positive_int("kv_heads", heads)
    return delta_rule_scan(GatedDeltaNet(key_heads, heads, case.positive_int("head_dim"), values), shard)


def _kda(case: ValidationCase, shard: MixerShard) -> Scan:
    key_dim = case.positive_int("head_dim")
    mixer = KimiDeltaAttention(case.positive_int("heads"), key_dim, case.positive_int("v_head_dim"), rank=key_dim)
    return kda_scan(mixer, shard)


def _lightning(case: ValidationCase, shard: MixerShard) -> Scan:
    return lightning_scan(LightningAttention(case.positive_int("heads"), case.positive_int("head_dim")), shard)


def _mamba2(case: ValidationCase, shard: MixerShard) -> Scan:
    heads, head_dim, state_dim, groups = (case.positive_int(column) for column in ("heads", "head_dim", "k", "groups"))
    return ssd_scan(Mamba2(heads, head_dim, state_dim, groups), shard)


_SCANS: Final[Mapping[str, Callable[[ValidationCase, MixerShard], Scan]]] = {
    "gated_delta_rule": _gated_delta,
    "kda": _kda,
    "lightning": _lightning,
    "mamba2": _mamba2,
}
_NORMALIZES_KEYS: Final = ("gated_delta_rule", "kda")  # flash-linear-attention normalizes queries and keys in the call
_NORMS: Final = ("gated_rmsnorm", "mamba2_gated_rmsnorm")
SCAN_OPS: Final = (*_SCANS, *_NORMS, "causal_conv1d")
"""Values of `op` of rows whose kernels are built here."""


def timed_scan_kernels(case: ValidationCase, *, backward: bool) -> tuple[Kernel, ...]:
    """The kernels of a row in one direction."""
    op = case.text("op")
    if op in _NORMS:
        return _passes(memory_bound.GATED_RMSNORM, case.positive_int("m"), case.positive_int("n"), backward=backward)
    tokens = case.positive_int("batch", 1) * case.positive_int("seq")
    if op == "causal_conv1d":
        return _passes(memory_bound.CAUSAL_CONV1D, tokens, case.positive_int("n"), backward=backward)
    operator = _SCANS[op](case, _shard(case)).operator(_shard(case).rank, op)
    kernels = operator.input_gradient if backward else operator.forward
    if op not in _NORMALIZES_KEYS:
        return kernels
    rows, width = 2 * tokens * case.positive_int("heads"), case.positive_int("head_dim")
    return (*kernels, *_passes(memory_bound.L2NORM, rows, width, backward=backward))


def _shard(case: ValidationCase) -> MixerShard:
    sequence = case.positive_int("seq")
    shard = LayerShard(case.positive_int("batch", 1), sequence, sequence)
    return MixerShard(RankContext(load_preset("llama-tiny"), Training(sequence, 1), shard), ContextRule.NONE)


def _passes(spec: MemoryBoundSpec, rows: int, width: int, *, backward: bool) -> tuple[Kernel, ...]:
    shape = spec.shape_for(rows, width)
    if backward:
        return spec.backward_kernels("pass", DType.BF16, shape)
    return (spec.forward_kernel("pass", DType.BF16, shape),)
