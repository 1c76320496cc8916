"""Formats with scales on a stand-in for a GPU: products, experts and casts, their rows, and shares fitted to them."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from clustersim.build import distinct_kernels
from clustersim.common.dtypes import LOW_PRECISION_DTYPES, DType
from clustersim.cost.calibration_record import (
    CalibrationRecord,
    DeviceInfo,
    KernelSample,
    MeasurementConditions,
    MeasurementOutcome,
    TimeStatistics,
    signature_of,
)
from clustersim.cost.measured_kernels import MeasuredKernels
from clustersim.cost.record_file import read_record, write_record
from clustersim.cost.timing import Provenance
from clustersim.hardware.accelerator import load_accelerator
from clustersim.model.kernels import Kernel, KernelKind, MatmulLayout, MatmulShape
from clustersim.model.precision_recipe import OperandCast
from clustersim.model.quantization import quantize_kernels
from clustersim.scenario import Scenario

torch = pytest.importorskip("torch")
fakes = pytest.importorskip("tests.calibrate.fake_cuda")
from calibrate.devices.cuda import CudaDevice  # noqa: E402 - after torch is known to be there
from calibrate.fit.record_fit import fit_record  # noqa: E402
from calibrate.kernels import imbalanced_gemm, kernel_grid, selection  # noqa: E402
from calibrate.kernels.pytorch_ops import prepare_kernel, scaled_grouped_gemm  # noqa: E402
from calibrate.kernels.pytorch_ops.scaled_matmul import ALIGNMENTS  # noqa: E402
from calibrate.kernels.timing import MeasurementMethod  # noqa: E402
from tests.calibrate import fake_tensors  # noqa: E402
from tests.calibrate.fake_gpu import Chip  # noqa: E402

FAST = MeasurementMethod(max_seconds=0.002, min_samples=2, max_samples=2, min_sample_seconds=0.0)
AMPERE, HOPPER, BLACKWELL = (8, 0), (9, 0), (10, 0)
GROUPS = 3
OF_BLACKWELL = (DType.FP8, DType.FP8_ROWWISE, DType.MXFP8, DType.NVFP4)

Make = Callable[[tuple[int, int]], "fakes.FakeCuda"]


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    """A GPU of a compute capability."""
    with ExitStack() as stack:

        def make(capability: tuple[int, int]) -> "fakes.FakeCuda":
            scaled_grouped_gemm.has_grouped_kernel.cache_clear()
            chip = Chip(name="NVIDIA Test", capability=capability, sustained=Chip().boost)
            return stack.enter_context(fake_tensors.on(fakes.FakeCuda(chip).install(monkeypatch)))

        yield make
    scaled_grouped_gemm.has_grouped_kernel.cache_clear()


def _experts(dtype: DType, operands: MatmulLayout, kind: KernelKind = KernelKind.GROUPED_MATMUL) -> Kernel:
    return Kernel("test", kind, dtype, 1.0, 1.0, MatmulShape(256, 384, 512, GROUPS, operands))


@pytest.mark.parametrize("operands", MatmulLayout)
@pytest.mark.parametrize(
    ("capability", "dtype", "launches"),
    [
        (HOPPER, DType.FP8, GROUPS),
        (HOPPER, DType.FP8_ROWWISE, 1),
        (HOPPER, DType.FP8_BLOCKWISE, GROUPS),
        (BLACKWELL, DType.FP8_ROWWISE, GROUPS),
        (BLACKWELL, DType.MXFP8, 1),
        (BLACKWELL, DType.NVFP4, GROUPS),
        ((10, 3), DType.MXFP8, GROUPS),
    ],
)
def test_experts_are_one_kernel_where_pytorch_has_one(
    gpu: Make, capability: tuple[int, int], dtype: DType, operands: MatmulLayout, launches: int
) -> None:
    """PyTorch's own checks of sizes, formats and strides are passed on the way."""
    cuda = gpu(capability)
    action = prepare_kernel(_experts(dtype, operands), torch.device("cuda", 0))
    before = cuda.calls["launch"]
    action()
    assert cuda.calls["launch"] - before == launches


def test_experts_are_one_by_one_where_a_build_lacks_the_kernel(gpu: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object, **__: object) -> None:
        raise NotImplementedError("mxfp8_mxfp8 grouped gemm requires compile with USE_MSLK")

    cuda = gpu(BLACKWELL)
    monkeypatch.setattr(torch, "_scaled_grouped_mm", refused)
    action = prepare_kernel(_experts(DType.MXFP8, MatmulLayout.NT), torch.device("cuda", 0))
    before = cuda.calls["launch"]
    action()
    assert cuda.calls["launch"] - before == GROUPS


@pytest.mark.parametrize("operands", MatmulLayout)
@pytest.mark.parametrize("dtype", [DType.MXFP8, DType.FP8])
def test_uneven_groups_are_whole_blocks(gpu: Make, dtype: DType, operands: MatmulLayout) -> None:
    gpu(BLACKWELL)
    kernel = _experts(dtype, operands)
    rows = list(imbalanced_gemm.measure_imbalanced(imbalanced_gemm.imbalanced_cases([kernel]), CudaDevice(0), FAST))
    assert len(rows) == 2
    assert isinstance(kernel.shape, MatmulShape)
    whole = GROUPS * (kernel.shape.k if operands is MatmulLayout.TN else kernel.shape.m)
    for row in rows:
        assert sum(row.rows) == whole and len(set(row.rows)) > 1
        assert not any(item % ALIGNMENTS[dtype] for item in row.rows)


def test_a_format_that_a_gpu_lacks_is_a_row_that_says_so(gpu: Make) -> None:
    gpu(AMPERE)
    wishes = selection.KernelRequest([], [], include_grid=True, budget=60.0)
    asked = [
        kernel for kernel in selection.requested_kernels(wishes, CudaDevice(0)) if kernel.dtype in LOW_PRECISION_DTYPES
    ]
    assert [kernel.dtype for kernel in asked] == list(LOW_PRECISION_DTYPES)
    rows = selection.measure_kernels(asked, CudaDevice(0), method=FAST)
    assert {row.outcome for row in rows} == {MeasurementOutcome.UNSUPPORTED}
    assert [row.source for row in rows] == [f"NVIDIA Test has no {dtype.value}" for dtype in LOW_PRECISION_DTYPES]


def test_the_grid_has_products_experts_and_casts_of_what_a_gpu_has(gpu: Make) -> None:
    gpu(BLACKWELL)
    wishes = selection.KernelRequest([], [], include_grid=True, budget=3600.0)
    asked = selection.requested_kernels(wishes, CudaDevice(0))
    for dtype in OF_BLACKWELL:
        assert {kernel.kind for kernel in asked if kernel.dtype is dtype} == {
            KernelKind.MATMUL,
            KernelKind.GROUPED_MATMUL,
            KernelKind.STREAMED_MATMULS,
            KernelKind.CAST,
        }
        of = [item.shape for item in asked if isinstance(item.shape, MatmulShape) and item.dtype is dtype]
        assert all(shape.accumulated is None for shape in of)
    assert sum(kernel.dtype is DType.FP8_BLOCKWISE for kernel in asked) == 1


def test_a_grid_may_be_of_some_formats(gpu: Make) -> None:
    """Products and casts into them; and a row that says that one is not there."""
    gpu(BLACKWELL)
    wishes = selection.KernelRequest(
        [], [], include_grid=True, budget=3600.0, formats=(DType.MXFP8, DType.FP8_BLOCKWISE)
    )
    asked = selection.requested_kernels(wishes, CudaDevice(0))
    (lacking,) = (kernel for kernel in asked if kernel_grid.kernel_format(kernel) is DType.FP8_BLOCKWISE)
    assert lacking.kind is KernelKind.MATMUL
    mx = [kernel for kernel in asked if kernel is not lacking]
    assert {kernel_grid.kernel_format(kernel) for kernel in mx} == {DType.MXFP8}
    assert {kernel.dtype for kernel in mx if kernel.kind is KernelKind.CAST} == {DType.BF16, DType.MXFP8}


def _measured(kernels: list[Kernel], path: Path) -> CalibrationRecord:
    """A session's record, fitted, written and read again."""
    device = CudaDevice(0)
    rows = selection.measure_kernels(kernels, device, method=replace(FAST, min_samples=3, max_samples=3))
    empty = CalibrationRecord(device.describe("b200-sxm-180gb"), MeasurementConditions("2026-01-01", "test", str(FAST)))
    made = fit_record(replace(empty, kernels=tuple(rows)), load_accelerator("b200-sxm-180gb"))
    write_record(made, path)
    found = read_record(path)
    assert found == made
    return found


def test_shares_of_formats_are_fitted_to_their_rows(gpu: Make, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The stand-in multiplies eight bits twice and four bits four times as fast as BF16, whatever their scales."""
    cuda = gpu(BLACKWELL)
    pytest.importorskip("tests.calibrate.fake_nvml").install(cuda, monkeypatch)
    cubes = [
        replace(kernel, name="cube", bytes=1.0)
        for dtype in (DType.BF16, *OF_BLACKWELL)
        for kernel in kernel_grid._cube_matmuls(dtype, (4096, 8192))
    ]
    (cast,) = quantize_kernels(
        "cast", OperandCast(1, 2), (4096, 8192), high_precision=DType.BF16, low_precision=DType.MXFP8
    )
    record = _measured([*cubes, cast], tmp_path / "b200.json")
    assert {row.outcome for row in record.kernels} == {MeasurementOutcome.MEASURED}
    fit = record.kernel_fit
    assert fit is not None
    matmul = fit.efficiency.matmul
    dense = matmul.share * fit.peak[DType.BF16]
    rates = {dtype: matmul.peak_fraction_of(dtype) * fit.peak[dtype.peak_dtype] / dense for dtype in OF_BLACKWELL}
    eight = dict.fromkeys(OF_BLACKWELL[:3], pytest.approx(2.0, rel=0.05))
    assert rates == {**eight, DType.NVFP4: pytest.approx(4.0, rel=0.1)}
    answers = MeasuredKernels(record, load_accelerator("b200-sxm-180gb"))
    assert answers.time_kernel(cast).provenance is Provenance.MEASURED


def test_products_that_are_added_are_measured_as_written_too() -> None:
    given = {
        "model": {"preset": "llama-tiny", "layers": 1},
        "cluster": {"name": "dgx-h100", "gpus": 8},
        "layout": {"dp": 8},
        "training": {"sequence": 256, "global_batch": 8, "precision": "fp8", "fused": True},
    }
    scenario = Scenario.from_mapping(given)
    before = set(distinct_kernels(scenario))
    more = [kernel for kernel in kernel_grid.scenario_kernels([scenario]) if kernel not in before]
    added = [item for item in before if isinstance(item.shape, MatmulShape) and item.shape.accumulated is not None]
    narrow = [element for element in added if element.dtype is DType.FP8]
    assert 0 < len(more) == len({signature_of(entry) for entry in narrow}) < len(added)
    for kernel in more:
        shape = kernel.shape
        assert isinstance(shape, MatmulShape) and shape.accumulated is None
        sizes = shape.m * shape.k + shape.k * shape.n + 2 * shape.m * shape.n
        assert (kernel.dtype, kernel.bytes) == (DType.FP8, sizes)


def test_a_format_of_experts_alone_has_the_share_of_others() -> None:
    """No product tells its share, and the accelerator's file has none: it is that of other formats."""
    assert DType.MXFP8 not in load_accelerator("h100-sxm-80gb").formats
    kernel = _experts(DType.MXFP8, MatmulLayout.NT)
    assert kernel.shape is not None
    row = KernelSample("e", kernel.kind, kernel.dtype, kernel.shape, 1e12, 1e6, 1, TimeStatistics(1e-3, 1e-3, 1e-3, 3))
    device = DeviceInfo("h100-sxm-80gb", "NVIDIA Test", 80e9, 132, torch="2.13.0")
    record = CalibrationRecord(device, MeasurementConditions("2026-01-01", "test", ""), (row,))
    fit = fit_record(record, load_accelerator("h100-sxm-80gb")).kernel_fit
    assert fit is not None
    assert fit.efficiency.matmul.peak_fraction_of(DType.MXFP8) == fit.efficiency.matmul.share
