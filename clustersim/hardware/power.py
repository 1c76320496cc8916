"""What does a GPU draw, by what it does?

An accelerator's file says what it draws at most (`tdp`, the limit of its board), what it draws while a process holds it
and nothing runs (`idle`), and its part of what a whole node draws at most (`node`). What it draws meanwhile is a part
of the limit, the same for all (`topologies/power/activities.yaml`): matrix products draw all of it, kernels that stream
through memory and collectives half. Assumed: a kernel draws what kernels of its class do, however well it uses the GPU;
what moves beside kernels draws nothing of its own; who waits for others draws what an idle process does, though the
library polls. The rest of a node (CPUs, NICs, switches, fans, losses of power supplies) draws the same all the time, a
part of what its makers leave room for.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum

from clustersim.common.data_files import find_file, read_mapping
from clustersim.common.errors import InputError
from clustersim.common.mapping_reader import MappingReader
from clustersim.common.units import Dimension, Watts, format_power


class GpuActivity(Enum):
    """What a GPU does, as far as it is told apart by what it draws."""

    MATMUL = "products"  # matrix products and attention
    MEMORY_BOUND = "streaming"  # all other kernels
    COMMUNICATING = "communicating"  # while nothing hides it
    WAITING = "waiting"  # for other ranks, for the host, for copies


@dataclass(frozen=True, slots=True)
class PowerSpec:
    """What an accelerator's file says. idle: None where nobody measured it; node: of a whole node, for each GPU."""

    tdp: Watts
    idle: Watts | None = None
    node_share: Watts | None = None

    @classmethod
    def from_section(cls, section: MappingReader) -> "PowerSpec":
        """From the accelerator's own section; raise InputError where parts are more than the whole."""
        tdp = section.get_quantity("tdp", Dimension.POWER)
        idle = section.get_quantity("idle", Dimension.POWER) if section.has_key("idle") else None
        node = section.get_quantity("node", Dimension.POWER) if section.has_key("node") else None
        if idle is not None and idle > tdp:
            raise section.input_error("idle", f"{format_power(idle)} is above tdp {format_power(tdp)}")
        if node is not None and node < tdp:
            raise section.input_error(
                "node", f"{format_power(node)} is below tdp {format_power(tdp)}; it contains the GPU"
            )
        return cls(tdp, idle, node)


@dataclass(frozen=True, slots=True)
class PowerFractions:
    """Parts of the limit that activities draw. waiting: where an accelerator's file does not say it.

    rest: the part that the rest of a node draws of what its rated power leaves beside the GPUs' limits.
    """

    products: float
    streaming: float
    communicating: float
    waiting: float
    rest: float


@dataclass(frozen=True, slots=True)
class PowerDraw:
    """What one GPU draws while it does each thing, and what its part of the rest of the node does; None: not known."""

    by_activity: Mapping[GpuActivity, Watts]
    node_rest: Watts | None


@dataclass(frozen=True, slots=True)
class PowerOverrides:
    """What somebody says of power in place of data files, of every accelerator; None: nothing said."""

    tdp: Watts | None = None
    idle: Watts | None = None
    rest: Watts | None = None
    products: float | None = None
    streaming: float | None = None
    communicating: float | None = None

    def resolve_draw(self, power: PowerSpec | None) -> PowerDraw | None:
        """What an accelerator draws; None where no limit is known. Raises InputError for one that draws below idle."""
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
        """A limit that is said (a power cap) leaves the rest of the node as it is."""
        if self.rest is not None or power is None or power.node_share is None:
            return self.rest
        return fractions.rest * (power.node_share - power.tdp)

    def _override_fractions(self, fractions: PowerFractions) -> PowerFractions:
        overrides = {name: getattr(self, name) for name in ("products", "streaming", "communicating")}
        return replace(fractions, **{name: fraction for name, fraction in overrides.items() if fraction is not None})


def load_power_fractions(name_or_path: str = "activities") -> PowerFractions:
    """Read topologies/power/NAME.yaml, or a file of the same form."""
    path = find_file("power", name_or_path)
    section = MappingReader(path, read_mapping(path))
    section.get_text("description")
    fractions = PowerFractions(*(section.get_fraction(key) for key in PowerFractions.__slots__))
    section.get_section("sources").get_text_mapping()
    section.reject_unknself_keys()
    return fractions


def _draw_by_activity(tdp: Watts, idle: Watts, fractions: PowerFractions) -> dict[GpuActivity, Watts]:
    return {
        GpuActivity.MATMUL: fractions.products * tdp,
        GpuActivity.MEMORY_BOUND: fractions.streaming * tdp,
        GpuActivity.COMMUNICATING: fractions.communicating * tdp,
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
