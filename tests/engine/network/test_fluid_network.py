"""When do activities that share links end? Closed forms, and what holds in every network."""

from collections.abc import Iterator

import numpy as np
import pytest
import simpy
from hypothesis import given
from hypothesis import strategies as st

from clustersim.engine.kernel.environment import SimEnvironment
from clustersim.engine.kernel.network.fluid_network import FlowDemand
from tests.conftest import examples
from tests.engine.network.recording_network import Watched, load, play


def test_an_activity_alone_takes_exactly_its_own_time() -> None:
    """Thirds and tenths, so that any detour over rates would show in the last bit."""
    assert play(2, (0.1, load(1 / 3, 0, 1)))[0] == [0.1 + 1 / 3]
    assert play(2, (0.1, load(1 / 3, 0)), (0.1, load(0.7, 1)))[0] == [0.1 + 1 / 3, 0.1 + 0.7]


def test_two_on_one_link_take_twice_as_long() -> None:
    assert play(1, (0.0, load(3.0, 0)), (0.0, load(3.0, 0)))[0] == [6.0, 6.0]


def test_who_comes_later_shares_what_is_left() -> None:
    """Alone until 1, half speed until the first is done at 1 + 2·(3-1) = 5; the second has 3 - 2 = 1 left by then."""
    assert play(1, (0.0, load(3.0, 0)), (1.0, load(3.0, 0)))[0] == [5.0, 6.0]


def test_who_is_limited_leaves_the_rest_to_others() -> None:
    """Two of 3 s on one link: from 1 on the first goes at 1/4 at most, so the second at 3/4, and ends at 1 + 2.5 · 4/3.

    By then the first has done 0.5 + 2.5/3, and is let go at 5; at 1/4 it has done 1/6 more, and 1.5 s are left.
    """
    environment = SimEnvironment()
    network, ends = Watched(environment, 1), []
    first, second = (network.create_flow(load(3.0, 0)) for _ in range(2))
    for flow in (first, second):
        network.begin_flow(flow)
        flow.done.callbacks.append(lambda _: ends.append(environment.now))
    environment.timeout(1.0).callbacks.append(lambda _: network.set_rate_bound(first, 0.25))
    environment.timeout(5.0).callbacks.append(lambda _: network.set_rate_bound(first, 1.0))
    environment.run_all()
    network.check()
    assert ends == pytest.approx([1 + 2.5 * 4 / 3, 6.5])


def test_who_is_limited_before_it_begins_or_after_it_has_ended() -> None:
    environment = SimEnvironment()
    network, ends = Watched(environment, 1), []
    activity = network.create_flow(load(2.0, 0))
    network.set_rate_bound(activity, 0.5)
    activity.done.callbacks.append(lambda _: ends.append(environment.now))
    environment.timeout(1.0).callbacks.append(lambda _: network.begin_flow(activity))
    environment.timeout(9.0).callbacks.append(lambda _: network.set_rate_bound(activity, 0.1))
    environment.run_all()
    assert ends == [5.0]


def test_one_after_the_other_do_not_share() -> None:
    ends, network = play(1, (0.0, load(2.0, 0)), (2.0, load(3.0, 0)))
    assert ends == [2.0, 5.0]
    assert [speed for _, _, speed in network.notes] == [1.0, 0.0, 1.0, 0.0]


def test_links_that_are_not_full_slow_nobody() -> None:
    """Four that each keep a spine link busy for a quarter of their time fill it; a fifth slows all to 4/5."""
    assert play(1, *[(0.0, load(1 / 3, 0, busy=0.25))] * 4)[0] == [1 / 3] * 4
    assert play(1, *[(0.0, load(1.0, 0, busy=0.25))] * 5)[0] == [1.25] * 5


def test_a_class_of_groups_shares_its_link_with_itself() -> None:
    """Three groups of one class on one real link keep it busy for 3 s per second of work: three times as long."""
    assert play(1, (0.0, load(2.0, 0, busy=3.0)))[0] == [6.0]
    assert play(1, *[(0.0, load(2.0, 0))] * 3)[0] == [6.0] * 3


def test_the_parking_lot() -> None:
    """A long one over three links and a short one on each: all at half speed, whatever the number of links."""
    ends, _ = play(3, (0.0, load(2.0, 0, 1, 2)), *[(0.0, load(2.0, link)) for link in range(3)])
    assert ends == [4.0] * 4
    ends, _ = play(3, (0.0, load(2.0, 0, 1, 2)), (0.0, load(1.0, 0)), (0.0, load(2.0, 1)))
    assert ends == [4.0, 2.0, 4.0], "link 0 is free after 2 s, but link 1 is not"


def test_flows_share_a_link_fairly_not_activities() -> None:
    """One activity has twice as many flows on the link as the other, so two thirds of it.

    It is done at 1.5; the other has done half of its second by then, and does the rest alone.
    """
    assert play(1, (0.0, load(1.0, 0, share=2.0)), (0.0, load(1.0, 0)))[0] == pytest.approx([1.5, 2.0], rel=1e-12)


def test_only_the_connected_part_is_solved_again() -> None:
    """Links 0 and 1 have nothing to do with each other: those on 0 get their speeds once, and once when one is done."""
    busy_elsewhere = [(0.25 * number, load(0.1, 1)) for number in range(20)]
    _, network = play(2, (0.0, load(1.0, 0)), (0.0, load(2.0, 0)), *busy_elsewhere)
    on_zero = [(when, speed) for when, flow, speed in network.notes if flow.demand.link_ids == (0,)]
    assert on_zero == [(0.0, 1.0), (0.0, 0.5), (0.0, 0.5), (2.0, 0.0), (2.0, 1.0), (3.0, 0.0)]


def test_an_instant_is_solved_once() -> None:
    """Ten come together: but for the first, which found the link free, each gets its speed once."""
    _, network = play(1, *[(1.0, load(1.0, 0))] * 10)
    assert [speed for _, _, speed in network.notes] == [1.0, *[0.1] * 10, *[0.0] * 10]


def test_who_follows_at_once_takes_over_the_speed() -> None:
    """The first is done at 2; who waits for the one that waits for it starts then: the second is never re-rated."""
    environment = SimEnvironment()
    network = Watched(environment, 1)

    def carry(seconds: float, after: simpy.Event | None) -> Iterator[simpy.Event]:
        if after is not None:
            yield after
        yield network.start_flow(load(seconds, 0))

    first = environment.process(carry(1.0, None))
    environment.process(carry(5.0, None))
    environment.process(carry(1.0, first))
    environment.run_all()
    second = [(when, speed) for when, flow, speed in network.notes if flow.demand.work_seconds == 5.0]
    assert second == [(0.0, 0.5), (4.0, 1.0), (7.0, 0.0)]


DYADIC = st.sampled_from([0.25, 0.5, 0.75, 1.0, 1.5, 2.0])


@st.composite
def loads(draw: st.DrawFn) -> tuple[float, FlowDemand]:
    links = draw(st.lists(st.integers(0, 5), min_size=1, max_size=4, unique=True))
    busy = [draw(DYADIC) for _ in links]
    made = FlowDemand(draw(DYADIC), draw(DYADIC), np.array(links, np.int64), np.array(busy))
    return draw(st.sampled_from([0.0, 0.5, 1.0, 1.25, 3.0])), made


@given(st.lists(loads(), min_size=1, max_size=12))
@examples(300)
def test_no_link_is_overloaded_and_all_work_is_done(starts: list[tuple[float, FlowDemand]]) -> None:
    ends, network = play(6, *starts)
    network.check()
    for end, (begin, flow_demand) in zip(ends, starts, strict=True):
        assert end >= begin + flow_demand.work_seconds * max(1.0, float(flow_demand.utilization.max())) * (1 - 1e-12)


@given(st.lists(loads(), min_size=1, max_size=10))
@examples(100)
def test_a_link_with_somebody_slowed_is_full(starts: list[tuple[float, FlowDemand]]) -> None:
    """Max-min fairness wastes nothing: whoever is slower than alone crosses a full link."""
    _, network = play(6, *starts)
    for _, running in network.stretches():
        busy = network.busy(running)
        for flow, speed in running.items():
            assert speed in {0.0, 1.0} or busy[flow.demand.link_indices].max() >= 1 - 1e-12


@given(st.lists(loads(), min_size=1, max_size=8), st.sampled_from([0.5, 2.0, 8.0]))
@examples(100)
def test_times_scale_with_work_bit_for_bit(starts: list[tuple[float, FlowDemand]], scale: float) -> None:
    scaled = [
        (
            begin * scale,
            FlowDemand(
                flow_demand.work_seconds * scale,
                flow_demand.fair_weight,
                flow_demand.link_indices,
                flow_demand.utilization,
            ),
        )
        for begin, flow_demand in starts
    ]
    assert play(6, *scaled)[0] == [end * scale for end in play(6, *starts)[0]]
