"""What is better never makes a step longer, where no ranks wait for each other's bandwidth.

With `cost.network: uncontended` and no interference every duration is given before the step runs. The start of a task
is then a maximum over sums of durations, since streams run in order and a collective starts with its last member: no
shorter duration can end any task later. On shared links, or where kernels and collectives slow each other, a faster
part may meet others at a worse time (scheduling anomalies, DESIGN.md), so nothing is claimed there. Nor is it where
ranks that differ wait for their hosts: how long is known per rank before the step, as if it never waited for another,
so that a faster rank waits for launches that a host had made meanwhile (1e-5 of a step that is bound by launches).
"""

from typing import Any

from hypothesis import assume, event, given
from hypothesis import strategies as st

from clustersim import Scenario, simulate
from clustersim.common.errors import InputError
from clustersim.results.memory_check import peak_memory
from tests.conftest import examples
from tests.varied_scenarios import varied_scenarios

ROUNDING = 1 + 1e-9
NO_HOST = {"framework": "ideal"}
FACTORS = st.sampled_from([1.05, 1.5, 2.0, 8.0])


@st.composite
def scheduled_scenarios(draw: st.DrawFn) -> Scenario:
    """Scenarios whose durations do not depend on when tasks run."""
    scenario = draw(varied_scenarios())
    differs = "mixed" in scenario.raw_mapping["cluster"] or "slow" in scenario.raw_mapping.get("degradations", {})
    host = NO_HOST if differs else {}
    return changed(scenario, {"cost.network": "uncontended", "cost.interference": 0.0, **host})


def changed(scenario: Scenario, changes: dict[str, Any]) -> Scenario:
    """The scenario with changes; examples that do not allow them are discarded."""
    try:
        return scenario.changed(changes)
    except InputError:
        assume(False)
        raise


def assert_never_slower(better: Scenario, worse: Scenario) -> None:
    better_seconds, worse_seconds = simulate(better).step_time, simulate(worse).step_time
    event(f"it matters: {better_seconds < worse_seconds}")
    assert better_seconds <= worse_seconds * ROUNDING


def port(part: str, key: str, value: str) -> dict[str, Any]:
    """A change of the nodes' ports; part: nic, nvlink or pcie."""
    return {"cluster.node": {part: {key: value}}}


@given(scheduled_scenarios(), st.sampled_from(["nic", "nvlink", "pcie"]), st.sampled_from([0.1, 1.0, 20.0]), FACTORS)
@examples(50)
def test_more_bandwidth_is_never_slower(scenario: Scenario, part: str, gigabytes: float, factor: float) -> None:
    faster, slower = (
        changed(scenario, port(part, "bandwidth", f"{bandwidth} GB/s")) for bandwidth in (gigabytes * factor, gigabytes)
    )
    assert_never_slower(faster, slower)


@given(scheduled_scenarios(), st.sampled_from(["nic", "nvlink", "pcie"]), FACTORS)
@examples(50)
def test_less_latency_is_never_slower(scenario: Scenario, part: str, factor: float) -> None:
    nearer, farther = (
        changed(scenario, port(part, "latency", f"{microseconds} us")) for microseconds in (10.0 / factor, 10.0)
    )
    assert_never_slower(nearer, farther)


def accelerator(scenario: Scenario, *, flops: float = 1.0, memory_bandwidth: float = 1.0, memory: float = 1.0) -> Any:
    """An accelerator like the scenario's, with multiples of its peaks, its memory bandwidth and its memory."""
    own = scenario.cluster.accelerator
    return {
        "cluster.accelerator": {
            "like": own.name,
            "peak": {dtype.value: f"{peak * flops} FLOP/s" for dtype, peak in own.peak.items()},
            "memory_bandwidth": f"{own.memory_bandwidth * memory_bandwidth} B/s",
            "memory": f"{own.memory_bytes * memory} B",
        }
    }


@given(scheduled_scenarios(), FACTORS)
@examples(50)
def test_more_flops_are_never_slower(scenario: Scenario, factor: float) -> None:
    faster, slower = (changed(scenario, accelerator(scenario, flops=flops)) for flops in (1.0, 1.0 / factor))
    assert_never_slower(faster, slower)


@given(scheduled_scenarios(), FACTORS)
@examples(50)
def test_more_memory_bandwidth_is_never_slower(scenario: Scenario, factor: float) -> None:
    faster, slower = (changed(scenario, accelerator(scenario, memory_bandwidth=bandwidth)) for bandwidth in (factor, 1))
    assert_never_slower(faster, slower)


@given(varied_scenarios(), st.sampled_from([0.01, 2.0, 100.0]))
@examples(30)
def test_memory_capacity_moves_no_time_and_no_peak(scenario: Scenario, factor: float) -> None:
    """Nothing is predicted of an allocator near its limit: a step that does not fit is timed as if it did."""
    own, other = (simulate(changed(scenario, accelerator(scenario, memory=memory))) for memory in (1.0, factor))
    assert other.step_time == own.step_time
    assert [ledger.peak for ledger in other.ledgers] == [ledger.peak for ledger in own.ledgers]


@given(scheduled_scenarios(), st.integers(0, 15), st.sampled_from([0.3, 0.9, 0.999]))
@examples(50)
def test_a_slow_rank_is_never_faster(scenario: Scenario, gpu: int, speed: float) -> None:
    slow = [{"gpu": gpu % scenario.layout.world_size, "speed": speed}]
    healthy, degraded = (changed(scenario, {"degradations.slow": gpus, **NO_HOST}) for gpus in ([], slow))
    assert_never_slower(healthy, degraded)


@given(scheduled_scenarios(), st.integers(2, 3))
@examples(50)
def test_more_microbatches_are_never_faster_and_take_no_less_memory(scenario: Scenario, times: int) -> None:
    larger = changed(scenario, {"training.global_batch": scenario.training.global_batch * times})
    assert_never_slower(scenario, larger)
    assert peak_memory(larger) * ROUNDING >= peak_memory(scenario)
