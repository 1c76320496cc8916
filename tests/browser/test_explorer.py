"""The explorer in a real browser: its numbers are the Python models', for any choice that a reader can make."""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from clustersim.analysis.exploration import Exploration
from clustersim.errors import InputError
from clustersim.fitting import ledgers_of
from clustersim.lowering.step import lower
from clustersim.parallel.groups import process_groups
from clustersim.parallel.mesh import AXES
from clustersim.parallel.plan import Plan
from clustersim.planning.explore import tables
from clustersim.program.program import RankProgram
from clustersim.program.task import Collective, Communicate, Compute, Send
from clustersim.report.explorer import explorer_page
from clustersim.scenario import Scenario
from clustersim.schedules.shelf import schedule

pytestmark = pytest.mark.browser

SAMPLES = 150
LLAMA: dict[str, Any] = {
    "model": "llama3-8b",
    "cluster": {"name": "dgx-h100", "gpus": 64},
    "layout": {"tp": 2, "pp": 4, "dp": 8, "data": "zero1", "sequence_parallel": True},
    "schedule": {"interleaved": {"chunks": 2}},
    "training": {"sequence": 4096, "global_batch": 64, "recompute": {"layers": 1}},
}
GPT: dict[str, Any] = {  # scores that are kept, tied embeddings, stages of its own, a loss in FP32, FSDP with options
    "model": "gpt3-1.3b",
    "cluster": {"name": "dgx-a100", "gpus": 16},
    "layout": {
        "tp": 2,
        "pp": 4,
        "dp": 2,
        "layers_per_stage": [7, 6, 6, 5],
        "data": {"fsdp": {"prefetch": 2, "reshard_after_forward": False}},
    },
    "schedule": "gpipe",
    "training": {
        "sequence": 2048, "global_batch": 32, "attention": "standard", "loss": "torch", "precision": "fp16",
    },
}  # fmt: skip
PRECISIONS = {
    "mixed precision, BF16": "bf16",
    "BF16 with BF16 gradients": "{compute: bf16, gradients: bf16}",
    "FP32": "fp32",
}
DATA = ("ddp", "zero1", "zero2", "zero3")


@dataclass
class Explorer:
    """The open page of a scenario."""

    scenario: Scenario
    tables: Exploration
    page: Any

    def js(self, script: str, argument: object = None) -> Any:
        return self.page.evaluate(script, argument)

    def samples(self, many: int) -> Iterator[dict[str, Any]]:
        """Random settings of the page's controls; some keep to the scenario's."""
        choices: dict[str, list[Any]] = self.js(
            "() => Object.fromEntries([...document.querySelectorAll('[data-key]')].map(({ dataset, type }) =>"
            " [dataset.key, type === 'checkbox' ? [false, true] : JSON.parse(dataset.values)]))"
        )
        start = self.js("() => clustersim.explorer.drawn().settings")
        chance = random.Random(0)
        for _ in range(many):
            kept = chance.random()
            yield {
                key: start[key] if chance.random() < kept else chance.choice(values) for key, values in choices.items()
            }

    def legal(self, many: int) -> Iterator[tuple[dict[str, Any], Scenario]]:
        """Those of random settings that Python finds legal, with their scenarios."""
        for settings in self.samples(many):
            try:
                yield settings, self.at(settings)
            except InputError:
                continue

    def at(self, settings: dict[str, Any], zero: int | None = None) -> Scenario:
        """The scenario of some settings, by the front door."""
        return self.scenario.changed(self.changes(settings, settings["zero"] if zero is None else zero))

    def changes(self, at: dict[str, Any], zero: int) -> Iterator[str]:
        if at["model"] != 0:
            yield f"model={self.tables.models[at['model']].name}"
        if at["format"] != 0:
            yield f"training.precision={PRECISIONS[self.tables.formats[at['format']].name]}"
        replica = at["tp"] * at["cp"] * at["pp"]
        if at["gpus"] % replica:
            raise InputError("ranks that do not divide the GPUs")
        chunks = at["chunks"] if at["schedule"] == "interleaved" else 1
        yield f"cluster.gpus={at['gpus']}"
        yield from (f"layout.{axis}={at[axis]}" for axis in ("tp", "cp", "pp"))
        yield f"layout.dp={at['gpus'] // replica}"
        yield f"layout.sequence_parallel={'true' if at['split'] else 'false'}"
        if zero != self.scenario.layout.data.stage:
            yield f"layout.data={DATA[zero]}"
        own = self.scenario.layout.layers_per_stage
        if own is not None and (at["model"] != 0 or len(own) != at["pp"] * chunks):
            yield "layout.layers_per_stage=even"
        yield f"schedule={{interleaved: {{chunks: {chunks}}}}}" if chunks > 1 else f"schedule={at['schedule']}"
        mode, _, layers = at["recompute"].partition(":")
        yield f"training.recompute={f'{{layers: {layers}}}' if layers else mode}"
        yield f"training.microbatch={at['microbatch']}"
        yield f"training.sequence={at['sequence']}"
        yield f"training.global_batch={at['batch']}"


@pytest.fixture(scope="module", params=[LLAMA, GPT], ids=["llama", "gpt"])
def made(request: Any, tmp_path_factory: Any) -> tuple[Scenario, Exploration, Path]:
    scenario = Scenario.from_mapping(request.param)
    known = tables(scenario)
    page = tmp_path_factory.mktemp("explorer") / "explorer.html"
    page.write_text(explorer_page(known))
    return scenario, known, page


@pytest.fixture(scope="module")
def explorer(made: tuple[Scenario, Exploration, Path], chromium: Any) -> Iterator[Explorer]:
    """A page that is asked, not played with."""
    scenario, known, path = made
    with chromium.new_context() as context:
        page = context.new_page()
        page.goto(path.as_uri())
        page.wait_for_selector("html[data-ready=yes]", state="attached")
        yield Explorer(scenario, known, page)


def test_it_says_what_is_illegal_where_python_does(explorer: Explorer) -> None:
    legal = 0
    for settings in explorer.samples(SAMPLES):
        problems = explorer.js("settings => [...clustersim.explorer.model.problems(settings)]", settings)
        try:
            explorer.at(settings)
            legal += 1
            assert problems == [], settings
        except InputError as error:
            assert problems, (settings, str(error))
    assert legal > SAMPLES // 10


def test_the_bars_are_the_model_of_memory(
    made: tuple[Scenario, Exploration, Path], open_page: Callable[..., Any]
) -> None:
    """What is drawn for each ZeRO stage after the controls were moved, and that nothing complains."""
    scenario, known, path = made
    opened = open_page(path)
    explorer = Explorer(scenario, known, opened.page)
    for settings, _ in islice(explorer.legal(SAMPLES), 8):
        drawn = explorer.js(
            "settings => { clustersim.explorer.set(settings); return document.getElementById('explorer-memory').data"
            ".filter(({ type }) => type === 'bar').map(({ y }) => Array.from(y, value => value * 2 ** 30)); }",
            settings,
        )
        for zero in range(4):
            fullest = max(ledgers_of(explorer.at(settings, zero)), key=lambda ledger: ledger.peak)
            told = sum(part[zero] for part in drawn)
            assert told == pytest.approx(fullest.peak, rel=1e-9), (settings, zero)
    assert opened.quiet()


def test_every_part_of_every_rank_is_the_ledgers(explorer: Explorer) -> None:
    for settings, _ in islice(explorer.legal(SAMPLES), 25):
        stages = explorer.js("settings => clustersim.explorer.model.memory(settings)", settings)
        for zero in range(4):
            ledgers = ledgers_of(explorer.at(settings, zero))
            for ledger, told in zip(ledgers, stages[zero]["ranks"], strict=True):
                parts = {use.value: size for use, size in ledger.at_peak().items()}
                assert told["parts"] == pytest.approx(parts, rel=1e-9, abs=1.0), (settings, zero)
            assert stages[zero]["peak"] == pytest.approx(max(ledger.peak for ledger in ledgers), rel=1e-9)


def test_orders_are_the_schedules(explorer: Explorer) -> None:
    for name, chunks in (("1f1b", 1), ("gpipe", 1), ("interleaved", 2), ("interleaved", 3)):
        for ranks in (2, 3, 4, 8):
            for microbatches in (1, 2, 3, 4, 8, 16, 24):
                shelf = schedule(name, chunks if chunks > 1 else None)
                try:
                    expected = [[str(action) for action in actions] for actions in shelf.order(ranks, microbatches)]
                except InputError:
                    assert not explorer.js("args => clustersim.passes.runs(...args)", [name, ranks, microbatches])
                    continue
                told = explorer.js(
                    "args => clustersim.passes.order(...args).map(rank => rank.map("
                    "({ stage, back, microbatch }) => `${stage}${back ? 'B' : 'F'}${microbatch}`))",
                    [name, ranks, microbatches, chunks],
                )
                assert told == expected


@pytest.mark.parametrize(("name", "chunks"), [("1f1b", 1), ("gpipe", 1), ("interleaved", 2), ("interleaved", 4)])
def test_bubbles_are_the_textbooks(explorer: Explorer, name: str, chunks: int) -> None:
    """(p - 1) / (v m + p - 1) of the step, microbatches in rounds of p; Narayanan et al. 2021, section 2.2."""
    for ranks, microbatches in ((2, 2), (4, 8), (8, 64), (3, 9)):
        told = explorer.js("args => clustersim.passes.bubble(...args)", [name, ranks, microbatches, chunks])
        assert told == pytest.approx((ranks - 1) / (chunks * microbatches + ranks - 1))


ROUNDS = {Collective.ALL_REDUCE: 2, Collective.ALL_GATHER: 1, Collective.REDUCE_SCATTER: 1, Collective.SHIFT: 1}


def sent(program: RankProgram, role: str, members: int) -> float:
    """Bytes that a rank sends on rings in a step, by the tasks of its program; sums of a few bytes left out."""
    total = 0.0
    for task in program.tasks:
        exchanges = task.block.exchanges if isinstance(task, Compute) else ()
        if isinstance(task, Communicate):
            exchanges = (task.exchange,)
        if isinstance(task, Send):
            total += task.exchange.payload if role == "pp" else 0.0
        for exchange in exchanges:
            if exchange.group == role and exchange.payload > 4.0:
                total += ROUNDS[exchange.collective] * exchange.payload * (members - 1) / members
    return total


def test_exchanges_are_those_of_the_program(explorer: Explorer) -> None:
    """Bytes of every axis, against what lowering makes of the same scenario."""
    for settings, scenario in explorer.legal(SAMPLES):
        layout = scenario.layout
        if scenario.microbatches * layout.pp > 300 or scenario.model.layers > 60:
            continue
        plan = Plan(scenario.model, scenario.training, layout, scenario.schedule.placement)
        program = lower(plan, scenario.schedule.order(layout.pp, scenario.microbatches))
        members = {"tp": layout.tp, "cp": layout.cp, "dp": layout.dp * layout.cp, "pp": 1, "embedding": 2}
        for rank in {0, layout.pp - 1, layout.pp // 2}:
            told = explorer.js(
                "([settings, rank]) => clustersim.explorer.exchanges.traffic(settings, rank)", [settings, rank]
            )
            expected = {role: sent(program.programs[rank], role, count) for role, count in members.items()}
            assert told == pytest.approx(expected, rel=1e-9), (settings, rank)


def test_groups_and_tiers_are_the_layouts(explorer: Explorer) -> None:
    """Who is beside whom, and over which tier their traffic goes, for layouts of all orders of axes."""
    for settings, scenario in explorer.legal(40):
        rank = random.Random(settings["gpus"]).randrange(settings["gpus"])
        groups = process_groups(scenario.layout, scenario.schedule.placement)
        for role, axes in (("tp", ["tp"]), ("cp", ["cp"]), ("dp", ["dp", "cp"])):
            told, tier = explorer.js(
                "([settings, rank, axes]) => { const { group, tier } = clustersim.explorer.exchanges;"
                " const ranks = group(settings, rank, axes); return [ranks, tier(ranks)]; }",
                [settings, rank, axes],
            )
            row = next(row for row in groups[role].members if rank in row)
            assert told == row.tolist()
            assert tier == scenario.cluster.fabric.tier(row)
        at = explorer.js(
            "([settings, rank]) => clustersim.explorer.exchanges.coordinates(settings, rank)", [settings, rank]
        )
        assert at == {axis.name: int(scenario.layout.mesh.coordinate(axis)[rank]) for axis in AXES}


LLAMA_ALONE = pytest.mark.parametrize("made", [LLAMA], indirect=True, ids=["llama"])


def key(opened: Any, control: str, *keys: str) -> None:
    """Press keys on a control, as a reader without a mouse does."""
    opened.page.focus(f"#control-{control}")
    for each in keys:
        opened.page.keyboard.press(each)


@LLAMA_ALONE
def test_controls_work_by_keyboard_and_share_their_state(
    made: tuple[Scenario, Exploration, Path], open_page: Callable[..., Any]
) -> None:
    scenario, _, path = made
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
def test_what_is_illegal_keeps_the_last_drawing_grey(
    made: tuple[Scenario, Exploration, Path], open_page: Callable[..., Any]
) -> None:
    opened = open_page(made[2])
    before = opened.page.inner_text("#explorer-memory-table")
    key(opened, "tp", "End")
    assert "tp 64" in opened.page.inner_text("#explorer-problems")
    assert opened.js("() => document.body.classList.contains('stale')")
    assert opened.page.inner_text("#explorer-memory-table") == before
    opened.page.click("#explorer-reset")
    assert not opened.js("() => document.body.classList.contains('stale')")


@LLAMA_ALONE
@pytest.mark.parametrize(("width", "dark"), [(1280, False), (390, True)])
def test_ranks_say_with_whom_they_talk(
    made: tuple[Scenario, Exploration, Path], open_page: Callable[..., Any], width: int, dark: bool
) -> None:
    scenario, _, path = made
    opened = open_page(path, width=width, dark=dark)
    opened.page.click("#explorer-ranks button >> nth=1")
    opened.page.keyboard.press("ArrowRight")
    chosen = int(opened.page.input_value("#explorer-chosen"))
    assert chosen == 2
    groups = process_groups(scenario.layout, scenario.schedule.placement)
    row = next(row.tolist() for row in groups["tp"].members if chosen in row)
    marked = opened.js(
        "() => [...document.querySelectorAll('.rank.tp, .rank.chosen')].map(({ dataset }) => +dataset.rank)"
    )
    assert sorted(marked) == row
    assert opened.js("() => document.documentElement.scrollWidth") <= width
    assert opened.quiet()
