"""With which software was the step simulated, and what of it was assumed because the file does not say?"""

from dataclasses import dataclass
from typing import Any

from clustersim.model.training import FusedKernel
from clustersim.scenario import Scenario


@dataclass(frozen=True, slots=True)
class Software:
    """The software of a step.

    framework, version, recipe: as in `topologies/frameworks`, "": the newest version, no recipe; is_compiled: its
    layers are; fused: what runs as one kernel each; attention, loss: implementations; gradients: the format in
    which they are accumulated; is_assumed: the file names no framework.
    """

    framework: str
    version: str
    recipe: str
    is_compiled: bool
    fused: tuple[FusedKernel, ...]
    attention: str
    loss: str
    gradients: str
    is_assumed: bool

    @property
    def unfused(self) -> tuple[FusedKernel, ...]:
        """What runs operation by operation."""
        return tuple(kind for kind in FusedKernel if kind not in self.fused)

    def to_json(self) -> dict[str, Any]:
        """The software as JSON data."""
        return {
            "framework": self.framework,
            "version": self.version or None,
            "recipe": self.recipe or None,
            "torch_compile": self.is_compiled,
            "fused": [kind.value for kind in self.fused],
            "attention": self.attention,
            "loss": self.loss,
            "gradients": self.gradients,
            "assumed": self.is_assumed,
        }


def software_of(scenario: Scenario) -> Software:
    """The software of a scenario."""
    framework, training = scenario.framework, scenario.training
    return Software(
        framework.name,
        framework.version,
        framework.recipe,
        framework.compiled,
        tuple(kind for kind in FusedKernel if training.fuses(kind)),
        training.attention.value,
        training.loss.value,
        training.recipe.weight_formats.gradients.value,
        is_assumed=not scenario.names_framework,
    )
