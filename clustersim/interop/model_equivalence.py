"""Are two models the same to whoever computes them?"""

from collections.abc import Iterator
from dataclasses import fields, is_dataclass, replace

from clustersim.model.layer_stack import LayerGroup, MoeMlp, layer_specs
from clustersim.model.transformer import PositionEncoding, TransformerModel


def alike(one: TransformerModel, other: TransformerModel) -> bool:
    """Whether two models are the same but for names, positions without a table, and corrections of routers.

    These choose experts beside their scores; a framework that has them has them for every mixture.
    """
    return _bare(one) == _bare(other)


def apart(one: TransformerModel, other: TransformerModel) -> list[str]:
    """By which of their properties two models are not alike, in the words of `model` as far as it has them."""
    mine, theirs = _bare(one), _bare(other)
    found = [
        dataclass_field.name
        for dataclass_field in fields(TransformerModel)
        if getattr(mine, dataclass_field.name) != getattr(theirs, dataclass_field.name)
    ]
    pairs = zip(layer_specs(mine.stack), layer_specs(theirs.stack), strict=False)
    first = next(((a, b) for a, b in pairs if a != b), None)
    if "stack" not in found or first is None:
        return ["layers" if name == "stack" else name for name in found]
    return [*(name for name in found if name != "stack"), *_fields_apart(*first)]


def _fields_apart(one: object, other: object) -> list[str]:
    """Names of fields of two things that differ, and of fields of these where they are of one kind."""
    found = []
    for dataclass_field in fields(one):  # type: ignore[arg-type]
        mine, theirs = getattr(one, dataclass_field.name), getattr(other, dataclass_field.name)
        if mine != theirs:
            inner = is_dataclass(mine) and type(mine) is type(theirs)
            found += _fields_apart(mine, theirs) if inner else [dataclass_field.name]
    return found


def corrects(model: TransformerModel) -> bool:
    """Whether routers have a correction."""
    routed = (run.spec.mlp for run in model.stack if isinstance(run.spec.mlp, MoeMlp))
    return any(mlp.router.bias for mlp in routed)


def has_experts(model: TransformerModel) -> bool:
    """Whether it is a mixture of experts."""
    return any(isinstance(run.spec.mlp, MoeMlp) for run in model.stack)


def _bare(model: TransformerModel) -> TransformerModel:
    positions = model.max_positions if model.positions is PositionEncoding.LEARNED else 0
    return replace(model, name="", max_positions=positions, stack=tuple(_corrected(model)))


def _corrected(model: TransformerModel) -> Iterator[LayerGroup]:
    for run in model.stack:
        match run.spec.mlp:
            case MoeMlp() as routed:
                mlp = replace(routed, router=replace(routed.router, bias=True))
                yield replace(run, spec=replace(run.spec, mlp=mlp))
            case _:
                yield run
