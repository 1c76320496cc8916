"""What may a scenario file say of other jobs on its machine?"""

from typing import Annotated, Any, ClassVar

from pydantic import BeforeValidator, Field

from clustersim.common.errors import shown
from clustersim.scenario.config.placement import PlacementSection
from clustersim.scenario.config_reader import Moment, Section, mistake, or_none, reads

_EXAMPLE = "other.yaml"


def _scenario(value: object) -> object:
    """A file, or what one would hold."""
    if isinstance(value, dict) or (isinstance(value, str) and value.strip()):
        return value
    raise mistake(f"{shown(value)} is neither a scenario file nor what one would hold; write scenario: {_EXAMPLE}")


class JobSection(Section):
    """An entry of `disturbances.jobs`: another job on the machine, see [Other jobs](scenario.md#other-jobs)."""

    short: ClassVar[str | None] = "scenario"
    scenario: Annotated[str | dict[str, Any], reads(_scenario, "a scenario file, or what one holds", _EXAMPLE)] = Field(
        examples=[_EXAMPLE]
    )
    """what it trains, and how"""
    placement: Annotated[PlacementSection | None, BeforeValidator(or_none)] = None
    """which GPUs of the machine it has; left out: its own file's, or the first that no other job has"""
    start: Moment = 0.0
    """when its first step begins, below zero before this job's"""
