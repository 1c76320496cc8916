"""What does the terminal say of a search? The layout to take and why, the best ones, and why the others are not."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Final

from clustersim.common.units import format_bytes, format_seconds, format_step_time
from clustersim.report.terminal.table import grid, text
from clustersim.results.search_result import FOLLOWING, Bounded, Found, Layout, keys_of

if TYPE_CHECKING:
    from rich.console import Group, RenderableType
    from rich.table import Table
    from rich.text import Text

STEP_TIME: Final = "step-time"
_PER: Final = {"cost": " per trillion tokens", "energy": " per trillion tokens", "run-cost": " for the run"}
_SUBJECT: Final = {"tokens-per-gpu": "tokens/s/GPU", "run-cost": "cost"}
_MOST_PARTS: Final = 4  # in which layouts differ
_MOST_REASONS: Final = 8
_LEAST: Final = 0.001  # of a step: parts that differ by less are not told


def render_search(found: Found, *, resumable: bool = False) -> "Group":
    """Something that rich prints: coloured on a terminal, plain elsewhere."""
    from rich.console import Group

    shown: list[RenderableType] = []
    if not found.complete:
        more = "; the same command goes on" if resumable else "; with --resume DIR it could go on"
        shown.append(text(f"stopped before the end{more}", "yellow"))
    if not found.simulated:
        return Group(*shown, text("nothing was simulated yet"))
    shown += [*_choice(found), text(""), *_best(found)]
    if len(found.of_jobs) > 1:
        jobs = (((of_job.cluster, f"{of_job.gpus:,}"), of_job, short(of_job, found)) for of_job in found.of_jobs)
        shown += [text(""), text("the best on each", "bold"), _table(("cluster", "GPUs"), found, jobs)]
    pruned = [(f"{item.count:,}", why, item.example.partition(": ")[2]) for why, item in found.pruned.items()]
    set_aside = grid(("", "set aside for", "such as"), pruned[:_MOST_REASONS], right=(0,))
    shown += [text(""), *_why(found), *_sure(found), text(""), text(counted(found)), set_aside]
    return Group(*shown)


def headline(found: Found) -> str:
    """The layout to take, and how it compares with the first guess."""
    choice = found.choice
    by = "" if found.objective == STEP_TIME else f", {found.score_words(choice.score)}{_PER.get(found.objective, '')}"
    against = "" if found.first is None else _against(found, found.first)
    return f"best layout: {format_step_time(choice.step_time)} a step{by}{against}"


def _against(found: Found, first: Layout) -> str:
    """How the layout to take compares with the first guess."""
    if first.headroom < 0.0:
        needed, there = format_bytes(first.peak_memory), format_bytes(first.memory)
        return f"; the file's own layout does not fit ({needed} of {there})"
    if found.choice.score == first.score:
        return ", the file's own layout"
    ratio = found.choice.score / first.score
    change = (1.0 / ratio if found.more_is_better else ratio) - 1.0
    if abs(change) < _LEAST:
        return ", as good as the file's own layout"
    subject = "" if found.objective == STEP_TIME else f" {_SUBJECT.get(found.objective, found.objective)}"
    return f", {change:+.1%}{subject} against the file's own layout"


def command(found: Found, layout: Layout, file: Path) -> str:
    """What runs a layout again."""
    sets = " ".join(f"--set {quote(item)}" for item in (*found.given, *layout.overrides))
    return f"clustersim run {quote(str(file))} {sets}"


def short(layout: Layout, found: Found) -> str:
    """What tells a layout from others, in few words; empty of the file's own."""
    return _words(shown_keys(layout, found))


def _words(keys: Mapping[str, str]) -> str:
    return ", ".join(pair_words(key, value) for key, value in keys.items())


def pair_words(key: str, value: str) -> str:
    """A key and its value; words that say all by themselves stand alone."""
    word = key.rpartition(".")[2]
    if word in ("schedule", "data", "name", "path"):
        return bare(value)
    if key == "cluster.gpus":
        return f"{int(value):,} GPUs"
    if key == "training.recompute" and value == "none":
        return "no recompute"
    return f"{word} {bare(value)}"


def bare(value: str) -> str:
    """A value that is a mapping, in few characters.

    >>> bare("{interleaved: {chunks: 4}}"), bare("{hsdp: {shard: 8}}"), bare("{layers: 2}")
    ('interleaved x 4', 'hsdp over 8', 'layers 2')
    """
    plain = value.translate(str.maketrans("", "", '{}"')).replace("interleaved: chunks: ", "interleaved x ")
    return plain.replace(": shard: ", " over ").replace("layers: ", "layers ")


def shown_keys(layout: Layout | Bounded, found: Found) -> dict[str, str]:
    """The keys that matter to people, with their values: what follows from others is left out."""
    hidden = set(FOLLOWING) - found.telling
    return {key: value for key, value in keys_of(layout).items() if key not in hidden and value != "null"}


def band_words(layout: Layout) -> str:
    """Between what and what a step is expected; the unit once where it is one."""
    low, high = map(format_step_time, layout.band)
    (first, unit), (_, other) = low.split(" "), high.split(" ")
    return f"{first}-{high}" if unit == other else f"{low}-{high}"


def counted(found: Found) -> str:
    """How many layouts there were, and what became of them."""
    aside = sum(pruned.count for pruned in found.pruned.values())
    extended = sum(layout.extended for layout in found.simulated)
    words = f" ({extended:,} of them with fewer microbatches)" if extended else ""
    return (
        f"{found.candidates:,} combinations: {aside:,} set aside, {len(found.bounded):,} cannot be among the best by "
        f"their bounds, {len(found.simulated):,} simulated{words}, in {format_seconds(found.wall)}"
    )


def differences(found: Found, other: Layout) -> str:
    """Which parts another layout has longer than the one to take, and which shorter."""
    least = _LEAST * found.choice.step_time
    parts = [(name, more) for name, more in found.why(other).items() if abs(more) >= least][:_MOST_PARTS]
    words = [f"{format_seconds(abs(more))} {'more' if more > 0 else 'less'} {name}" for name, more in parts]
    return ", ".join(words) if words else "no part differs by as much as a thousandth of the step"


def _choice(found: Found) -> "Iterator[Text]":
    tied = sum(layout.tied for layout in found.simulated)
    yield text(headline(found), "bold")
    yield text(short(found.choice, found))
    if run := run_words(found.choice):
        yield text(run)
    if tied > 1:
        plain = "the plainest of them" if found.preferred else "it is the plainest of them, too"
        yield text(f"{tied} layouts are as good, as far as runs of one and the same differ; {plain}", "dim")


def run_words(layout: Layout) -> str:
    """What becomes of a whole run with what breaks; empty where nobody asked."""
    run = layout.run
    if run is None:
        return ""
    spares = run["spare_nodes"]
    return (
        f"{run['days']:.1f} days with what breaks, goodput {run['goodput']:.1%}, {spares:,} spare "
        f"node{'' if spares == 1 else 's'}, a checkpoint every {format_seconds(run['interval'])}"
    )


def _best(found: Found) -> "Iterator[RenderableType]":
    """The best, by the keys in which they differ; the others are said once."""
    keys = [shown_keys(layout, found) for layout in found.best]
    common = dict(item for item in keys[0].items() if all(item in others.items() for others in keys))
    rows = []
    for place, element in enumerate(found.best):
        taken = element is found.choice
        mark = "*" if taken else "=" if element.tied else " "
        own = _words({key: value for key, value in keys[place].items() if key not in common})
        rows.append(((f"{(found.preferred if taken else place) + 1}{mark}",), element, own))
    if found.first is not None:
        rows.append((("file ",), found.first, "as it is"))
    yield _table(("",), found, rows)
    if common:
        yield text(f"all of them: {_words(common)}", "dim")


def _numbers(layout: Layout, found: Found) -> dict[str, str]:
    """What is compared, by its head."""
    by = {} if found.objective == STEP_TIME else {found.objective: found.score_words(layout.score)}
    step, memory = format_step_time(layout.step_time), format_bytes(layout.peak_memory)
    return {"step": step, "expected": band_words(layout), **by, "MFU": f"{layout.mfu:.1%}", "memory": memory}


def _table(before: Sequence[str], found: Found, rows: Iterable[tuple[Sequence[str], Layout, str]]) -> "Table":
    """Rows of what stands before a layout's numbers, the layout, and its words. before: heads of the first."""
    heads = (*before, *_numbers(found.choice, found), "layout")
    cells = [(*first, *_numbers(layout, found).values(), words) for first, layout, words in rows]
    return grid(heads, cells, right=range(len(heads) - 1))


def _why(found: Found) -> "Iterator[Text]":
    if (other := found.runner_up) is not None:
        yield text(f"the next, {short(other, found)}: {differences(found, other)}")
    if found.first is not None:
        yield text(f"the file's own layout: {differences(found, found.first)}")


def _sure(found: Found) -> "Iterator[Text]":
    """Whether the layout to take stays the best of its rivals where something is other than supposed."""
    told = [change for change in found.changes if change.scores and change.scores[0] is not None]
    if len(found.rivals) < 2 or not told:
        return
    lost = found.overtaken
    words = f"another is better with {'; '.join(lost)}" if lost else "no other is better with any of these"
    yield text(f"with {'; '.join(change.words for change in told)}: {words}")
