"""The extension points of docs/extending.md, as used by the packaged examples."""

import re
import runpy
from pathlib import Path
from typing import Any

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


def run_example(name: str) -> dict[str, Any]:
    return runpy.run_path(str(EXAMPLES / f"extend_{name}.py"))


def test_grouped_gpipe_memory_and_bubble(
    capsys: pytest.CaptureFixture[str],
) -> None:
    run_example("schedule")["main"]()
    table_rows = re.findall(r"^(\S.*?) +([\d.]+) s +([\d.]+)% +([\d.]+) GiB$", capsys.readouterr().out, re.MULTILINE)
    step = {name: float(seconds) for name, seconds, *_ in table_rows}
    bubble = {name: float(percent) for name, _, percent, _ in table_rows}
    memory = {name: float(gib) for name, *_, gib in table_rows}
    assert list(step) == ["gpipe", "groups of 8", "1f1b"]
    assert step["gpipe"] == step["1f1b"] < step["groups of 8"]
    assert bubble["gpipe"] == bubble["1f1b"] < bubble["groups of 8"]
    # activations of 16, 8 and 1 microbatches on the last stage; of 4 on 1F1B's first stage, which has no logits
    assert memory["1f1b"] < memory["groups of 8"] < memory["gpipe"]


def test_custom_schedule_rejects_invalid_microbatch_count() -> None:
    with pytest.raises(ValueError, match="10 microbatches are no whole groups of 8"):
        run_example("schedule")["Grouped"]().order(4, 10)


def test_ring_topology_with_a_cut_link_is_slower(capsys: pytest.CaptureFixture[str]) -> None:
    run_example("topology")["main"]()
    steps = [float(text) for text in re.findall(r"([\d.]+) s a step", capsys.readouterr().out)]
    assert len(steps) == 2
    assert steps[0] < steps[1]


def test_custom_networks_diameter_and_step_time(
    capsys: pytest.CaptureFixture[str],
) -> None:
    import networkx as nx

    module = run_example("networks")
    switches = {
        name: graph.subgraph(node for node, kind in graph.nodes(data="kind") if kind == "switch")
        for name, graph in module["networks"]().items()
    }
    assert {name: len(switches[name]) for name in ("torus", "dragonfly", "rail-only")} == {
        "torus": 64,
        "dragonfly": 64,
        "rail-only": 8,
    }
    assert nx.diameter(switches["torus"]) == 3 * 2  # half way round each of three rings of four
    assert nx.diameter(switches["dragonfly"]) == 3  # in a group, between groups, in a group
    assert switches["rail-only"].number_of_edges() == 0
    module["main"]()
    steps = dict(re.findall(r"^(\S+) +([\d.]+) s a step$", capsys.readouterr().out, re.MULTILINE))
    step = {name: float(seconds) for name, seconds in steps.items()}
    # DP rings stay on their rail and need no links between rails; in the other networks hops share links
    assert step["rail-only"] == pytest.approx(step["dgx-h100"], rel=0.02)
    assert step["dgx-h100"] < step["dragonfly"] < step["torus"]


def test_kernel_durations_from_a_custom_function(tmp_path: Path) -> None:
    """On one GPU compute and optimizer take the record's times: half the peak fraction doubles them."""
    from clustersim import Scenario, simulate
    from clustersim.build import distinct_kernels
    from clustersim.cost.record_file import write_record
    from clustersim.cost.synthetic_record import record_from_function

    module = run_example("cost")
    scenario = Scenario.from_mapping({**module["GIVEN"], "cluster": {"name": "dgx-h100", "gpus": 1}})
    kernel_seconds = {}
    for peak_fraction in (0.2, 0.1):
        module["seconds"].__globals__["REACHED"] = peak_fraction
        record = record_from_function(
            module["seconds"], distinct_kernels(scenario), accelerator="h100-sxm-80gb", description="a roofline"
        )
        write_record(record, tmp_path / "own.json")
        breakdown = simulate(scenario.with_overrides(f"cost.record={tmp_path / 'own.json'}")).to_json()["breakdown_s"]
        kernel_seconds[peak_fraction] = breakdown["compute"] + breakdown["optimizer"]
    assert kernel_seconds[0.1] == pytest.approx(2 * kernel_seconds[0.2], rel=1e-3)


def test_custom_cost_function_for_two_layouts(capsys: pytest.CaptureFixture[str]) -> None:
    run_example("cost")["main"]()
    table_row = re.compile(r"^(tp \d, dp \d)  (\w+) +([\d.]+) s a step, compute ([\d.]+) s$", re.MULTILINE)
    table_rows = table_row.findall(capsys.readouterr().out)
    assert [table_row[:2] for table_row in table_rows] == [
        (layout, source) for layout in ("tp 2, dp 4", "tp 4, dp 2") for source in ("model", "roofline")
    ]
    compute = {table_row[:2]: float(table_row[3]) for table_row in table_rows}
    # smaller matrices reach a lower peak fraction in the model, and the same with the function
    slowdown = {
        source: compute["tp 4, dp 2", source] / compute["tp 2, dp 4", source] - 1.0 for source in ("model", "roofline")
    }
    assert slowdown["roofline"] < slowdown["model"]


def test_custom_algorithm_is_selected_where_faster(capsys: pytest.CaptureFixture[str]) -> None:
    run_example("chosen")["main"]()
    text = capsys.readouterr().out
    step = {label: float(ms) for label, ms in re.findall(r"^(\w.*?) +([\d.]+) ms a step$", text, re.MULTILINE)}
    assert list(step) == ["its own", "may be mine", "must be mine"]
    assert step["may be mine"] < min(step["its own"], step["must be mine"])
    sections = re.split(r"ms a step", text)[1:]
    assert ["extend_chosen" in section for section in sections] == [False, True, True]
    assert "reduce_scatter  65.536 MB in  477 us by ring" in sections[1]  # rings are faster for large payloads


def test_nic_utilization_over_time(
    capsys: pytest.CaptureFixture[str],
) -> None:
    run_example("links")["main"]()
    text = capsys.readouterr().out
    table_rows = re.findall(r"^ *(\S+) to (\S+) +\|(.*)\| ([\d.]+) GB$", text, re.MULTILINE)
    assert [row[:2] for row in table_rows] == [("nic0.0", "leaf0.0"), ("leaf0.0", "nic0.0")]
    for *_, bars, carried in table_rows:
        assert len(bars) == 40
        assert "█" not in bars[:30]
        assert set(bars[:30]) < set(" ▁▂")  # messages between stages
        assert min(bars[-4:-1]) > "▄"  # gradient all-reduce in rings of two: each rank sends the payload once
        # half of the model's weights on one of 8 tensor-parallel ranks, in FP32
        assert float(carried) == pytest.approx(8.03e9 / 2 / 8 * 4 / 1e9, rel=0.1)


def test_shortest_tour_placement_minimizes_rack_crossings(capsys: pytest.CaptureFixture[str]) -> None:
    run_example("placement")["main"]()
    table_rows = re.findall(r"^(\S.*?) +([\d.]+) s a step, nodes (.*)$", capsys.readouterr().out, re.MULTILINE)
    assert [label for label, *_ in table_rows] == ["as handed out", "shortest way round"]
    racks = [[int(node) // 4 for node in nodes.split()] for *_, nodes in table_rows]
    assert all(sorted(tour) == sorted(racks[0]) for tour in racks)
    crossings = [
        sum(rack != next_rack for rack, next_rack in zip(tour, tour[1:] + tour[:1], strict=True)) for tour in racks
    ]
    assert crossings == [16, 4]
    assert float(table_rows[1][1]) < float(table_rows[0][1])


def test_background_traffic_and_timed_link_slowdown(capsys: pytest.CaptureFixture[str]) -> None:
    run_example("background")["main"]()
    table_rows = re.findall(r"^(\S.*?) +[\d.]+ s a step, ([+-][\d.]+) ms$", capsys.readouterr().out, re.MULTILINE)
    added_ms = {label: float(ms) for label, ms in table_rows}
    assert list(added_ms) == ["alone", "beside a neighbour", "a link at 10 % for 50 ms"]
    assert added_ms["alone"] == 0.0
    assert added_ms["beside a neighbour"] > 1.0
    assert 0.9 * 45.0 < added_ms["a link at 10 % for 50 ms"] <= 45.0  # nine tenths of its duration


def test_co_scheduled_jobs_contend(capsys: pytest.CaptureFixture[str]) -> None:
    run_example("jobs")["main"]()
    text = capsys.readouterr().out
    job_rows = re.findall(r"^beside (\w+) +([\d.]+) s a step become ([\d.]+) s$", text, re.MULTILINE)
    neighbour_rows = re.findall(r"^ +(\d+) of its steps +([\d.]+) s a step become ([\d.]+) s$", text, re.MULTILINE)
    assert [name for name, *_ in job_rows] == ["pipelines", "replicas", "shards"]
    assert len({isolated for _, isolated, _ in job_rows}) == 1
    for (_, isolated, contended), (step_count, neighbour_isolated, neighbour_contended) in zip(
        job_rows, neighbour_rows, strict=True
    ):
        assert float(isolated) < float(contended) < float(isolated) + int(step_count) * float(neighbour_isolated)
        assert float(neighbour_isolated) <= float(neighbour_contended)
        assert (
            int(step_count) * float(neighbour_contended)
            <= float(contended)
            < (int(step_count) + 1.1) * float(neighbour_contended)
        )


def test_halving_doubling_volume_and_latency_steps(capsys: pytest.CaptureFixture[str]) -> None:
    run_example("collective")["main"]()
    text = capsys.readouterr().out
    table_rows = re.findall(r"^ +(\d+) +(\w+) +([\d.]+) payloads +([\d.]+) ms +(\d+)$", text, re.MULTILINE)
    assert len(table_rows) == 6
    for nodes, algorithm, sent, _, rounds in table_rows:
        ranks = 8 * int(nodes)
        assert float(sent) == pytest.approx(2 * (ranks - 1) / ranks, abs=5e-4)
        assert int(rounds) == (2 * (ranks - 1) if algorithm == "RingAlgorithm" else 2 * (ranks.bit_length() - 1))
    times = {(nodes, algorithm): float(time) for nodes, algorithm, _, time, _ in table_rows}
    # within a node both saturate NVLink; across nodes all 8 members exchange halves over NICs that a ring shares less
    assert times["1", "RingAlgorithm"] == times["1", "HalvingDoubling"]
    assert times["16", "RingAlgorithm"] < times["16", "HalvingDoubling"]
