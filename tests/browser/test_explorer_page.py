"""The explorer in a real browser: its script computes what its tables contain, as tested in tests/planning."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import comb
from pathlib import Path
from typing import Any

import pytest

from clustersim import Scenario, simulate
from clustersim.model.operators import EXPERTS
from clustersim.parallel.process_groups import process_groups
from clustersim.planning.explorer.explorer_data import build_exploration
from clustersim.report.explorer_page import explorer_page
from clustersim.results.memory_check import build_footprint, build_plan, memory_timelines
from tests.planning.explorer_page import ZERO_STAGES, ExplorerPage
from tests.planning.explorer_scenarios import ExploredScenario, explore_scenario, few_choices

pytestmark = [pytest.mark.browser, pytest.mark.slow]

SAMPLES = 150
_BUBBLE_ELEMENT_IDS = ("explorer-bubble-words", "explain-pipeline")


@dataclass(frozen=True)
class ExplorerFile:
    """An explorer page: its explored scenario and its path."""

    explored: ExploredScenario
    path: Path


@pytest.fixture(scope="module", params=["llama", "gpt", "latent", "mixed", "shared"])
def explorer_file(request: Any, tmp_path_factory: Any) -> ExplorerFile:
    exploration = explore_scenario(request.param)
    path = tmp_path_factory.mktemp("explorer") / "explorer.html"
    path.write_text(explorer_page(exploration.exploration))
    return ExplorerFile(exploration, path)


Evaluator = Callable[..., Any]


@pytest.fixture(scope="module")
def evaluate(explorer_file: ExplorerFile, chromium: Any) -> Iterator[Evaluator]:
    """Evaluates a JavaScript expression of the page's model for given settings."""
    with chromium.new_context() as context:
        page = context.new_page()
        page.goto(explorer_file.path.as_uri())
        page.wait_for_selector("html[data-ready=yes]", state="attached")
        body = "const { model, groups } = clustersim.explorer; const settings = model.settled(chosen);"
        yield lambda expression, chosen, more=None: page.evaluate(
            f"([chosen, more]) => {{ {body} return {expression}; }}", [chosen, more]
        )


def test_problems_of_invalid_settings(explorer_file: ExplorerFile, evaluate: Evaluator) -> None:
    reference, legal = ExplorerPage(explorer_file.explored.exploration), 0
    for settings in explorer_file.explored.random_settings(SAMPLES):
        problems = evaluate("model.problems(settings)", settings)
        assert problems == reference.problems(settings), settings
        legal += not problems
    assert SAMPLES // 10 < legal < SAMPLES


def test_memory_traffic_and_bubble_equal_the_tables(explorer_file: ExplorerFile, evaluate: Evaluator) -> None:
    reference, tables = ExplorerPage(explorer_file.explored.exploration), explorer_file.explored.exploration.tables
    for settings, scenario in explorer_file.explored.legal_settings:
        memory = evaluate("model.memory(settings)", settings)
        for zero in ZERO_STAGES:
            expected = [
                pytest.approx(rank_memory, rel=1e-9, abs=1)
                for rank_memory in reference.rank_memory({**settings, "zero": zero})
            ]
            assert [rank_memory["parts"] for rank_memory in memory[zero]["ranks"]] == expected, (settings, zero)
            assert memory[zero]["peak"] == max(rank_memory["peak"] for rank_memory in memory[zero]["ranks"])
        for rank in {0, scenario.layout.pp // 2, scenario.layout.pp - 1}:
            traffic = evaluate("model.traffic(settings, more)", settings, rank)
            assert traffic == pytest.approx(reference.sent_bytes(settings, rank), rel=1e-9), (settings, rank)
        schedule_table = tables.schedules.lookup(reference.complete_settings(settings))
        assert evaluate("model.bubble(settings)", settings) == schedule_table["bubble"]


def test_groups_and_tiers_equal_the_layout(explorer_file: ExplorerFile, evaluate: Evaluator) -> None:
    """Members of the process groups, and the tier of their traffic."""
    for settings, scenario in explorer_file.explored.legal_settings[:30]:
        rank, layout = settings["gpus"] * 5 // 7, scenario.layout
        groups = process_groups(layout, scenario.placement)
        existing = {
            comm_group for comm_group in explorer_file.explored.exploration.tables.roles if comm_group in groups
        }
        for comm_group in sorted(existing):
            result, tier = evaluate(
                f"(ranks => [ranks, groups.tier(ranks)])(groups.group(settings, more, '{comm_group}'))", settings, rank
            )
            members = next(members for members in groups[comm_group].members if rank in members)
            assert result == members.tolist()
            assert tier == scenario.cluster.fabric.highest_tier(members)
        for comm_group in ("pp_next", "pp_previous") if layout.pp > 1 else ():
            partners = [int(target) for source, target in groups[comm_group].members if source == rank]
            assert evaluate(f"groups.partners(settings, more, '{comm_group}')", settings, rank) == partners
        coordinates = {axis.name: int(layout.rank_coordinates(axis)[rank]) for axis in layout.axes}
        result = evaluate("groups.coordinates(settings, more)", settings, rank)
        assert {name: result[name] for name in coordinates} == coordinates


def test_memory_bars_equal_the_memory_model(explorer_file: ExplorerFile, open_page: Callable[..., Any]) -> None:
    """Bars of each ZeRO stage after changing the controls, without console messages."""
    opened = open_page(explorer_file.path)
    for settings, _ in explorer_file.explored.legal_settings[:8]:
        drawn = opened.js(
            "settings => { clustersim.explorer.set(settings); return document.getElementById('explorer-memory').data"
            ".filter(({ type }) => type === 'bar').map(({ y }) => Array.from(y, value => value * 2 ** 30)); }",
            settings,
        )
        for zero in ZERO_STAGES:
            max_peak = max(
                ledger.peak for ledger in memory_timelines(explorer_file.explored.with_settings(settings, zero))
            )
            assert sum(bar[zero] for bar in drawn) == pytest.approx(max_peak, rel=1e-9), (settings, zero)
    assert opened.quiet()


def test_bubble_curve_equals_the_schedule_tables(explorer_file: ExplorerFile, open_page: Callable[..., Any]) -> None:
    """All drawn points equal the tables for their number of microbatches."""
    reference = ExplorerPage(explorer_file.explored.exploration)
    opened = open_page(explorer_file.path)
    settings = reference.complete_settings(explorer_file.explored.exploration.start)
    chunks = opened.js("() => clustersim.explorer.drawn().chosen.chunks")
    schedules = (("1f1b", 1), ("interleaved", chunks)) if settings["pp"] > 1 else ()
    drawn = opened.js("() => document.getElementById('explorer-bubble').data.length")
    assert bool(drawn) == bool(schedules)
    for name, chunk_count in schedules:
        trace_index = 0 if chunk_count == 1 else 1
        x, y = opened.js(
            "place => { const { x, y } = document.getElementById('explorer-bubble').data[place];"
            " return [Array.from(x), Array.from(y)]; }",
            trace_index,
        )
        assert len(x) > 3
        for microbatches, share in zip(x, y, strict=True):
            point_settings = {**settings, "schedule": name, "chunks": chunk_count, "microbatches": microbatches}
            assert share == pytest.approx(
                100 * explorer_file.explored.exploration.tables.schedules.lookup(point_settings)["bubble"]
            )


def test_simulated_bubble_equals_run_output(open_page: Callable[..., Any], tmp_path: Path) -> None:
    """Next to the ideal (p - 1)/(m + p - 1); only the ideal for other settings, which are not simulated."""
    scenario = Scenario.from_mapping(
        {
            "model": {"preset": "llama-tiny", "layers": 8},
            "cluster": {"name": "dgx-h100", "gpus": 8},
            "layout": {"pp": 4, "dp": 2},
            "training": {"sequence": 256, "global_batch": 16},
        }
    )
    with few_choices():
        (tmp_path / "page.html").write_text(
            explorer_page(build_exploration(scenario, lambda _: None)), encoding="utf-8"
        )
    opened = open_page(tmp_path / "page.html")
    bubble = simulate(scenario).to_json()["bubble_fraction"]
    texts = [opened.js(f"() => document.getElementById('{name}').textContent") for name in _BUBBLE_ELEMENT_IDS]
    for text in texts:
        assert f"a bubble of {3 / 11:.1%} of the step".replace("%", " %") in text
        assert f"has {bubble:.1%} of the step, as clustersim run says".replace("%", " %") in text
    opened.js("() => clustersim.explorer.set({ batch: 32 })")
    assert "simulated" not in opened.js(f"() => document.getElementById('{_BUBBLE_ELEMENT_IDS[0]}').textContent")


LLAMA_ONLY = pytest.mark.parametrize("explorer_file", ["llama"], indirect=True)


def press_keys(opened: Any, control: str, *keys: str) -> None:
    """Press keys on a control, as without a mouse."""
    opened.page.focus(f"#control-{control}")
    for name in keys:
        opened.page.keyboard.press(name)


@LLAMA_ONLY
def test_keyboard_controls_and_url_state(explorer_file: ExplorerFile, open_page: Callable[..., Any]) -> None:
    scenario, path = explorer_file.explored.scenario, explorer_file.path
    opened = open_page(path)
    before = opened.js("() => clustersim.explorer.drawn().stages[0].peak")
    press_keys(opened, "microbatch", "ArrowRight")
    opened.page.select_option("#control-zero", "2")
    settings = opened.js("() => clustersim.explorer.drawn().settings")
    assert (settings["microbatch"], settings["zero"]) == (2 * scenario.training.microbatch, 2)
    assert opened.js("() => clustersim.explorer.drawn().stages[0].peak") > before
    address = opened.js("() => location.hash")
    reopened = open_page(path)
    reopened.js("address => { location.hash = address; }", address)
    reopened.until(lambda: reopened.js("() => clustersim.explorer.drawn().settings.zero") == 2)
    assert reopened.js("() => clustersim.explorer.drawn().settings") == settings
    reopened.page.click("#explorer-reset")
    assert reopened.js("() => location.hash") == ""
    assert reopened.js("() => clustersim.explorer.drawn().stages[0].peak") == before
    assert reopened.quiet()


@LLAMA_ONLY
def test_invalid_settings_keep_the_last_drawing_stale(
    explorer_file: ExplorerFile, open_page: Callable[..., Any]
) -> None:
    opened = open_page(explorer_file.path)
    before = opened.page.inner_text("#explorer-memory-table")
    press_keys(opened, "tp", "End")
    assert "tp 64" in opened.page.inner_text("#explorer-problems")
    assert opened.js("() => document.body.classList.contains('stale')")
    assert opened.page.inner_text("#explorer-memory-table") == before
    opened.page.click("#explorer-reset")
    assert not opened.js("() => document.body.classList.contains('stale')")


@LLAMA_ONLY
@pytest.mark.parametrize(("width", "dark"), [(1280, False), (390, True)])
def test_selected_rank_highlights_its_groups(
    explorer_file: ExplorerFile, open_page: Callable[..., Any], width: int, dark: bool
) -> None:
    scenario, path = explorer_file.explored.scenario, explorer_file.path
    opened = open_page(path, width=width, dark=dark)
    opened.page.click("#explorer-ranks button >> nth=1")
    opened.page.keyboard.press("ArrowRight")
    chosen = int(opened.page.input_value("#explorer-chosen"))
    assert chosen == 2
    groups = process_groups(scenario.layout, scenario.placement)
    members = next(members.tolist() for members in groups["tp"].members if chosen in members)
    marked = opened.js(
        "() => [...document.querySelectorAll('.rank.tp, .rank.chosen')].map(({ dataset }) => +dataset.rank)"
    )
    assert sorted(marked) == members
    assert opened.js("() => document.documentElement.scrollWidth") <= width
    assert opened.quiet()


@pytest.mark.parametrize("explorer_file", ["latent"], indirect=True)
def test_selected_rank_shows_experts_and_dispatch(explorer_file: ExplorerFile, open_page: Callable[..., Any]) -> None:
    """DeepSeek-V3's 256 experts on 8 ranks of a node, 32 each: a token uses a rank if its group is selected."""
    opened = open_page(explorer_file.path)
    opened.page.fill("#explorer-chosen", "11")
    opened.page.press("#explorer-chosen", "Enter")
    assert "experts 96 to 127 of the 256" in opened.page.inner_text("#explorer-rank")
    highlighted = opened.js("() => [...document.querySelectorAll('.rank.ep')].map(({ dataset }) => +dataset.rank)")
    assert sorted(highlighted) == [8, 9, 10, 12, 13, 14, 15]
    text = opened.page.inner_text("#explorer-dispatch")
    token_bytes, tokens = 7168 * 2, 1024
    reach_probability = (4 / 8) * (1 - comb(96, 8) / comb(128, 8))  # 4 of 8 groups are selected, 8 experts of their 128
    (bar,) = opened.js(
        "() => clustersim.explorerExperts(clustersim.explorer, clustersim.tools)"
        ".dispatch(clustersim.explorer.drawn().settings, 11)"
    )
    assert bar["bytes"] == pytest.approx(7 * tokens * token_bytes * reach_probability, rel=1e-9)
    assert "1,024 tokens, each for 8 experts" in text
    opened.js("() => clustersim.explorer.set({ ep: 16, dispatcher: 'alltoall' })")
    bars = opened.js("() => [...document.querySelectorAll('#explorer-dispatch .sent')].length")
    assert bars == 2
    assert opened.quiet()


@pytest.mark.parametrize("explorer_file", ["latent"], indirect=True)
def test_expert_memory_is_listed_separately(explorer_file: ExplorerFile, open_page: Callable[..., Any]) -> None:
    opened, scenario = open_page(explorer_file.path), explorer_file.explored.scenario
    expert_bytes = opened.js("() => clustersim.explorer.drawn().stages[1].ranks.map(({ ofExperts }) => ofExperts)")
    footprint = build_footprint(scenario, build_plan(scenario))
    for rank, rank_bytes in enumerate(expert_bytes):
        assert sum(rank_bytes.values()) == pytest.approx(footprint.weights_by_group(rank)[EXPERTS][1], rel=1e-9)
    assert opened.page.inner_text("#explorer-memory-table").count("of which experts'") == 3
