"""Completion times of flows that share links: closed forms and properties of every network."""

from collections.abc import Iterator

import numpy as np
import pytest
import simpy
from hypothesis import given
from hypothesis import strategies as st

from clustersim.engine.kernel.environment import SimEnvironment
from clustersim.engine.kernel.network.fluid_network import Flow, FlowDemand
from tests.conftest import examples
from tests.engine.network.recording_network import RecordingNetwork, flow_demand, run_flows


def test_an_uncontended_flow_takes_exactly_its_demand() -> None:
    """Thirds and tenths, so that any detour over rates would show in the last bit."""
    assert run_flows(2, (0.1, flow_demand(1 / 3, 0, 1)))[0] == [0.1 + 1 / 3]
    assert run_flows(2, (0.1, flow_demand(1 / 3, 0)), (0.1, flow_demand(0.7, 1)))[0] == [0.1 + 1 / 3, 0.1 + 0.7]


def test_two_on_one_link_take_twice_as_long() -> None:
    assert run_flows(1, (0.0, flow_demand(3.0, 0)), (0.0, flow_demand(3.0, 0)))[0] == [6.0, 6.0]


def test_a_late_flow_shares_the_link_from_its_start() -> None:
    """Uncontended until 1, half speed until the first ends at 1 + 2·(3-1) = 5; the second has 3 - 2 = 1 left then."""
    assert run_flows(1, (0.0, flow_demand(3.0, 0)), (1.0, flow_demand(3.0, 0)))[0] == [5.0, 6.0]


def test_a_rate_bound_leaves_bandwidth_to_other_flows() -> None:
    """Two of 3 s on one link: from 1 on the first goes at 1/4 at most, so the second at 3/4, and ends at 1 + 2.5 · 4/3.

    By then the first has done 0.5 + 2.5/3, and is let go at 5; at 1/4 it has done 1/6 more, and 1.5 s are left.
    """
    environment = SimEnvironment()
    network, ends = RecordingNetwork(environment, 1), []
    bounded_flow, other_flow = (Flow(network, flow_demand(3.0, 0)) for _ in range(2))
    for flow in (bounded_flow, other_flow):
        network.begin_flow(flow)
        flow.done.callbacks.append(lambda _: ends.append(environment.now))
    environment.timeout(1.0).callbacks.append(lambda _: bounded_flow.set_rate_bound(0.25))
    environment.timeout(5.0).callbacks.append(lambda _: bounded_flow.set_rate_bound(1.0))
    environment.run()
    network.check_invariants()
    assert ends == pytest.approx([1 + 2.5 * 4 / 3, 6.5])


def test_a_rate_bound_before_start_or_after_completion() -> None:
    environment = SimEnvironment()
    network, ends = RecordingNetwork(environment, 1), []
    flow = Flow(network, flow_demand(2.0, 0))
    flow.set_rate_bound(0.5)
    flow.done.callbacks.append(lambda _: ends.append(environment.now))
    environment.timeout(1.0).callbacks.append(lambda _: network.begin_flow(flow))
    environment.timeout(9.0).callbacks.append(lambda _: flow.set_rate_bound(0.1))
    environment.run()
    assert ends == [5.0]


def test_consecutive_flows_do_not_share() -> None:
    ends, network = run_flows(1, (0.0, flow_demand(2.0, 0)), (2.0, flow_demand(3.0, 0)))
    assert ends == [2.0, 5.0]
    assert [speed for _, _, speed in network.rate_changes] == [1.0, 0.0, 1.0, 0.0]


def test_links_below_capacity_slow_no_flow() -> None:
    """Four flows that each use a quarter of a spine link fill it; a fifth slows all to 4/5."""
    assert run_flows(1, *[(0.0, flow_demand(1 / 3, 0, busy=0.25))] * 4)[0] == [1 / 3] * 4
    assert run_flows(1, *[(0.0, flow_demand(1.0, 0, busy=0.25))] * 5)[0] == [1.25] * 5


def test_a_class_of_groups_shares_its_link_with_itself() -> None:
    """Three groups of one class on one real link keep it busy for 3 s per second of work: three times as long."""
    assert run_flows(1, (0.0, flow_demand(2.0, 0, busy=3.0)))[0] == [6.0]
    assert run_flows(1, *[(0.0, flow_demand(2.0, 0))] * 3)[0] == [6.0] * 3


def test_the_parking_lot() -> None:
    """A long flow over three links and a short one on each: all at half speed, whatever the number of links."""
    ends, _ = run_flows(3, (0.0, flow_demand(2.0, 0, 1, 2)), *[(0.0, flow_demand(2.0, link)) for link in range(3)])
    assert ends == [4.0] * 4
    ends, _ = run_flows(3, (0.0, flow_demand(2.0, 0, 1, 2)), (0.0, flow_demand(1.0, 0)), (0.0, flow_demand(2.0, 1)))
    assert ends == [4.0, 2.0, 4.0], "link 0 is free after 2 s, but link 1 is not"


def test_shares_weight_the_fair_rates() -> None:
    """One demand has twice the share of the other on the link, so two thirds of its bandwidth.

    It is done at 1.5; the other has done half of its second by then, and does the remainder uncontended.
    """
    assert run_flows(1, (0.0, flow_demand(1.0, 0, share=2.0)), (0.0, flow_demand(1.0, 0)))[0] == pytest.approx(
        [1.5, 2.0], rel=1e-12
    )


def test_only_the_connected_component_is_solved_again() -> None:
    """Links 0 and 1 are in different components: flows on 0 get their rates once, and again when one of them ends."""
    other_component = [(0.25 * index, flow_demand(0.1, 1)) for index in range(20)]
    _, network = run_flows(2, (0.0, flow_demand(1.0, 0)), (0.0, flow_demand(2.0, 0)), *other_component)
    link_0_speeds = [(when, speed) for when, flow, speed in network.rate_changes if flow.demand.link_ids == (0,)]
    assert link_0_speeds == [(0.0, 1.0), (0.0, 0.5), (0.0, 0.5), (2.0, 0.0), (2.0, 1.0), (3.0, 0.0)]


def test_simultaneous_starts_are_solved_once() -> None:
    """Ten start together: except for the first, which found the link free, each gets its rate once."""
    _, network = run_flows(1, *[(1.0, flow_demand(1.0, 0))] * 10)
    assert [speed for _, _, speed in network.rate_changes] == [1.0, *[0.1] * 10, *[0.0] * 10]


def test_an_immediate_successor_inherits_the_rate() -> None:
    """The first is done at 2; its successor starts then, so the rate of the long flow is not recomputed."""
    environment = SimEnvironment()
    network = RecordingNetwork(environment, 1)

    def start_flow(seconds: float, depends_on: simpy.Event | None) -> Iterator[simpy.Event]:
        if depends_on is not None:
            yield depends_on
        yield network.start_flow(flow_demand(seconds, 0))

    first_process = environment.process(start_flow(1.0, None))
    environment.process(start_flow(5.0, None))
    environment.process(start_flow(1.0, first_process))
    environment.run()
    long_flow_speeds = [(when, speed) for when, flow, speed in network.rate_changes if flow.demand.work_seconds == 5.0]
    assert long_flow_speeds == [(0.0, 0.5), (4.0, 1.0), (7.0, 0.0)]


DYADIC = st.sampled_from([0.25, 0.5, 0.75, 1.0, 1.5, 2.0])


@st.composite
def flow_demands(draw: st.DrawFn) -> tuple[float, FlowDemand]:
    links = draw(st.lists(st.integers(0, 5), min_size=1, max_size=4, unique=True))
    busy = [draw(DYADIC) for _ in links]
    demand = FlowDemand(draw(DYADIC), draw(DYADIC), np.array(links, np.int64), np.array(busy))
    return draw(st.sampled_from([0.0, 0.5, 1.0, 1.25, 3.0])), demand


@given(st.lists(flow_demands(), min_size=1, max_size=12))
@examples(300)
def test_no_link_is_overloaded_and_all_work_completes(starts: list[tuple[float, FlowDemand]]) -> None:
    ends, network = run_flows(6, *starts)
    network.check_invariants()
    for end, (begin, item) in zip(ends, starts, strict=True):
        assert end >= begin + item.work_seconds * max(1.0, float(item.utilization.max())) * (1 - 1e-12)


@given(st.lists(flow_demands(), min_size=1, max_size=10))
@examples(100)
def test_every_slowed_flow_crosses_a_full_link(starts: list[tuple[float, FlowDemand]]) -> None:
    """Max-min fairness is work-conserving: a flow below its uncontended rate crosses a full link."""
    _, network = run_flows(6, *starts)
    for _, running in network.constant_rate_intervals():
        busy = network.link_utilization(running)
        for flow, speed in running.items():
            assert speed in {0.0, 1.0} or busy[flow.demand.link_indices].max() >= 1 - 1e-12


@given(st.lists(flow_demands(), min_size=1, max_size=8), st.sampled_from([0.5, 2.0, 8.0]))
@examples(100)
def test_completion_times_scale_with_work_bit_for_bit(starts: list[tuple[float, FlowDemand]], scale: float) -> None:
    scaled = [
        (begin * scale, FlowDemand(item.work_seconds * scale, item.fair_weight, item.link_indices, item.utilization))
        for begin, item in starts
    ]
    assert run_flows(6, *scaled)[0] == [end * scale for end in run_flows(6, *starts)[0]]
