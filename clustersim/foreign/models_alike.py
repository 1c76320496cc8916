"""Are two models the same to whoever computes them?"""

from collections.abc import Iterator
from dataclasses import replace

from clustersim.workload.stack import LayerRun, RoutedMlp
from clustersim.workload.transformer import Model, Positions


def alike(one: Model, other: Model) -> bool:
    """Whether two models are the same but for names, positions without a table, and corrections of routers.

    These choose experts beside their scores; a framework that has them has them for every mixture.
    """
    return _bare(one) == _bare(other)


def corrects(model: Model) -> bool:
    """Whether routers have a correction."""
    routed = (run.spec.mlp for run in model.stack if isinstance(run.spec.mlp, RoutedMlp))
    return any(mlp.router.bias for mlp in routed)


def has_experts(model: Model) -> bool:
    """Whether it is a mixture of experts."""
    return any(isinstance(run.spec.mlp, RoutedMlp) for run in model.stack)


def _bare(model: Model) -> Model:
    positions = model.max_positions if model.positions is Positions.LEARNED else 0
    return replace(model, name="", max_positions=positions, stack=tuple(_corrected(model)))


def _corrected(model: Model) -> Iterator[LayerRun]:
    for run in model.stack:
        match run.spec.mlp:
            case RoutedMlp() as routed:
                mlp = replace(routed, router=replace(routed.router, bias=True))
                yield replace(run, spec=replace(run.spec, mlp=mlp))
            case _:
                yield run
