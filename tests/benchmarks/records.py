"""How well does the record of a profiled step predict others on this machine? Prints the error of each, in one run.

    python -m tests.benchmarks.records                  DDP, FSDP2, tp 2, pp 2, one process, a fake process group
    python -m tests.benchmarks.records --rounds 5 "ddp 2" "tp 2"

In every round new processes time steps of `examples/tiny_cpu.yaml`, also with another depth, microbatch and sequence,
and then profile steps of the first of them (`tests.benchmarks.profiled_steps`). A record is made of each profiled step
and the median time of such steps; its predictions are compared with the median times of the others. Records of a fake
process group predict the steps of as many real processes, and those of two processes steps of four, timed last. Errors
mean little with other load: each process needs a core of its own; layouts of more processes than cores are not timed.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Final

from calibrate.check.prediction import adapt_scenario
from calibrate.profile.record import record_from_profile
from clustersim.common.processes import usable_cpu_count
from clustersim.common.units import Seconds
from clustersim.cost.calibration_record import CalibrationRecord
from clustersim.interop.kineto import FAKE_BACKEND, read_traces
from clustersim.scenario import Scenario
from clustersim.simulation import simulate

ROOT: Final = Path(__file__).parents[2]
SCENARIO: Final = str(ROOT / "examples" / "tiny_cpu.yaml")
_GLOO: Final = "gloo"
_OTHERS: Final = {
    "as profiled": (),
    "2 layers": ("model.layers=2",),
    "microbatch 1": ("training.microbatch=1",),
    "sequence 128": ("training.sequence=128",),
}


@dataclass(frozen=True, slots=True)
class Case:
    """A layout of some processes that is profiled. backend: of its process group."""

    ranks: int
    changes: tuple[str, ...]
    backend: str = _GLOO

    def overrides(self, others: Sequence[str] = ()) -> list[str]:
        """Of the scenario, with other changes."""
        machine = [f"cluster.node.gpus={self.ranks}", f"cluster.gpus={self.ranks}"]
        return [*machine, "training.global_batch=8", *self.changes, *others]

    def scaled_to(self, ranks: int) -> "Case":
        """The same with real processes, of which there are as many; only data parallelism takes more."""
        changes = tuple(change.replace(f"dp={self.ranks}", f"dp={ranks}") for change in self.changes)
        return Case(ranks, changes)


CASES: Final = {
    "one process": Case(1, ()),
    "ddp 2": Case(2, ("layout.dp=2", "layout.data=ddp")),
    "fsdp 2": Case(2, ("layout.dp=2", "layout.data=fsdp")),
    "tp 2": Case(2, ("layout.tp=2",)),
    "pp 2": Case(2, ("layout.pp=2",)),
    "fake fsdp 2": Case(2, ("layout.dp=2", "layout.data=fsdp"), FAKE_BACKEND),
}


def run_case(case: Case, folder: Path, rounds: int) -> list[float]:
    """Median seconds of the steps of `_OTHERS`; traces of the first are in the folder."""
    seconds = [_run_round(case, folder / f"round-{number}", number) for number in range(rounds)]
    return [median(column) for column in zip(*seconds, strict=True)]


def _run_round(case: Case, folder: Path, number: int) -> list[float]:
    is_alone = case.ranks == 1 or case.backend == FAKE_BACKEND
    processes = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(case.ranks)]
    changes = [json.dumps(case.overrides(others)) for others in _OTHERS.values()]
    done = subprocess.run(
        [
            sys.executable, *([] if is_alone else processes), "-m", "tests.benchmarks.profiled_steps", str(folder),
            SCENARIO, str(number), case.backend, str(case.ranks), *changes,
        ],
        cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, text=True, check=True, stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )  # fmt: skip
    seconds: list[float] = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("[")))
    return seconds


def trained_scenario(case: Case, others: Sequence[str] = ()) -> Scenario:
    """The scenario as `calibrate.check` trains it on a CPU."""
    return adapt_scenario(Scenario.load(SCENARIO, case.overrides(others)), on_cpu=True)


def records(case: Case, folder: Path, step_time: Seconds) -> list[CalibrationRecord]:
    """The record of each profiled step. step_time: of the step without a profiler."""
    scenario = trained_scenario(case)
    return [
        record_from_profile(read_traces(traces, on_host=True), scenario, step_time).record
        for traces in sorted({trace.parent for trace in folder.rglob("rank-*.json")})
    ]


def errors(case: Case, made: Sequence[CalibrationRecord], seconds: Sequence[float]) -> dict[str, tuple[float, ...]]:
    """Predicted over measured steps, less 1: of each of `_OTHERS`, by record."""
    results = {}
    for (label, others), measured in zip(_OTHERS.items(), seconds, strict=True):
        scenario = trained_scenario(case, others)
        results[label] = tuple(
            simulate(replace(scenario, cost=replace(scenario.cost, record=record))).step_time / measured - 1.0
            for record in made
        )
    return results


def print_errors(name: str, results: dict[str, tuple[float, ...]]) -> None:
    """The median over records, and the extremes."""
    for label, values in results.items():
        print(f"{name:<22}{label:<14}{median(values):>+8.1%}  ({min(values):+.1%} to {max(values):+.1%})", flush=True)


def main() -> None:
    """Profile every layout and print the errors of its records."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"{', '.join(CASES)} (all)")
    parser.add_argument("--rounds", type=int, default=3, help="how often each is profiled and timed (3)")
    options, cores = parser.parse_args(), usable_cpu_count()
    for name in options.cases or CASES:
        case = CASES[name]
        with tempfile.TemporaryDirectory() as folder:
            seconds = run_case(case, Path(folder) / "profiled", options.rounds)
            made = records(case, Path(folder) / "profiled", seconds[0])
            if case.backend != FAKE_BACKEND:
                print_errors(name, errors(case, made, seconds))
            if case.ranks > 1 and any("dp=" in change for change in case.changes):
                larger = case.scaled_to(2 if case.backend == FAKE_BACKEND else 4)
                if larger.ranks > cores:
                    print(f"{name} -> {larger.ranks}: not timed, this machine has {cores} cores", flush=True)
                    continue
                timed = run_case(larger, Path(folder) / "larger", options.rounds)
                print_errors(f"{name} -> {larger.ranks}", errors(larger, made, timed))


if __name__ == "__main__":
    main()
