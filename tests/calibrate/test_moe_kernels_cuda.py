"""MoE kernels on a fake GPU: which of them are launched, and in how many streams."""

from collections.abc import Iterator

import pytest

from clustersim.build import distinct_kernels
from clustersim.common.dtypes import DType
from clustersim.cost.record_kinds import MeasurementOutcome
from clustersim.model.kernels import GROUPED_MATMUL_KINDS, Kernel, KernelKind, MatmulLayout, MatmulShape
from tests.calibrate.check_scenarios import LLAMA, small_scenario

torch = pytest.importorskip("torch")
fake_cuda_module = pytest.importorskip("tests.calibrate.fake_cuda")
from calibrate.devices.cuda import CudaDevice  # noqa: E402 - after torch is known to be there
from calibrate.imbalanced_shares import VARIATIONS  # noqa: E402
from calibrate.kernels import imbalanced_gemm  # noqa: E402
from calibrate.kernels.measure import measure_sequence  # noqa: E402
from calibrate.kernels.pytorch_ops import grouped_gemm, prepare_kernel  # noqa: E402
from calibrate.kernels.timing import MeasurementMethod  # noqa: E402
from tests.calibrate import fake_tensors  # noqa: E402

FAST_METHOD = MeasurementMethod(max_seconds=0.002, min_samples=2, max_samples=2, min_sample_seconds=0.0)
GROUPS = 6


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator["fake_cuda_module.FakeCuda"]:
    grouped_gemm.has_grouped_kernel.cache_clear()
    with fake_tensors.fake_cuda_tensors(fake_cuda_module.FakeCuda().install(monkeypatch)) as fake:
        yield fake
    grouped_gemm.has_grouped_kernel.cache_clear()


def _kernel(kind: KernelKind, operands: MatmulLayout = MatmulLayout.NT, accumulated: DType | None = None) -> Kernel:
    sizes = (512, 256, 128) if operands is MatmulLayout.TN else (128, 512, 256)
    shape = MatmulShape(*sizes, GROUPS, operands, accumulated)
    return Kernel("test", kind, DType.BF16, 1.0, 1.0, shape)


@pytest.mark.usefixtures("cuda")
def test_moe_kernels_are_measured_on_a_gpu() -> None:
    """All expert kernels have a time, grouped kernels and matmuls accumulated to FP32 on streams.

    Except the permutation map, whose output size depends on values, which the fake does not compute.
    """
    for grouping, fused in (("kernel", "false"), ("streams", "true")):
        scenario = small_scenario(
            LLAMA, "model.experts={count: 8, top_k: 2, ffn: 48}", "cluster.gpus=2", "layout.ep=2",
            "training.precision=bf16", f"training.fused={fused}", f"training.overheads.grouping={grouping}",
        )  # fmt: skip
        samples = list(measure_sequence(distinct_kernels(scenario), CudaDevice(0), FAST_METHOD))
        matmuls = [sample for sample in samples if sample.kind in GROUPED_MATMUL_KINDS]
        assert len(matmuls) == 6
        assert {sample.name for sample in samples if sample.outcome is not MeasurementOutcome.MEASURED} == {
            "mlp.permute.map"
        }


@pytest.mark.parametrize("operands", MatmulLayout)
def test_grouped_kernel_is_one_launch(cuda: "fake_cuda_module.FakeCuda", operands: MatmulLayout) -> None:
    action = prepare_kernel(_kernel(KernelKind.GROUPED_MATMUL, operands), torch.device("cuda"))
    launches = cuda.calls["launch"]
    action()
    assert cuda.calls["launch"] - launches == 1


@pytest.mark.parametrize("accumulated", [None, DType.FP32])
def test_streamed_matmuls_use_several_streams_and_are_joined(
    cuda: "fake_cuda_module.FakeCuda", accumulated: DType | None
) -> None:
    action = prepare_kernel(_kernel(KernelKind.STREAMED_MATMULS, MatmulLayout.TN, accumulated), torch.device("cuda"))
    cuda.synchronize()
    launches = cuda.calls["launch"]
    action()
    assert cuda.calls["launch"] - launches == GROUPS
    assert len(cuda.gpu().streams) >= 1 + grouped_gemm.STREAM_COUNT
    assert cuda.current.ready_time == cuda.gpu().finish_time


def test_matmuls_are_launched_sequentially_without_a_grouped_kernel(
    cuda: "fake_cuda_module.FakeCuda", monkeypatch: pytest.MonkeyPatch
) -> None:
    def raise_unsupported(*_: object, **__: object) -> None:
        raise RuntimeError("torch._grouped_mm is only supported on CUDA devices with compute capability = 9.0")

    monkeypatch.setattr(grouped_gemm, "_grouped_mm", raise_unsupported)
    action = prepare_kernel(_kernel(KernelKind.GROUPED_MATMUL), torch.device("cuda"))
    launches = cuda.calls["launch"]
    action()
    assert cuda.calls["launch"] - launches == GROUPS


@pytest.mark.usefixtures("cuda")
def test_imbalanced_groups_are_measured() -> None:
    """With the same total number of rows; unsupported kernels have no sample."""
    unsupported = Kernel("mx", KernelKind.GROUPED_MATMUL, DType.MXFP8, 1.0, 1.0, MatmulShape(64, 64, 64, GROUPS))
    cases = imbalanced_gemm.imbalanced_cases(
        [*map(_kernel, sorted(GROUPED_MATMUL_KINDS, key=lambda kind: kind.value)), unsupported]
    )
    samples = list(imbalanced_gemm.measure_imbalanced(cases, CudaDevice(0), FAST_METHOD))
    assert {sample.kernel.kind for sample in samples} == set(GROUPED_MATMUL_KINDS)
    assert len(samples) == 2 * len(VARIATIONS)
    for sample in samples:
        assert sum(sample.tokens_per_group) == GROUPS * 128
        assert sample.imbalance > 1.2
        assert sample.kernel.time is not None and sample.time.seconds > 0.0
