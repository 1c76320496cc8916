"""What does who decides look at? The top of the page, as HTML, before one must scroll.

Tiles: how long a step takes, how fast that is, whether it fits, what the run takes. Below them, side by side: the
largest losses with what was found to make them smaller, and how far this is to be trusted.
"""

from html import escape
from typing import Final

from clustersim.analysis.losses import Help
from clustersim.analysis.nearest import NearestRun
from clustersim.analysis.what_if import Outcome, WhatIf, WhatIfs
from clustersim.report.economics import run_lines, trillion_lines
from clustersim.report.figure import share_words
from clustersim.report.keys import named
from clustersim.report.steps import spread_words
from clustersim.report.view import PageView, ShownLoss, Verdict
from clustersim.units import format_bytes, format_flops, format_number, format_seconds, format_step_time

_HELPS: Final = 2  # changes that are named beside a loss
_DIFFERENCES: Final = 4  # in which the nearest run is unlike this one, that are named


def tiles(verdict: Verdict) -> str:
    """The numbers that decide."""
    found = (_step(verdict), _speed(verdict), _fits(verdict), _run(verdict))
    return f'<div class="tiles">{"".join(found)}</div>'


def losses_part(view: PageView) -> str:
    """The largest losses, each with what helps; empty where nothing is lost."""
    if not view.losses:
        return ""
    items = "".join(map(_loss, view.losses))
    lead = "Of the step, the mean over all GPUs, beside the model's FLOP at the peak. "
    return (
        f'<section class="losses"><h2>Largest losses</h2><p class="lead">{lead}{_tried(view.what_ifs)}</p>'
        f"<ol>{items}</ol></section>"
    )


def trust_part(view: PageView) -> str:
    """How sure the answer is for steps like this one, and the published run that is most like it."""
    nearest = _nearest(view.nearest) if view.nearest is not None else ""
    if not (view.trust.experience or nearest):
        return ""
    return f'<section class="sure"><h2>How sure</h2><p>{escape(view.trust.experience)}</p>{nearest}</section>'


def rate_words(tokens: float) -> str:
    """Tokens per second: whole ones where there are many."""
    return f"{tokens:,.0f}" if tokens >= 1000 else format_number(tokens)


def _step(verdict: Verdict) -> str:
    return (
        f'<div class="step"><b>{_large(format_step_time(verdict.step_time))}</b><span>{_per_step(verdict)}</span></div>'
    )


def _large(words: str) -> str:
    """A quantity with its units small beside its numbers."""
    parts = words.split(" ")
    pairs = zip(parts[::2], parts[1::2], strict=True)
    return " ".join(f"{number}<small>&nbsp;{unit}</small>" for number, unit in pairs)


def _per_step(verdict: Verdict) -> str:
    """What the step time is of, and between what it is expected."""
    words = "per training step"
    if verdict.steps is not None:
        words += f", the mean of {len(verdict.steps.times):,}<br>{escape(spread_words(verdict.steps.spread))}"
    if verdict.band is not None:
        words += f"<br>expected between <b>{' and '.join(map(format_step_time, verdict.band))}</b>"
    return words


def _speed(verdict: Verdict) -> str:
    return (
        f"<div><b>{rate_words(verdict.tokens_per_s_per_gpu)}<small>&nbsp;tokens/s per GPU</small></b>"
        f"<span>{rate_words(verdict.tokens_per_s)} tokens/s of all</span>"
        f"<b>{verdict.mfu:.1%}<small>&nbsp;MFU</small></b>"
        f"<span>{format_flops(verdict.model_flops_per_gpu)} per GPU</span></div>"
    )


def _fits(verdict: Verdict) -> str:
    share = verdict.peak_memory / verdict.memory_capacity if verdict.memory_capacity else 0.0
    words = "fits" if verdict.fits else "does not fit"
    sign = "✓" if verdict.fits else "✕"
    where = f" on {escape(verdict.worst_stage)}" if verdict.worst_stage else ""
    return (
        f'<div class="fits {"yes" if verdict.fits else "no"}">'
        f'<b><span aria-hidden="true">{sign}</span> {words}</b><em>{_headroom(verdict)}</em>'
        f'<div class="gauge"><i style="width:{min(1.0, share):.1%}"></i></div>'
        f"<span>{format_bytes(verdict.peak_memory)} of {format_bytes(verdict.memory_capacity)} "
        f"({share:.0%}){where}{_host(verdict)}</span></div>"
    )


def _headroom(verdict: Verdict) -> str:
    """What the fullest GPU has left, or lacks."""
    left = verdict.memory_capacity - verdict.peak_memory
    return f"{format_bytes(abs(left))} {'left' if left >= 0.0 else 'too much'}"


def _host(verdict: Verdict) -> str:
    """What the fullest host holds, if anything is offloaded."""
    if verdict.host is None:
        return ""
    held, capacity = map(format_bytes, verdict.host)
    return f"<br>{held} of {capacity} on the fullest host"


def _run(verdict: Verdict) -> str:
    """Time and money of the run, or of a trillion tokens where nobody said how many there are."""
    if verdict.economics is None:
        return ""
    lines = run_lines(verdict.economics) or trillion_lines(verdict.economics, verdict.gpu_hours)
    return f"<div>{''.join(f'<b>{_large(value)}</b><span>{escape(words)}</span>' for value, words in lines)}</div>"


def _tried(found: WhatIfs | None) -> str:
    """How much was tried of what might help: what was left out may help more."""
    if found is None or not found.tried:
        return ""
    tried = f"{len(found.tried)} of {len(found.cases)} changes"
    some = f"What helps was simulated: {tried}, each alone; percentages are of the time for the same work"
    return f"{some}. What if says why not the others." if found.untried else f"{some}."


def _loss(shown: ShownLoss) -> str:
    loss = shown.loss
    return (
        f"<li><p><b>{named(shown.look, loss.name)}</b>"
        f"<span>{format_seconds(loss.seconds)} · {share_words(loss.share)}</span></p>{_helps(shown.help)}</li>"
    )


def _helps(found: Help | None) -> str:
    """What makes a loss smaller; else what it hangs on."""
    if found is None:
        return ""
    if found.better:
        return f"<p>helps: {'; '.join(_change(*each) for each in found.better[:_HELPS])}</p>"
    if found.worse is not None:
        return f"<p>nothing that was tried helps; it hangs on this: {_change(*found.worse)}</p>"
    return "<p>nothing that was tried changes it</p>"


def _change(case: WhatIf, outcome: Outcome) -> str:
    return f"{escape(case.words)}: <b>{outcome.part:+.1%}</b>"


def _nearest(run: NearestRun) -> str:
    """The published run, how far its prediction was off, and in what it is unlike this one."""
    step = f"{format_step_time(run.measured)} a step measured"
    if run.predicted is not None and run.error is not None:
        step += f", {format_step_time(run.predicted)} predicted (<b>{run.error:+.1%}</b>)"
    told, more = run.differs[:_DIFFERENCES], len(run.differs) - _DIFFERENCES
    differs = ", ".join(told) + (f" and {more} more" if more > 0 else "")
    unlike = f"unlike this one in: {escape(differs)}" if differs else "this one, as far as it is told apart"
    return (
        f"<p>Nearest published run: <b>{escape(run.words)}</b>, {step}; {unlike}. "
        f'<small title="{escape(run.locator)}">Source: {escape(run.source)}, {escape(run.locator)}</small></p>'
    )
