"""How are the rounds of local training (DiLoCo) summarized on the terminal?"""

from typing import TYPE_CHECKING, Final

from clustersim.common.units import format_bandwidth, format_bytes, format_step_time
from clustersim.report.terminal.table import build_table, plain_text
from clustersim.results.outer_rounds import CONVERGENCE_NOTE, OuterRounds

if TYPE_CHECKING:
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

REPLICA_COLUMNS: Final = (
    "replica",
    "GPUs",
    "steps",
    "each",
    "in exchange",
    "waits for it",
    "for slower",
    "utilization",
)
ROUND_COLUMNS: Final = ("of a round", "value", "of which")
LINK_COLUMNS: Final = ("from", "to", "a round", "busy", "egress a round")
CHOICE_COLUMNS: Final = ("inner steps", "format", "fragments", "overlap", "utilization", "a link in a day")


def headline(result: OuterRounds) -> str:
    """A round in one sentence."""
    fits = "" if result.fits else "DOES NOT FIT in memory: "
    return (
        f"{fits}{result.name}: a round of {result.settings.inner_steps:,} inner steps takes "
        f"{format_step_time(result.round_seconds)}, utilization {result.utilization:.1%}, "
        f"{result.tokens_per_second:,.0f} tokens/s"
    )


def replica_rows(result: OuterRounds) -> list[tuple[str, ...]]:
    """A row for each replica; columns: `REPLICA_COLUMNS`."""
    return [
        (
            replica.name,
            f"{replica.gpus:,}",
            f"{result.inner_steps(replica):,}",
            format_step_time(replica.step_time),
            format_step_time(replica.overlapped_step_time),
            format_step_time(result.waits(replica).exchange),
            format_step_time(result.waits(replica).slower),
            f"{result.replica_utilization(replica):.1%}",
        )
        for replica in result.replicas
    ]


def link_rows(result: OuterRounds) -> list[tuple[str, ...]]:
    """A row for each link between sites; columns: `LINK_COLUMNS`."""
    return [
        (
            link.source,
            link.target,
            format_bytes(link.sent_bytes),
            f"{link.busy:.1%}",
            f"{link.cost:,.2f} USD" if link.cost else "",
        )
        for link in result.links
    ]


def render_outer_rounds(result: OuterRounds) -> "Group":
    """Headline, times of a round, sites, and links."""
    from rich.console import Group

    return Group(
        plain_text(headline(result), "bold"),
        build_table(("", "", ""), round_rows(result), (1,)),
        plain_text(""),
        build_table(REPLICA_COLUMNS, replica_rows(result), range(1, 8)),
        plain_text(""),
        *_link_table(result),
        *_choice_table(result),
        plain_text(CONVERGENCE_NOTE, "dim"),
    )


def round_rows(result: OuterRounds) -> list[tuple[str, str, str]]:
    """What a round takes and needs; columns: `ROUND_COLUMNS`."""
    fragments, overlap = result.settings.fragments, result.settings.overlap
    state = result.outer_bytes_per_gpu or result.host_bytes_per_gpu
    location = "in its host's memory" if result.settings.offload else "of GPU memory"
    return [
        ("inner steps", format_step_time(result.inner_seconds), f"of {result.pacer.name}, {_pace_clause(result)}"),
        (
            "exchange",
            format_step_time(result.exchange_seconds),
            f"each of {fragments} fragments" * (fragments > 1)
            + ", " * (fragments > 1 and overlap > 0)
            + f"overlapped with {overlap} inner step{'s' * (overlap > 1)}" * (overlap > 0),
        ),
        ("waiting for it", format_step_time(result.exposed_seconds), "in a round"),
        ("outer optimizer", format_step_time(result.optimizer_seconds), "in a round"),
        (
            "outer gradients",
            format_bytes(result.payload),
            f"{result.settings.outer_gradients.value}, {result.algorithm} among GPUs of all replicas",
        ),
        ("outer state", format_bytes(state), f"{location}, on each GPU"),
        (
            "peak memory",
            format_bytes(result.peak_memory),
            f"of {format_bytes(result.memory_capacity)}, outer state included",
        ),
        ("GPUs' utilization", f"{result.gpu_utilization:.1%}", "mean of all GPUs"),
        *_cost_rows(result),
        *_outage_rows(result),
        *(_need_row(result, utilization, factor) for utilization, factor in result.bandwidth_needs),
    ]


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


def _link_table(result: OuterRounds) -> "tuple[Table | Text, ...]":
    if not result.links:
        return ()
    return build_table(LINK_COLUMNS, link_rows(result), range(2, 5)), plain_text("")


def _choice_table(result: OuterRounds) -> "tuple[Table | Text, ...]":
    if not result.choices:
        return ()
    title = plain_text("settings that reach the utilization, fewest inner steps first", "bold")
    return title, build_table(CHOICE_COLUMNS, choice_rows(result), (0, 2, 3, 4, 5)), plain_text("")


def _pace_clause(result: OuterRounds) -> str:
    """Why the replica sets the pace."""
    quorum, count = result.settings.quorum, len(result.replicas)
    if quorum is None or quorum == count:
        return "the slowest"
    return f"the slowest of a quorum of {quorum} of {count}"


def _cost_rows(result: OuterRounds) -> list[tuple[str, str, str]]:
    """What all GPUs and links cost, and how long the training takes without failures."""
    rows, price, days = [], result.price_per_second, result.run_days()
    if price is not None:
        per_hour = f"{price.amount * 3600.0:,.2f} {price.currency}"
        tokens = result.tokens_per_second / price.amount
        rows.append(("cost an hour", per_hour, f"{tokens:,.0f} tokens/{price.currency}, egress included"))
    if days is not None:
        rows.append(("all tokens", f"{days:,.1f} days", f"{result.run_tokens:.3g} tokens without failures"))
    return rows


def _outage_rows(result: OuterRounds) -> list[tuple[str, str, str]]:
    """Goodput over some days with failures."""
    outages = result.outages
    if outages is None:
        return []
    waiting, with_quorum = (share * result.gpu_utilization for share in (outages.waiting, outages.with_quorum))
    quorum = "any replica" if outages.quorum == 1 else f"{outages.quorum} replicas"
    return [
        (
            f"goodput, {outages.days:g} days",
            f"{waiting:.1%}",
            f"all wait for an absent replica{_days_clause(result, outages.waiting)}; mean of {outages.runs} runs",
        ),
        ("", f"{with_quorum:.1%}", f"rounds go on with {quorum}{_days_clause(result, outages.with_quorum)}"),
    ]


def _days_clause(result: OuterRounds, goodput: float) -> str:
    days = result.run_days(goodput)
    return "" if days is None else f", {days:,.1f} days for all tokens"


def _need_row(result: OuterRounds, utilization: float, factor: float | None) -> tuple[str, str, str]:
    name = f"for {utilization:.0%}"
    if factor is None:
        return name, "", "no bandwidth of the links between sites is enough"
    slowest = min(link.bandwidth for link in result.links)
    return name, format_bandwidth(factor * slowest), f"on the slowest link between sites, {factor:.3g} times as much"
