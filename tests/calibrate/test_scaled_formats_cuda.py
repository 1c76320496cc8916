"""Formats with scales on a fake GPU: matmuls, experts and casts, their samples, and fitted shares."""

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
    TimeStatistics,
    signature_of,
)
from clustersim.cost.measured_kernels import MeasuredKernels
from clustersim.cost.record_file import read_record, write_record
from clustersim.cost.record_kinds import MeasurementOutcome
from clustersim.cost.timing import Provenance
from clustersim.hardware.accelerator import load_accelerator
from clustersim.model.kernels import Kernel, KernelKind, MatmulLayout, MatmulShape
from clustersim.model.precision_recipe import OperandCast
from clustersim.model.quantization import quantize_kernels
from clustersim.scenario import Scenario

torch = pytest.importorskip("torch")
fake_cuda_module = pytest.importorskip("tests.calibrate.fake_cuda")
from calibrate.devices.cuda import CudaDevice  # noqa: E402 - after torch is known to be there
from calibrate.fit.record_fit import fit_record  # noqa: E402
from calibrate.kernels import imbalanced_gemm, kernel_grid, selection  # noqa: E402
from calibrate.kernels.measure import measure_sequence  # noqa: E402
from calibrate.kernels.pytorch_ops import prepare_kernel, scaled_grouped_gemm  # noqa: E402
from calibrate.kernels.pytorch_ops.scaled_matmul import ALIGNMENTS  # noqa: E402
from calibrate.kernels.timing import MeasurementMethod  # noqa: E402
from tests.calibrate import fake_tensors  # noqa: E402
from tests.calibrate.fake_gpu import FakeChip  # noqa: E402

FAST_METHOD = MeasurementMethod(max_seconds=0.002, min_samples=2, max_samples=2, min_sample_seconds=0.0)
AMPERE, HOPPER, BLACKWELL = (8, 0), (9, 0), (10, 0)
GROUPS = 3
BLACKWELL_FORMATS = (DType.FP8, DType.FP8_ROWWISE, DType.MXFP8, DType.NVFP4)

GpuFactory = Callable[[tuple[int, int]], "fake_cuda_module.FakeCuda"]


@pytest.fixture
def make_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[GpuFactory]:
    """Creates a fake GPU of a compute capability."""
    with ExitStack() as stack:

        def create_gpu(capability: tuple[int, int]) -> "fake_cuda_module.FakeCuda":
            scaled_grouped_gemm.has_grouped_kernel.cache_clear()
            chip = FakeChip(name="NVIDIA Test", capability=capability, sustained=FakeChip().boost)
            return stack.enter_context(
                fake_tensors.fake_cuda_tensors(fake_cuda_module.FakeCuda(chip).install(monkeypatch))
            )

        yield create_gpu
    scaled_grouped_gemm.has_grouped_kernel.cache_clear()


def _grouped_kernel(dtype: DType, operands: MatmulLayout, kind: KernelKind = KernelKind.GROUPED_MATMUL) -> Kernel:
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
def test_scaled_experts_are_one_kernel_where_pytorch_has_one(
    make_gpu: GpuFactory, capability: tuple[int, int], dtype: DType, operands: MatmulLayout, launches: int
) -> None:
    """PyTorch's checks of sizes, formats and strides are passed as well."""
    cuda = make_gpu(capability)
    action = prepare_kernel(_grouped_kernel(dtype, operands), torch.device("cuda", 0))
    launch_count = cuda.calls["launch"]
    action()
    assert cuda.calls["launch"] - launch_count == launches


def test_scaled_experts_are_sequential_where_a_build_lacks_the_kernel(
    make_gpu: GpuFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    def raise_unsupported(*_: object, **__: object) -> None:
        raise NotImplementedError("mxfp8_mxfp8 grouped gemm requires compile with USE_MSLK")

    cuda = make_gpu(BLACKWELL)
    monkeypatch.setattr(torch, "_scaled_grouped_mm", raise_unsupported)
    action = prepare_kernel(_grouped_kernel(DType.MXFP8, MatmulLayout.NT), torch.device("cuda", 0))
    launch_count = cuda.calls["launch"]
    action()
    assert cuda.calls["launch"] - launch_count == GROUPS


@pytest.mark.parametrize("operands", MatmulLayout)
@pytest.mark.parametrize("dtype", [DType.MXFP8, DType.FP8])
def test_imbalanced_group_sizes_are_multiples_of_the_scale_block(
    make_gpu: GpuFactory, dtype: DType, operands: MatmulLayout
) -> None:
    make_gpu(BLACKWELL)
    kernel = _grouped_kernel(dtype, operands)
    samples = list(
        imbalanced_gemm.measure_imbalanced(imbalanced_gemm.imbalanced_cases([kernel]), CudaDevice(0), FAST_METHOD)
    )
    assert len(samples) == 2
    assert isinstance(kernel.shape, MatmulShape)
    total_rows = GROUPS * (kernel.shape.k if operands is MatmulLayout.TN else kernel.shape.m)
    for sample in samples:
        assert sum(sample.tokens_per_group) == total_rows and len(set(sample.tokens_per_group)) > 1
        assert not any(size % ALIGNMENTS[dtype] for size in sample.tokens_per_group)


def test_missing_format_has_an_unsupported_sample(make_gpu: GpuFactory) -> None:
    make_gpu(AMPERE)
    request = selection.KernelRequest([], [], include_grid=True, budget=60.0)
    requested = [
        kernel for kernel in selection.requested_kernels(request, CudaDevice(0)) if kernel.dtype in LOW_PRECISION_DTYPES
    ]
    assert [kernel.dtype for kernel in requested] == list(LOW_PRECISION_DTYPES)
    samples = list(measure_sequence(requested, CudaDevice(0), FAST_METHOD))
    assert {sample.outcome for sample in samples} == {MeasurementOutcome.UNSUPPORTED}
    assert [sample.source for sample in samples] == [
        f"NVIDIA Test has no {dtype.value}" for dtype in LOW_PRECISION_DTYPES
    ]


def test_grid_has_matmuls_experts_and_casts_of_supported_formats(make_gpu: GpuFactory) -> None:
    make_gpu(BLACKWELL)
    request = selection.KernelRequest([], [], include_grid=True, budget=3600.0)
    requested = selection.requested_kernels(request, CudaDevice(0))
    for dtype in BLACKWELL_FORMATS:
        assert {kernel.kind for kernel in requested if kernel.dtype is dtype} == {
            KernelKind.MATMUL,
            KernelKind.GROUPED_MATMUL,
            KernelKind.STREAMED_MATMULS,
            KernelKind.CAST,
        }
        matmul_shapes = [
            item.shape for item in requested if isinstance(item.shape, MatmulShape) and item.dtype is dtype
        ]
        assert all(shape.accumulated is None for shape in matmul_shapes)
    assert sum(kernel.dtype is DType.FP8_BLOCKWISE for kernel in requested) == 1


def test_grid_can_be_limited_to_formats(make_gpu: GpuFactory) -> None:
    """Matmuls and casts of those formats, and one sample that records an unsupported format."""
    make_gpu(BLACKWELL)
    request = selection.KernelRequest(
        [], [], include_grid=True, budget=3600.0, formats=(DType.MXFP8, DType.FP8_BLOCKWISE)
    )
    requested = selection.requested_kernels(request, CudaDevice(0))
    (unsupported,) = (kernel for kernel in requested if kernel_grid.kernel_format(kernel) is DType.FP8_BLOCKWISE)
    assert unsupported.kind is KernelKind.MATMUL
    mx = [kernel for kernel in requested if kernel is not unsupported]
    assert {kernel_grid.kernel_format(kernel) for kernel in mx} == {DType.MXFP8}
    assert {kernel.dtype for kernel in mx if kernel.kind is KernelKind.CAST} == {DType.BF16, DType.MXFP8}


def _measure_record(kernels: list[Kernel], path: Path) -> CalibrationRecord:
    """The record of a session, fitted, written and read again."""
    device = CudaDevice(0)
    samples = measure_sequence(kernels, device, replace(FAST_METHOD, min_samples=3, max_samples=3))
    empty = CalibrationRecord(
        device.describe("b200-sxm-180gb"), MeasurementConditions("2026-01-01", "test", str(FAST_METHOD))
    )
    record = fit_record(replace(empty, kernels=tuple(samples)), load_accelerator("b200-sxm-180gb"))
    write_record(record, path)
    restored = read_record(path)
    assert restored == record
    return restored


def test_format_shares_are_fitted(make_gpu: GpuFactory, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The fake's rate is twice that of BF16 for eight bits and four times for four bits, whatever the scales."""
    cuda = make_gpu(BLACKWELL)
    pytest.importorskip("tests.calibrate.fake_nvml").install(cuda, monkeypatch)
    cubes = [
        replace(kernel, name="cube", bytes=1.0)
        for dtype in (DType.BF16, *BLACKWELL_FORMATS)
        for kernel in kernel_grid._cube_matmuls(dtype, (4096, 8192))
    ]
    (cast,) = quantize_kernels(
        "cast", OperandCast(1, 2), (4096, 8192), high_precision=DType.BF16, low_precision=DType.MXFP8
    )
    record = _measure_record([*cubes, cast], tmp_path / "b200.json")
    assert {sample.outcome for sample in record.kernels} == {MeasurementOutcome.MEASURED}
    fit = record.kernel_fit
    assert fit is not None
    matmul = fit.efficiency.matmul
    dense = matmul.peak_fraction * fit.peak[DType.BF16]
    rates = {dtype: matmul.peak_fraction_of(dtype) * fit.peak[dtype.peak_dtype] / dense for dtype in BLACKWELL_FORMATS}
    eight_bit_rates = dict.fromkeys(BLACKWELL_FORMATS[:3], pytest.approx(2.0, rel=0.05))
    assert rates == {**eight_bit_rates, DType.NVFP4: pytest.approx(4.0, rel=0.1)}
    cost = MeasuredKernels(record, load_accelerator("b200-sxm-180gb"))
    assert cost.time_kernel(cast).provenance is Provenance.MEASURED


def test_accumulating_matmuls_are_also_measured_without_accumulation() -> None:
    mapping = {
        "model": {"preset": "llama-tiny", "layers": 1},
        "cluster": {"name": "dgx-h100", "gpus": 8},
        "layout": {"dp": 8},
        "training": {"sequence": 256, "global_batch": 8, "precision": "fp8"},
        "framework": "ideal",
    }
    scenario = Scenario.from_mapping(mapping)
    scenario_kernels = set(distinct_kernels(scenario))
    additional = [kernel for kernel in kernel_grid.scenario_kernels([scenario]) if kernel not in scenario_kernels]
    accumulating = [
        scenario_kernel
        for scenario_kernel in scenario_kernels
        if isinstance(scenario_kernel.shape, MatmulShape) and scenario_kernel.shape.accumulated is not None
    ]
    low_precision = [item for item in accumulating if item.dtype is DType.FP8]
    assert 0 < len(additional) == len({signature_of(element) for element in low_precision}) < len(accumulating)
    for kernel in additional:
        shape = kernel.shape
        assert isinstance(shape, MatmulShape) and shape.accumulated is None
        sizes = shape.m * shape.k + shape.k * shape.n + 2 * shape.m * shape.n
        assert (kernel.dtype, kernel.bytes) == (DType.FP8, sizes)


def test_format_measured_by_experts_only_has_the_default_share() -> None:
    """No dense matmul determines its share, and the accelerator's file has none: it is that of the other formats."""
    assert DType.MXFP8 not in load_accelerator("h100-sxm-80gb").formats
    kernel = _grouped_kernel(DType.MXFP8, MatmulLayout.NT)
    assert kernel.shape is not None
    sample = KernelSample(
        "e", kernel.kind, kernel.dtype, kernel.shape, 1e12, 1e6, 1, TimeStatistics(1e-3, 1e-3, 1e-3, 3)
    )
    device = DeviceInfo("h100-sxm-80gb", "NVIDIA Test", 80e9, 132, torch="2.13.0")
    record = CalibrationRecord(device, MeasurementConditions("2026-01-01", "test", ""), (sample,))
    fit = fit_record(record, load_accelerator("h100-sxm-80gb")).kernel_fit
    assert fit is not None
    assert fit.efficiency.matmul.peak_fraction_of(DType.MXFP8) == fit.efficiency.matmul.peak_fraction
