"""Scans take their roofline over the share that their library's kernels reach, or that an accelerator gives."""

from dataclasses import replace

import pytest

from clustersim.common import data_files
from clustersim.common.dtypes import DType
from clustersim.cost.roofline import Roofline
from clustersim.cost.scan_rates import library_share
from clustersim.hardware.accelerator import Accelerator, load_accelerator
from clustersim.hardware.efficiency import ScanShare
from clustersim.model import memory_bound
from clustersim.model.kernels import Kernel, KernelKind, MemoryBoundOp, ScanRoutine, ScanShape, SparseRoutine

H100 = load_accelerator("h100-sxm-80gb")


def _scan(routine: ScanRoutine, *, flops: float, moved_bytes: float, backward: bool = False) -> Kernel:
    shape = ScanShape(routine, 1, 8192, 32, 128, 128, 64, backward=backward)
    return Kernel("scan", KernelKind.SCAN, DType.BF16, flops, moved_bytes, shape)


def _seconds(accelerator: Accelerator, kernel: Kernel) -> float:
    return Roofline(accelerator).time_kernel(kernel).seconds


def _with_share(share: float) -> Accelerator:
    shares = {routine.value: ScanShare(share, share) for routine in ScanRoutine}
    return replace(H100, efficiency=replace(H100.efficiency, scan_shares=shares))


def test_every_routine_has_a_share_and_every_share_a_routine() -> None:
    routines = {routine.value for routine in (*ScanRoutine, *SparseRoutine)}
    shared = (MemoryBoundOp.CAUSAL_CONV1D, MemoryBoundOp.GATED_RMSNORM, MemoryBoundOp.FACTORIZATION)
    operations = {op.value for op in shared}
    paths = [data_files.find_file("scans", name) for name in data_files.list_names("scans")]
    assert sorted(name for path in paths for name in data_files.read_mapping(path)) == sorted(routines | operations)
    for routine in (*ScanRoutine, *SparseRoutine):
        share = library_share(routine.value)
        assert share is not None
        assert all(0 < share.select(backward=backward) <= 1 for backward in (False, True))
    assert library_share("causal_conv1d_cuda") is None


@pytest.mark.parametrize("moved_bytes", [1e9, 1.0])
def test_half_the_share_is_twice_the_time(moved_bytes: float) -> None:
    kernel = _scan(ScanRoutine.GATED_DELTA_RULE, flops=1e12, moved_bytes=moved_bytes)
    latency = _seconds(_with_share(0.5), replace(kernel, flops=0.0, bytes=0.0))
    whole, half = (_seconds(_with_share(share), kernel) - latency for share in (1.0, 0.5))
    assert half == pytest.approx(2 * whole)


def test_the_accelerators_share_comes_before_the_librarys() -> None:
    kernel = _scan(ScanRoutine.SSD, flops=1e12, moved_bytes=1e9)
    share = library_share("ssd")
    assert share is not None
    assert _seconds(H100, kernel) == _seconds(_with_share(share.forward), kernel)
    assert _seconds(_with_share(share.forward / 2), kernel) > _seconds(H100, kernel)


def test_directions_have_shares_of_their_own() -> None:
    kernels = [_scan(ScanRoutine.LIGHTNING, flops=0.0, moved_bytes=1e9, backward=back) for back in (False, True)]
    share = library_share("lightning")
    assert share is not None
    assert (_seconds(H100, kernels[0]) > _seconds(H100, kernels[1])) == (share.forward < share.backward)


def test_a_convolution_in_cuda_passes_at_the_bandwidth_of_other_operators() -> None:
    kernels = {
        spec.op.value: spec.forward_kernel("conv", DType.BF16, spec.shape_for(8192, 8192))
        for spec in (memory_bound.CAUSAL_CONV1D, memory_bound.CAUSAL_CONV1D_CUDA, memory_bound.SILU)
    }
    seconds = {name: _seconds(H100, kernel) for name, kernel in kernels.items()}
    assert seconds["causal_conv1d_cuda"] == pytest.approx(seconds["silu"])
    assert seconds["causal_conv1d"] > 2 * seconds["causal_conv1d_cuda"]
