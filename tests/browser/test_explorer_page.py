"""The explorer in a real browser: its script gives what its tables say, which tests/planning holds to the package."""

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
from tests.planning.explorer_page import ZERO, Page
from tests.planning.explorer_scenarios import Explored, explored, few_choices

pytestmark = [pytest.mark.browser, pytest.mark.slow]

SAMPLES = 150
_BUBBLE_WORDS = ("explorer-bubble-words", "explain-pipeline")


@dataclass(frozen=True)
class Made:
    """A scenario's page: what it knows, and where it is."""

    known: Explored
    path: Path


@pytest.fixture(scope="module", params=["llama", "gpt", "latent", "mixed"])
def made(request: Any, tmp_path_factory: Any) -> Made:
    known = explored(request.param)
    path = tmp_path_factory.mktemp("explorer") / "explorer.html"
    path.write_text(explorer_page(known.exploration))
    return Made(known, path)


Ask = Callable[..., Any]


@pytest.fixture(scope="module")
def ask(made: Made, chromium: Any) -> Iterator[Ask]:
    """Ask an open page for an expression of its model and some settings."""
    with chromium.new_context() as context:
        page = context.new_page()
        page.goto(made.path.as_uri())
        page.wait_for_selector("html[data-ready=yes]", state="attached")
        body = "const { model, groups } = clustersim.explorer; const settings = model.settled(chosen);"
        yield lambda expression, chosen, more=None: page.evaluate(
            f"([chosen, more]) => {{ {body} return {expression}; }}", [chosen, more]
        )


def test_it_says_why_settings_are_impossible(made: Made, ask: Ask) -> None:
    reference, legal = Page(made.known.exploration), 0
    for settings in made.known.samples(SAMPLES):
        told = ask("model.problems(settings)", settings)
        assert told == reference.problems(settings), settings
        legal += not told
    assert SAMPLES // 10 < legal < SAMPLES


def test_memory_traffic_and_bubble_are_what_the_tables_say(made: Made, ask: Ask) -> None:
    reference, tables = Page(made.known.exploration), made.known.exploration.tables
    for settings, scenario in made.known.legal:
        memory = ask("model.memory(settings)", settings)
        for zero in ZERO:
            expected = [pytest.approx(item, rel=1e-9, abs=1) for item in reference.memory({**settings, "zero": zero})]
            assert [element["parts"] for element in memory[zero]["ranks"]] == expected, (settings, zero)
            assert memory[zero]["peak"] == max(entry["peak"] for entry in memory[zero]["ranks"])
        for rank in {0, scenario.layout.pp // 2, scenario.layout.pp - 1}:
            told = ask("model.traffic(settings, more)", settings, rank)
            assert told == pytest.approx(reference.traffic(settings, rank), rel=1e-9), (settings, rank)
        played = tables.schedules.lookup(reference.settings(settings))
        assert ask("model.bubble(settings)", settings) == played["bubble"]


def test_groups_and_tiers_are_the_layouts(made: Made, ask: Ask) -> None:
    """Who is beside whom, and over which tier their traffic goes."""
    for settings, scenario in made.known.legal[:30]:
        rank, layout = settings["gpus"] * 5 // 7, scenario.layout
        groups = process_groups(layout, scenario.placement)
        there = {role for role in made.known.exploration.tables.roles if role in groups}
        for role in sorted(there):
            told, tier = ask(
                f"(ranks => [ranks, groups.tier(ranks)])(groups.group(settings, more, '{role}'))", settings, rank
            )
            row = next(row for row in groups[role].members if rank in row)
            assert told == row.tolist()
            assert tier == scenario.cluster.fabric.highest_tier(row)
        for role in ("pp_next", "pp_previous") if layout.pp > 1 else ():
            to = [int(other) for one, other in groups[role].members if one == rank]
            assert ask(f"groups.partners(settings, more, '{role}')", settings, rank) == to
        place = {axis.name: int(layout.rank_coordinates(axis)[rank]) for axis in layout.axes}
        told = ask("groups.coordinates(settings, more)", settings, rank)
        assert {name: told[name] for name in place} == place


def test_the_bars_are_the_model_of_memory(made: Made, open_page: Callable[..., Any]) -> None:
    """What is drawn for each ZeRO stage after the controls were moved, and that nothing complains."""
    opened = open_page(made.path)
    for settings, _ in made.known.legal[:8]:
        drawn = opened.js(
            "settings => { clustersim.explorer.set(settings); return document.getElementById('explorer-memory').data"
            ".filter(({ type }) => type === 'bar').map(({ y }) => Array.from(y, value => value * 2 ** 30)); }",
            settings,
        )
        for zero in ZERO:
            fullest = max(ledger.peak for ledger in memory_timelines(made.known.at(settings, zero)))
            assert sum(part[zero] for part in drawn) == pytest.approx(fullest, rel=1e-9), (settings, zero)
    assert opened.quiet()


def test_the_curve_is_the_bubble(made: Made, open_page: Callable[..., Any]) -> None:
    """Every point that is drawn is what the tables say of so many microbatches."""
    reference = Page(made.known.exploration)
    opened = open_page(made.path)
    found = reference.settings(made.known.exploration.start)
    chunks = opened.js("() => clustersim.explorer.drawn().chosen.chunks")
    for name, many in (("1f1b", 1), ("interleaved", chunks)):
        place = 0 if many == 1 else 1
        x, y = opened.js(
            "place => { const { x, y } = document.getElementById('explorer-bubble').data[place];"
            " return [Array.from(x), Array.from(y)]; }",
            place,
        )
        assert len(x) > 3
        for microbatches, share in zip(x, y, strict=True):
            asked = {**found, "schedule": name, "chunks": many, "microbatches": microbatches}
            assert share == pytest.approx(100 * made.known.exploration.tables.schedules.lookup(asked)["bubble"])


def test_the_scenario_s_bubble_is_told_as_run_tells_it(open_page: Callable[..., Any], tmp_path: Path) -> None:
    """Beside the schedule's own, (p - 1)/(m + p - 1); for other settings, which are not simulated, that alone."""
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
    told = simulate(scenario).to_json()["bubble_fraction"]
    words = [opened.js(f"() => document.getElementById('{name}').textContent") for name in _BUBBLE_WORDS]
    for word in words:
        assert f"a bubble of {3 / 11:.1%} of the step".replace("%", " %") in word
        assert f"has {told:.1%} of the step, as clustersim run says".replace("%", " %") in word
    opened.js("() => clustersim.explorer.set({ batch: 32 })")
    assert "simulated" not in opened.js(f"() => document.getElementById('{_BUBBLE_WORDS[0]}').textContent")


LLAMA_ALONE = pytest.mark.parametrize("made", ["llama"], indirect=True)


def key(opened: Any, control: str, *keys: str) -> None:
    """Press keys on a control, as a reader without a mouse does."""
    opened.page.focus(f"#control-{control}")
    for item in keys:
        opened.page.keyboard.press(item)


@LLAMA_ALONE
def test_controls_work_by_keyboard_and_share_their_state(made: Made, open_page: Callable[..., Any]) -> None:
    scenario, path = made.known.scenario, made.path
    opened = open_page(path)
    before = opened.js("() => clustersim.explorer.drawn().stages[0].peak")
    key(opened, "microbatch", "ArrowRight")
    opened.page.select_option("#control-zero", "2")
    settings = opened.js("() => clustersim.explorer.drawn().settings")
    assert (settings["microbatch"], settings["zero"]) == (2 * scenario.training.microbatch, 2)
    assert opened.js("() => clustersim.explorer.drawn().stages[0].peak") > before
    address = opened.js("() => location.hash")
    again = open_page(path)
    again.js("address => { location.hash = address; }", address)
    again.until(lambda: again.js("() => clustersim.explorer.drawn().settings.zero") == 2)
    assert again.js("() => clustersim.explorer.drawn().settings") == settings
    again.page.click("#explorer-reset")
    assert again.js("() => location.hash") == ""
    assert again.js("() => clustersim.explorer.drawn().stages[0].peak") == before
    assert again.quiet()


@LLAMA_ALONE
def test_what_is_illegal_keeps_the_last_drawing_grey(made: Made, open_page: Callable[..., Any]) -> None:
    opened = open_page(made.path)
    before = opened.page.inner_text("#explorer-memory-table")
    key(opened, "tp", "End")
    assert "tp 64" in opened.page.inner_text("#explorer-problems")
    assert opened.js("() => document.body.classList.contains('stale')")
    assert opened.page.inner_text("#explorer-memory-table") == before
    opened.page.click("#explorer-reset")
    assert not opened.js("() => document.body.classList.contains('stale')")


@LLAMA_ALONE
@pytest.mark.parametrize(("width", "dark"), [(1280, False), (390, True)])
def test_ranks_say_with_whom_they_talk(made: Made, open_page: Callable[..., Any], width: int, dark: bool) -> None:
    scenario, path = made.known.scenario, made.path
    opened = open_page(path, width=width, dark=dark)
    opened.page.click("#explorer-ranks button >> nth=1")
    opened.page.keyboard.press("ArrowRight")
    chosen = int(opened.page.input_value("#explorer-chosen"))
    assert chosen == 2
    groups = process_groups(scenario.layout, scenario.placement)
    row = next(row.tolist() for row in groups["tp"].members if chosen in row)
    marked = opened.js(
        "() => [...document.querySelectorAll('.rank.tp, .rank.chosen')].map(({ dataset }) => +dataset.rank)"
    )
    assert sorted(marked) == row
    assert opened.js("() => document.documentElement.scrollWidth") <= width
    assert opened.quiet()


@pytest.mark.parametrize("made", ["latent"], indirect=True)
def test_ranks_say_which_experts_they_have_and_what_they_send(made: Made, open_page: Callable[..., Any]) -> None:
    """DeepSeek-V3's 256 experts over 8 ranks of one node: 32 each, which a token has one of if its groups are drawn."""
    opened = open_page(made.path)
    opened.page.fill("#explorer-chosen", "11")
    opened.page.press("#explorer-chosen", "Enter")
    assert "experts 96 to 127 of the 256" in opened.page.inner_text("#explorer-rank")
    lit = opened.js("() => [...document.querySelectorAll('.rank.ep')].map(({ dataset }) => +dataset.rank)")
    assert sorted(lit) == [8, 9, 10, 12, 13, 14, 15]
    text = opened.page.inner_text("#explorer-dispatch")
    row, tokens = 7168 * 2, 1024
    reached = (4 / 8) * (1 - comb(96, 8) / comb(128, 8))  # 4 of 8 groups are drawn, 8 experts of their 128
    (bar,) = opened.js(
        "() => clustersim.explorerExperts(clustersim.explorer, clustersim.tools)"
        ".dispatch(clustersim.explorer.drawn().settings, 11)"
    )
    assert bar["bytes"] == pytest.approx(7 * tokens * row * reached, rel=1e-9)
    assert "1,024 tokens, each for 8 experts" in text
    opened.js("() => clustersim.explorer.set({ ep: 16, dispatcher: 'alltoall' })")
    bars = opened.js("() => [...document.querySelectorAll('#explorer-dispatch .sent')].length")
    assert bars == 2
    assert opened.quiet()


@pytest.mark.parametrize("made", ["latent"], indirect=True)
def test_experts_are_apart_in_memory(made: Made, open_page: Callable[..., Any]) -> None:
    opened, scenario = open_page(made.path), made.known.scenario
    told = opened.js("() => clustersim.explorer.drawn().stages[1].ranks.map(({ ofExperts }) => ofExperts)")
    footprint = build_footprint(scenario, build_plan(scenario))
    for rank, item in enumerate(told):
        assert sum(item.values()) == pytest.approx(footprint.weights_by_group(rank)[EXPERTS][1], rel=1e-9)
    assert opened.page.inner_text("#explorer-memory-table").count("of which experts'") == 3
