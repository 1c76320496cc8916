"""Which operators does each kind of mixer have? The one list of mixers."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final, Protocol

from clustersim.model.attention_spec import FullAttention, LatentAttention
from clustersim.model.mixer import Mixer
from clustersim.model.mixers.full_attention import full_attention_operators
from clustersim.model.mixers.latent_attention import latent_attention_operators
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


MIXERS: Final[Mapping[type[Mixer], RegisteredMixer]] = MappingProxyType(
    {
        FullAttention: RegisteredMixer(full_attention_operators, starts_linear=True),
        LatentAttention: RegisteredMixer(latent_attention_operators),
    }
)


def registered_mixer(mixer: Mixer) -> RegisteredMixer:
    """The registration of a mixer's kind."""
    return MIXERS[type(mixer)]
