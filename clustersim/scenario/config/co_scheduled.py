"""What may a scenario file say about co-scheduled jobs on its cluster?"""

from typing import Annotated, Any, ClassVar

from pydantic import BeforeValidator, Field

from clustersim.common.errors import format_value
from clustersim.scenario.config.placement import PlacementConfig
from clustersim.scenario.config_reader import ConfigModel, Timestamp, config_error, none_from_word, value_parser

_EXAMPLE_FILE = "other.yaml"


def _parse_scenario(value: object) -> object:
    """A file name, or the mapping of a scenario file."""
    if isinstance(value, dict) or (isinstance(value, str) and value.strip()):
        return value
    raise config_error(
        f"{format_value(value)} is neither a scenario file nor what one would hold; write scenario: {_EXAMPLE_FILE}"
    )


class CoScheduledJobConfig(ConfigModel):
    """An entry of `degradations.jobs`: a co-scheduled job, see [Other jobs](scenario.md#other-jobs)."""

    shorthand_key: ClassVar[str | None] = "scenario"
    scenario: Annotated[
        str | dict[str, Any], value_parser(_parse_scenario, "a scenario file, or what one holds", _EXAMPLE_FILE)
    ] = Field(examples=[_EXAMPLE_FILE])
    """its scenario: model, layout and training"""
    placement: Annotated[PlacementConfig | None, BeforeValidator(none_from_word)] = None
    """its GPUs; left out: those of its own file, or the first free ones"""
    start: Timestamp = 0.0
    """start of its first step relative to this job's, may be negative"""
