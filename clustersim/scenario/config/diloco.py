"""What may a scenario file say about local training (DiLoCo)?"""

from typing import Annotated, ClassVar, Self

from pydantic import Field, model_validator

from clustersim.scenario.config.degradations import as_list
from clustersim.scenario.config_reader import (
    ConfigModel,
    Duration,
    NonEmptyText,
    config_error,
    enum_parser,
    value_parser,
)
from clustersim.scenario.diloco import (
    MAX_REPLICAS,
    DilocoSettings,
    OuterFormat,
    OuterOptimizer,
    OuterRejoin,
    OuterSend,
    SiteAbsence,
    StepBudget,
)

MAX_INNER_STEPS = 100_000


class SiteAbsenceConfig(ConfigModel):
    """An entry of `diloco.away`: a site whose replicas come and go as planned."""

    example: ClassVar[str] = "{site: north, begin: 8 h, end: 20 h, every: 1 d}"
    site: NonEmptyText = Field(examples=["north"])
    """name of the site"""
    begin: Duration = Field(default=0.0, examples=["8 h"])
    """when it leaves, after the start of training"""
    end: Duration = Field(examples=["20 h"])
    """when it is back"""
    every: Annotated[Duration | None, Field(examples=["1 d"])] = None
    """after which time it leaves again; left out: it leaves once"""

    @model_validator(mode="after")
    def _check_times(self) -> Self:
        if not 0.0 <= self.begin < self.end:
            raise config_error(f"end {self.end:g} s is not after begin {self.begin:g} s")
        if self.every is not None and self.every < self.end:
            raise config_error(
                f"every {self.every:g} s is shorter than end {self.end:g} s; it returns before it leaves again"
            )
        return self

    def site_absence(self) -> SiteAbsence:
        """The absence as the simulator represents it."""
        return SiteAbsence(self.site, self.begin, self.end, self.every)


class DilocoConfig(ConfigModel):
    """`diloco`: replicas train by themselves and exchange outer gradients now and then (`clustersim diloco`)."""

    shorthand_key: ClassVar[str | None] = "inner_steps"
    example: ClassVar[str] = "{inner_steps: 100, fragments: 8, overlap: 1, outer_gradients: fp4}"
    inner_steps: Annotated[int, Field(ge=1, le=MAX_INNER_STEPS)] = Field(examples=[100])
    """steps of each replica between two exchanges of the same layers (H)"""
    fragments: Annotated[int, Field(ge=1, le=MAX_INNER_STEPS)] = 1
    """parts of the layers that are exchanged at different steps of a round (streaming)"""
    overlap: Annotated[int, Field(ge=0, le=MAX_INNER_STEPS)] = 0
    """inner steps that replicas go on while a fragment travels (tau); 0: they wait"""
    outer_gradients: Annotated[OuterFormat, enum_parser(OuterFormat)] = OuterFormat.FP32
    """format in which outer gradients travel"""
    optimizer: Annotated[OuterOptimizer, enum_parser(OuterOptimizer)] = OuterOptimizer.NESTEROV
    """outer optimizer; sgd: without momentum"""
    send: Annotated[OuterSend, enum_parser(OuterSend)] = OuterSend.AFTER_OPTIMIZER
    """when outer gradients start to travel: after the inner optimizer's step, or layer by layer during its backward"""
    offload: bool = False
    """the common weights and their momentum are kept and updated in host memory"""
    replicas: Annotated[int | None, Field(ge=2, le=MAX_REPLICAS, examples=[4])] = None
    """replicas that train by themselves, of equally many GPUs, in a site or over several; left out: one in each site"""
    quorum: Annotated[int | None, Field(ge=1, le=MAX_REPLICAS, examples=[1])] = None
    """replicas that an exchange waits for: decoupled, slower and absent ones hold nobody up; left out: all"""
    rejoin: Annotated[OuterRejoin | None, enum_parser(OuterRejoin)] = None
    """what an absent replica continues from; left out: peers with a quorum, else its own checkpoint"""
    step_budget: Annotated[StepBudget, enum_parser(StepBudget)] = StepBudget.SAME
    """inner steps of replicas of unlike speed: the same, or as many as fit into inner_steps of the slowest"""
    away: Annotated[
        list[SiteAbsenceConfig],
        value_parser(as_list, "one or a list", schema_type=list[SiteAbsenceConfig] | SiteAbsenceConfig),
    ] = Field(default_factory=list)
    """sites whose replicas come and go as planned, counted by `--days`"""

    @model_validator(mode="after")
    def _check_round(self) -> Self:
        if self.overlap >= self.inner_steps:
            raise config_error(
                f"overlap {self.overlap} is not below inner_steps {self.inner_steps}; a fragment arrives before it is "
                f"sent again, so at most {self.inner_steps - 1}"
            )
        if self.fragments > self.inner_steps:
            raise config_error(
                f"{self.fragments} fragments do not fit in {self.inner_steps} inner steps; at most one is sent after "
                "each"
            )
        return self

    def diloco_settings(self) -> DilocoSettings:
        """The settings as the simulator represents them."""
        values = {name: getattr(self, name) for name in type(self).model_fields}
        return DilocoSettings(**values | {"away": tuple(absence.site_absence() for absence in self.away)})
