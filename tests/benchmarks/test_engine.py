import pytest
import simpy
from simpy.events import ProcessGenerator

from clustersim import Scenario
from tests.benchmarks import cases
from tests.benchmarks.engine import CASES, figures_by_name, performance_targets
from tests.benchmarks.isolated_process import ResourceLimitError, RunMeasurement, count_events, measure_in_process

DEFAULT_RUN = RunMeasurement(
    seconds=0.5, cpu_seconds=0.5, peak_bytes=10**9, timeouts_per_s=1e6, events=None, ranks=8, simulated_ranks=1
)
RUNS_BY_CASE = dict.fromkeys(CASES, DEFAULT_RUN) | {"folded_16k": RunMeasurement(0.2, 0.2, 10**8, 1e6, 100_000, 8, 1)}


@pytest.mark.parametrize("size", [1, 100])
def test_count_events_counts_every_clock_event(size: int) -> None:
    """A process that waits n times has n + 2 events: its start, n timeouts, its end."""
    clocks: list[simpy.Environment] = []

    def run() -> None:
        clocks.append(simpy.Environment())
        clocks[0].process(wait_repeatedly(clocks[0]))
        clocks[0].run()

    def wait_repeatedly(clock: simpy.Environment) -> ProcessGenerator:
        for _ in range(size):
            yield clock.timeout(1.0)

    assert count_events(run) == size + 2
    assert clocks[0].now == size


@pytest.mark.parametrize("mapping", [case for case, _ in CASES.values()])
def test_benchmark_cases_are_valid_and_use_their_whole_cluster(mapping) -> None:
    scenario = Scenario.from_mapping(mapping())
    assert scenario.layout.world_size == scenario.cluster.gpu_count
    assert [warning for warning in scenario.warnings if "tokens a step" not in warning] == []


def test_fsdp_case_crosses_oversubscribed_core_links() -> None:
    """Eight units of two nodes of eight GPUs are a pod: 1,024 GPUs are eight of them."""
    fabric = Scenario.from_mapping(cases.fsdp_1k_contended()).cluster.fabric
    assert fabric.highest_tier([0, 127]) == "spine"
    assert fabric.highest_tier([0, 128]) == "core"


def test_figure_names_and_targets_derived_from_them() -> None:
    figures = figures_by_name(RUNS_BY_CASE)
    first_names = (
        "bare_timeouts_per_s folded_16k_s folded_16k_events folded_131k_s folded_1m_s folded_1m_peak_bytes "
        "slow_rank_16k_s slow_rank_175b_s jitter_16k_s"
    )
    other_names = (
        "moe_2k_s moe_expert_load_1k_s dualpipe_2k_s dualpipe_2k_peak_bytes jitter_16k_peak_bytes fsdp_1k_contended_s"
    )
    assert set(figures) == {*first_names.split(), *other_names.split()}
    is_met = [target.value <= target.limit for target in performance_targets(figures)]
    assert is_met == [
        False,
        *[True] * 12,
    ]  # 0.2 s on 16,384 GPUs are more than 0.05 s; 0.5 s of one slow rank 2.5 times


def test_isolated_process_reports_resources_and_enforces_its_timeout() -> None:
    run = measure_in_process(cases.gpt3_7b(32))
    assert (run.ranks, run.events) == (32, None)
    assert run.seconds > 0
    assert run.peak_bytes > 10 * 2**20
    with pytest.raises(ResourceLimitError, match="over 0 s"):
        measure_in_process(cases.gpt3_7b(32), timeout=0.01)
