"""Small files that parsers spend minutes, gigabytes or the stack on: each is refused in a sentence, soon.

They run one after another in a process with one gigabyte of address space, and a limit of CPU time.
"""

import gzip
import json
import resource
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

BASE = """model: llama-tiny
cluster: {name: dgx-h100, gpus: 8}
layout: {dp: 8}
training: {sequence: 256, global_batch: 8}
"""
LIMIT = 10**9
SECONDS = 10  # of CPU time, for each command
COMMANDS = """
import contextlib, io, json, resource, sys, time
from clustersim.cli import main
seconds = float(sys.argv[1])
for arguments in json.load(sys.stdin):
    errors, sys.argv = io.StringIO(), ["clustersim", *arguments]
    resource.setrlimit(resource.RLIMIT_CPU, (int(time.process_time() + seconds) + 1, resource.RLIM_INFINITY))
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(errors):
        try:
            status = main()
        except SystemExit as end:
            status = end.code
    print(json.dumps([status, errors.getvalue()]), flush=True)
"""
BOMBS = {
    "hexadecimal": BASE + "steps: 0x" + "F" * 6000,
    "base 60": BASE + "steps: " + ":".join(["59"] * 3000),
    "decimal": BASE + "steps: " + "9" * 6000,
    "quoted": BASE + "steps: !!int '" + "9" * 6000 + "'",
    "no integer": BASE + "steps: !!int ''",
    "no float": BASE + "steps: !!float ''",
    "a date": BASE + "steps: 2024-01-01",
    "brackets": "a: " + "[" * 100_000,
    "braces": "a: " + "{a: " * 100_000,
    "dashes": "- " * 100_000 + "a",
    "nested": "".join(f"{' ' * depth}a:\n" for depth in range(500)),
    "aliases": "a0: &a0 [x]\n" + "".join(f"a{n}: &a{n} [*a{n - 1}]\n" for n in range(1, 600)),
    "keys": BASE + "".join(f"k{n}: 1\n" for n in range(300_000)),
    "fewer keys": BASE + "".join(f"k{n}: 1\n" for n in range(120_000)),
    "inner keys": BASE + "economics:\n" + "".join(f"  k{n}: 1\n" for n in range(120_000)),
}


JSON_BOMBS = {
    "json brackets": "[" * 100_000,
    "json nested": '{"a":' * 500 + "1" + "}" * 500,
    "json digits": f'{{"steps": {"9" * 5000}}}',
}
_TABLE = "------------------------ arguments ------------------------\n"
PRINTED_BOMBS = {
    "table.log": f"{_TABLE}  num_layers ... {' ' * 300_000}x\n" + "  a ..... 1\n" * 20_000,
    "dots.log": f"{_TABLE}  hidden_size {'.' * 2_000_000}x\n",
    "ranks.log": "[rank0]:" * 500_000 + "\nRunning with args: " + "{'a':" * 100_000,
    "mesh.log": "Running with args: {}\n" + "Building 1-D device mesh with [" * 200_000,
    "bridge.log": "_target_: megatron.ConfigContainer\n" + "".join(f"{' ' * depth}a:\n" for depth in range(900)),
    "targets.log": "_target_: megatron.x"
    + "ConfigContainer" * 100_000
    + "_\n"
    + "_target_: megatron.ConfigContainer\n",
    "deep.xml": "<system>" + "<pci>" * 200_000,
    "wide.xml": "<system>" + "<net name='a' speed='1'/>" * 190_000 + "</system>",
    "laughs.xml": '<!DOCTYPE x [<!ENTITY a "aaaa"><!ENTITY b "&a;&a;">]><system>&b;</system>',
    "matrix.txt": "\t" + "\t".join(f"GPU{index}" for index in range(60_000)) + "\nGPU0\tX\t" + "NV18\t" * 60_000,
    "topology.conf": "SwitchName=a Nodes=n[0-999999999]\nSwitchName=b Switches=s[0-99999999]\n",
    "nemo.yaml": "trainer: {}\nmodel: {micro_batch_size: 1, num_layers: '"
    + "${.b}" * 90_000
    + f"', b: {'7' * 90_000}}}\n",
    "jobs.py": "def f() -> Trainer.Config:\n    return Trainer.Config(a=" + "(" * 5000 + "1" + ")" * 5000 + ")\n",
    "calls.py": "def f() -> Trainer.Config:\n    return Trainer.Config(a=f(), b=f(), c=f())\n",
    "lines.sh": 'while read a; do b+=$a$a; done <<< "' + "x\n" * 90_000 + '"\n',
    "dotted.toml": ".".join(["a"] * 60_000) + "=1\n",
    "empty.sh": "\n" * 1_000_000 + "echo\n",
    "comments.xml": "<!-- -->" * 40,
    "experiment.yaml": "modules: {pre_trainer: {framework: megatron, config: self.yaml, model: self.yaml}}\n",
    "lora.yaml": "base_model: a\nsequence_len: 1\nadapter: lora\nlora_target_modules: '"
    + "(a+)+" * 20_000
    + "_proj'\n",
}
"""What programs print and read, of which each part is more than they would have."""
ENDLESS = [
    ("check", "/dev/zero"),
    ("topology", "/dev/zero.yaml"),
    ("import", "auto", "/dev/zero"),
    ("validate", "steps", "/dev/zero"),
    ("calibrate", "import-nccl-tests", "/dev/zero", "--cluster", "dgx-h100", "-o", "x.json"),
    ("calibrate", "import-kineto", "/dev/zero", "--cluster", "dgx-h100", "-o", "x.json"),
    ("calibrate", "report", "/dev/zero"),
    ("diff", "/dev/zero", "plan.yaml"),
    ("check", "plan.yaml", "--set", "schedule={csv: /dev/zero}"),
    ("check", "plan.yaml", "--set", "steps=0x" + "F" * 6000),
    ("search", "plan.yaml", "--vary", "layout.tp=!!int ''"),
    ("search", "plan.yaml", "--vary", "layout.tp=" + "9" * 6000),
    ("search", "plan.yaml", "--vary", "layout.tp=" + "[" * 5000),
    ("search", "plan.yaml", "--fix", "layout.tp=[1, {a: 2}]"),
]


def run_limited(folder: Path, *commands: Sequence[str]) -> list[tuple[object, str]]:
    """Exit status and standard error of commands, which one process runs."""
    finished = subprocess.run(
        [sys.executable, "-c", COMMANDS, str(SECONDS)],
        cwd=folder,
        capture_output=True,
        text=True,
        input=json.dumps(commands),
        check=False,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (LIMIT, LIMIT)),
    )
    results = [(status, errors) for status, errors in map(json.loads, finished.stdout.splitlines())]
    assert len(results) == len(commands), (finished.returncode, commands[len(results)], finished.stderr[-2000:])
    return results


def problem(status: object, errors: str) -> str:
    """What is wrong with how a command refused its input, or nothing."""
    is_sentence = status == 2 and any(line.startswith("error: ") for line in errors.splitlines())
    return "" if is_sentence and "Traceback" not in errors and len(errors) < 20_000 else f"{status}: {errors[-2000:]}"


def require_sentences(folder: Path, commands: Sequence[Sequence[str]]) -> None:
    results = zip(commands, run_limited(folder, *commands), strict=True)
    problems = {" ".join(command)[:80]: found for command, result in results if (found := problem(*result))}
    assert not problems


def test_bombs_are_refused(tmp_path: Path) -> None:
    for index, text in enumerate(BOMBS.values()):
        (tmp_path / f"{index}.yaml").write_text(text)
    for index, text in enumerate(JSON_BOMBS.values()):
        (tmp_path / f"{index}.json").write_text(text)
    require_sentences(tmp_path, [("check", path.name) for path in sorted(tmp_path.iterdir())])


@pytest.mark.slow
def test_bombs_of_other_programs_are_refused(tmp_path: Path) -> None:
    (tmp_path / "self.yaml").write_text("extends: [self.yaml, self.yaml]\n")
    for name, text in PRINTED_BOMBS.items():
        (tmp_path / name).write_text(text)
    require_sentences(tmp_path, [("import", "auto", name, "--gpus", "8") for name in PRINTED_BOMBS])


def test_a_compressed_bomb_is_refused(tmp_path: Path) -> None:
    """1.5 GB of zeros, in members of 100 MB."""
    (tmp_path / "plan.yaml").write_text(BASE)
    member = gzip.compress(bytes(100 << 20), 6)
    (tmp_path / "rank-0.json.gz").write_bytes(15 * member)
    require_sentences(tmp_path, [("diff", "rank-0.json.gz", "plan.yaml")])


def test_endless_files_and_values_are_refused(tmp_path: Path) -> None:
    (tmp_path / "plan.yaml").write_text(BASE)
    require_sentences(tmp_path, ENDLESS)


@pytest.mark.parametrize("megabytes", [50, 150, 300])
def test_too_little_memory_is_a_sentence(tmp_path: Path, megabytes: int) -> None:
    """Of a process that has it from its start."""
    (tmp_path / "plan.yaml").write_text(BASE)
    finished = subprocess.run(
        [sys.executable, "-m", "clustersim.cli", "run", "plan.yaml"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (megabytes * 10**6,) * 2),
    )
    assert not problem(finished.returncode, finished.stderr)
    assert "memory" in finished.stderr
