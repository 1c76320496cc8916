"""Are two models computationally equivalent?"""

from collections.abc import Iterator
from dataclasses import fields, is_dataclass, replace

from clustersim.model.layer_stack import LayerGroup, LayerStack, MoeMlp, layer_specs
from clustersim.model.transformer import PositionEncoding, TransformerModel


def models_equivalent(first: TransformerModel, second: TransformerModel) -> bool:
    """Whether two models are equal except for names, unused position counts and MTP layers, and router biases.

    Router biases select experts without changing their scores; a framework that has them has them for all MoE
    models.
    """
    return _normalize(first) == _normalize(second)


def differing_fields(first: TransformerModel, second: TransformerModel) -> list[str]:
    """Names of the fields in which two models differ, in the terms of the `model` section where it has them."""
    first_model, second_model = _normalize(first), _normalize(second)
    names = [
        dataclass_field.name
        for dataclass_field in fields(TransformerModel)
        if getattr(first_model, dataclass_field.name) != getattr(second_model, dataclass_field.name)
    ]
    pairs = zip(layer_specs(first_model.stack), layer_specs(second_model.stack), strict=False)
    layer_pair = next(((a, b) for a, b in pairs if a != b), None)
    if "stack" not in names or layer_pair is None:
        return ["layers" if name == "stack" else name for name in names]
    return [*(name for name in names if name != "stack"), *_differing_field_names(*layer_pair)]


def _differing_field_names(first: object, second: object) -> list[str]:
    """Names of the fields in which two objects differ, recursively if their types agree."""
    names = []
    for spec_field in fields(first):  # type: ignore[arg-type]
        first_value, second_value = getattr(first, spec_field.name), getattr(second, spec_field.name)
        if first_value != second_value:
            is_same_type = is_dataclass(first_value) and type(first_value) is type(second_value)
            names += _differing_field_names(first_value, second_value) if is_same_type else [spec_field.name]
    return names


def has_router_bias(model: TransformerModel) -> bool:
    """Whether routers have an expert bias (load-balancing correction)."""
    return any(run.spec.moe is not None and run.spec.moe.router.bias for run in model.stack)


def has_experts(model: TransformerModel) -> bool:
    """Whether it is an MoE model."""
    return any(run.spec.moe is not None for run in model.stack)


def _normalize(model: TransformerModel) -> TransformerModel:
    positions = model.max_positions if model.positions is PositionEncoding.LEARNED else 0
    mtp_spec = next((group.spec for group in _with_router_bias(model.mtp_stack)), None)
    return replace(
        model, name="", max_positions=positions, mtp_spec=mtp_spec, stack=tuple(_with_router_bias(model.stack))
    )


def _with_router_bias(stack: LayerStack) -> Iterator[LayerGroup]:
    for group in stack:
        match group.spec.mlp:
            case MoeMlp() as moe:
                mlp = replace(moe, router=replace(moe.router, bias=True))
                yield replace(group, spec=replace(group.spec, mlp=mlp))
            case _:
                yield group
