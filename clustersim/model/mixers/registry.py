"""Which operators does each kind of mixer have? The one list of mixers.

Those besides attention are imported where a model has one.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType
from typing import Any, Final, Protocol

from clustersim.model.attention_spec import FullAttention
from clustersim.model.mixer import Mixer
from clustersim.model.mixers.full_attention import full_attention_operators
from clustersim.model.operators import Operator
from clustersim.model.sharded_layer import RankContext


class MixerOperators(Protocol):
    """Builds the operators of a mixer on one rank."""

    def __call__(self, rank: RankContext, mixer: Any, /, *, after_norm: bool) -> list[Operator]:
        """The operators between the norm and the residual add; after_norm: the norm is fused into the first one."""
        ...


@dataclass(frozen=True, slots=True)
class RegisteredMixer:
    """The operators of a kind of mixer. starts_linear: a linear layer is first, which the norm may be fused into."""

    operators: MixerOperators
    starts_linear: bool = False


_FULL_ATTENTION: Final = RegisteredMixer(full_attention_operators, starts_linear=True)


@cache
def registered_mixers() -> Mapping[type[Mixer], RegisteredMixer]:
    """All kinds of mixers."""
    from clustersim.model.attention_spec import LatentAttention
    from clustersim.model.cross_attention_spec import CrossAttention
    from clustersim.model.mixers.block_attention import BlockAttention, block_attention_operators
    from clustersim.model.mixers.cross_attention import cross_attention_operators
    from clustersim.model.mixers.deepseek_sparse_attention import deepseek_sparse_attention_operators
    from clustersim.model.mixers.gated_delta_net import GatedDeltaNet, gated_delta_net_operators
    from clustersim.model.mixers.kimi_delta_attention import KimiDeltaAttention, kimi_delta_attention_operators
    from clustersim.model.mixers.latent_attention import latent_attention_operators
    from clustersim.model.mixers.lightning_attention import LightningAttention, lightning_attention_operators
    from clustersim.model.mixers.mamba1 import Mamba1, mamba1_operators
    from clustersim.model.mixers.mamba2 import Mamba2, mamba2_operators
    from clustersim.model.mixers.native_sparse_attention import NativeSparseAttention, native_sparse_attention_operators
    from clustersim.model.mixers.parallel import parallel_operators
    from clustersim.model.mixers.rwkv7 import Rwkv7, rwkv7_operators
    from clustersim.model.mixers.shared_block import shared_block_operators
    from clustersim.model.parallel_mixers import ParallelMixers
    from clustersim.model.shared_block_spec import SharedBlock
    from clustersim.model.sparse_attention_spec import DeepseekSparseAttention

    return MappingProxyType(
        {
            FullAttention: _FULL_ATTENTION,
            CrossAttention: RegisteredMixer(cross_attention_operators, starts_linear=True),
            LatentAttention: RegisteredMixer(latent_attention_operators),
            DeepseekSparseAttention: RegisteredMixer(deepseek_sparse_attention_operators),
            BlockAttention: RegisteredMixer(block_attention_operators, starts_linear=True),
            NativeSparseAttention: RegisteredMixer(native_sparse_attention_operators, starts_linear=True),
            ParallelMixers: RegisteredMixer(parallel_operators),
            Rwkv7: RegisteredMixer(rwkv7_operators),
            SharedBlock: RegisteredMixer(shared_block_operators),
            Mamba1: RegisteredMixer(mamba1_operators, starts_linear=True),
            Mamba2: RegisteredMixer(mamba2_operators, starts_linear=True),
            GatedDeltaNet: RegisteredMixer(gated_delta_net_operators, starts_linear=True),
            KimiDeltaAttention: RegisteredMixer(kimi_delta_attention_operators, starts_linear=True),
            LightningAttention: RegisteredMixer(lightning_attention_operators, starts_linear=True),
        }
    )


def registered_mixer(mixer: Mixer) -> RegisteredMixer:
    """The registration of a mixer's kind."""
    return _FULL_ATTENTION if type(mixer) is FullAttention else registered_mixers()[type(mixer)]
