"""Which layers of a scenario's model are MoE layers, and with which experts?

`model.experts` changes the MoE layers of a model that has some, or replaces its MLPs: in every layer, in all
but the first, or in every n-th. In an entry of `model.stack` it applies to the layers of that group. A count
of 0 means a dense MLP.
"""

from dataclasses import replace
from typing import Final, TypeVar

from clustersim.common.errors import InputError
from clustersim.model.layer_stack import DenseMlp, LayerSpec, MlpSpec, MoeMlp, Router, layer_specs, stack_layers
from clustersim.model.transformer import TransformerModel, map_layers
from clustersim.scenario.config.model import ExpertsConfig, LayerGroupConfig, ModelConfig, ModelExpertsConfig

_MlpType = TypeVar("_MlpType", DenseMlp, MoeMlp)
_ROUTER_FIELDS: Final = {
    "router": "scores",
    "router_bias": "bias",
    "num_groups": "num_groups",
    "group_topk": "group_topk",
}
_MOE_FIELDS: Final = {"count": "experts"} | {
    key: key for key in ("top_k", "ffn", "shared", "shared_gate", "bias", "capacity_factor")
}
_PLACEMENT_KEYS: Final = frozenset(ModelExpertsConfig.model_fields) - frozenset(ExpertsConfig.model_fields)


def with_experts(model: TransformerModel, config: ModelConfig) -> TransformerModel:
    """The model with the section's expert settings, in all of its MoE layers or in the selected layers."""
    experts = config.experts
    if experts is None:
        return model
    if experts.selects_layers or experts.count == 0 or not model.distinct_moes:
        return _select_moe_layers(model, experts, config.ffn)
    return map_layers(
        model, lambda spec: spec if spec.moe is None else replace(spec, mlp=_replace_mlp(spec.moe, experts, None))
    )


def check_ffn_used(model: TransformerModel, ffn: int | None) -> None:
    """Raise InputError for an MLP width that neither a dense MLP nor an MoE layer uses."""
    experts_only = bool(model.distinct_moes) and not model.distinct_dense_mlps
    if ffn is not None and experts_only and all(routed.ffn != ffn for routed in model.distinct_moes):
        raise InputError(f"ffn: {model.name} has no dense MLP; experts.ffn is the width of its experts")


def with_group_experts(spec: LayerSpec, group: LayerGroupConfig, ffn: int | None) -> LayerSpec:
    """A layer of a `stack` group with the group's experts; a dense MLP where their count is 0.

    ffn: the width of the dense MLP if the group has none.
    """
    experts, mlp = group.experts, spec.mlp
    if mlp is None or experts is None:
        if group.ffn is not None and spec.moe is not None:
            raise InputError("stack: ffn is of a dense MLP, and the layer has experts; give experts.ffn")
        return spec
    if group.ffn is not None and experts.ffn is not None:
        raise InputError("stack: has both ffn and experts.ffn, and the layer has no dense MLP; leave ffn out")
    return replace(spec, mlp=_replace_mlp(mlp, experts, group.ffn or ffn))


def _select_moe_layers(model: TransformerModel, experts: ModelExpertsConfig, ffn: int | None) -> TransformerModel:
    """The model with MoE layers as selected by `dense_layers` and `interleave_moe_layer_step`.

    The other layers have dense MLPs. Where all its MoE layers, or all its dense MLPs, are equal, they are the
    template for new ones.
    """
    first_moe_layer, period = experts.dense_layers or 0, experts.interleave_moe_layer_step or 1
    if first_moe_layer >= model.layer_count:
        raise InputError(
            f"experts.dense_layers: {first_moe_layer} leaves none of the {model.layer_count} layers of {model.name}"
        )
    if period > model.layer_count:
        raise InputError(
            f"experts.interleave_moe_layer_step: {period} is above the {model.layer_count} layers of {model.name}"
        )
    moe_template, dense_template = _single_or_none(model.distinct_moes), _single_or_none(model.distinct_dense_mlps)

    def layer_mlp(layer_index: int, original_mlp: MlpSpec | None) -> MlpSpec | None:
        if original_mlp is None:
            return None
        if layer_index >= first_moe_layer and (layer_index + 1) % period == 0:
            return _replace_mlp(moe_template or original_mlp, experts, ffn)
        return _dense_mlp(dense_template or original_mlp, ffn)

    return replace(
        model,
        stack=stack_layers(
            replace(spec, mlp=layer_mlp(layer_index, spec.mlp))
            for layer_index, spec in enumerate(layer_specs(model.stack))
        ),
    )


def _single_or_none(mlps: tuple[_MlpType, ...]) -> _MlpType | None:
    return mlps[0] if len(mlps) == 1 else None


def _replace_mlp(mlp: MlpSpec, experts: ExpertsConfig, ffn: int | None) -> MlpSpec:
    """The MLP of a layer after applying the section: an MoE layer, or dense for a count of 0."""
    given_keys = experts.model_dump(exclude_none=True)
    if experts.count == 0:
        if extra_keys := [
            key for key in given_keys if key not in _PLACEMENT_KEYS and given_keys[key] and key != "count"
        ]:
            raise InputError(
                f"experts: has a count of 0, and {extra_keys[0]}, which is of experts; leave one of them out"
            )
        return _dense_mlp(mlp, ffn)
    router_fields = {name: given_keys[key] for key, name in _ROUTER_FIELDS.items() if key in given_keys}
    moe_fields = {name: given_keys[key] for key, name in _MOE_FIELDS.items() if key in given_keys}
    match mlp:
        case MoeMlp() as routed:
            return replace(routed, **moe_fields, router=replace(routed.router, **router_fields))
        case DenseMlp(width, form):
            missing = [key for key in ("count", "top_k") if key not in given_keys]
            if missing:
                raise InputError(f"experts: missing keys: {', '.join(missing)}; write such as {ExpertsConfig.example}")
            return MoeMlp(**{"ffn": width, "form": form, **moe_fields}, router=Router(**router_fields))


def _dense_mlp(mlp: MlpSpec, ffn: int | None) -> DenseMlp:
    match mlp:
        case DenseMlp():
            return mlp if ffn is None else replace(mlp, ffn=ffn)
        case MoeMlp(form=form):
            if ffn is None:
                raise InputError("ffn: the model has no dense MLP, so nothing says how wide one is; give ffn")
            return DenseMlp(ffn, form)
