"""Nothing leaks: not to the terminal, not from neighbouring files into messages and results, not into spreadsheets."""

import csv
import hashlib
import io
import os
import pty
import re
import subprocess
import sys
from base64 import b64encode
from pathlib import Path
from typing import Any

import pytest
import yaml

from clustersim.common.control_characters import escape_controls
from clustersim.report.export.table import COLUMNS, write_csv
from clustersim.report.html_document import PLOTLY_PATH, html_document

from .doors import PLAN
from .test_fuzz import run_command

NAME = "\x1b]0;owned\x07\x1b[31mred\x1b[0m \x1b]8;;http://evil.example\x07X \x9b2J \u202egnp"
SECRET = "root:x:0:0:T0pSecret+/="


def write(folder: Path, **keys: Any) -> Path:
    plan = folder / "plan.yaml"
    plan.write_text(yaml.safe_dump({**PLAN, **keys}))
    return plan


@pytest.mark.parametrize(
    "command",
    [("check", "plan.yaml"), ("run", "plan.yaml"), ("diff", "plan.yaml", "--set", "steps=2"), ("topology", "plan.yaml"),
     ("check", "plan.yaml", "--set", "model=\x1b[31mred"), ("export", "megatron", "plan.yaml")],
)  # fmt: skip
def test_escape_codes_of_a_file_are_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...]
) -> None:
    write(tmp_path, name=NAME)
    _, printed, errors = run_command(command, tmp_path, monkeypatch)
    assert printed + errors == escape_controls(printed + errors)


def test_a_terminal_gets_the_styles_of_this_program_only(tmp_path: Path) -> None:
    write(tmp_path, name=NAME)
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "clustersim.cli", "run", "plan.yaml"]
    with subprocess.Popen(command, cwd=tmp_path, stdout=theirs, env={**os.environ, "TERM": "xterm-256color"}):
        os.close(theirs)
        received = b""
        while True:
            try:
                received += os.read(ours, 65536)
            except OSError:
                break
    os.close(ours)
    assert b"\\x1b]0;owned" in received
    assert b"\x1b[1m" in received
    codes = re.sub(rb"\x1b\[[0-9;]*m", b"", received)
    assert not re.search(rb"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]|\xc2[\x80-\x9f]|\xe2\x80\xae", codes)
    assert b"\x1b[31mred" not in received


@pytest.mark.parametrize(
    "keys",
    [
        {"schedule": {"csv": "secret"}},
        {"cluster": {**PLAN["cluster"], "placement": {"order": "secret"}}},
        {"reliability": {"failures": {"gpu": {"trace": "secret"}}}},
        {"model": {"path": "secret"}},
        {"cluster": {**PLAN["cluster"], "accelerator": "secret.yaml"}},
        {"cost": {"record": "secret.json"}},
        {"framework": "secret.yaml"},
    ],
)
def test_messages_do_not_repeat_the_file_that_a_scenario_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keys: dict[str, Any]
) -> None:
    for name in ("secret", "secret.yaml", "secret.json"):
        (tmp_path / name).write_text(f"{SECRET}\n{SECRET},{SECRET}\n")
    write(tmp_path, **keys)
    status, printed, errors = run_command(("check", "plan.yaml"), tmp_path, monkeypatch)
    assert status == 2
    assert "T0pSecret" not in printed + errors


@pytest.mark.parametrize("kind", ["steps", "memory", "collectives", "kernels", "reliability"])
def test_a_table_that_is_none_is_not_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    (tmp_path / "secret").write_text(f"{SECRET}\n{SECRET}\n")
    status, printed, errors = run_command(("validate", kind, "secret"), tmp_path, monkeypatch)
    assert status == 2
    assert "T0pSecret" not in printed + errors


@pytest.mark.parametrize("start", ["=", "+", "-", "@", "\t", "\r"])
def test_texts_like_formulas_are_neutral_in_csv(start: str) -> None:
    import numpy as np

    text = np.array([f"{start}cmd|' /C calc'!A0"], dtype=object)
    columns = {name: text if column.type.name == "TEXT" else np.array([-1.0]) for name, column in COLUMNS.items()}
    file = io.BytesIO()
    write_csv([columns], file)
    _, cells = csv.reader(io.StringIO(file.getvalue().decode(), newline=""))
    for cell, column in zip(cells, COLUMNS.values(), strict=True):
        assert cell.startswith("'") if column.type.name == "TEXT" else cell in ("", "-1.0")  # empty: none stated


def test_pages_allow_the_scripts_that_they_have_and_no_others() -> None:
    page = html_document("a page", [])
    (policy,) = re.findall(r'Content-Security-Policy" content="([^"]*)"', page)
    (sources,) = re.findall(r"script-src ([^;]*);", policy)
    scripts = re.findall(r"<script>(.*?)</script>", page, re.DOTALL)
    texts = [*scripts, PLOTLY_PATH.read_text(encoding="utf-8")]
    hashes = [f"'sha256-{b64encode(hashlib.sha256(text.encode()).digest()).decode()}'" for text in texts]
    assert sources.split() == hashes
    assert "default-src 'none'" in policy
    assert not re.search(r"<[^>]+\son[a-z]+=|javascript:", page.replace(scripts[0], ""))


@pytest.mark.parametrize(
    "command",
    [
        ("run", "plan.yaml", "--quiet"),
        ("diff", "plan.yaml", "--set", "steps=2", "--quiet"),
        ("goodput", "plan.yaml", "--tokens", "100M", "--runs", "3", "--workers", "1", "--quiet"),
        ("search", "plan.yaml", "--workers", "1", "--fix", "layout.pp=1", "--fix", "layout.tp=2", "--quiet"),
    ],
)
def test_a_page_is_the_same_byte_for_byte(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...]
) -> None:
    write(tmp_path)
    pages = []
    for name in ("first.html", "second.html"):
        status, _, errors = run_command((*command, "--html", name), tmp_path, monkeypatch)
        assert status == 0, errors
        pages.append((tmp_path / name).read_bytes())
    assert pages[0] == pages[1]
