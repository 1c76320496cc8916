"""What docs/extending.md lets a researcher bring along does what it says, in the examples as they are shipped."""

import re
import runpy
from pathlib import Path
from typing import Any

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


def example(name: str) -> dict[str, Any]:
    return runpy.run_path(str(EXAMPLES / f"extend_{name}.py"))


def test_groups_of_microbatches_keep_less_than_gpipe_and_idle_longer(
    capsys: pytest.CaptureFixture[str],
) -> None:
    example("schedule")["main"]()
    found = re.findall(r"^(\S.*?) +([\d.]+) s +([\d.]+)% +([\d.]+) GiB$", capsys.readouterr().out, re.MULTILINE)
    step = {name: float(seconds) for name, seconds, *_ in found}
    bubble = {name: float(percent) for name, _, percent, _ in found}
    memory = {name: float(gib) for name, *_, gib in found}
    assert list(step) == ["gpipe", "groups of 8", "1f1b"]
    assert step["gpipe"] == step["1f1b"] < step["groups of 8"]
    assert bubble["gpipe"] == bubble["1f1b"] < bubble["groups of 8"]
    # the last stage keeps 16, 8 and 1 microbatches; 1F1B's first stage, which has no logits, keeps 4
    assert memory["1f1b"] < memory["groups of 8"] < memory["gpipe"]


def test_what_a_rule_raises_refuses_the_numbers() -> None:
    with pytest.raises(ValueError, match="10 microbatches are no whole groups of 8"):
        example("schedule")["Grouped"]().order(4, 10)


def test_a_ring_without_one_of_its_links_is_slower(capsys: pytest.CaptureFixture[str]) -> None:
    example("topology")["main"]()
    steps = [float(item) for item in re.findall(r"([\d.]+) s a step", capsys.readouterr().out)]
    assert len(steps) == 2
    assert steps[0] < steps[1]


def test_networks_of_switches_have_their_diameters_and_a_step_as_long_as_their_links_are_few(
    capsys: pytest.CaptureFixture[str],
) -> None:
    import networkx as nx

    module = example("networks")
    switches = {
        name: graph.subgraph(item for item, kind in graph.nodes(data="kind") if kind == "switch")
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
    # rings of data parallelism stay on their rail: what joins rails is not needed; hops of others meet on links
    assert step["rail-only"] == pytest.approx(step["dgx-h100"], rel=0.02)
    assert step["dgx-h100"] < step["dragonfly"] < step["torus"]


def test_kernels_take_what_the_function_says(tmp_path: Path) -> None:
    """On one GPU: its compute and optimizer are those of a record, by the launch, of half the time twice as fast."""
    from clustersim import Scenario, simulate
    from clustersim.build import distinct_kernels
    from clustersim.cost.record_file import write_record
    from clustersim.cost.synthetic_record import record_from_function

    module = example("cost")
    scenario = Scenario.from_mapping({**module["GIVEN"], "cluster": {"name": "dgx-h100", "gpus": 1}})
    took = {}
    for reached in (0.2, 0.1):
        module["seconds"].__globals__["REACHED"] = reached
        record = record_from_function(
            module["seconds"], distinct_kernels(scenario), accelerator="h100-sxm-80gb", description="a roofline"
        )
        write_record(record, tmp_path / "own.json")
        parts = simulate(scenario.with_overrides(f"cost.record={tmp_path / 'own.json'}")).to_json()["breakdown_s"]
        took[reached] = parts["compute"] + parts["optimizer"]
    assert took[0.1] == pytest.approx(2 * took[0.2], rel=1e-3)


def test_one_function_times_the_kernels_of_several_layouts(capsys: pytest.CaptureFixture[str]) -> None:
    example("cost")["main"]()
    row = re.compile(r"^(tp \d, dp \d)  (\w+) +([\d.]+) s a step, compute ([\d.]+) s$", re.MULTILINE)
    rows = row.findall(capsys.readouterr().out)
    assert [row[:2] for row in rows] == [
        (layout, source) for layout in ("tp 2, dp 4", "tp 4, dp 2") for source in ("model", "roofline")
    ]
    compute = {row[:2]: float(row[3]) for row in rows}
    # smaller matrices reach less of the peak by the model, and as much by the function
    lost = {
        source: compute["tp 4, dp 2", source] / compute["tp 2, dp 4", source] - 1.0 for source in ("model", "roofline")
    }
    assert lost["roofline"] < lost["model"]


def test_the_library_takes_an_algorithm_of_ones_own_where_it_is_faster(capsys: pytest.CaptureFixture[str]) -> None:
    example("chosen")["main"]()
    text = capsys.readouterr().out
    step = {words: float(ms) for words, ms in re.findall(r"^(\w.*?) +([\d.]+) ms a step$", text, re.MULTILINE)}
    assert list(step) == ["its own", "may be mine", "must be mine"]
    assert step["may be mine"] < min(step["its own"], step["must be mine"])
    parts = re.split(r"ms a step", text)[1:]
    assert ["extend_chosen" in part for part in parts] == [False, True, True]
    assert "reduce_scatter  65.536 MB in  477 us by ring" in parts[1]  # so much goes faster round rings


def test_a_port_is_full_while_gradients_are_summed_and_never_carries_more_than_it_can(
    capsys: pytest.CaptureFixture[str],
) -> None:
    example("links")["main"]()
    text = capsys.readouterr().out
    rows = re.findall(r"^ *(\S+) to (\S+) +\|(.*)\| ([\d.]+) GB$", text, re.MULTILINE)
    assert [row[:2] for row in rows] == [("nic0.0", "leaf0.0"), ("leaf0.0", "nic0.0")]
    for *_, bars, carried in rows:
        assert len(bars) == 40
        assert "█" not in bars
        assert set(bars[:30]) < set(" ▁▂")  # messages between stages
        assert min(bars[-5:-1]) > "▄"  # all-reduce of gradients in rings of two: each sends its payload once
        # half of the model's weights on one of 8 tensor-parallel ranks, in FP32
        assert float(carried) == pytest.approx(8.03e9 / 2 / 8 * 4 / 1e9, rel=0.1)


def test_the_shortest_way_round_leaves_a_rack_as_seldom_as_there_are_racks(capsys: pytest.CaptureFixture[str]) -> None:
    example("placement")["main"]()
    rows = re.findall(r"^(\S.*?) +([\d.]+) s a step, nodes (.*)$", capsys.readouterr().out, re.MULTILINE)
    assert [words for words, *_ in rows] == ["as handed out", "shortest way round"]
    racks = [[int(node) // 4 for node in nodes.split()] for *_, nodes in rows]
    assert all(sorted(rack) == sorted(racks[0]) for rack in racks)
    leaves = [sum(one != other for one, other in zip(item, item[1:] + item[:1], strict=True)) for item in racks]
    assert leaves == [16, 4]
    assert float(rows[1][1]) < float(rows[0][1])


def test_others_on_the_network_cost_a_step_what_they_take_from_it(capsys: pytest.CaptureFixture[str]) -> None:
    example("background")["main"]()
    rows = re.findall(r"^(\S.*?) +[\d.]+ s a step, ([+-][\d.]+) ms$", capsys.readouterr().out, re.MULTILINE)
    more = {words: float(ms) for words, ms in rows}
    assert list(more) == ["alone", "beside a neighbour", "a link at 10 % for 50 ms"]
    assert more["alone"] == 0.0
    assert more["beside a neighbour"] > 1.0
    assert 0.9 * 45.0 < more["a link at 10 % for 50 ms"] <= 45.0  # nine tenths of the time that it lasts


def test_jobs_on_one_network_cost_each_other_what_both_would_send_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    example("jobs")["main"]()
    text = capsys.readouterr().out
    mine = re.findall(r"^beside (\w+) +([\d.]+) s a step become ([\d.]+) s$", text, re.MULTILINE)
    theirs = re.findall(r"^ +(\d+) of its steps +([\d.]+) s a step become ([\d.]+) s$", text, re.MULTILINE)
    assert [name for name, *_ in mine] == ["pipelines", "replicas", "shards"]
    assert len({alone for _, alone, _ in mine}) == 1
    for (_, alone, beside), (ended, own, become) in zip(mine, theirs, strict=True):
        assert float(alone) < float(beside) < float(alone) + int(ended) * float(own)
        assert float(own) <= float(become)
        assert int(ended) * float(become) <= float(beside) < (int(ended) + 1.1) * float(become)


def test_halving_and_doubling_moves_the_textbook_volume_in_fewer_rounds(capsys: pytest.CaptureFixture[str]) -> None:
    example("collective")["main"]()
    text = capsys.readouterr().out
    rows = re.findall(r"^ +(\d+) +(\w+) +([\d.]+) payloads +([\d.]+) ms +(\d+)$", text, re.MULTILINE)
    assert len(rows) == 6
    for nodes, algorithm, sent, _, rounds in rows:
        ranks = 8 * int(nodes)
        assert float(sent) == pytest.approx(2 * (ranks - 1) / ranks, abs=5e-4)
        assert int(rounds) == (2 * (ranks - 1) if algorithm == "Ring" else 2 * (ranks.bit_length() - 1))
    times = {(nodes, algorithm): float(time) for nodes, algorithm, _, time, _ in rows}
    # inside a node both use all of NVLink; beyond, the halves of all 8 members share what a ring leaves to one
    assert times["1", "Ring"] == times["1", "HalvingDoubling"]
    assert times["16", "Ring"] < times["16", "HalvingDoubling"]
