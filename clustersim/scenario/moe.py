"""Which layers of a scenario's model have experts, and which?

`model.experts` changes the mixture of a model that has one, or puts one in place of the MLP: in every layer, in all but
the first, or in every so-manieth. In an entry of `model.stack` it is about the layers of that run. A count of 0 means a
dense MLP.
"""

from dataclasses import replace
from typing import Final, TypeVar

from clustersim.common.errors import InputError
from clustersim.model.layer_stack import AnyMlp, DenseMlp, LayerSpec, RoutedMlp, Router, specs, stacked
from clustersim.model.transformer import Model
from clustersim.scenario.config.model import ExpertsSection, ModelSection, PlacedExpertsSection, RunSection

_Kind = TypeVar("_Kind", DenseMlp, RoutedMlp)
_ROUTER: Final = {"router": "scores", "router_bias": "bias", "groups": "groups", "limit": "limit"}
_MIXTURE: Final = {"count": "experts"} | {
    key: key for key in ("top_k", "ffn", "shared", "shared_gate", "bias", "capacity")
}
_PLACES: Final = frozenset(PlacedExpertsSection.model_fields) - frozenset(ExpertsSection.model_fields)


def with_experts(model: Model, section: ModelSection) -> Model:
    """The model with the experts that the section gives all of its layers, or those that it says."""
    given = section.experts
    if given is None:
        return model
    if given.placed or given.count == 0 or not model.mixtures:
        return _placed(model, given, section.ffn)
    layers = (
        replace(spec, mlp=_mlp(spec.mlp, given, None)) if isinstance(spec.mlp, RoutedMlp) else spec
        for spec in specs(model.stack)
    )
    return replace(model, stack=stacked(layers))


def check_width(model: Model, ffn: int | None) -> None:
    """Raise InputError where a width is given that no mixture took, and there is no dense MLP."""
    experts_only = bool(model.mixtures) and not model.mlps
    if ffn is not None and experts_only and all(routed.ffn != ffn for routed in model.mixtures):
        raise InputError(f"ffn: {model.name} has no dense MLP; experts.ffn is the width of its experts")


def mixed(spec: LayerSpec, run: RunSection, ffn: int | None) -> LayerSpec:
    """A layer of a run with the experts that the run gives it; with a dense MLP where it gives none.

    ffn: the width of a dense MLP where the run has none.
    """
    given, mlp = run.experts, spec.mlp
    if mlp is None or given is None:
        if run.ffn is not None and isinstance(mlp, RoutedMlp):
            raise InputError("stack: ffn is of a dense MLP, and the layer has experts; give experts.ffn")
        return spec
    if run.ffn is not None and given.ffn is not None:
        raise InputError("stack: has ffn beside experts.ffn, and the layer has no dense MLP; leave ffn out")
    return replace(spec, mlp=_mlp(mlp, given, run.ffn or ffn))


def _placed(model: Model, given: PlacedExpertsSection, ffn: int | None) -> Model:
    """The model with experts in the layers that `dense_layers` and `every` leave, and a dense MLP in the others.

    Where all its mixtures, or all its dense MLPs, are equal, new ones are as these.
    """
    first, every = given.dense_layers or 0, given.every or 1
    if first >= model.layers:
        raise InputError(f"experts.dense_layers: {first} leaves none of the {model.layers} layers of {model.name}")
    if every > model.layers:
        raise InputError(f"experts.every: {every} is above the {model.layers} layers of {model.name}")
    routed, dense = _only(model.mixtures), _only(model.mlps)

    def mlp(at: int, own: AnyMlp | None) -> AnyMlp | None:
        if own is None:
            return None
        if at >= first and (at + 1) % every == 0:
            return _mlp(routed or own, given, ffn)
        return _dense(dense or own, ffn)

    return replace(
        model, stack=stacked(replace(spec, mlp=mlp(at, spec.mlp)) for at, spec in enumerate(specs(model.stack)))
    )


def _only(kinds: tuple[_Kind, ...]) -> _Kind | None:
    return kinds[0] if len(kinds) == 1 else None


def _mlp(mlp: AnyMlp, given: ExpertsSection, ffn: int | None) -> AnyMlp:
    """What an MLP becomes: a mixture as the section describes it beside what it has, or dense where it has none."""
    said = given.model_dump(exclude_none=True)
    if given.count == 0:
        if idle := [key for key in said if key not in _PLACES and said[key] and key != "count"]:
            raise InputError(f"experts: has a count of 0, and {idle[0]}, which is of experts; leave one of them out")
        return _dense(mlp, ffn)
    of_router = {name: said[key] for key, name in _ROUTER.items() if key in said}
    of_mixture = {name: said[key] for key, name in _MIXTURE.items() if key in said}
    match mlp:
        case RoutedMlp() as routed:
            return replace(routed, **of_mixture, router=replace(routed.router, **of_router))
        case DenseMlp(width, form):
            missing = [key for key in ("count", "top_k") if key not in said]
            if missing:
                raise InputError(f"experts: lacks {', '.join(missing)}; write such as {ExpertsSection.example}")
            return RoutedMlp(**{"ffn": width, "form": form, **of_mixture}, router=Router(**of_router))


def _dense(mlp: AnyMlp, ffn: int | None) -> DenseMlp:
    match mlp:
        case DenseMlp():
            return mlp if ffn is None else replace(mlp, ffn=ffn)
        case RoutedMlp(form=form):
            if ffn is None:
                raise InputError("ffn: the model has no dense MLP, so nothing says how wide one is; give ffn")
            return DenseMlp(ffn, form)
