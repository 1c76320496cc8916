"""How are the rounds of local training (DiLoCo) summarized on the terminal?"""

from typing import TYPE_CHECKING, Final

from clustersim.common.units import format_bandwidth, format_bytes, format_step_time
from clustersim.report.terminal.table import build_table, plain_text
from clustersim.results.outer_rounds import OuterRounds

if TYPE_CHECKING:
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

CHOICE_COLUMNS: Final = ("inner steps", "format", "fragments", "overlap", "utilization", "a link in a day")
CONVERGENCE_NOTE: Final = (
    "Convergence is not simulated: what fewer exchanges cost in loss is published, see arXiv:2503.09799 (loss against "
    "inner steps and replicas) and arXiv:2501.18512 (fragments, overlap, formats)."
)


def headline(result: OuterRounds) -> str:
    """A round in one sentence."""
    fits = "" if result.fits else "DOES NOT FIT in memory: "
    return (
        f"{fits}{result.name}: a round of {result.settings.inner_steps:,} inner steps takes "
        f"{format_step_time(result.round_seconds)}, utilization {result.utilization:.1%}, "
        f"{result.tokens_per_second:,.0f} tokens/s"
    )


def render_outer_rounds(result: OuterRounds) -> "Group":
    """Headline, times of a round, sites, and links."""
    from rich.console import Group

    return Group(
        plain_text(headline(result), "bold"),
        _round_table(result),
        plain_text(""),
        build_table(
            ("site", "GPUs", "sequences", "inner step", "in exchanges", "utilization"),
            [
                (
                    site.name,
                    f"{site.gpus:,}",
                    f"{site.sequences:,}",
                    format_step_time(site.step_time),
                    format_step_time(site.overlapped_step_time),
                    f"{result.site_utilization(site):.1%}",
                )
                for site in result.sites
            ],
            range(1, 6),
        ),
        plain_text(""),
        build_table(
            ("from", "to", "a round", "busy", "egress a round"),
            [
                (
                    link.source,
                    link.target,
                    format_bytes(link.sent_bytes),
                    f"{link.busy:.1%}",
                    f"{link.cost:,.2f} USD" if link.cost else "",
                )
                for link in result.links
            ],
            range(2, 5),
        ),
        plain_text(""),
        *_choice_table(result),
        plain_text(CONVERGENCE_NOTE, "dim"),
    )


def _round_table(result: OuterRounds) -> "Table":
    fragments, overlap = result.settings.fragments, result.settings.overlap
    state = result.outer_bytes_per_gpu or result.host_bytes_per_gpu
    location = "in its host's memory" if result.settings.offload else "of GPU memory"
    rows = [
        ("inner steps", format_step_time(result.inner_seconds), ""),
        (
            "exchange",
            format_step_time(result.exchange_seconds),
            f"each of {fragments} fragments" * (fragments > 1)
            + ", " * (fragments > 1 and overlap > 0)
            + f"overlapped with {overlap} inner steps" * (overlap > 0),
        ),
        ("waiting for it", format_step_time(result.exposed_seconds), "in a round"),
        ("outer optimizer", format_step_time(result.optimizer_seconds), "in a round"),
        (
            "outer gradients",
            format_bytes(result.payload),
            f"{result.settings.outer_gradients.value}, {result.algorithm} among GPUs of all sites",
        ),
        ("outer state", format_bytes(state), f"{location}, on each GPU"),
        (
            "peak memory",
            format_bytes(result.peak_memory),
            f"of {format_bytes(result.memory_capacity)}, outer state included",
        ),
        *_outage_rows(result),
        *(_need_row(result, utilization, factor) for utilization, factor in result.bandwidth_needs),
    ]
    return build_table(("", "", ""), rows, (1,))


def choice_rows(result: OuterRounds) -> list[tuple[str, ...]]:
    """A row for each of the settings that reach the asked utilization; columns: `CHOICE_COLUMNS`."""
    return [
        (
            f"{choice.settings.inner_steps:,}",
            choice.settings.outer_gradients.value,
            f"{choice.settings.fragments:,}",
            f"{choice.settings.overlap:,}",
            f"{choice.rounds.utilization:.1%}",
            format_bytes(choice.bytes_per_day),
        )
        for choice in result.choices
    ]


def _choice_table(result: OuterRounds) -> "tuple[Table | Text, ...]":
    if not result.choices:
        return ()
    title = plain_text("settings that reach the utilization, fewest inner steps first", "bold")
    return title, build_table(CHOICE_COLUMNS, choice_rows(result), (0, 2, 3, 4, 5)), plain_text("")


def _outage_rows(result: OuterRounds) -> list[tuple[str, str, str]]:
    """Goodput over some days with failures."""
    outages = result.outages
    if outages is None:
        return []
    return [
        (
            f"goodput, {outages.days:g} days",
            f"{outages.waiting * result.utilization:.1%}",
            f"all wait for an absent replica; mean of {outages.runs} runs",
        ),
        ("", f"{outages.without_absent * result.utilization:.1%}", "rounds go on without the absent ones"),
    ]


def _need_row(result: OuterRounds, utilization: float, factor: float | None) -> tuple[str, str, str]:
    name = f"for {utilization:.0%}"
    if factor is None:
        return name, "", "no bandwidth of the links between sites is enough"
    slowest = min(link.bandwidth for link in result.links)
    return name, format_bandwidth(factor * slowest), f"on the slowest link between sites, {factor:.3g} times as much"
