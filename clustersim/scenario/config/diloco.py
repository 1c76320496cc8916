"""What may a scenario file say about local training (DiLoCo)?"""

from typing import Annotated, ClassVar, Self

from pydantic import Field, model_validator

from clustersim.scenario.config_reader import ConfigModel, config_error, enum_parser
from clustersim.scenario.diloco import DilocoSettings, OuterFormat, OuterOptimizer, OuterSend

MAX_INNER_STEPS = 100_000


class DilocoConfig(ConfigModel):
    """`diloco`: every site trains a replica, which exchange outer gradients now and then (`clustersim diloco`)."""

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
        return DilocoSettings(**{name: getattr(self, name) for name in type(self).model_fields})
