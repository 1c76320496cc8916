"""Which layers of a scenario's model have experts, and which?

`model.experts` changes the mixture of a model that has one, or puts one in place of the MLP: in every layer, in all but
the first, or in every so-manieth. In an entry of `model.stack` it is about the layers of that run.
"""

from dataclasses import replace
from typing import Final

from clustersim.errors import InputError
from clustersim.scenario.sections.model import ExpertsSection, ModelSection
from clustersim.workload.stack import AnyMlp, DenseMlp, LayerSpec, RoutedMlp, Router, specs, stacked
from clustersim.workload.transformer import Model

_ROUTER: Final = {"router": "scores", "router_bias": "bias", "groups": "groups", "limit": "limit"}
_MIXTURE: Final = {"count": "experts", "top_k": "top_k", "ffn": "ffn", "shared": "shared", "shared_gate": "shared_gate"}


def with_experts(model: Model, section: ModelSection) -> Model:
    """The model with the experts that the section gives all of its layers, or those that it says."""
    given = section.experts
    if section.ffn is not None and model.mixtures and not model.mlps and not isinstance(given, ExpertsSection):
        raise InputError(f"ffn: {model.name} has no dense MLP; experts.ffn is the width of its experts")
    if given is None:
        return model
    if given is False:
        raise InputError(f"experts: false is for an entry of stack; name a dense model instead of {model.name}")
    section_of = _asked(given)
    placed = section_of.dense_layers is not None or section_of.every is not None
    if placed or not model.mixtures:
        return _placed(model, section_of)
    layers = (mixed(spec, section_of) if isinstance(spec.mlp, RoutedMlp) else spec for spec in specs(model.stack))
    return replace(model, stack=stacked(layers))


def mixed(spec: LayerSpec, given: ExpertsSection | bool | None) -> LayerSpec:
    """A layer with the experts that the section gives it; with a dense MLP where that is false."""
    if given is None or spec.mlp is None:
        return spec
    if given is False:
        return replace(spec, mlp=_dense(spec.mlp))
    return replace(spec, mlp=_mixture(spec.mlp, _asked(given)))


def _asked(given: ExpertsSection | bool) -> ExpertsSection:
    if isinstance(given, bool):
        raise InputError(f"experts: true says nothing of them; write such as {ExpertsSection.example}")
    return given


def _placed(model: Model, given: ExpertsSection) -> Model:
    """The model with experts in the layers that `dense_layers` and `every` leave."""
    first, every = given.dense_layers or 0, given.every or 1
    if first >= model.layers:
        raise InputError(f"experts.dense_layers: {first} leaves none of the {model.layers} layers of {model.name}")
    layers = enumerate(specs(model.stack))
    return replace(
        model,
        stack=stacked(mixed(spec, given if at >= first and (at + 1) % every == 0 else False) for at, spec in layers),
    )


def _dense(mlp: AnyMlp) -> DenseMlp:
    match mlp:
        case DenseMlp():
            return mlp
        case RoutedMlp(ffn=ffn, form=form):
            return DenseMlp(ffn, form)


def _mixture(mlp: AnyMlp, given: ExpertsSection) -> RoutedMlp:
    """The mixture that a section describes, beside what the layer has."""
    said = given.model_dump(exclude_none=True)
    of_router = {name: said[key] for key, name in _ROUTER.items() if key in said}
    of_mixture = {name: said[key] for key, name in _MIXTURE.items() if key in said}
    if "bias" in said:
        of_mixture["bias"] = said["bias"]
    match mlp:
        case RoutedMlp() as routed:
            return replace(routed, **of_mixture, router=replace(routed.router, **of_router))
        case DenseMlp(ffn, form):
            missing = [key for key in ("count", "top_k") if key not in said]
            if missing:
                raise InputError(f"experts: lacks {', '.join(missing)}; write such as {ExpertsSection.example}")
            return RoutedMlp(**{"ffn": ffn, "form": form, **of_mixture}, router=Router(**of_router))
