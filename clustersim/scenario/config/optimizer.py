"""What may a scenario file say about the optimizer?

optimizer: muon
optimizer: {name: muon, steps: 5, distribution: layer_wise, tensor_parallel: blockwise}
"""

from typing import Annotated, ClassVar, Final, Literal, Self

from pydantic import model_validator

from clustersim.common.errors import format_value, suggest_nearest
from clustersim.model.optimizers import AnyOptimizer, Muon, MuonDistribution, MuonTensorParallel, Optimizer
from clustersim.scenario.config_reader import ConfigModel, LayerCount, config_error, enum_parser, value_parser

_MUON: Final = "muon"
_NAMES: Final = (*(optimizer.value for optimizer in Optimizer), _MUON)


def _parse_name(value: object) -> object:
    if value not in _NAMES:
        raise config_error(f"{format_value(value)} is unknown; {suggest_nearest(str(value), _NAMES)}")
    return value


class OptimizerConfig(ConfigModel):
    """`training.optimizer`: its name, and for Muon how matrices are orthogonalized."""

    shorthand_key: ClassVar[str | None] = "name"
    name: Annotated[
        str,
        value_parser(_parse_name, f"one of {', '.join(_NAMES)}", schema_type=Literal[_NAMES]),
    ] = Optimizer.ADAM.value
    """muon: layers' matrices by Muon, all other weights by scalar; left out: adam, muon if a key of it is given"""
    steps: LayerCount = 5
    """of Muon's Newton-Schulz iteration"""
    distribution: Annotated[MuonDistribution | None, enum_parser(MuonDistribution)] = None
    """which rank orthogonalizes what: replicated (ddp), layer_wise or gather (zero1, zero2), all_to_all or gather
    (fsdp); left out: the first that fits layout.data"""
    tensor_parallel: Annotated[MuonTensorParallel, enum_parser(MuonTensorParallel)] = MuonTensorParallel.DUPLICATED
    """matrices that tp ranks share: each its shard (blockwise), all the whole (duplicated), or summed products"""
    symmetric: bool = False
    """kernels compute one triangle of symmetric products"""
    batched: bool = False
    """equal matrices of a layer, such as experts, run in one batch"""
    overlap: bool = True
    """communication of matrices overlaps the iterations of others"""
    scalar: Annotated[Optimizer, enum_parser(Optimizer)] = Optimizer.ADAM
    """of embedding, output matrix, norms and biases"""
    dense: bool = True
    """for the matrices of layers, other than experts"""
    experts: bool = True
    """for those of experts"""

    @model_validator(mode="before")
    @classmethod
    def _name_muon(cls, value: object) -> object:
        """Keys of Muon without a name are Muon's."""
        is_unnamed = isinstance(value, dict) and value and "name" not in value
        return {"name": _MUON, **value} if is_unnamed and isinstance(value, dict) else value

    @model_validator(mode="after")
    def _check_name(self) -> Self:
        muon_keys = sorted(self.model_fields_set - {"name"})
        if muon_keys and self.name != _MUON:
            raise config_error(f"{muon_keys[0]} is a key of muon, and name is {self.name}; leave it out")
        return self

    def optimizer(self) -> AnyOptimizer:
        """The optimizer as the simulator represents it."""
        if self.name != _MUON:
            return Optimizer(self.name)
        keys = (name for name in type(self).model_fields if name != "name")
        return Muon(**{name: getattr(self, name) for name in keys})
