"""Layers in a loop of XLA copy the results of products that backward reads."""

import pytest

from clustersim.lowering.units import UnitBuilder
from clustersim.model.framework_files import load_framework
from clustersim.model.kernels import Kernel
from clustersim.model.overheads import Overheads
from clustersim.model.presets import load_preset
from clustersim.model.training import (
    DotsSaveableRecompute,
    FullRecompute,
    NoRecompute,
    Recompute,
    SelectiveOpRecompute,
    Training,
)
from clustersim.parallel.layout import Layout
from clustersim.parallel.plan import Plan

T = 64
ALL_BUT_DOWN = 4096 + 2 * 1024 + 4096 + 2 * 14336
EVERY_SECOND = (4096 + 1024) + 14336 + 4096


def copied_bytes(recompute: Recompute, *, scan_copies: bool = True) -> float:
    """Bytes that the forward of a Llama 3 8B layer moves to stack what it saves."""
    training = Training(T, 1, recompute=recompute, overheads=Overheads(scan_copies=scan_copies))
    plan = Plan(load_preset("llama3-8b"), training, Layout())
    (stage,) = plan.stages
    (run,) = plan.layer_runs(stage)
    bodies = (operation.body for operation in UnitBuilder(plan).layer_unit(run, None).forward)
    return sum(body.bytes for body in bodies if isinstance(body, Kernel) and body.name == "stack saved products")


@pytest.mark.parametrize(
    ("recompute", "columns"),
    [
        (NoRecompute(), ALL_BUT_DOWN),  # q, k, v; output; gate, up
        (DotsSaveableRecompute(), ALL_BUT_DOWN),
        (SelectiveOpRecompute(), EVERY_SECOND),  # q, v; gate; down
        (FullRecompute(), 0),
    ],
)
def test_saved_results_of_products_are_read_and_written(recompute: Recompute, columns: int) -> None:
    """Two bytes an element, each read and written once."""
    assert copied_bytes(recompute) == 4 * T * columns


def test_layers_that_are_not_scanned_copy_nothing() -> None:
    assert copied_bytes(NoRecompute(), scan_copies=False) == 0


@pytest.mark.parametrize(("name", "scans"), [("maxtext", True), ("paxml", True), ("pytorch", False)])
def test_programs_of_jax_scan_their_layers(name: str, scans: bool) -> None:
    assert load_framework(name).overheads.scan_copies is scans
