"""`calibrate fit-memory-error`: the packaged errors of predicted peaks are those that it writes."""

from pathlib import Path

import pytest

from calibrate.command import main
from calibrate.fit.memory_error import FAMILIES, UNMEASURED, memory_error_model
from clustersim.common.data_files import find_file, list_names
from clustersim.common.errors import InputError
from clustersim.validation.memory import PeakError


def test_packaged_errors_are_those_of_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fit-memory-error", "--write", str(tmp_path / "memory.yaml")]) == 0
    assert (tmp_path / "memory.yaml").read_text() == find_file("uncertainty", "memory").read_text()
    printed = capsys.readouterr().out
    assert "pytorch: headroom " in printed
    assert "out of sample" in printed


def test_every_packaged_framework_is_of_a_family() -> None:
    assert UNMEASURED.union(*FAMILIES.values()) == set(list_names("frameworks"))


def test_framework_of_no_family_is_an_error() -> None:
    with pytest.raises(InputError, match="framework other is of no family"):
        memory_error_model([PeakError("run", "source", "other", 1.0)])
