"""Properties that need a subprocess: exit signals, redirected streams, loaded modules and interpreter warnings.

The output of the commands is tested in-process, see conftest.
"""

import json
import signal
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from clustersim.cli import app
from tests.cli.conftest import CommandRunner
from tests.validation.sample_cases import step_row, write_rows


@pytest.mark.parametrize(
    ("arguments", "status", "printed", "complained"),
    [
        (["run", "plan.yaml"], 0, "step time ", ""),
        (["check", "plan.yaml", "--set", "model=llama3-70b"], 3, "plan", ""),
        (["run", "plan.yaml", "--set", "layout.tp=3"], 2, "", "error: plan.yaml: layout: tp 3"),
        (["run", "plan.yaml", "--fast"], 2, "", "Usage: "),
    ],
)
def test_exit_status_and_separate_streams(
    process: CommandRunner, plan: Path, arguments: list[str], status: int, printed: str, complained: str
) -> None:
    """Warnings are errors."""
    assert plan.name == "plan.yaml"
    done = process(*arguments, PYTHONWARNINGS="error")
    assert done.returncode == status, done
    for text, prefix in ((done.stdout, printed), (done.stderr, complained)):
        assert text.startswith(prefix), done
        assert bool(text) is bool(prefix), done
    assert "Traceback" not in done.stderr


def test_version_option(process: CommandRunner) -> None:
    assert process("--version").stdout == f"clustersim {version('clustersim')}\n"


def test_ascii_terminal_gets_the_table(process: CommandRunner, plan: Path) -> None:
    done = process("run", plan, PYTHONIOENCODING="ascii")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("step time ")


@pytest.mark.skipif(not Path("/dev/stdout").exists(), reason="not every system has a file for standard output")
def test_json_to_dev_stdout(process: CommandRunner, plan: Path) -> None:
    done = process("run", plan, "--quiet", "--json", "/dev/stdout")
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["ranks"] == 8


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="only Linux has a disk that is always full")
@pytest.mark.parametrize("arguments", [["--json", "-"], []])
def test_full_disk_is_an_error_and_closed_pipe_is_silent(plan: Path, arguments: list[str]) -> None:
    command = [sys.executable, "-m", "clustersim.cli", "run", str(plan), *arguments]
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False, timeout=120)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "standard output cannot be written (No space left on device)" in done.stderr
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as started:
        assert started.stdout is not None
        assert started.stderr is not None
        started.stdout.close()
        assert started.stderr.read() == b""
    assert started.returncode == -signal.SIGPIPE  # as other Unix tools


@pytest.mark.slow
def test_validation_does_not_depend_on_worker_count(
    process: CommandRunner, clustersim: CommandRunner, tmp_path: Path
) -> None:
    """Sixteen cases are enough to use two workers."""
    table_rows = [step_row(case_id=f"case {n}", seq=str(128 * (n + 1)), layers="2") for n in range(16)]
    table = write_rows(tmp_path / "many.csv", *table_rows)
    one_worker = clustersim("validate", "steps", table, "--json", "-", "--workers", "1")
    two_workers = process("validate", "steps", table, "--json", "-", "--workers", "2")
    assert one_worker.stdout == two_workers.stdout
    assert [case["case_id"] for case in json.loads(one_worker.stdout)["cases"]] == [f"case {n}" for n in range(16)]


@pytest.mark.parametrize("code", ["import clustersim", "import clustersim.cli"])
def test_import_loads_no_heavy_packages(code: str) -> None:
    heavy = "{'numpy', 'networkx', 'plotly', 'simpy', 'pydantic', 'torch', 'pyarrow', 'perfetto'}"
    check = f"import sys; {code}; assert not {heavy} & set(sys.modules), {heavy} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", check], check=True, timeout=60)


def test_terminal_run_imports_no_page_modules(plan: Path) -> None:
    """Modules of pages and result exports are not imported."""
    pages = (
        "{'page', 'answer_timeline', 'answer_kernels', 'timeline', 'heatmap', 'network', 'topology', 'spans', 'write'}"
    )
    check = f"""
import sys
from clustersim.cli import main
sys.argv = ["clustersim", "run", {str(plan)!r}]
try:
    main()
except SystemExit as ended:
    assert not ended.code
found = {{name.rpartition(".")[2] for name in sys.modules if name.startswith("clustersim.report.")}}
assert "clustersim.report.terminal.run" in sys.modules
assert not {pages} & found, {pages} & found
assert not {{"plotly", "jinja2", "networkx", "torch", "pyarrow", "perfetto"}} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", check], check=True, timeout=120, stdout=subprocess.DEVNULL)


def test_an_interrupt_before_the_command_begins_ends_like_any_other(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(app, "_prepare_streams", interrupt)
    with pytest.raises(SystemExit) as ended:
        app.main()
    assert ended.value.code == 130
