"""How do DDP, ZeRO, tensor and pipeline parallelism place a model, and what do they cost? A page to play with.

Everything is in the page: tables of what the package answers (`analysis.exploration`), in which its script looks up and
sums what it shows for any choice, and steps that were simulated beforehand.
"""

import json
from collections.abc import Sequence
from dataclasses import fields
from html import escape
from pathlib import Path
from typing import Any, Final

import numpy as np

from clustersim.analysis.exploration import Exploration
from clustersim.memory.footprint import Category as Use
from clustersim.report.answer import USE_LOOKS
from clustersim.report.document import Card, document, section, slot
from clustersim.report.explorer_controls import controls
from clustersim.report.explorer_steps import steps_card
from clustersim.report.figure import Figure, axis, layout, legend, packed, script_json
from clustersim.report.files import write_text_atomically
from clustersim.report.keys import key
from clustersim.units import format_bytes

_SCRIPTS: Final = (
    "explorer_model", "explorer_groups", "explorer", "explorer_experts", "explorer_ranks", "explorer_words",
)  # fmt: skip
_TOPICS: Final = {
    "ddp": "Data parallelism (DDP)",
    "zero1": "ZeRO 1: sharded optimizer",
    "zero2": "ZeRO 2: and gradients",
    "zero3": "ZeRO 3: and parameters (FSDP)",
    "tensor": "Tensor parallelism",
    "pipeline": "Pipeline parallelism",
}
_STACK: Final = (
    Use.PARAMETERS, Use.COPIES, Use.GRADIENTS, Use.OPTIMIZER, Use.ACTIVATIONS, Use.GATHERED, Use.MESSAGES,
    Use.WORKSPACE, Use.COMMUNICATION, Use.CONTEXT, Use.FRAGMENTATION,
)  # fmt: skip
"""Parts of memory from the bottom of a bar."""


def write_explorer(exploration: Exploration, path: str | Path) -> None:
    """Write the page; raise OutputError if it cannot be written."""
    write_text_atomically(path, explorer_page(exploration))


def explorer_page(exploration: Exploration) -> str:
    """The page as HTML text."""
    cards = [
        _head(exploration),
        _panel(exploration),
        _memory_card(),
        _words_card(),
        _ranks_card(exploration),
        _bubble_card(),
        *([steps_card(exploration)] if exploration.studies else []),
        _trust_card(exploration),
    ]
    return document(f"explore {exploration.name}", cards, scripts=_SCRIPTS, styles=("explorer",))


def _head(exploration: Exploration) -> Card:
    machine = exploration.machine
    words = (
        f"{exploration.models[0].name} on {machine.cluster} ({machine.accelerator}, "
        f"{format_bytes(machine.capacity)} each). Change anything below; the address "
        "keeps what you chose, so that it can be shared."
    )
    title = f"<h1>{escape(exploration.name)}: what goes where?</h1>"
    return Card(f'<section class="card">{title}<p class="subject">{escape(words)}</p></section>')


def _panel(exploration: Exploration) -> Card:
    """Controls and the verdict, which stay in sight; and what the page's script knows."""
    verdict = (
        '<div class="state"><div class="fits" id="explorer-verdict" role="status"><b></b> <span></span>'
        '<div class="gauge"><i></i></div></div>'
        '<button type="button" id="explorer-reset">back to the scenario</button></div>'
        '<ul class="alerts" id="explorer-problems" role="alert" hidden></ul>'
    )
    facts = f'<script type="application/json" id="explorer-facts">{script_json(_facts(exploration))}</script>'
    return Card(f'<section class="card panel">{controls(exploration)}{verdict}{facts}</section>')


def _facts(exploration: Exploration) -> dict[str, str]:
    """What the page's script reads, packed; studies are drawn here, notes and choices are in the page's text."""
    known = {name: getattr(exploration, name) for name in ("models", "formats", "machine", "start", "tables")}
    known["simulated_bubble"] = None if exploration.own is None else exploration.own.bubble
    text = json.dumps(known, default=_plain, separators=(",", ":"), allow_nan=False)
    return packed(np.frombuffer(text.encode(), np.uint8))


def _plain(value: Any) -> Any:
    """An array as a list, a dataclass as a mapping."""
    if isinstance(value, np.ndarray):
        return value.tolist()
    return {each.name: getattr(value, each.name) for each in fields(value)}


def _memory_card() -> Card:
    parts = [
        {
            "name": use.value,
            "label": USE_LOOKS[use].label,
            "colour": USE_LOOKS[use].colour,
            "pattern": USE_LOOKS[use].pattern,
            "key": key(USE_LOOKS[use]),
        }
        for use in _STACK
    ]
    figure = Figure(
        name="explorer-memory",
        traces=[],
        layout=layout(
            barmode="stack",
            showlegend=True,
            legend=legend(traceorder="normal", y=1.02),
            xaxis=axis("", type="category", fixedrange=True, tickfont={"size": 13}),
            yaxis=axis("memory of the fullest GPU [GiB]", fixedrange=True),
            dragmode=False,
            bargap=0.35,
        ),
        height=430,
        narrow={"showlegend": False, "xaxis": {"tickfont": {"size": 10}}},  # the table below has the colours, too
        behaviour="explorer_memory",
        facts={"parts": parts},
    )
    table = _to_fill(
        ("memory of the fullest GPU", "DDP, ZeRO 0", "ZeRO 1", "ZeRO 2", "ZeRO 3"), "explorer-memory-table", "wide"
    )
    lead = (
        "Each bar is one GPU of the pipeline rank that needs most, at its fullest moment. ZeRO cuts optimizer state "
        "(1), gradients (2) and parameters (3) into a part for each replica. Click a bar to choose its stage."
    )
    return _shown("Does it fit? Memory of a GPU", slot(figure) + table, figure, lead=lead)


def _words_card() -> Card:
    topics = "".join(
        f'<div><h3>{escape(title)}</h3><p id="explain-{name}"></p></div>' for name, title in _TOPICS.items()
    )
    return _shown("What each of them does, with these numbers", f'<div class="explained">{topics}</div>')


def _ranks_card(exploration: Exploration) -> Card:
    """Ranks on their nodes, what the chosen one holds, and with whom it talks."""
    mixture = exploration.tables.experts is not None
    of_experts = ", e: ep" if mixture else ""
    order = ", then ".join(exploration.tables.orders[0])
    talkers = "tp, cp, dp, pp, ep, etp or edp" if mixture else "tp, cp, dp or pp"
    lead = (
        f"Each box is a GPU with its rank and its coordinates on the axes (t: tp, c: cp, d: dp{of_experts}, p: pp); "
        f"ranks count {order}. Choose one with a click or the arrow keys: boxes that say {talkers} are those with "
        "which it talks."
    )
    pick = (
        '<label class="pick">chosen rank <input type="number" id="explorer-chosen" min="0" step="1" value="0"></label>'
    )
    talks = _scrolled(("axis", "with", "over", "a GPU sends a step", "what for"), "explorer-talks")
    stages = _scrolled(("stage", "ranks", "holds", "parameters", "memory", ""), "explorer-stages")
    body = (
        f'{pick}<div class="two wide-left"><div class="grid-of-ranks" id="explorer-ranks" role="group" '
        f'aria-label="ranks on their nodes"></div><dl class="holds" id="explorer-rank" aria-live="polite"></dl></div>'
        f"<h3>With whom it talks</h3>{talks}{_dispatch(mixture)}<h3>All ranks, by pipeline stage</h3>{stages}"
    )
    return _shown("Who holds what, who talks to whom", body, lead=lead)


def _dispatch(mixture: bool) -> str:
    """Where the page's script tells what the chosen rank sends to experts; empty where there are none."""
    if not mixture:
        return ""
    return '<h3>What it sends to experts</h3><div id="explorer-dispatch" aria-live="polite"></div>'


def _scrolled(heads: Sequence[str], name: str) -> str:
    return f'<div class="scroll">{_to_fill(heads, name, "told")}</div>'


def _to_fill(heads: Sequence[str], name: str, look: str) -> str:
    """A table without rows, which the page's script makes. look: a class of the page's style."""
    row = "".join(f"<th>{escape(head)}</th>" for head in heads)
    return f'<table class="{look}"><thead><tr>{row}</tr></thead><tbody id="{name}"></tbody></table>'


def _bubble_card() -> Card:
    figure = Figure(
        name="explorer-bubble",
        traces=[],
        layout=layout(
            showlegend=True,
            legend=legend(),
            xaxis=axis("microbatches of a step on each replica", type="log", fixedrange=True),
            yaxis=axis("bubble, share of the step", ticksuffix=" %", fixedrange=True, rangemode="tozero"),
            dragmode=False,
        ),
        height=330,
        narrow={},
        behaviour="explorer_bubble",
    )
    lead = (
        "The order of passes of each schedule, played with equal stages, a backward of twice its forward and messages "
        "that take no time. More microbatches make the pipeline's beginning and end a smaller part of the step."
    )
    words = '<p id="explorer-bubble-words" aria-live="polite"></p>'
    return _shown("Bubble: how long stages wait for each other", words + slot(figure), figure, lead=lead)


def _trust_card(exploration: Exploration) -> Card:
    rows = "".join(f"<li>{escape(note)}</li>" for note in (*exploration.notes, *_ALWAYS))
    return Card(section("What this rests on", f"<ul>{rows}</ul>"))


_ALWAYS: Final = (
    "memory is what clustersim's model of memory says of each choice (clustersim check); it needs no simulation",
    "bytes sent are those of ring algorithms; a library may choose others. Sums of a few bytes are left out",
    "attention, loss, optimizer, framework and cluster are the scenario's; stages hold layers as evenly as they can",
    "simulated steps do not follow the controls: they are the scenario's, changed as their titles say",
)


def _shown(title: str, body: str, *figures: Figure, lead: str = "") -> Card:
    """A card that is greyed while the controls say something illegal."""
    return Card(f'<div class="shown">{section(title, body, lead=lead)}</div>', figures)
