"""Kernels of a mixture on a stand-in for a GPU: which of them are launched, and in how many streams."""

from collections.abc import Iterator

import pytest

from clustersim.build import distinct_kernels
from clustersim.common.dtypes import DType
from clustersim.cost.calibration_record import MeasurementOutcome
from clustersim.model.kernels import GROUPED_MATMUL_KINDS, Kernel, KernelKind, MatmulLayout, MatmulShape
from tests.calibrate.check_scenarios import LLAMA, scenario

torch = pytest.importorskip("torch")
fakes = pytest.importorskip("tests.calibrate.fake_cuda")
from calibrate.devices.cuda import CudaDevice  # noqa: E402 - after torch is known to be there
from calibrate.imbalanced_shares import VARIATIONS  # noqa: E402
from calibrate.kernels import imbalanced_gemm, selection  # noqa: E402
from calibrate.kernels.pytorch_ops import grouped_gemm, prepare_kernel  # noqa: E402
from calibrate.kernels.timing import MeasurementMethod  # noqa: E402
from tests.calibrate import fake_tensors  # noqa: E402

FAST = MeasurementMethod(max_seconds=0.002, min_samples=2, max_samples=2, min_sample_seconds=0.0)
GROUPS = 6


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator["fakes.FakeCuda"]:
    grouped_gemm.has_grouped_kernel.cache_clear()
    with fake_tensors.on(fakes.FakeCuda().install(monkeypatch)) as made:
        yield made
    grouped_gemm.has_grouped_kernel.cache_clear()


def _kernel(kind: KernelKind, operands: MatmulLayout = MatmulLayout.NT, accumulated: DType | None = None) -> Kernel:
    sizes = (512, 256, 128) if operands is MatmulLayout.TN else (128, 512, 256)
    shape = MatmulShape(*sizes, GROUPS, operands, accumulated)
    return Kernel("test", kind, DType.BF16, 1.0, 1.0, shape)


@pytest.mark.usefixtures("cuda")
def test_a_mixture_is_measured_on_a_gpu() -> None:
    """All kernels of experts have a time, those in one kernel and those that are added to FP32 on streams.

    But for the map, of whose result values decide the size, and the stand-in computes none.
    """
    for grouping, fused in (("kernel", "false"), ("streams", "true")):
        given = scenario(
            LLAMA, "model.experts={count: 8, top_k: 2, ffn: 48}", "cluster.gpus=2", "layout.ep=2",
            "training.precision=bf16", f"training.fused={fused}", f"training.overheads.grouping={grouping}",
        )  # fmt: skip
        rows = selection.measure_kernels(distinct_kernels(given), CudaDevice(0), method=FAST)
        products = [row for row in rows if row.kind in GROUPED_MATMUL_KINDS]
        assert len(products) == 6
        assert {row.name for row in rows if row.outcome is not MeasurementOutcome.MEASURED} == {"mlp.permute.map"}


@pytest.mark.parametrize("operands", MatmulLayout)
def test_one_kernel_is_one_launch(cuda: "fakes.FakeCuda", operands: MatmulLayout) -> None:
    action = prepare_kernel(_kernel(KernelKind.GROUPED_MATMUL, operands), torch.device("cuda"))
    before = cuda.calls["launch"]
    action()
    assert cuda.calls["launch"] - before == 1


@pytest.mark.parametrize("accumulated", [None, DType.FP32])
def test_products_on_streams_take_turns_and_are_waited_for(cuda: "fakes.FakeCuda", accumulated: DType | None) -> None:
    action = prepare_kernel(_kernel(KernelKind.STREAMED_MATMULS, MatmulLayout.TN, accumulated), torch.device("cuda"))
    cuda.synchronize()
    before = cuda.calls["launch"]
    action()
    assert cuda.calls["launch"] - before == GROUPS
    assert len(cuda.gpu().streams) >= 1 + grouped_gemm.STREAM_COUNT
    assert cuda.current.ready == cuda.gpu().done


def test_where_there_is_no_such_kernel_products_are_launched_one_by_one(
    cuda: "fakes.FakeCuda", monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object, **__: object) -> None:
        raise RuntimeError("torch._grouped_mm is only supported on CUDA devices with compute capability = 9.0")

    monkeypatch.setattr(grouped_gemm, "_grouped_mm", refused)
    action = prepare_kernel(_kernel(KernelKind.GROUPED_MATMUL), torch.device("cuda"))
    before = cuda.calls["launch"]
    action()
    assert cuda.calls["launch"] - before == GROUPS


@pytest.mark.usefixtures("cuda")
def test_uneven_groups_are_measured_beside_even_ones() -> None:
    """As many rows together; of what the device has no kernel for there is no row."""
    lacking = Kernel("mx", KernelKind.GROUPED_MATMUL, DType.MXFP8, 1.0, 1.0, MatmulShape(64, 64, 64, GROUPS))
    asked = imbalanced_gemm.imbalanced_cases(
        [*map(_kernel, sorted(GROUPED_MATMUL_KINDS, key=lambda kind: kind.value)), lacking]
    )
    rows = list(imbalanced_gemm.measure_imbalanced(asked, CudaDevice(0), FAST))
    assert {row.kernel.kind for row in rows} == set(GROUPED_MATMUL_KINDS)
    assert len(rows) == 2 * len(VARIATIONS)
    for row in rows:
        assert sum(row.rows) == GROUPS * 128
        assert row.imbalance > 1.2
        assert row.kernel.time is not None and row.time.seconds > 0.0
