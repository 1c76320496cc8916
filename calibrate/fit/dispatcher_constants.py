"""How well is the dispatch of tokens to experts predicted, and which constants of dispatchers fit best?

Of each dispatcher (`topologies/dispatchers`) are fitted: the shares of NVLink's and the network's rate that its kernels
reach, what combine reaches of that, how fast an SM passes rows on, what a chunk of rows of a combine takes beyond them,
and which part of a call its kernels are. They are
searched one after the other on grids, again and again until none changes, for the least mean over sources of the mean
of |predicted / measured - 1|. A constant that no row tells about stays. Latencies are not fitted: all tables are of one
size.

Errors are also given left out: each place (source, GPU and number of ranks) as constants predict it that were fitted to
all others.

    python -m calibrate fit-dispatchers            print the errors with the shipped constants, and left out
    python -m calibrate fit-dispatchers --fit      search the constants; print them and the errors with them

Source of the measurements: the rows moe_dispatch and moe_combine of clustersim/validation/published/collectives.csv;
those of older or newer software, and figures in a text, take no part but are judged all the same.
"""

import argparse
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

import numpy as np

from calibrate.fit.dispatch_samples import (
    CHUNK,
    COMBINE,
    KERNELS,
    NETWORK,
    NVLINK,
    RATE,
    RATE_BACK,
    ROUND,
    ROW,
    Constants,
    Row,
    constants_of,
    read_rows,
)
from clustersim.collectives.library import load_dispatcher
from clustersim.program.task import TokenDispatcher
from clustersim.validation.error_statistics import grouped

DISPATCHERS: Final = (TokenDispatcher.DEEPEP, TokenDispatcher.DEEPEP_V2, TokenDispatcher.HYBRIDEP)
_SHARES: Final = tuple(round(0.3 + 0.01 * step, 2) for step in range(71))
GRIDS: Final[Mapping[str, Sequence[float]]] = {
    **dict.fromkeys((NVLINK, NETWORK, KERNELS), _SHARES),
    ROUND: tuple(step * 1e-5 for step in range(61)),
    COMBINE: tuple(round(0.6 + 0.01 * step, 2) for step in range(51)),
    ROW: tuple(step * 1e-8 for step in range(61)),
    CHUNK: tuple(step * 1e-7 for step in range(31)),
    **dict.fromkeys((RATE, RATE_BACK), tuple(step * 1e9 for step in range(10, 121))),
}


def search(rows: Sequence[Row], start: Constants) -> dict[str, float]:
    """The constants of grids that fit rows best, one after the other until none changes; of equals the first found."""
    best, least = dict(start), misfit(rows, start)
    before: dict[str, float] = {}
    while best != before:
        before = dict(best)
        for name, values in GRIDS.items():
            for value in values:
                found = misfit(rows, best | {name: value})
                if found < least * (1.0 - 1e-9):
                    best, least = best | {name: value}, found
    return best


def misfit(rows: Iterable[Row], constants: Constants) -> float:
    """Mean over sources of the mean of |predicted / measured - 1|."""
    sources = grouped(rows, lambda row: row.source).values()
    return float(np.mean([np.mean([abs(row.ratio(constants) - 1.0) for row in source]) for source in sources]))


def left_out(rows: Sequence[Row], start: Constants) -> dict[Row, float]:
    """Predicted over measured of every row, by constants that were fitted to all other places."""
    found: dict[Row, float] = {}
    for where, own in grouped(rows, lambda row: row.where).items():
        others = search([row for row in rows if row.fitted and row.where != where], start)
        found |= {row: row.ratio(others) for row in own}
    return found


def report(dispatcher: TokenDispatcher, rows: Sequence[Row], constants: Constants) -> str:
    """One line per place, and means."""
    unseen = left_out(rows, constants)
    lines = [f"{dispatcher.value:<40}{'rows':>5}{'fitted':>10}{'left out':>10}"]
    for (source, gpu, ranks), own in grouped(rows, lambda row: row.where).items():
        lines.append(_line(f"  {source} {gpu} {ranks}", own, constants, unseen))
    return "\n".join([*lines, _line("  all rows", rows, constants, unseen), ""])


def _line(name: str, rows: Sequence[Row], constants: Constants, unseen: Mapping[Row, float]) -> str:
    fitted = np.mean([abs(row.ratio(constants) - 1.0) for row in rows])
    without = np.mean([abs(unseen[row] - 1.0) for row in rows])
    return f"{name:<40}{len(rows):>5}{fitted:>10.1%}{without:>10.1%}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `command`."""
    parser.add_argument("--fit", action="store_true", help="search the fitted constants first, and print them")


def command(options: argparse.Namespace) -> None:
    """Print how predicted and published times compare."""
    rows = read_rows()
    for dispatcher in DISPATCHERS:
        own = [row for row in rows if row.dispatcher is dispatcher]
        constants = constants_of(load_dispatcher(dispatcher))
        if options.fit:
            constants = search([row for row in own if row.fitted], constants)
            print(", ".join(f"{name} {value:g}" for name, value in constants.items()))
        print(report(dispatcher, own, constants))
