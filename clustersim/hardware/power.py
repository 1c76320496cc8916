"""Power draw of a GPU by activity.

An accelerator's file has its maximum draw (`tdp`, the limit of its board), its draw while a process holds it
and nothing runs (`idle`), and its share of a whole node's rated power (`node`). The draw of an activity is a
fraction of the limit, the same for all accelerators (`topologies/power/activities.yaml`): matmuls draw all of
it, memory-bound kernels and collectives half. Assumed: a kernel draws what kernels of its class do,
regardless of its utilization; communication that overlaps kernels draws nothing extra; a GPU waiting for
others draws idle power, though the library polls. The rest of a node (CPUs, NICs, switches, fans, power
supply losses) draws constant power, a fraction of what the node's rated power leaves for it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum

from clustersim.common.data_files import find_file, read_mapping
from clustersim.common.errors import InputError
from clustersim.common.mapping_reader import MappingReader
from clustersim.common.units import Dimension, Watts, format_power


class GpuActivity(Enum):
    """Activities of a GPU that differ in power draw."""

    MATMUL = "matmul"  # matmuls and attention
    MEMORY_BOUND = "memory_bound"  # all other kernels
    COMMUNICATING = "exposed_communication"  # exposed only
    WAITING = "idle"  # for other ranks, for the host, for copies


@dataclass(frozen=True, slots=True)
class PowerSpec:
    """Power of an accelerator's file.

    idle: None if unmeasured; node_share: rated power of a node per GPU, None if unknown.
    """

    tdp: Watts
    idle: Watts | None = None
    node_share: Watts | None = None

    @classmethod
    def from_section(cls, section: MappingReader) -> "PowerSpec":
        """Read the accelerator's `power` section; raise InputError where idle exceeds tdp, or tdp exceeds node."""
        watts = section.collect(
            tdp=lambda: section.get_quantity("tdp", Dimension.POWER),
            idle=lambda: section.get_quantity("idle", Dimension.POWER) if section.has_key("idle") else None,
            node=lambda: section.get_quantity("node", Dimension.POWER) if section.has_key("node") else None,
        )
        tdp, idle, node = watts["tdp"], watts["idle"], watts["node"]
        if idle is not None and idle > tdp:
            raise section.input_error("idle", f"{format_power(idle)} is above tdp {format_power(tdp)}")
        if node is not None and node < tdp:
            raise section.input_error(
                "node", f"{format_power(node)} is below tdp {format_power(tdp)}; it contains the GPU"
            )
        return cls(tdp, idle, node)


@dataclass(frozen=True, slots=True)
class PowerFractions:
    """Fractions of the power limit that activities draw.

    waiting: used where an accelerator's file has no idle power.

    rest: draw of the rest of a node, as a fraction of its rated power minus the GPUs' limits. Field names are the
    keys of the file.
    """

    matmul: float
    memory_bound: float
    exposed_communication: float
    waiting: float
    rest: float


@dataclass(frozen=True, slots=True)
class PowerDraw:
    """Power draw of one GPU by activity, and its share of the draw of the rest of the node, None: unknown; watts."""

    by_activity: Mapping[GpuActivity, Watts]
    node_rest: Watts | None


@dataclass(frozen=True, slots=True)
class PowerOverrides:
    """The user's values in place of data files, for every accelerator; None: not overridden."""

    tdp: Watts | None = None
    idle: Watts | None = None
    rest: Watts | None = None
    matmul: float | None = None
    memory_bound: float | None = None
    exposed_communication: float | None = None

    def resolve_draw(self, power: PowerSpec | None) -> PowerDraw | None:
        """Power draw of an accelerator; None if no limit is known.

        Raises InputError if an activity draws less than idle.
        """
        tdp = self.tdp if self.tdp is not None or power is None else power.tdp
        if tdp is None:
            return None
        fractions = self._override_fractions(load_power_fractions())
        draw = PowerDraw(
            _draw_by_activity(tdp, self._idle_watts(power, tdp, fractions), fractions),
            self._node_rest_watts(power, fractions),
        )
        _require_above_idle(draw)
        return draw

    def _idle_watts(self, power: PowerSpec | None, tdp: Watts, fractions: PowerFractions) -> Watts:
        if self.idle is not None and self.idle > tdp:
            raise InputError(f"idle {format_power(self.idle)} is above tdp {format_power(tdp)}")
        idle = self.idle if self.idle is not None or power is None else power.idle
        return min(fractions.waiting * tdp if idle is None else idle, tdp)

    def _node_rest_watts(self, power: PowerSpec | None, fractions: PowerFractions) -> Watts | None:
        """Watts of the rest of the node per GPU; an overridden limit (a power cap) leaves it unchanged."""
        if self.rest is not None or power is None or power.node_share is None:
            return self.rest
        return fractions.rest * (power.node_share - power.tdp)

    def _override_fractions(self, fractions: PowerFractions) -> PowerFractions:
        overrides = {name: getattr(self, name) for name in ("matmul", "memory_bound", "exposed_communication")}
        return replace(fractions, **{name: fraction for name, fraction in overrides.items() if fraction is not None})


def load_power_fractions() -> PowerFractions:
    """Load topologies/power/activities.yaml."""
    path = find_file("power", "activities")
    section = MappingReader(path, read_mapping(path))
    section.get_text("description")
    fractions = PowerFractions(*(section.get_fraction(key) for key in PowerFractions.__slots__))
    section.get_section("sources").get_text_mapping()
    section.reject_unknown_keys()
    return fractions


def _draw_by_activity(tdp: Watts, idle: Watts, fractions: PowerFractions) -> dict[GpuActivity, Watts]:
    return {
        GpuActivity.MATMUL: fractions.matmul * tdp,
        GpuActivity.MEMORY_BOUND: fractions.memory_bound * tdp,
        GpuActivity.COMMUNICATING: fractions.exposed_communication * tdp,
        GpuActivity.WAITING: idle,
    }


def _require_above_idle(draw: PowerDraw) -> None:
    idle = draw.by_activity[GpuActivity.WAITING]
    for activity, watts in draw.by_activity.items():
        if watts < idle:
            raise InputError(
                f"{activity.value} draws {format_power(watts)}, less than a GPU that is idle ({format_power(idle)}); "
                "raise it, or lower idle"
            )
