"""Which commands are there, and which options do they take?

Exit status: 0 success and the scenario fits in memory, 2 invalid input or an output that cannot be
written, 3 the scenario does not fit (results are printed all the same). Heavy modules are imported by the
command that needs them, so that `--help` is fast.
"""

import io
import os
import signal
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import typer

from clustersim.cli import completion
from clustersim.common.errors import ClusterSimError, OutputError
from clustersim.common.gc_control import raise_gc_threshold

EXIT_BAD_INPUT = 2
EXIT_DOES_NOT_FIT = 3

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="How long does a training step take on a cluster, where does the time go, and does it fit?",
)


def _override_option(*names: str, help: str, metavar: str = "KEY=VALUE") -> Any:  # noqa: A002 - typer's word
    """A typer option that takes scenario keys, with shell completion of the dotted keys."""
    return typer.Option(*names, metavar=metavar, help=help, autocompletion=completion.complete_override_key)


ScenarioFile = Annotated[
    Path, typer.Argument(metavar="FILE", help="Scenario, YAML or JSON.", autocompletion=completion.complete_data_file)
]
Overrides = Annotated[
    list[str] | None,
    _override_option("--set", help="Change one key of the scenario, e.g. layout.tp=4; repeatable."),
]
Html = Annotated[str | None, typer.Option("--html", metavar="FILE", help="Write a page to look at, offline.")]


def main() -> None:
    """Run the command line. A user error is printed as one sentence on stderr; the exit status is then 2."""
    raise_gc_threshold()
    _prepare_streams()
    try:
        _run_app()
    except ClusterSimError as error:
        from clustersim.cli.outputs import print_error

        print_error(error)
        raise SystemExit(EXIT_BAD_INPUT) from None


def _prepare_streams() -> None:
    """Make printing robust against characters the terminal lacks, closed streams and `| head`."""
    if hasattr(signal, "SIGPIPE"):
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # end like other tools when the reader of a pipe closes it
    sys.stdout = sys.stdout or Path(os.devnull).open("w")  # noqa: SIM115 - None where the shell closed it (>&-)
    sys.stderr = sys.stderr or Path(os.devnull).open("w")  # noqa: SIM115
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")


def _run_app() -> None:
    """Run the command and flush stdout; raise OutputError where stdout cannot be written, as on a full disk."""
    try:
        try:
            app(prog_name="clustersim")  # the name under which shells request completions, however it was started
        finally:
            sys.stdout.flush()
    except OSError as error:
        if error.filename is not None:
            raise
        os.dup2(
            os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno()
        )  # otherwise Python flushes stdout again at exit and fails again
        raise OutputError(f"standard output cannot be written ({error.strerror})") from error


def _show_version(is_requested: bool) -> None:
    if is_requested:
        typer.echo(f"clustersim {version('clustersim')}")
        raise typer.Exit


@app.callback()
def _options(
    _version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_show_version, help="Show the version and exit.")
    ] = False,
) -> None:
    """Options that are not a command's."""


@app.command()
def run(
    file: ScenarioFile,
    overrides: Overrides = None,
    json: Annotated[str | None, typer.Option(metavar="FILE", help="Write the numbers as JSON; - is stdout.")] = None,
    html: Html = None,
    trace: Annotated[str | None, typer.Option(metavar="FILE", help="Write a trace for ui.perfetto.dev.")] = None,
    kineto: Annotated[
        str | None, typer.Option(metavar="DIR", help="Write a trace per rank, as PyTorch's profiler does.")
    ] = None,
    spans: Annotated[
        str | None, typer.Option(metavar="FILE", help="Write all spans as a table: .csv, .parquet or .arrow.")
    ] = None,
    ranks: Annotated[
        str,
        typer.Option(
            metavar="RANKS", help="Of which ranks traces are, e.g. 0:8,stage:3,slowest:4; default: one of each kind."
        ),
    ] = "",
    force: Annotated[bool, typer.Option("--force", help="Write traces of more than 1 GiB, too.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print no table.")] = False,
    watch: Annotated[
        bool,
        typer.Option("--watch", help="Answer again whenever FILE, or a file that it names, is saved; Ctrl-C ends."),
    ] = False,
) -> None:
    """Simulate training steps and print where the time goes."""
    from clustersim.cli.outputs import Outputs, TraceOptions

    trace_options = TraceOptions(ranks, force)
    outputs = Outputs(
        json=json,
        html=html,
        trace=trace,
        kineto=kineto,
        spans=spans,
        trace_options=trace_options,
        table=not quiet and json != "-",
    )
    if watch:
        from clustersim.cli.watch import run_watched

        run_watched(file, overrides or [], outputs)
        return
    from clustersim.cli.run import run_scenario

    _exit_with_status(fits=run_scenario(file, overrides or [], outputs))


@app.command()
def check(file: ScenarioFile, overrides: Overrides = None) -> None:
    """Say whether a scenario is legal and fits in memory, without simulating it."""
    from clustersim.cli.check import check_scenario

    _exit_with_status(fits=check_scenario(file, overrides or []))


@app.command()
def coverage(
    file: ScenarioFile,
    overrides: Overrides = None,
    json: Annotated[str | None, typer.Option(metavar="FILE", help="Write the list as JSON; - is stdout.")] = None,
    all_rows: Annotated[bool, typer.Option("--all", help="List what is measured, too.")] = False,
) -> None:
    """Show which kernels and collectives are not covered by the scenario's record, and what they weigh in the step."""
    from clustersim.cli.coverage import show_coverage

    show_coverage(file, overrides or [], json, include_measured=all_rows)


@app.command()
def diff(
    first: Annotated[
        Path,
        typer.Argument(
            metavar="A",
            help="Scenario, a result that `run --json` wrote, or traces of PyTorch's profiler (a file or a directory).",
            autocompletion=completion.complete_data_file,
        ),
    ],
    second: Annotated[
        Path | None,
        typer.Argument(
            metavar="[B]",
            help="The other; default: A with the changes. Of a trace: the scenario that predicts it.",
            autocompletion=completion.complete_data_file,
        ),
    ] = None,
    overrides: Annotated[
        list[str] | None,
        _override_option("--set", help="Change one key of B; repeatable."),
    ] = None,
    json: Annotated[str | None, typer.Option(metavar="FILE", help="Write the difference as JSON; - is stdout.")] = None,
    html: Html = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print no table.")] = False,
) -> None:
    """Say what is different between two scenarios or results, or a measured step and its prediction, and where."""
    from clustersim.cli.diff import show_difference
    from clustersim.cli.outputs import Outputs

    outputs = Outputs(json=json, html=html, table=not quiet and json != "-")
    _exit_with_status(fits=show_difference(first, second, overrides or [], outputs))


@app.command()
def explore(
    file: ScenarioFile,
    html: Annotated[str, typer.Option("--html", metavar="FILE", help="The page to write.")],
    overrides: Overrides = None,
) -> None:
    """Write an interactive page: memory, placement, bubbles and scaling as layouts and sizes change."""
    from clustersim.cli.explore import explore_scenario

    explore_scenario(file, overrides or [], html)


@app.command()
def search(
    file: ScenarioFile,
    overrides: Overrides = None,
    objective: Annotated[
        str,
        typer.Option(
            metavar="WHAT",
            help="What is the best: step-time, tokens-per-gpu, cost, energy, days, run-cost.",
            autocompletion=completion.complete_objective,
        ),
    ] = "step-time",
    gpus: Annotated[str, typer.Option(metavar="N,...", help="Sizes to compare, e.g. 4096,8192.")] = "",
    batch_per_gpu: Annotated[
        bool, typer.Option("--batch-per-gpu", help="The batch grows with --gpus; default: it stays.")
    ] = False,
    clusters: Annotated[
        str,
        typer.Option(
            metavar="NAME,...", help="Clusters to compare: gb200-nvl72,...", autocompletion=completion.complete_cluster
        ),
    ] = "",
    fix: Annotated[
        list[str] | None,
        _override_option(help="A key that does not vary; repeatable."),
    ] = None,
    vary: Annotated[
        list[str] | None,
        _override_option(help="A key and the values that it takes; repeatable.", metavar="KEY=V1,V2,..."),
    ] = None,
    top: Annotated[int, typer.Option(min=1, metavar="K", help="How many of the best.")] = 10,
    workers: Annotated[int | None, typer.Option(min=1, metavar="N", help="Processes; default: one per core.")] = None,
    executor: Annotated[
        str, typer.Option(metavar="local|dask://HOST:PORT", help="Where layouts are simulated.")
    ] = "local",
    resume: Annotated[
        str | None, typer.Option(metavar="DIR", help="Keep what is found out there, and go on from it.")
    ] = None,
    json: Annotated[str | None, typer.Option(metavar="FILE", help="Write what was found as JSON; - is stdout.")] = None,
    html: Html = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print no table.")] = False,
) -> None:
    """Look for the best layouts of a scenario's job; the one in the file is a first guess."""
    from clustersim.cli.outputs import EXIT_INTERRUPTED, Outputs
    from clustersim.cli.search import SearchOptions, search_layouts

    options = SearchOptions(
        tuple(fix or ()),
        tuple(vary or ()),
        gpus,
        clusters,
        batch_per_gpu,
        objective,
        top,
        workers,
        resume,
        executor,
    )
    outputs = Outputs(json=json, html=html, table=not quiet and json != "-")
    complete = search_layouts(file, overrides or [], options, outputs)
    raise typer.Exit(0 if complete else EXIT_INTERRUPTED)


@app.command()
def goodput(
    file: ScenarioFile,
    overrides: Overrides = None,
    tokens: Annotated[
        str, typer.Option(metavar="N", help="Tokens of the run, e.g. 15T; default: economics.tokens of the file.")
    ] = "",
    runs: Annotated[int, typer.Option(min=1, metavar="N", help="How many runs, which differ in what breaks.")] = 1000,
    seed: Annotated[int, typer.Option(min=0, metavar="N", help="Another seed, other failures.")] = 0,
    workers: Annotated[int | None, typer.Option(min=1, metavar="N", help="Processes; default: one per core.")] = None,
    resume: Annotated[
        str | None, typer.Option(metavar="DIR", help="Keep runs there as they come, and go on from them.")
    ] = None,
    json: Annotated[str | None, typer.Option(metavar="FILE", help="Write the answer as JSON; - is stdout.")] = None,
    html: Html = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print no table.")] = False,
) -> None:
    """Say how many days and how much money a run takes on a cluster that breaks, and where its time goes."""
    from clustersim.cli.goodput import GoodputOptions, show_goodput
    from clustersim.cli.outputs import EXIT_INTERRUPTED, Outputs

    options = GoodputOptions(tokens, runs, seed, workers, resume)
    outputs = Outputs(json=json, html=html, table=not quiet and json != "-")
    complete = show_goodput(file, overrides or [], options, outputs)
    raise typer.Exit(0 if complete else EXIT_INTERRUPTED)


@app.command()
def explain(
    file: ScenarioFile,
    measured: Annotated[str, typer.Option(metavar="TIME", help="Time that a step took, e.g. 4.2s.")],
    overrides: Overrides = None,
    json: Annotated[str | None, typer.Option(metavar="FILE", help="Write the answer as JSON; - is stdout.")] = None,
) -> None:
    """Say whether a measured step time is reasonable, and which single causes would explain the gap."""
    from clustersim.cli.explain import explain_step

    explain_step(file, measured, overrides or [], json)


@app.command()
def validate(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="KIND FILE.csv | show CASE_ID",
            help="Kinds: steps, memory, collectives, kernels, reliability. Without a file the packaged cases; "
            "default: all kinds.",
            autocompletion=completion.complete_validation_target,
        ),
    ] = None,
    json: Annotated[str | None, typer.Option(metavar="FILE", help="Write errors as JSON; - is stdout.")] = None,
    html: Html = None,
    workers: Annotated[int | None, typer.Option(min=1, metavar="N", help="Processes; default: one per core.")] = None,
    only: Annotated[str, typer.Option(metavar="TEXT", help="Only cases whose id contains it.")] = "",
    changes: Annotated[
        list[str] | None,
        _override_option("--set", help="Change one key of the scenario of every step; repeatable."),
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print no table.")] = False,
) -> None:
    """Predict published runs and measurements, or your own, and report the prediction errors."""
    from clustersim.cli.outputs import Outputs
    from clustersim.cli.validate import run_validation
    from clustersim.cli.validation_kinds import ValidationOptions

    options = ValidationOptions(only, workers, tuple(changes or ()))
    run_validation(arguments or [], options, Outputs(json=json, html=html, table=not quiet and json != "-"))


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True}, add_help_option=False)
def calibrate(context: typer.Context) -> None:
    """Measure this machine's kernels and collectives, and check predictions against real steps (needs PyTorch)."""
    from clustersim.cli.extension import run_extension

    raise typer.Exit(run_extension("calibrate", context.args))


@app.command(name="import")
def import_command(
    program: Annotated[
        str,
        typer.Argument(
            metavar="PROGRAM", help="Whose: megatron, torchtitan.", autocompletion=completion.complete_import_program
        ),
    ],
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Its launch script, its arguments alone, or its TOML.")],
    overrides: Overrides = None,
    cluster: Annotated[
        str,
        typer.Option(
            metavar="NAME", help="The cluster, which no argument says.", autocompletion=completion.complete_cluster
        ),
    ] = "dgx-h100",
    gpus: Annotated[int | None, typer.Option(min=1, metavar="N", help="How many; default: the file's.")] = None,
    out: Annotated[
        str, typer.Option("--out", "--output", metavar="FILE", help="Write the scenario there; - is stdout.")
    ] = "-",
) -> None:
    """Write the scenario of another program's arguments (Megatron-LM's launch scripts, torchtitan's job files)."""
    from clustersim.cli.import_arguments import import_scenario

    import_scenario(program, file, overrides or [], cluster, gpus, out)


@app.command(name="export")
def export_command(
    program: Annotated[
        str,
        typer.Argument(
            metavar="PROGRAM",
            help="For whom: chakra, megatron, torchtitan.",
            autocompletion=completion.complete_export_program,
        ),
    ],
    file: ScenarioFile,
    overrides: Overrides = None,
    out: Annotated[
        str, typer.Option("--out", "--output", metavar="PATH", help="Write it there; arguments: - is stdout.")
    ] = "-",
    force: Annotated[bool, typer.Option("--force", help="chakra: write traces of more than 1 GiB, too.")] = False,
) -> None:
    """Write a scenario in another program's arguments, or its step as execution traces (chakra, for ASTRA-sim)."""
    from clustersim.cli.export import export_for_program as exported

    _exit_with_status(fits=exported(program, file, overrides or [], out, force=force))


@app.command()
def presets() -> None:
    """List the models, clusters, accelerators and schedules that are shipped."""
    from clustersim.cli.presets import print_presets

    print_presets()


@app.command()
def schema(
    markdown: Annotated[
        bool, typer.Option("--markdown", help="The same for readers: tables of keys, values and defaults.")
    ] = False,
) -> None:
    """Print the JSON Schema of scenario files, with which editors complete and check them."""
    from clustersim.cli.outputs import STDOUT, write_json
    from clustersim.scenario.key_reference import render_key_reference
    from clustersim.scenario.schema import scenario_schema

    if markdown:
        typer.echo(render_key_reference(scenario_schema()), nl=False)
    else:
        write_json(scenario_schema(), STDOUT)


@app.command()
def topology(
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME",
            help="A packaged cluster, a topology file, or a scenario.",
            autocompletion=completion.complete_cluster_or_file,
        ),
    ],
    overrides: Overrides = None,
    gpus: Annotated[
        int | None, typer.Option(metavar="N", help="Number of GPUs of a cluster; default: the file's.")
    ] = None,
    html: Html = None,
) -> None:
    """Show how a cluster is wired, and how the axes of a scenario's layout lie on it."""
    from clustersim.cli.topology import show_topology

    show_topology(name, overrides or [], gpus, html)


def _exit_with_status(*, fits: bool) -> None:
    raise typer.Exit(0 if fits else EXIT_DOES_NOT_FIT)
