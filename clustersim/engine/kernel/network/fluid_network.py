"""When do activities that share links end?

An activity has seconds of work, which it does at full speed where it has its links for itself, or at the part of it to
which it is limited. Each of its links it keeps busy for a part of every second of work; no link is busy for more than a
second per second. Speeds are max-min fair (`max_min`) and constant between changes: when an activity comes or goes,
what is left of every activity in the same connected part of links and activities is brought up to date and their speeds
are found again, once per instant. An activity whose speed stays the same keeps its end, so one that nobody disturbs
takes exactly its own time.

Reference: Casanova et al., "Versatile, scalable, and accurate simulation of distributed applications and platforms",
J. Parallel Distrib. Comput. 74(10), 2014, section 3 (fluid models with lazy, partial updates).
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import simpy

from clustersim.common.arrays import FloatArray, IntArray
from clustersim.common.units import Seconds
from clustersim.engine.kernel.environment import Clock
from clustersim.engine.kernel.network.max_min import Usage, max_min

FEW: Final = 64
"""Loads of a connected part up to which their speeds are remembered; larger parts seldom recur."""


@dataclass(frozen=True, slots=True, eq=False)
class Load:
    """What an activity asks for. seconds: of work, above 0; share: by which links are divided, above 0.

    links: [links] numbers, each once; busy: [links] seconds that each is busy per second of work, above 0.
    """

    seconds: Seconds
    share: float
    links: IntArray
    busy: FloatArray
    numbers: tuple[int, ...] = field(init=False)
    alone: bool = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "numbers", tuple(self.links.tolist()))
        object.__setattr__(self, "alone", bool((self.busy <= 1.0).all()))


class Activity:
    """One load under way; `left` seconds of work at time `since`. done: it has ended.

    due: the timer whose end counts; most: the speed to which it is limited; under_way: it has begun.
    """

    __slots__ = ("done", "due", "left", "load", "most", "since", "speed", "under_way")

    due: simpy.Event

    def __init__(self, load: Load, environment: Clock, since: Seconds) -> None:
        self.load, self.done = load, simpy.Event(environment)
        self.left, self.since = load.seconds, since
        self.speed, self.most, self.under_way = 0.0, 1.0, False


class Network:
    """Links 0 ... links-1 and the activities that load them now."""

    def __init__(self, environment: Clock, links: int) -> None:
        self._environment = environment
        self._unit = np.ones(links)
        self._users: defaultdict[int, dict[Activity, None]] = defaultdict(dict)
        self._changed: dict[int, None] = {}
        self._kept: dict[int, Callable[[], None]] = {}
        self._known: dict[tuple[tuple[Load, ...], tuple[float, ...]], list[float]] = {}

    def planned(self, load: Load) -> Activity:
        """An activity that is yet to begin."""
        return Activity(load, self._environment, self._environment.now)

    def start(self, load: Load) -> simpy.Event:
        """Begin an activity; return its end."""
        activity = self.planned(load)
        self.begin(activity)
        return activity.done

    def limit(self, activity: Activity, speed: float) -> None:
        """Let an activity go at this speed at most from now, or once it begins."""
        activity.most = speed
        if activity.under_way:
            self._change(activity.load.numbers)

    def begin(self, activity: Activity) -> None:
        """Begin an activity."""
        load, activity.since, activity.under_way = activity.load, self._environment.now, True
        if self._kept:
            for keeper in dict.fromkeys(self._kept[link] for link in load.numbers if link in self._kept):
                keeper()
        users = [self._users[link] for link in load.numbers]
        free = load.alone and not any(users)
        for user in users:
            user[activity] = None
        if free:
            self._run(activity, activity.most)
        else:
            self._change(load.numbers)

    def free(self, links: Iterable[int]) -> bool:
        """Whether nobody loads these links or keeps any."""
        return not any(self._users.get(link) or link in self._kept for link in links)

    def keep(self, links: Iterable[int], visited: Callable[[], None]) -> None:
        """Be told before anybody loads one of these links, which are free."""
        self._kept.update(dict.fromkeys(links, visited))

    def leave(self, links: Iterable[int], visited: Callable[[], None]) -> None:
        """Keep links no longer, those of them that are kept."""
        for link in links:
            if self._kept.get(link) == visited:
                del self._kept[link]

    def resumed(self, load: Load, since: Seconds) -> Activity:
        """An activity that has had its links for itself since a time, and has them until now."""
        activity = Activity(load, self._environment, since)
        activity.speed, activity.under_way = activity.most, True
        for link in load.numbers:
            self._users[link][activity] = None
        self._end(activity, self._environment.at(since + activity.left / activity.speed))
        return activity

    def _run(self, activity: Activity, speed: float) -> None:
        """Let an activity go on at this speed from now."""
        now = self._environment.now
        activity.left = max(activity.left - (now - activity.since) * activity.speed, 0.0)
        activity.since, activity.speed = now, speed
        self._end(activity, self._environment.wait(activity.left / speed))

    def _end(self, activity: Activity, due: simpy.Event) -> None:
        """End an activity when an event happens, and at no other."""
        activity.due = due
        due.callbacks.append(lambda due: self._finish(activity, due))

    def _finish(self, activity: Activity, due: simpy.Event) -> None:
        """End an activity, unless its speed has changed since this timer was set."""
        if due is not activity.due:
            return
        left: list[int] = []
        for link in activity.load.numbers:
            users = self._users[link]
            del users[activity]
            if users:
                left.append(link)
        activity.under_way = False
        activity.done.succeed()
        self._change(left)

    def _change(self, links: Sequence[int]) -> None:
        """Find speeds again, at the end of this instant, in the parts of these links."""
        if not links:
            return
        waiting = bool(self._changed)
        self._changed.update(dict.fromkeys(links))
        if not waiting:
            self._environment.last().callbacks.append(self._settle)

    def _settle(self, _: simpy.Event) -> None:
        changed, self._changed = self._changed, {}
        seen: set[int] = set()
        for link in changed:
            if link not in seen and self._users[link]:
                self._share(self._part(link, seen))

    def _part(self, link: int, seen: set[int]) -> list[Activity]:
        """All activities that are connected with a link through others; notes their links as seen."""
        part: dict[Activity, None] = {}
        waiting = [link]
        seen.add(link)
        while waiting:
            for activity in self._users[waiting.pop()]:
                if activity not in part:
                    part[activity] = None
                    fresh = [item for item in activity.load.numbers if item not in seen]
                    seen.update(fresh)
                    waiting += fresh
        return list(part)

    def _share(self, part: list[Activity]) -> None:
        """Give each activity of a connected part its fair speed."""
        for activity, speed in zip(part, self._speeds(part), strict=True):
            if speed != activity.speed:
                self._run(activity, speed)

    def _speeds(self, part: list[Activity]) -> list[float]:
        """Fair speeds of a connected part; the same few loads meet again and again while microbatches pass."""
        loads, most = tuple([activity.load for activity in part]), tuple([activity.most for activity in part])
        if len(loads) == 1 and loads[0].alone:
            return [most[0]]
        if len(loads) > FEW:
            return self._shared(loads, most)
        known = self._known.get((loads, most))
        if known is None:
            known = self._known[loads, most] = self._shared(loads, most)
        return known

    def _shared(self, loads: Sequence[Load], most: Sequence[float]) -> list[float]:
        usage = Usage(
            resource=np.concatenate([load.links for load in loads]),
            activity=np.repeat(np.arange(len(loads)), [len(load.links) for load in loads]),
            weight=np.concatenate([load.busy for load in loads]),
        )
        share = np.array([load.share for load in loads])
        speeds: list[float] = max_min(usage, self._unit, np.array(most), share).tolist()
        return speeds
