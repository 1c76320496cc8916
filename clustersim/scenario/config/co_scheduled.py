"""What may a scenario file say of other jobs on its machine?"""

from typing import Annotated, Any, ClassVar

from pydantic import BeforeValidator, Field

from clustersim.common.errors import format_value
from clustersim.scenario.config.placement import PlacementConfig
from clustersim.scenario.config_reader import ConfigModel, Timestamp, config_error, none_from_word, value_parser

_EXAMPLE_FILE = "other.yaml"


def _parse_scenario(value: object) -> object:
    """A file, or what one would hold."""
    if isinstance(value, dict) or (isinstance(value, str) and value.strip()):
        return value
    raise config_error(
        f"{format_value(value)} is neither a scenario file nor what one would hold; write scenario: {_EXAMPLE_FILE}"
    )


class CoScheduledJobConfig(ConfigModel):
    """An entry of `disturbances.jobs`: another job on the machine, see [Other jobs](scenario.md#other-jobs)."""

    shorthand_key: ClassVar[str | None] = "scenario"
    scenario: Annotated[
        str | dict[str, Any], value_parser(_parse_scenario, "a scenario file, or what one holds", _EXAMPLE_FILE)
    ] = Field(examples=[_EXAMPLE_FILE])
    """what it trains, and how"""
    placement: Annotated[PlacementConfig | None, BeforeValidator(none_from_word)] = None
    """which GPUs of the machine it has; left out: its own file's, or the first that no other job has"""
    start: Timestamp = 0.0
    """when its first step begins, below zero before this job's"""
