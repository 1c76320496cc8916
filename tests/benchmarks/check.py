"""How accurate are predictions of real steps on this machine? Prints the error of every layout, in one run.

    python -m tests.benchmarks.check            DDP, FSDP, tp 2, pp 2, MoE, ...: examples/tiny_cpu.yaml
    python -m tests.benchmarks.check --json -   the same as JSON

Layouts are checked one after the other, each by `python -m calibrate --check`: kernels and collectives are
measured between real steps. Errors are larger on a machine with other load: two processes of one thread each
need two idle cores, plus cores for the threads that move data.
"""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).parents[2]
SCENARIO: Final = "examples/tiny_cpu.yaml"
LARGE_MICROBATCH: Final = (
    "training.microbatch=4"  # tensor parallelism: fewer, longer kernels between its many collectives
)
SMALL_MICROBATCH: Final = "training.microbatch=1"  # a pipeline: four microbatches
MOE: Final = ("model.experts={count: 8, top_k: 2, ffn: 512}",)
CASES: Final = {
    "one process": (1, ()),
    "ddp 2": (2, ("layout.data=ddp",)),
    "fsdp 2": (2, ("layout.data=fsdp",)),
    "tp 2": (2, ("layout.tp=2", LARGE_MICROBATCH)),
    "pp 2": (2, ("layout.pp=2", SMALL_MICROBATCH)),
    "experts": (1, MOE),
    "ep 2": (2, ("layout.data=ddp", "layout.ep=2", *MOE)),
}


def run_check(ranks: int, changes: tuple[str, ...], steps: int) -> dict[str, Any]:
    """Run one check in new processes and return its JSON result."""
    override_arguments = [word for change in (f"cluster.gpus={ranks}", *changes) for word in ("--set", change)]
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    check_arguments = [
        "-m",
        "calibrate",
        "--check",
        SCENARIO,
        "--device",
        "cpu",
        "--steps",
        str(steps),
        "--json",
        "-",
        *override_arguments,
    ]
    process = subprocess.run(
        [sys.executable, *(launcher if ranks > 1 else []), *check_arguments], cwd=ROOT, text=True, check=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, timeout=600,
    )  # fmt: skip
    result: dict[str, Any] = json.loads(process.stdout[process.stdout.index("{") : process.stdout.rindex("}") + 1])
    return result


def main() -> None:
    """Check every layout and print the errors."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=12, help="real steps of each layout (12)")
    parser.add_argument("--json", metavar="FILE", help="write JSON to FILE, or to standard output for -")
    options = parser.parse_args()
    results = {name: run_check(ranks, changes, options.steps) for name, (ranks, changes) in CASES.items()}
    if options.json is not None:
        text = json.dumps(results, indent=2)
        print(text) if options.json == "-" else Path(options.json).write_text(text + "\n", encoding="utf-8")
        return
    print(
        f"{'':<14}{'predicted':>11}{'measured':>11}{'step':>9}{'forward':>9}{'backward':>9}{'optimizer':>10}{'peak':>8}"
    )
    for name, result in results.items():
        phase_errors = "".join(f"{100 * result['parts'][phase]['error']:>+8.0f} %" for phase in ("forward", "backward"))
        print(
            f"{name:<14}{result['predicted_s'] * 1e3:>8.0f} ms{result['measured_s'] * 1e3:>8.0f} ms"
            f"{100 * result['error']:>+7.1f} %{phase_errors.replace(' %', '%'):>18}"
            f"{100 * result['parts']['optimizer']['error']:>+9.0f}%{100 * result['peak_error']:>+7.1f}%"
        )


if __name__ == "__main__":
    main()
