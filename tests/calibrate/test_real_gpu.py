"""What a stand-in for a GPU cannot tell, on a real one: right results, credible times, a whole check (`-m gpu`)."""

import json
from pathlib import Path
from time import perf_counter

import pytest

from calibrate.command import main
from clustersim.build import distinct_kernels
from clustersim.common.dtypes import DType
from clustersim.cost.record_kinds import LaunchMode, MeasurementOutcome
from clustersim.model.kernels import Kernel, KernelKind, MatmulLayout, MatmulShape
from clustersim.scenario import Scenario

torch = pytest.importorskip("torch")
from calibrate.devices.cuda import CudaDevice  # noqa: E402 - after torch is known to be there
from calibrate.devices.device import accelerator_name  # noqa: E402
from calibrate.host.measure import measure_host_launches  # noqa: E402
from calibrate.kernels.formulas import UnsupportedKernel  # noqa: E402
from calibrate.kernels.measure import measure_kernel, measure_sequence  # noqa: E402
from calibrate.kernels.pytorch_ops import matmul, scaled_matmul  # noqa: E402
from calibrate.kernels.pytorch_ops.random_tensors import TORCH_DTYPES  # noqa: E402
from calibrate.kernels.timing import QUICK, measure_action  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("default"),  # those of PyTorch's compiler are its own
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here"),
]

MODEL = "{preset: llama-tiny, layers: 2, hidden: 1024, ffn: 2048, heads: 8, kv_heads: 2, head_dim: 128, vocab: 1024}"
PLAN = f"""
model: {MODEL}
cluster: {{name: dgx-h100, gpus: 1}}
training: {{sequence: 2048, global_batch: 2}}
"""
SIZE = 512
WORKSPACE = 2**25  # bytes that cuBLAS keeps for each thread and stream
ROUNDING = 0.01  # of results: BF16 has 8 bits
SCALED = (DType.FP8, DType.FP8_ROWWISE, DType.FP8_BLOCKWISE)
UNFUSED = ("training.fused=false", "training.loss=torch")


@pytest.fixture(scope="module")
def gpu() -> CudaDevice:
    """The first one."""
    return CudaDevice(0)


@pytest.fixture
def plan(tmp_path: Path) -> Path:
    """A small scenario of one GPU."""
    path = tmp_path / "plan.yaml"
    path.write_text(PLAN)
    return path


def _error(result: "torch.Tensor", expected: "torch.Tensor") -> float:
    return float((result.double() - expected).norm() / expected.norm())


@pytest.mark.parametrize("dtype", SCALED)
def test_products_of_formats_with_scales_are_right(gpu: CudaDevice, dtype: DType) -> None:
    if not gpu.supports(dtype):
        pytest.skip(f"{gpu.name} has no {dtype.value}")
    eight = [torch.randn(SIZE, SIZE, device=gpu.torch).to(torch.float8_e4m3fn) for _ in range(2)]
    a, b = eight[0], eight[1].t()
    for operands in MatmulLayout:
        result = scaled_matmul.scaled_matmul(MatmulShape(SIZE, SIZE, SIZE, operands=operands), dtype, a, b)()
        assert result.dtype is torch.bfloat16
        assert _error(result, a.double() @ b.double()) < ROUNDING


@pytest.mark.parametrize("operands", MatmulLayout)
def test_a_product_is_added_to_wider_gradients(gpu: CudaDevice, operands: MatmulLayout) -> None:
    shape = MatmulShape(SIZE, 2 * SIZE, SIZE, operands=operands)
    a, b = matmul.matmul_operands(shape, DType.BF16, gpu.torch)
    held = torch.randn(SIZE, 2 * SIZE, device=gpu.torch)
    expected = held.double() + a.double() @ b.double()
    torch.addmm(held, a, b, out_dtype=TORCH_DTYPES[DType.FP32], out=held)
    assert _error(held, expected) < 1e-5


def test_events_tell_what_a_clock_on_the_wall_tells(gpu: CudaDevice) -> None:
    shape = MatmulShape(4096, 4096, 4096)
    action = matmul.prepare_matmul(shape, DType.BF16, gpu.torch)
    time = measure_action(gpu.stopwatch(), gpu.prepare_under_load(lambda: action), QUICK)
    count = 200
    gpu.host_seconds(action, count)
    began = perf_counter()
    wall = gpu.host_seconds(action, count) / count
    assert perf_counter() - began >= count * wall
    assert time.seconds == pytest.approx(wall, rel=0.15)


@pytest.mark.parametrize("changes", [(), UNFUSED])
def test_every_kernel_of_a_scenario_is_measured(gpu: CudaDevice, plan: Path, changes: tuple[str, ...]) -> None:
    rows = list(measure_sequence(distinct_kernels(Scenario.load(plan, changes)), gpu, QUICK))
    lacking = {
        f"{row.name}: {row.outcome.value}, {row.source}"
        for row in rows
        if row.outcome is not MeasurementOutcome.MEASURED
    }
    assert not lacking
    assert all(row.time is not None and 1e-7 < row.time.seconds < 1e-2 for row in rows)


def test_experts_and_their_routing_are_measured(gpu: CudaDevice, plan: Path) -> None:
    plan.write_text(PLAN.replace("ffn: 2048", "experts: {count: 8, top_k: 2, ffn: 512}"))
    changes = (*UNFUSED, "training.overheads.grouping=kernel")
    rows = list(measure_sequence(distinct_kernels(Scenario.load(plan, changes)), gpu, QUICK))
    assert {(row.name, row.outcome, row.source) for row in rows if row.time is None} == set()


def test_the_gpu_says_what_it_is_and_how_it_is(gpu: CudaDevice) -> None:
    described = gpu.describe(accelerator_name(gpu, None))
    assert described.driver and described.cuda and described.cudnn and described.power_limit_w > 0.0
    state = gpu.telemetry()
    assert state.sm_clock_mhz > 0.0 and state.power_w > 0.0 and state.temperature_c > 0.0


def test_launches_are_measured_in_every_state(gpu: CudaDevice, plan: Path) -> None:
    rows = measure_host_launches(Scenario.load(plan), gpu, 0.5)
    assert {row.mode for row in rows} >= set(LaunchMode) - {LaunchMode.COMPILED}, "which PyTorch 2.11 cannot"
    assert all(1e-7 < row.forward < 1e-3 and 1e-7 < row.backward < 1e-3 for row in rows if row.mode.value == "eager")


def test_what_a_gpu_lacks_is_said(gpu: CudaDevice) -> None:
    kernel = Kernel("test", KernelKind.MATMUL, DType.NVFP4, 1.0, 1.0, MatmulShape(SIZE, SIZE, SIZE))
    if gpu.supports(DType.NVFP4):
        pytest.skip("it has all of them")
    row = measure_kernel(kernel, gpu, QUICK)
    assert row.outcome is MeasurementOutcome.UNSUPPORTED
    with pytest.raises(UnsupportedKernel):
        scaled_matmul.random_scaled_matmul(MatmulShape(SIZE, SIZE, SIZE + 1), DType.FP8, gpu.torch)


@pytest.mark.parametrize("changes", [(), UNFUSED])
def test_a_real_step_is_predicted_from_its_kernels(plan: Path, tmp_path: Path, changes: tuple[str, ...]) -> None:
    """So small that the host sets the pace: not more than that it is credible."""
    overrides = [word for change in changes for word in ("--set", change)]
    answer = tmp_path / "answer.json"
    assert main(["--check", str(plan), "--steps", "4", "--json", str(answer), *overrides]) == 0
    comparison = json.loads(answer.read_text())
    assert comparison["measured_s"] > 0.0
    assert abs(comparison["error"]) < 0.5
    assert abs(comparison["measured_peak_bytes"] - comparison["predicted_peak_bytes"]) < 5 * WORKSPACE
    assert comparison["sm_clock_mhz"]["in_steps"] > 0.0
