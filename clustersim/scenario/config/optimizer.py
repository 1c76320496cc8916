"""What may a scenario file say about the optimizer?

optimizer: muon
optimizer: {name: muon, steps: 5, distribution: layer_wise, tensor_parallel: blockwise}
optimizer: {name: dion, rank_fraction: 0.25}
optimizer: {name: soap, precondition_frequency: 10}
"""

from collections.abc import Mapping
from dataclasses import fields
from typing import Annotated, ClassVar, Final, Literal, Self

from pydantic import Field, model_validator

from clustersim.common.errors import format_value, suggest_nearest
from clustersim.model.optimizers import (
    AnyOptimizer,
    Dion,
    MatrixOptimizer,
    Muon,
    MuonDistribution,
    MuonTensorParallel,
    Optimizer,
    Soap,
)
from clustersim.scenario.config_reader import ConfigModel, LayerCount, config_error, enum_parser, value_parser

_MUON: Final = "muon"
_MATRIX_OPTIMIZERS: Final[Mapping[str, type[Muon | Dion | Soap]]] = {
    _MUON: Muon,
    "dion": Dion,
    "soap": Soap,
}
_NAMES: Final = (*(optimizer.value for optimizer in Optimizer), *_MATRIX_OPTIMIZERS)


def _parse_name(value: object) -> object:
    if value not in _NAMES:
        raise config_error(f"{format_value(value)} is unknown; {suggest_nearest(str(value), _NAMES)}")
    return value


class OptimizerConfig(ConfigModel):
    """`training.optimizer`: its name, and for Muon, Dion and SOAP how matrices are updated."""

    shorthand_key: ClassVar[str | None] = "name"
    name: Annotated[
        str,
        value_parser(_parse_name, f"one of {', '.join(_NAMES)}", schema_type=Literal[_NAMES]),
    ] = Optimizer.ADAM.value
    """muon, dion, soap: layers' matrices by it, the others by scalar; left out: adam, muon if a key of it is given"""
    steps: LayerCount = 5
    """of Muon's Newton-Schulz iteration"""
    distribution: Annotated[MuonDistribution | None, enum_parser(MuonDistribution)] = None
    """which rank orthogonalizes what: replicated (ddp), layer_wise or gather (zero1, zero2), all_to_all or gather
    (fsdp); left out: the first that fits layout.data"""
    tensor_parallel: Annotated[MuonTensorParallel, enum_parser(MuonTensorParallel)] = MuonTensorParallel.DUPLICATED
    """matrices that tp ranks share: each its shard (blockwise), all the whole (duplicated), or summed products"""
    rank_fraction: Annotated[float, Field(gt=0, le=1)] = 0.25
    """of Dion: rank of updates over the smaller dimension of a matrix"""
    precondition_frequency: LayerCount = 1
    """of SOAP: steps from one renewal of eigenbases to the next"""
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
        """Keys of matrices without a name are Muon's."""
        is_unnamed = isinstance(value, dict) and value and "name" not in value
        return {"name": _MUON, **value} if is_unnamed and isinstance(value, dict) else value

    @model_validator(mode="after")
    def _check_name(self) -> Self:
        kind = _MATRIX_OPTIMIZERS.get(self.name)
        for key in sorted(self.model_fields_set - {"name"} - set(_keys(kind) if kind else ())):
            owners = " and ".join(name for name, owner in _MATRIX_OPTIMIZERS.items() if key in _keys(owner))
            raise config_error(f"{key} is a key of {owners}, and name is {self.name}; leave it out")
        return self

    def optimizer(self) -> AnyOptimizer:
        """The optimizer as the simulator represents it."""
        kind = _MATRIX_OPTIMIZERS.get(self.name)
        return Optimizer(self.name) if kind is None else kind(**{key: getattr(self, key) for key in _keys(kind)})


def _keys(kind: type[MatrixOptimizer]) -> tuple[str, ...]:
    """The keys of an optimizer of matrices."""
    return tuple(field.name for field in fields(kind))
