"""How does an answer look on a terminal? The step time first, then what it is made of, then how far to trust it."""

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from clustersim.units import format_bytes, format_seconds

_BAR = 24  # characters of the longest share


def print_answer(console: Console, title: str, answer: Mapping[str, Any]) -> None:
    """Print the numbers of `Result.to_json()`."""
    console.print(Text.assemble((f"{format_seconds(answer['step_time_s'])} per step", "bold"), f"  {title}"))
    console.print(_numbers(answer))
    console.print(_breakdown(answer))
    console.print(_trust(answer), highlight=False)
    for warning in answer["warnings"]:
        console.print(Text(f"warning: {warning}", style="yellow"), soft_wrap=True)


def _grid() -> Table:
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column()
    table.add_column(justify="right")
    table.add_column(style="dim")
    return table


def _numbers(answer: Mapping[str, Any]) -> Table:
    table = _grid()
    table.add_row("tokens/s", f"{answer['tokens_per_s']:,.0f}", f"{answer['tokens_per_s_per_gpu']:,.1f} per GPU")
    table.add_row("model TFLOP/s per GPU", f"{answer['model_tflops_per_gpu']:,.1f}", "")
    table.add_row("MFU", f"{answer['mfu']:.1%}", f"HFU {answer['hfu']:.1%}")
    table.add_row("pipeline bubble", f"{answer['bubble_fraction']:.1%}", "")
    table.add_row("exposed communication", f"{answer['exposed_communication_fraction']:.1%}", "")
    capacity = f"of {format_bytes(answer['memory_capacity_bytes'])}: "
    verdict = Text("fits", "green") if answer["fits"] else Text("does not fit", "bold red")
    table.add_row("peak memory", format_bytes(answer["peak_memory_bytes"]), Text(capacity) + verdict)
    return table


def _breakdown(answer: Mapping[str, Any]) -> Table:
    table = _grid()
    parts = {name: seconds for name, seconds in answer["breakdown_s"].items() if seconds > 0}
    longest = max(parts.values(), default=1.0)
    for name, seconds in parts.items():
        share = seconds / answer["step_time_s"]
        bar = "█" * max(1, round(_BAR * seconds / longest))
        table.add_row(name.replace("_", " "), format_seconds(seconds), f"{share:6.1%} {bar}")
    return table


def _trust(answer: Mapping[str, Any]) -> str:
    shares = ", ".join(f"{share:.0%} {name}" for name, share in answer["provenance_share"].items() if share > 0)
    return (
        f"durations: {shares}; {answer['simulated_ranks']:,} of {answer['ranks']:,} ranks simulated, "
        f"{answer['spans']:,} spans in {format_seconds(answer['simulate_wall_s'])}"
    )
