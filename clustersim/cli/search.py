"""What does `clustersim search` do? Look for the best layouts of a scenario's job, and say why they are."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from json import dumps
from pathlib import Path
from typing import TYPE_CHECKING, Final

from clustersim.cli.outputs import Outputs, announce, write_json
from clustersim.cli.progress import following
from clustersim.common.data_files import parse_yaml
from clustersim.common.errors import InputError
from clustersim.scenario import Scenario

if TYPE_CHECKING:
    from clustersim.planning.layouts import Space
    from clustersim.results.search_result import Found, Layout

_FEW: Final = 64  # layouts for which another process is not worth its start


@dataclass(frozen=True, slots=True)
class Choice:
    """Options as they were typed. workers: None for one per core; resume: a folder."""

    fix: tuple[str, ...] = ()
    vary: tuple[str, ...] = ()
    gpus: str = ""
    clusters: str = ""
    batch_per_gpu: bool = False
    objective: str = "step-time"
    top: int = 10
    workers: int | None = None
    resume: str | None = None
    executor: str = "local"


def search_layouts(file: Path, overrides: Sequence[str], choice: Choice, outputs: Outputs) -> bool:
    """Search, print and write what was found; whether it was all looked at."""
    from clustersim.planning.layouts import Search
    from clustersim.planning.layouts.executors import executor_at
    from clustersim.planning.layouts.objective import objective_named

    scenario = Scenario.load(file, overrides)
    outputs.require((file, *scenario.files))
    objective, space = objective_named(choice.objective), space_of(scenario, choice)
    store = None if choice.resume is None else Path(choice.resume)
    workers = choice.workers or (1 if space.size < _FEW else os.cpu_count() or 1)
    with executor_at(choice.executor, workers) as (executor, many), following("weighing layouts") as tell:

        def progress(what: str, done: int, of: int, best: "Layout | None") -> None:
            from clustersim.common.units import format_step_time

            words = "" if best is None else f" (best so far {format_step_time(best.step_time)})"
            tell(f"{what}{words}", done, of)

        searched = Search(space, choice.top, objective, many, store, executor).run(progress)
    found = replace(searched, given=tuple(overrides))
    if outputs.json is not None:
        write_json(found.to_json(), outputs.json)
    if outputs.html is not None:
        _write_page(found, file, outputs.html)
    if outputs.table:
        _print(found, file, choice)
        for path in outputs.files.values():
            announce(path)
    return found.complete


def space_of(scenario: Scenario, choice: Choice) -> "Space":
    """The space that options name."""
    from clustersim.planning.layouts import Space

    fixed = _pairs("--fix", choice.fix)
    varied = {key: _values(key, text) for key, text in _pairs("--vary", choice.vary).items()}
    clusters = [name for name in choice.clusters.split(",") if name]
    return Space.of(
        scenario, fixed, varied, gpus=_numbers(choice.gpus), clusters=clusters, batch_per_gpu=choice.batch_per_gpu
    )


def _pairs(option: str, texts: Sequence[str]) -> dict[str, str]:
    """Keys with what is said of each."""
    found: dict[str, str] = {}
    for key, value in (_pair(option, text) for text in texts):
        if key in found:
            raise InputError(
                f"{option} {key}: is given twice; all values go into one: --vary {key}={found[key]},{value}"
            )
        found[key] = value
    return found


def _pair(option: str, text: str) -> tuple[str, str]:
    key, sign, value = text.partition("=")
    if not sign or not key.strip() or not value.strip():
        example = "layout.tp=8" if option == "--fix" else "layout.tp=1,2,4"
        raise InputError(f"{option} {text}: write a dotted key and a value, such as {option} {example}")
    return key.strip(), value.strip()


def _values(key: str, text: str) -> list[str]:
    """The values of a list with commas, of which mappings are one."""
    try:
        values = parse_yaml(f"[{text}]")
    except InputError as error:
        raise InputError(f"--vary {key}={text}: {error}") from error
    listed = values if isinstance(values, list) else [values]
    return [item if isinstance(item, str) else dumps(item) for item in listed]


def _numbers(text: str) -> list[int]:
    found = []
    for item in (element.strip().replace("_", "") for element in text.split(",") if text):
        if not item.isdecimal() or int(item) < 1:
            raise InputError(f"--gpus {text}: {item!r} is not a number of GPUs; write such as --gpus 4096,8192")
        found.append(int(item))
    return found


def _write_page(found: "Found", file: Path, path: str) -> None:
    from clustersim.common.files import write_text_atomically
    from clustersim.report.search_page import search_page

    write_text_atomically(path, search_page(found, file))


def _print(found: "Found", file: Path, choice: Choice) -> None:
    from rich.console import Console
    from rich.text import Text

    from clustersim.report.terminal.search import command, render_search

    console = Console()
    console.print(render_search(found, resumable=choice.resume is not None))
    if found.simulated:
        console.print(Text(f"to run it: {command(found, found.choice, file)}", style="cyan"), soft_wrap=True)
