"""Which commands are there, and which options do they take?

Exit status: 0 success and the scenario fits in memory, 2 invalid input or an output that cannot be
written, 3 the scenario does not fit (its results are printed all the same, except by `goodput`, which has
none). Heavy modules are imported by the command that needs them, so that `--help` is fast.
"""

import io
import os
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from clustersim.cli import completion
from clustersim.cli.limit import Limit, limit_as_error
from clustersim.cli.terminal import end_by_closed_pipe, ended_by_closed_pipe, with_escaped_streams
from clustersim.common.errors import ClusterSimError, MemoryFitError, OutputError
from clustersim.common.gc_control import raise_gc_threshold
from clustersim.common.memory_limit import as_short_memory, require_address_space
from clustersim.common.plugins import code_permission
from clustersim.common.signals import raise_interrupt_on_sigterm

EXIT_BAD_INPUT = 2
EXIT_DOES_NOT_FIT = 3
_CODE_REFUSAL = "runs only where --allow-code is typed (run, search and the like have it); look at the code first"


class _Group(TyperGroup):
    """Commands that print control characters, as names in files may have them, as escapes."""

    def __init__(self, **keywords: Any) -> None:
        super().__init__(**keywords)
        for command in self.commands.values():
            if command.callback is not None:
                command.callback = ended_by_closed_pipe(with_escaped_streams(limit_as_error(command.callback)))


app = typer.Typer(
    cls=_Group,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="How long does a training step take on a cluster, where does the time go, and does it fit in memory?",
)


def _override_option(*names: str, help: str, metavar: str = "KEY=VALUE") -> Any:  # noqa: A002 - typer's word
    """A typer option that takes scenario keys, with shell completion of the dotted keys."""
    return typer.Option(*names, metavar=metavar, help=help, autocompletion=completion.complete_override_key)


ScenarioFile = Annotated[
    Path,
    typer.Argument(metavar="FILE", help="Scenario file (YAML or JSON).", autocompletion=completion.complete_data_file),
]
Overrides = Annotated[
    list[str] | None,
    _override_option("--set", help="Override a key of the scenario, e.g. layout.tp=4; repeatable."),
]


def _allow_code(context: typer.Context, is_requested: bool) -> None:
    """Lift, until the command ends, the ban that `_options` has put on it."""
    if is_requested:
        context.with_resource(code_permission(""))


AllowCode = Annotated[
    bool,
    typer.Option(
        "--allow-code",
        callback=_allow_code,
        help="Run the Python code that the scenario names: schedules and collective algorithms of your own.",
    ),
]
Html = Annotated[str | None, typer.Option("--html", metavar="FILE", help="Write a self-contained HTML page.")]
Json = Annotated[str | None, typer.Option(metavar="FILE", help="Write the results as JSON; - is stdout.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Do not print tables.")]
Workers = Annotated[int | None, typer.Option(min=1, metavar="N", help="Worker processes; default: one per usable CPU.")]


def main() -> None:
    """Run the command line. A user error is printed as one sentence on stderr; the exit status is then 2.

    Or 3, where a job does not fit in memory; 130 where it is interrupted, also before the command has begun.
    """
    raise_gc_threshold()
    raise_interrupt_on_sigterm()
    try:
        _prepare_streams()
        require_address_space()
        with as_short_memory():
            _run_app()
    except ClusterSimError as error:
        from clustersim.cli.outputs import print_error

        print_error(error)
        raise SystemExit(EXIT_DOES_NOT_FIT if isinstance(error, MemoryFitError) else EXIT_BAD_INPUT) from None
    except KeyboardInterrupt:
        from clustersim.cli.outputs import EXIT_INTERRUPTED

        raise SystemExit(EXIT_INTERRUPTED) from None


def _prepare_streams() -> None:
    """Make printing robust against characters the terminal lacks, and closed streams."""
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
    except BrokenPipeError:
        end_by_closed_pipe()
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
    context: typer.Context,
    _version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_show_version, help="Show the version and exit.")
    ] = False,
) -> None:
    """Options that are not a command's. No command runs code that a file names, unless its options say so."""
    context.with_resource(code_permission(_CODE_REFUSAL))


@app.command()
def run(
    file: ScenarioFile,
    overrides: Overrides = None,
    json: Json = None,
    html: Html = None,
    trace: Annotated[
        str | None, typer.Option(metavar="FILE", help="Write a Perfetto trace, for ui.perfetto.dev.")
    ] = None,
    kineto: Annotated[
        str | None, typer.Option(metavar="DIR", help="Write a Kineto trace per rank, as PyTorch's profiler does.")
    ] = None,
    spans: Annotated[
        str | None, typer.Option(metavar="FILE", help="Write a table of all spans (.csv, .parquet or .arrow).")
    ] = None,
    ranks: Annotated[
        str,
        typer.Option(
            metavar="RANKS",
            help="Ranks to trace, e.g. 0:8,stage:3,slowest:4; default: a representative selection.",
        ),
    ] = "",
    force: Annotated[bool, typer.Option("--force", help="Also write traces larger than 1 GiB.")] = False,
    what_if: Annotated[
        bool, typer.Option("--what-if", help="Simulate which changes help, and print the best; --html always does.")
    ] = False,
    quiet: Quiet = False,
    watch: Annotated[
        bool,
        typer.Option("--watch", help="Rerun whenever FILE or a file that it refers to is saved; stop with Ctrl-C."),
    ] = False,
    _code: AllowCode = False,
    _limit: Limit = None,
) -> None:
    """Simulate training steps and print the step time, its breakdown and peak memory."""
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
        what_if=what_if,
    )
    if watch:
        from clustersim.cli.watch import run_watched

        run_watched(file, overrides or [], outputs)
        return
    from clustersim.cli.run import run_scenario

    _exit_with_status(fits=run_scenario(file, overrides or [], outputs))


@app.command()
def check(
    file: ScenarioFile,
    overrides: Overrides = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print problems only.")] = False,
) -> None:
    """Check whether a scenario is valid and fits in memory, without simulating it."""
    from clustersim.cli.check import check_scenario

    _exit_with_status(fits=check_scenario(file, overrides or [], quiet=quiet))


@app.command()
def coverage(
    file: ScenarioFile,
    overrides: Overrides = None,
    json: Annotated[str | None, typer.Option(metavar="FILE", help="Write the list as JSON; - is stdout.")] = None,
    all_rows: Annotated[
        bool, typer.Option("--all", help="Also list the kernels and collectives that are covered.")
    ] = False,
    _code: AllowCode = False,
) -> None:
    """List the kernels and collectives that the scenario's record does not cover, and their share of the step time."""
    from clustersim.cli.coverage import show_coverage

    show_coverage(file, overrides or [], json, include_measured=all_rows)


@app.command()
def diff(
    first: Annotated[
        Path,
        typer.Argument(
            metavar="A",
            help="Scenario, result of `run --json`, or traces of PyTorch's profiler (a file or a directory).",
            autocompletion=completion.complete_data_file,
        ),
    ],
    second: Annotated[
        Path | None,
        typer.Argument(
            metavar="[B]",
            help="Scenario or result to compare with; default: A with overrides. For a trace: its scenario.",
            autocompletion=completion.complete_data_file,
        ),
    ] = None,
    overrides: Annotated[
        list[str] | None,
        _override_option("--set", help="Override a key of B; repeatable."),
    ] = None,
    json: Annotated[str | None, typer.Option(metavar="FILE", help="Write the difference as JSON; - is stdout.")] = None,
    html: Html = None,
    what_if: Annotated[
        bool, typer.Option("--what-if", help="Simulate which changes of B help, and print the best.")
    ] = False,
    quiet: Quiet = False,
    _code: AllowCode = False,
    _limit: Limit = None,
) -> None:
    """Compare two scenarios or results, or a measured step with its prediction, by key and by category of time."""
    from clustersim.cli.diff import show_difference
    from clustersim.cli.outputs import Outputs

    outputs = Outputs(json=json, html=html, table=not quiet and json != "-", what_if=what_if)
    _exit_with_status(fits=show_difference(first, second, overrides or [], outputs))


@app.command()
def explore(
    file: ScenarioFile,
    html: Annotated[str, typer.Option("--html", metavar="FILE", help="HTML page to write.")],
    overrides: Overrides = None,
    workers: Workers = None,
    _code: AllowCode = False,
    _limit: Limit = None,
) -> None:
    """Write an interactive HTML page: memory, placement, pipeline bubbles and scaling by layout and size."""
    from clustersim.cli.explore import explore_scenario

    explore_scenario(file, overrides or [], html, workers)


@app.command()
def search(
    file: ScenarioFile,
    overrides: Overrides = None,
    objective: Annotated[
        str,
        typer.Option(
            metavar="WHAT",
            help="What to optimize: step-time, tokens-per-gpu, cost, energy, days, run-cost.",
            autocompletion=completion.complete_objective,
        ),
    ] = "step-time",
    gpus: Annotated[str, typer.Option(metavar="N,...", help="GPU counts to compare, e.g. 4096,8192.")] = "",
    batch_per_gpu: Annotated[
        bool, typer.Option("--batch-per-gpu", help="Scale the global batch with --gpus; default: constant.")
    ] = False,
    clusters: Annotated[
        str,
        typer.Option(
            metavar="NAME,...",
            help="Clusters to compare, e.g. dgx-h100,gb200-nvl72.",
            autocompletion=completion.complete_cluster,
        ),
    ] = "",
    fix: Annotated[
        list[str] | None,
        _override_option(help="Fix a key to a value; repeatable."),
    ] = None,
    vary: Annotated[
        list[str] | None,
        _override_option(help="Search over these values of a key; repeatable.", metavar="KEY=V1,V2,..."),
    ] = None,
    headroom: Annotated[
        str,
        typer.Option(
            metavar="SHARE",
            help="Share of each device to leave free, e.g. 10%; default: enough for published errors.",
        ),
    ] = "",
    top: Annotated[int, typer.Option(min=1, metavar="K", help="Number of best layouts to report.")] = 10,
    workers: Workers = None,
    executor: Annotated[
        str,
        typer.Option(
            metavar="local|dask://HOST:PORT", help="Where to simulate layouts: on this machine or on a Dask cluster."
        ),
    ] = "local",
    resume: Annotated[
        str | None, typer.Option(metavar="DIR", help="Store simulated layouts in DIR and resume from them.")
    ] = None,
    json: Annotated[
        str | None, typer.Option(metavar="FILE", help="Write the layouts found as JSON; - is stdout.")
    ] = None,
    html: Html = None,
    what_if: Annotated[
        bool, typer.Option("--what-if", help="Simulate which changes of the best layout help, and print the best.")
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print only the layout to take; no progress.")] = False,
    _code: AllowCode = False,
    limit: Limit = None,
) -> None:
    """Search for the best layouts of a scenario's job, starting from the layout in the file."""
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
        headroom,
        quiet,
        limit,
    )
    outputs = Outputs(json=json, html=html, table=json != "-", what_if=what_if)
    complete = search_layouts(file, overrides or [], options, outputs)
    raise typer.Exit(0 if complete or limit is not None else EXIT_INTERRUPTED)


@app.command()
def goodput(
    file: ScenarioFile,
    overrides: Overrides = None,
    tokens: Annotated[
        str,
        typer.Option(
            metavar="N", help="Training tokens of the run, e.g. 15T; default: economics.tokens of the scenario."
        ),
    ] = "",
    runs: Annotated[
        int, typer.Option(min=1, metavar="N", help="Number of simulated runs, each with its own random failures.")
    ] = 1000,
    seed: Annotated[int, typer.Option(min=0, metavar="N", help="Seed of the random failures.")] = 0,
    workers: Workers = None,
    resume: Annotated[
        str | None, typer.Option(metavar="DIR", help="Store finished runs in DIR and resume from them.")
    ] = None,
    json: Json = None,
    html: Html = None,
    quiet: Quiet = False,
    _code: AllowCode = False,
    limit: Limit = None,
) -> None:
    """Predict the duration, cost and goodput of a training run on a cluster with failures."""
    from clustersim.cli.goodput import GoodputOptions, show_goodput
    from clustersim.cli.outputs import EXIT_INTERRUPTED, Outputs

    options = GoodputOptions(tokens, runs, seed, workers, resume, limit)
    outputs = Outputs(json=json, html=html, table=not quiet and json != "-")
    complete = show_goodput(file, overrides or [], options, outputs)
    raise typer.Exit(0 if complete or limit is not None else EXIT_INTERRUPTED)


@app.command()
def diloco(
    file: ScenarioFile,
    overrides: Overrides = None,
    days: Annotated[
        float | None, typer.Option(metavar="N", help="Also simulate N days in which replicas fail, each by itself.")
    ] = None,
    utilization: Annotated[
        str,
        typer.Option(
            metavar="SHARE", help="Also list settings that reach this utilization, e.g. 95%, fewest inner steps first."
        ),
    ] = "",
    json: Json = None,
    html: Html = None,
    quiet: Quiet = False,
    _code: AllowCode = False,
) -> None:
    """Predict a round of local training (DiLoCo) over several sites: utilization, traffic of the links, memory."""
    from clustersim.cli.diloco import show_local_training
    from clustersim.cli.outputs import Outputs

    outputs = Outputs(json=json, html=html, table=not quiet and json != "-")
    fits = show_local_training(file, overrides or [], outputs, days=days, utilization=utilization)
    raise typer.Exit(0 if fits else EXIT_DOES_NOT_FIT)


@app.command()
def explain(
    file: ScenarioFile,
    measured: Annotated[str, typer.Option(metavar="TIME|MFU", help="Measured step time, e.g. 4.2s, or MFU, e.g. 38%.")],
    overrides: Overrides = None,
    json: Json = None,
    what_if: Annotated[
        bool, typer.Option("--what-if", help="Simulate which changes of the scenario help, and print the best.")
    ] = False,
    _code: AllowCode = False,
) -> None:
    """Compare a measured step time, or MFU, with its prediction, and list single causes of the difference."""
    from clustersim.cli.explain import explain_step
    from clustersim.cli.outputs import Outputs

    outputs = Outputs(json=json, table=json != "-", what_if=what_if)
    explain_step(file, measured, overrides or [], outputs)


@app.command()
def validate(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="KIND FILE.csv | show CASE_ID",
            help="Kinds: steps, memory, collectives, kernels, reliability, sites; default: all. "
            "Without a file: the packaged cases.",
            autocompletion=completion.complete_validation_target,
        ),
    ] = None,
    json: Annotated[str | None, typer.Option(metavar="FILE", help="Write the errors as JSON; - is stdout.")] = None,
    html: Html = None,
    workers: Workers = None,
    only: Annotated[str, typer.Option(metavar="TEXT", help="Only cases whose id contains TEXT.")] = "",
    changes: Annotated[
        list[str] | None,
        _override_option("--set", help="Override a key of the scenario of every step; repeatable."),
    ] = None,
    quiet: Quiet = False,
    _limit: Limit = None,
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
            metavar="PROGRAM",
            help="Program whose file it is, or auto: megatron, torchtitan, megatron-bridge, primus, nemo, gpt-neox, "
            "axolotl, llama-factory, transformers; of machines slurm, nccl-topology, nvidia-smi.",
            autocompletion=completion.complete_import_program,
        ),
    ],
    file: Annotated[
        Path,
        typer.Argument(
            metavar="FILE",
            help="Launch script, arguments, printed table of them, configuration file, or topology of a machine.",
        ),
    ],
    overrides: Overrides = None,
    definitions: Annotated[
        list[str] | None,
        typer.Option(
            "--define",
            metavar="NAME=VALUE",
            help="Environment variable of a launch script, or its parameter by number, e.g. 1=8; CONFIG=NAME of "
            "a file of torchtitan's jobs; repeatable.",
        ),
    ] = None,
    cluster: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="Cluster of the scenario, or that the topology of a machine changes; files do not name one.",
            autocompletion=completion.complete_cluster,
        ),
    ] = "dgx-h100",
    gpus: Annotated[int | None, typer.Option(min=1, metavar="N", help="Number of GPUs; default: the file's.")] = None,
    out: Annotated[
        str, typer.Option("--out", "--output", metavar="FILE", help="Scenario or cluster file to write; - is stdout.")
    ] = "-",
) -> None:
    """Convert another program's arguments to a scenario, or the topology of a machine to a cluster file."""
    from clustersim.cli.import_arguments import import_scenario

    import_scenario(program, file, overrides or [], definitions or [], cluster, gpus, out)


@app.command(name="export")
def export_command(
    program: Annotated[
        str,
        typer.Argument(
            metavar="PROGRAM",
            help="Target: chakra, megatron, primus, torchtitan.",
            autocompletion=completion.complete_export_program,
        ),
    ],
    file: ScenarioFile,
    overrides: Overrides = None,
    out: Annotated[
        str,
        typer.Option(
            "--out", "--output", metavar="PATH", help="File to write (- is stdout); chakra: directory to write."
        ),
    ] = "-",
    force: Annotated[bool, typer.Option("--force", help="chakra: also write traces larger than 1 GiB.")] = False,
    _code: AllowCode = False,
) -> None:
    """Convert a scenario to another program's arguments, or its step to Chakra execution traces (for ASTRA-sim)."""
    from clustersim.cli.export import export_for_program as exported

    _exit_with_status(fits=exported(program, file, overrides or [], out, force=force))


@app.command()
def presets() -> None:
    """List the packaged models, clusters, accelerators and schedules."""
    from clustersim.cli.presets import print_presets

    print_presets()


@app.command()
def schema(
    markdown: Annotated[
        bool, typer.Option("--markdown", help="Print Markdown tables of keys, values and defaults instead.")
    ] = False,
) -> None:
    """Print the JSON Schema of scenario files, which editors use for completion and validation."""
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
            help="Packaged cluster, cluster file or scenario file.",
            autocompletion=completion.complete_cluster_or_file,
        ),
    ],
    overrides: Overrides = None,
    gpus: Annotated[
        int | None, typer.Option(metavar="N", help="Number of GPUs of the cluster; default: the file's.")
    ] = None,
    html: Html = None,
    _code: AllowCode = False,
) -> None:
    """Show a cluster's network topology, and which of its tiers each parallel axis of a scenario crosses."""
    from clustersim.cli.topology import show_topology

    show_topology(name, overrides or [], gpus, html)


def _exit_with_status(*, fits: bool) -> None:
    raise typer.Exit(0 if fits else EXIT_DOES_NOT_FIT)
