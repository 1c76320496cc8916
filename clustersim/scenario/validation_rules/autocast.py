"""Does a framework that casts by operation fit the layout? The problem in one sentence."""

from collections.abc import Iterator

from clustersim.scenario.resolved import ResolvedScenario
from clustersim.scenario.validation_rules.remedies import Problem, Remedy


def check_autocast(scenario: ResolvedScenario) -> Iterator[str]:
    """Check that ranks exchange no residual stream, which would be in FP32."""
    if not scenario.training.overheads.autocast:
        return
    for axis, degree in (("tp", scenario.layout.tp), ("cp", scenario.layout.cp), ("pp", scenario.layout.pp)):
        if degree > 1:
            yield Problem(
                f"layout.{axis}: {degree} with training.overheads.autocast is not modelled: ranks would exchange FP32",
                Remedy(f"layout.{axis}", ((1,),)),
            )
