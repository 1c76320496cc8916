"""Validation of predicted MoE dispatch and combine times, and fit of the dispatchers' constants.

Fitted for each dispatcher (`topologies/dispatchers`): the fractions of NVLink and network bandwidth that its
kernels reach, the fraction of that which combine reaches, the copy rate of an SM, the additional time per
chunk of a combine, and the fraction of a call that its kernels take. The constants are searched on grids by
coordinate descent for the least macro average over sources of |predicted / measured - 1|. A constant that no
sample identifies keeps its value. Latencies are not fitted: all tables have one payload size.

Out-of-sample errors hold out one fold (source, GPU and rank count) at a time.

    python -m calibrate fit-dispatchers            print the errors with the packaged constants
    python -m calibrate fit-dispatchers --fit      search the constants; print them and the errors with them

Source of the measurements: the rows moe_dispatch and moe_combine of
clustersim/validation/published/collectives.csv; those of older or newer software, and figures in a text, are
excluded from the fit but evaluated all the same.
"""

import argparse
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

import numpy as np

from calibrate.fit.dispatch_samples import (
    CHUNK_SECONDS,
    COMBINE_SHARE,
    COMBINE_SM_RATE,
    KERNEL_SHARE,
    NETWORK_SHARE,
    NVLINK_SHARE,
    SM_RATE,
    STEP_LATENCY,
    TOKEN_SECONDS,
    DispatchConstants,
    DispatchSample,
    dispatcher_constants,
    read_dispatch_samples,
)
from clustersim.collectives.library_files import load_dispatcher
from clustersim.program.task import TokenDispatcher
from clustersim.validation.error_statistics import group_by

DISPATCHERS: Final = (
    TokenDispatcher.DEEPEP,
    TokenDispatcher.DEEPEP_V2,
    TokenDispatcher.HYBRIDEP,
    TokenDispatcher.MORI,
)
_SHARE_GRID: Final = tuple(round(0.3 + 0.01 * step, 2) for step in range(71))
CONSTANT_GRIDS: Final[Mapping[str, Sequence[float]]] = {
    **dict.fromkeys((NVLINK_SHARE, NETWORK_SHARE, KERNEL_SHARE), _SHARE_GRID),
    STEP_LATENCY: tuple(step * 1e-5 for step in range(61)),
    COMBINE_SHARE: tuple(round(0.6 + 0.01 * step, 2) for step in range(41)),
    TOKEN_SECONDS: tuple(step * 1e-8 for step in range(61)),
    CHUNK_SECONDS: tuple(step * 1e-7 for step in range(31)),
    **dict.fromkeys((SM_RATE, COMBINE_SM_RATE), tuple(step * 1e9 for step in range(10, 121))),
}


def search_constants(samples: Sequence[DispatchSample], start: DispatchConstants) -> dict[str, float]:
    """Coordinate descent over the grids until no constant changes; ties keep the first value found."""
    best, min_error = dict(start), macro_error(samples, start)
    previous: dict[str, float] = {}
    while best != previous:
        previous = dict(best)
        for name, values in CONSTANT_GRIDS.items():
            for value in values:
                error = macro_error(samples, best | {name: value})
                if error < min_error * (1.0 - 1e-9):
                    best, min_error = best | {name: value}, error
    return best


def macro_error(samples: Iterable[DispatchSample], constants: DispatchConstants) -> float:
    """Macro average over sources of the mean |predicted / measured - 1|."""
    sources = group_by(samples, lambda sample: sample.source).values()
    return float(np.mean([np.mean([abs(sample.ratio(constants) - 1.0) for sample in source]) for source in sources]))


def out_of_sample_ratios(samples: Sequence[DispatchSample], start: DispatchConstants) -> dict[DispatchSample, float]:
    """Predicted over measured of every sample, by constants fitted to all other folds."""
    ratios: dict[DispatchSample, float] = {}
    for fold, fold_samples in group_by(samples, lambda sample: sample.fold_key).items():
        constants = search_constants([sample for sample in samples if sample.fitted and sample.fold_key != fold], start)
        ratios |= {sample: sample.ratio(constants) for sample in fold_samples}
    return ratios


def format_report(dispatcher: TokenDispatcher, samples: Sequence[DispatchSample], constants: DispatchConstants) -> str:
    """One line per fold, and means."""
    out_of_sample = out_of_sample_ratios(samples, constants)
    lines = [f"{dispatcher.value:<40}{'rows':>5}{'fitted':>10}{'held out':>10}"]
    for (source, gpu, ranks), fold_samples in group_by(samples, lambda sample: sample.fold_key).items():
        lines.append(_report_line(f"  {source} {gpu} {ranks}", fold_samples, constants, out_of_sample))
    return "\n".join([*lines, _report_line("  all rows", samples, constants, out_of_sample), ""])


def _report_line(
    name: str,
    samples: Sequence[DispatchSample],
    constants: DispatchConstants,
    out_of_sample: Mapping[DispatchSample, float],
) -> str:
    in_sample_error = np.mean([abs(sample.ratio(constants) - 1.0) for sample in samples])
    out_of_sample_error = np.mean([abs(out_of_sample[sample] - 1.0) for sample in samples])
    return f"{name:<40}{len(samples):>5}{in_sample_error:>10.1%}{out_of_sample_error:>10.1%}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `command`."""
    parser.add_argument("--fit", action="store_true", help="fit the constants first, and print them")


def command(options: argparse.Namespace) -> None:
    """Print predicted against published times."""
    samples = read_dispatch_samples()
    for dispatcher in DISPATCHERS:
        dispatcher_samples = [sample for sample in samples if sample.dispatcher is dispatcher]
        constants = dispatcher_constants(load_dispatcher(dispatcher))
        if options.fit:
            constants = search_constants([sample for sample in dispatcher_samples if sample.fitted], constants)
            print(", ".join(f"{name} {value:g}" for name, value in constants.items()))
        print(format_report(dispatcher, dispatcher_samples, constants))
