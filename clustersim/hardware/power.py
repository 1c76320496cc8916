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

from clustersim.common.data_files import find, read_mapping
from clustersim.common.errors import InputError
from clustersim.common.mapping_reader import Section
from clustersim.common.units import Dimension, Watts, format_power


class Activity(Enum):
    """What a GPU does, as far as it is told apart by what it draws."""

    PRODUCTS = "products"  # matrix products and attention
    STREAMING = "streaming"  # all other kernels
    COMMUNICATING = "communicating"  # while nothing hides it
    WAITING = "waiting"  # for other ranks, for the host, for copies


@dataclass(frozen=True, slots=True)
class Power:
    """What an accelerator's file says. idle: None where nobody measured it; node: of a whole node, for each GPU."""

    tdp: Watts
    idle: Watts | None = None
    node: Watts | None = None

    @classmethod
    def read(cls, section: Section) -> "Power":
        """From the accelerator's own section; raise InputError where parts are more than the whole."""
        tdp = section.quantity("tdp", Dimension.POWER)
        idle = section.quantity("idle", Dimension.POWER) if section.has("idle") else None
        node = section.quantity("node", Dimension.POWER) if section.has("node") else None
        if idle is not None and idle > tdp:
            raise section.refuse("idle", f"{format_power(idle)} is above tdp {format_power(tdp)}")
        if node is not None and node < tdp:
            raise section.refuse("node", f"{format_power(node)} is below tdp {format_power(tdp)}; it contains the GPU")
        return cls(tdp, idle, node)


@dataclass(frozen=True, slots=True)
class Shares:
    """Parts of the limit that activities draw. waiting: where an accelerator's file does not say it.

    rest: the part that the rest of a node draws of what its rated power leaves beside the GPUs' limits.
    """

    products: float
    streaming: float
    communicating: float
    waiting: float
    rest: float


@dataclass(frozen=True, slots=True)
class Draw:
    """What one GPU draws while it does each thing, and what its part of the rest of the node does; None: not known."""

    gpu: Mapping[Activity, Watts]
    rest: Watts | None


@dataclass(frozen=True, slots=True)
class Powers:
    """What somebody says of power in place of data files, of every accelerator; None: nothing said."""

    tdp: Watts | None = None
    idle: Watts | None = None
    rest: Watts | None = None
    products: float | None = None
    streaming: float | None = None
    communicating: float | None = None

    def draw(self, power: Power | None) -> Draw | None:
        """What an accelerator draws; None where no limit is known. Raises InputError for one that draws below idle."""
        tdp = self.tdp if self.tdp is not None or power is None else power.tdp
        if tdp is None:
            return None
        shares = self._shares(load_shares())
        draw = Draw(_by_activity(tdp, self._idle(power, tdp, shares), shares), self._rest(power, shares))
        _require_above_idle(draw)
        return draw

    def _idle(self, power: Power | None, tdp: Watts, shares: Shares) -> Watts:
        if self.idle is not None and self.idle > tdp:
            raise InputError(f"idle {format_power(self.idle)} is above tdp {format_power(tdp)}")
        known = self.idle if self.idle is not None or power is None else power.idle
        return min(shares.waiting * tdp if known is None else known, tdp)

    def _rest(self, power: Power | None, shares: Shares) -> Watts | None:
        """A limit that is said (a power cap) leaves the rest of the node as it is."""
        if self.rest is not None or power is None or power.node is None:
            return self.rest
        return shares.rest * (power.node - power.tdp)

    def _shares(self, shares: Shares) -> Shares:
        said = {name: getattr(self, name) for name in ("products", "streaming", "communicating")}
        return replace(shares, **{name: share for name, share in said.items() if share is not None})


def load_shares(name_or_path: str = "activities") -> Shares:
    """Read topologies/power/NAME.yaml, or a file of the same form."""
    path = find("power", name_or_path)
    section = Section(path, read_mapping(path))
    section.text("description")
    shares = Shares(*(section.share(key) for key in Shares.__slots__))
    section.section("sources").texts()
    section.finish()
    return shares


def _by_activity(tdp: Watts, idle: Watts, shares: Shares) -> dict[Activity, Watts]:
    return {
        Activity.PRODUCTS: shares.products * tdp,
        Activity.STREAMING: shares.streaming * tdp,
        Activity.COMMUNICATING: shares.communicating * tdp,
        Activity.WAITING: idle,
    }


def _require_above_idle(draw: Draw) -> None:
    idle = draw.gpu[Activity.WAITING]
    for activity, watts in draw.gpu.items():
        if watts < idle:
            raise InputError(
                f"{activity.value} draws {format_power(watts)}, less than a GPU that is idle ({format_power(idle)}); "
                "raise it, or lower idle"
            )
