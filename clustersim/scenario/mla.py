"""Which latent attention does a scenario's model have?

`model.latent` changes that of a model that has one, or puts one in place of the attention of every layer.
"""

from dataclasses import replace
from typing import Any, Final

from clustersim.common.errors import InputError
from clustersim.model.layer_stack import Attention, FullAttention, LatentAttention, joined
from clustersim.model.transformer import Model, Positions
from clustersim.scenario.config.model import LatentSection, ModelSection

_NOT_ITS: Final = ("kv_heads", "head_dim", "qkv_bias", "qk_norm", "window", "rotary", "softcap")
_NEEDED: Final = ("kv_rank", "nope", "rope", "value_dim")


def with_latent(model: Model, section: ModelSection) -> Model:
    """The model with the latent attention that the section gives all of its layers."""
    given = section.latent
    if given is None:
        return model
    if wrong := [key for key in _NOT_ITS if key in section.of_layer]:
        raise InputError(f"{wrong[0]}: latent attention has heads of its own dimensions; leave it out")
    if model.positions is not Positions.ROTARY:
        raise InputError(f"latent needs rotary positions; {model.name} has {model.positions.value} ones")
    said = given.model_dump(exclude_none=True)
    if said.get("query_rank") == 0:
        said["query_rank"] = None
    runs = (replace(run, spec=replace(run.spec, attention=_attention(run.spec.attention, said))) for run in model.stack)
    return replace(model, stack=joined(runs))


def _attention(own: Attention | None, said: dict[str, Any]) -> Attention | None:
    match own:
        case None:
            return None
        case LatentAttention():
            return replace(own, **said)
        case FullAttention(heads=heads):
            if missing := [key for key in _NEEDED if key not in said]:
                raise InputError(f"latent: lacks {', '.join(missing)}; write such as {LatentSection.example}")
            return LatentAttention(**{"heads": heads, "query_rank": None, **said})
