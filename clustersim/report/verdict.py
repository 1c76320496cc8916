"""What is the answer, before any picture? The card at the top of the page, and the lines at its foot, as HTML.

What decides comes first (`deciding`); all other numbers, and the conventions that they follow, below it.
"""

from html import escape

from clustersim.analysis.utilization import masked
from clustersim.report.deciding import losses_part, rate_words, tiles, trust_part
from clustersim.report.economics import UNKNOWN, cost_line, energy_line, power_words, price_words
from clustersim.report.figure import share_words
from clustersim.report.view import PageView, Subject, Trust, Verdict
from clustersim.report.wording import PROVENANCE_MEANINGS, PROVENANCE_NAMES, formats_words, narrow_peak_words
from clustersim.units import format_flops, format_seconds, format_step_time


def verdict_card(view: PageView) -> str:
    """The step time in large, whether it fits, and the figures that people compare."""
    return (
        '<section class="card verdict" aria-label="verdict">'
        f"<h1>{escape(view.subject.title)}</h1>"
        f'<p class="subject">{escape(view.subject.model)} on {view.trust.ranks:,} × {escape(view.subject.gpu)}'
        f" ({escape(view.subject.cluster)})<br>{escape(view.subject.layout)}"
        f"{_placed(view.subject)}{_disturbed(view.subject)}</p>"
        f"{tiles(view.verdict)}{_suggestions(view.trust)}"
        f'<div class="two">{losses_part(view)}{trust_part(view)}</div>{_alerts(view.trust)}'
        f'<h2>In numbers</h2><dl class="numbers">{"".join(_number(*number) for number in _numbers(view.verdict))}</dl>'
        f'<p class="convention">{escape(view.verdict.convention)}</p>'
        f'<p class="convention">{escape(_rests_on(view.trust))}</p>{_not_modelled(view.trust)}</section>'
    )


def foot(view: PageView) -> str:
    """Where the durations come from, and how much was simulated."""
    trust = view.trust
    simulated = (
        f"{trust.simulated_ranks:,} of {trust.ranks:,} ranks were simulated, {trust.spans:,} spans; "
        "ranks that provably do the same run once."
        if trust.simulated_ranks < trust.ranks
        else f"All {trust.ranks:,} ranks were simulated, {trust.spans:,} spans."
    )
    notes = "".join(f"<p>{escape(note)}</p>" for note in view.notes)
    return f"<h3>Where the durations come from</h3>{_provenance(trust)}{_steps(trust)}<p>{simulated}</p>{notes}"


def _placed(subject: Subject) -> str:
    return f"<br>placed on {escape(subject.placement)}" if subject.placement else ""


def _disturbed(subject: Subject) -> str:
    return f'<br><b class="disturbed">disturbed:</b> {escape(subject.disturbed)}' if subject.disturbed else ""


def _rests_on(trust: Trust) -> str:
    """From what durations come, in a line."""
    shares = [f"{share_words(share)} {PROVENANCE_NAMES[source]}" for source, share in trust.provenance.items()]
    return f"Durations, by busy time: {'; '.join(shares)}." if shares else ""


def _not_modelled(trust: Trust) -> str:
    """What the answer leaves out, folded until asked for; a printed page has it open."""
    items = "".join(f"<li>{escape(item)}</li>" for item in trust.not_modelled)
    if not items:
        return ""
    return (
        f'<details class="missing"><summary>Not modelled: {len(trust.not_modelled)}</summary><ul>{items}</ul></details>'
    )


def _numbers(verdict: Verdict) -> list[tuple[str, str, str]]:
    rate, unit = format_flops(verdict.model_flops_per_gpu).split()
    peak = narrow_peak_words(verdict.formats)
    return [
        ("MFU", f"{verdict.mfu:.1%}", f"model FLOP utilisation, attention as a full matrix{peak}"),
        *_causal(verdict),
        *_formats(verdict),
        ("HFU", f"{verdict.hfu:.1%}", "hardware FLOP utilisation: recomputation counts"),
        (f"{unit} per GPU", rate, "model FLOP per second and GPU"),
        ("tokens/s", rate_words(verdict.tokens_per_s), "of the whole cluster"),
        ("tokens/s/GPU", rate_words(verdict.tokens_per_s_per_gpu), "of one GPU"),
        ("GPU hours", f"{verdict.gpu_hours:,.0f}", "of all GPUs, for a trillion tokens"),
        *_economics(verdict),
        ("bubble", f"{verdict.bubble_fraction:.1%}", "share of the step in which a stage waits for the pipeline"),
        (
            "exposed comm",
            f"{verdict.exposed_communication_fraction:.1%}",
            "share of the step spent in communication alone",
        ),
        *_experts(verdict),
    ]


def _economics(verdict: Verdict) -> list[tuple[str, str, str]]:
    """Money and energy of a trillion tokens, as far as they are known."""
    if verdict.economics is None:
        return []
    lines = (cost_line(verdict.economics), energy_line(verdict.economics))
    further = (price_words(verdict.economics), power_words(verdict.economics))
    return [
        (f"{name}/T tokens", value, ". ".join(filter(None, (meaning, more))))
        for (name, value, meaning), more in zip(lines, further, strict=True)
        if value != UNKNOWN
    ]


def _formats(verdict: Verdict) -> list[tuple[str, str, str]]:
    """Of products, and what casts cost, where there are several."""
    found = verdict.formats
    if found is None:
        return []
    wide, of_wide = found.wide.value, found.of_wide(verdict.mfu)
    casts = f"share of the step in which operands are cast, {format_seconds(found.casts)}"
    return [
        (f"MFU, {wide} peak", f"{of_wide:.1%}", f"of {format_flops(found.wide_flops)}, as tables for {wide} have it"),
        ("casts", f"{found.casts / verdict.step_time:.1%}", casts),
        (f"FLOP in {found.peak.value}", f"{found.shares[found.peak]:.0%}", f"of products: {formats_words(found)}"),
    ]


def _experts(verdict: Verdict) -> list[tuple[str, str, str]]:
    """Of the fullest ranks, if loads are uneven."""
    fullest = verdict.experts
    if fullest is None:
        return []
    meaning = f"rows of a layer's fullest rank over the mean; over all its layers rank {fullest.rank:,} is the fullest"
    return [("fullest experts", f"{fullest.layer:.2f}x", f"{meaning}, {fullest.rows:.2f}x")]


def _causal(verdict: Verdict) -> list[tuple[str, str, str]]:
    """MFU with causal attention, where it is another number."""
    if not masked(verdict.mfu, verdict.mfu_causal):
        return []
    return [
        ("MFU, causal", f"{verdict.mfu_causal:.1%}", "model FLOP utilisation, attention as its causal mask leaves it")
    ]


def _number(name: str, value: str, meaning: str) -> str:
    return f'<div title="{escape(meaning)}"><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>'


def _alerts(trust: Trust) -> str:
    items = "".join(f"<li>{escape(warning)}</li>" for warning in trust.warnings)
    return f'<ul class="alerts">{items}</ul>' if items else ""


def _suggestions(trust: Trust) -> str:
    items = "".join(f"<li>{escape(suggestion)}</li>" for suggestion in trust.suggestions)
    return f'<div class="suggestions"><h3>What would make it fit</h3><ul>{items}</ul></div>' if items else ""


def _provenance(trust: Trust) -> str:
    rows = "".join(
        f'<tr><th scope="row">{escape(PROVENANCE_NAMES[source])}</th><td class="gauge-cell">'
        f'<div class="gauge"><i style="width:{share:.1%}"></i></div></td><td>{share_words(share)}</td></tr>'
        f'<tr class="meaning"><td colspan="3">{escape(PROVENANCE_MEANINGS[source])}</td></tr>'
        for source, share in trust.provenance.items()
    )
    return f'<table class="provenance">{rows}</table>'


def _steps(trust: Trust) -> str:
    """Real steps that the record predicted, if it did."""
    if not trust.steps:
        return ""
    heads = "".join(f'<th scope="col">{word}</th>' for word in ("real step", "predicted", "measured", "error"))
    rows = "".join(
        f'<tr><th scope="row">{escape(step.what)}</th><td>{format_step_time(step.predicted)}</td>'
        f"<td>{format_step_time(step.measured)}</td><td>{step.error:+.1%}</td></tr>"
        for step in trust.steps
    )
    return (
        "<h3>Real steps that the record predicted</h3>"
        '<p class="caption">Run on one device at the end of its calibration; it was not measured for them. In the '
        "band the largest error stands for what rests on its kernels.</p>"
        f'<table class="tried"><thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table>'
    )
