"""Local training (DiLoCo and its kin): what do replicas exchange, and when?

Each replica trains by itself for `inner_steps` steps; then the replicas average how far they have come (outer
gradients), and an outer optimizer moves the weights that all continue from. Fragments of the layers may be exchanged at
different steps of a round, and while the replicas go on. With a quorum replicas are decoupled: an exchange waits for so
many of them, so that slower and absent ones hold nobody up.

Reference: Douillard et al. 2023, arXiv:2311.08105 (DiLoCo); Douillard et al. 2025, arXiv:2501.18512 (streaming:
fragments, overlap by tau steps, outer gradients in 4 bits); Jaghouar et al. 2024, arXiv:2412.01152 (over FSDP, int8);
Kale et al. 2025, arXiv:2502.12996 (eager updates: one fragment that overlaps a whole round); Douillard et al. 2026,
arXiv:2604.21428 (decoupled: quorum, peers that come and go).
"""

from dataclasses import dataclass
from enum import Enum
from typing import Final

from clustersim.common.units import Bytes, Seconds

MAX_REPLICAS: Final = 1024


class OuterFormat(Enum):
    """Number format in which outer gradients travel."""

    FP32 = "fp32"
    BF16 = "bf16"
    FP16 = "fp16"
    FP8 = "fp8"
    INT8 = "int8"
    FP4 = "fp4"  # E3M0 of streaming DiLoCo, section 2.4

    @property
    def bytes(self) -> Bytes:
        """Bytes of one element; scales are negligible."""
        return _BYTES[self]


_BYTES: Final = {
    OuterFormat.FP32: 4.0,
    OuterFormat.BF16: 2.0,
    OuterFormat.FP16: 2.0,
    OuterFormat.FP8: 1.0,
    OuterFormat.INT8: 1.0,
    OuterFormat.FP4: 0.5,
}


class OuterOptimizer(Enum):
    """What moves the common weights by the averaged outer gradients."""

    NESTEROV = "nesterov"
    SGD = "sgd"  # without momentum: the average of the replicas, as local SGD

    @property
    def state_bytes(self) -> Bytes:
        """Bytes of each parameter beyond the inner optimizer's: the common weights, and their momentum, in FP32."""
        return 8.0 if self is OuterOptimizer.NESTEROV else 4.0


class OuterSend(Enum):
    """From when on the outer gradients of a layer travel."""

    AFTER_OPTIMIZER = "after_optimizer"  # of the last inner step, as PRIME and OpenDiLoCo have it
    DURING_BACKWARD = "during_backward"  # as soon as that layer's backward is done, as streaming DiLoCo's simulation


class OuterRejoin(Enum):
    """What a replica that was absent continues from."""

    CHECKPOINT = "checkpoint"  # its own last one
    PEERS = "peers"  # weights and optimizer states of another replica, over the links between them


class StepBudget(Enum):
    """How many inner steps replicas of unlike speed do in a round."""

    SAME = "same"  # inner_steps, so faster ones wait
    BY_SPEED = "by_speed"  # as many as fit into those of the slowest (dynamic local updates, arXiv:2401.09135)


@dataclass(frozen=True, slots=True)
class SiteAbsence:
    """A site trains elsewhere, or nothing, from `begin` to `end`, again after every `period` seconds; None: once."""

    site: str
    begin: Seconds
    end: Seconds
    period: Seconds | None = None


@dataclass(frozen=True, slots=True)
class DilocoSettings:
    """inner_steps: H, between two exchanges of a fragment; fragments: P, that the layers are exchanged in.

    overlap: tau, inner steps that replicas go on while a fragment travels; 0: they wait. offload: the common weights
    and their momentum are kept, and updated, in host memory. replicas: of equally many GPUs, None: one in each site;
    quorum: replicas that an exchange waits for, None: all; rejoin: None: from peers where there is a quorum; away: as
    planned.
    """

    inner_steps: int
    fragments: int = 1
    overlap: int = 0
    outer_gradients: OuterFormat = OuterFormat.FP32
    optimizer: OuterOptimizer = OuterOptimizer.NESTEROV
    send: OuterSend = OuterSend.AFTER_OPTIMIZER
    offload: bool = False
    replicas: int | None = None
    quorum: int | None = None
    rejoin: OuterRejoin | None = None
    step_budget: StepBudget = StepBudget.SAME
    away: tuple[SiteAbsence, ...] = ()

    @property
    def rejoins_from_peers(self) -> bool:
        """Whether a replica that was absent takes the states of another one over."""
        if self.rejoin is None:
            return self.quorum is not None
        return self.rejoin is OuterRejoin.PEERS
