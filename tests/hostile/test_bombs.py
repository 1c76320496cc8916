"""Small files that parsers spend minutes, gigabytes or the stack on: each is refused in a sentence, soon.

Each runs in a process of its own with one gigabyte of address space.
"""

import gzip
import resource
import subprocess
import sys
from pathlib import Path

import pytest

BASE = """model: llama-tiny
cluster: {name: dgx-h100, gpus: 8}
layout: {dp: 8}
training: {sequence: 256, global_batch: 8}
"""
LIMIT = 10**9
SECONDS = 40  # 10 where nothing else runs
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


def run_limited(folder: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "clustersim.cli", *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (LIMIT, LIMIT)),
    )


def require_sentence(result: "subprocess.CompletedProcess[str]") -> None:
    assert result.returncode == 2, result.stderr[-2000:]
    lines = [line for line in result.stderr.splitlines() if not line.startswith("warning: ")]
    assert lines[0].startswith("error: ")
    assert "Traceback" not in result.stderr
    assert len(result.stderr) < 20_000


@pytest.mark.parametrize("name", [*BOMBS, "json brackets", "json nested", "json digits"])
def test_a_bomb_is_refused(tmp_path: Path, name: str) -> None:
    json_bombs = {
        "json brackets": "[" * 100_000,
        "json nested": '{"a":' * 500 + "1" + "}" * 500,
        "json digits": f'{{"steps": {"9" * 5000}}}',
    }
    file = tmp_path / ("plan.json" if name in json_bombs else "plan.yaml")
    file.write_text(json_bombs.get(name) or BOMBS[name])
    require_sentence(run_limited(tmp_path, "check", file.name))


def test_a_compressed_bomb_is_refused(tmp_path: Path) -> None:
    (tmp_path / "plan.yaml").write_text(BASE)
    with gzip.open(tmp_path / "rank-0.json.gz", "wb", 6) as file:
        for _ in range(1500):
            file.write(bytes(1 << 20))
    require_sentence(run_limited(tmp_path, "diff", "rank-0.json.gz", "plan.yaml"))


@pytest.mark.parametrize(
    "arguments",
    [
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
    ],
)
def test_an_endless_file_or_value_is_refused(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    (tmp_path / "plan.yaml").write_text(BASE)
    require_sentence(run_limited(tmp_path, *arguments))


@pytest.mark.parametrize("megabytes", [50, 150, 300])
def test_too_little_memory_is_a_sentence(tmp_path: Path, megabytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "plan.yaml").write_text(BASE)
    monkeypatch.setattr(sys.modules[__name__], "LIMIT", megabytes * 10**6)
    result = run_limited(tmp_path, "run", "plan.yaml")
    require_sentence(result)
    assert "memory" in result.stderr
