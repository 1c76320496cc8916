"""The trained model matches the simulated one: same parameters, same matmuls, same gradients."""

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import pytest

from clustersim.lowering.training_step import lower_step
from clustersim.model.kernels import Kernel, MatmulShape
from clustersim.model.transformer import parameter_count
from clustersim.program.task import ComputeTask
from clustersim.scenario import Scenario
from tests.calibrate.check_scenarios import GPT, LLAMA, single_thread, small_scenario

torch = pytest.importorskip("torch")
MatmulSize = tuple[int, int, int, int]

from calibrate.check.fused_linear import FusedWgradLinear  # noqa: E402 - torch first
from calibrate.check.phase_timer import PhaseTimer  # noqa: E402
from calibrate.check.supported import build_plan, build_trainer  # noqa: E402
from calibrate.check.torch_model import build_stage  # noqa: E402
from calibrate.check.trainer import random_batch  # noqa: E402

CPU_DEVICE = torch.device("cpu")


@pytest.fixture(autouse=True)
def _single_thread() -> Iterator[None]:
    with single_thread():
        yield


def _step_kernels(scenario: Scenario) -> Iterable[Kernel]:
    """Every kernel that the only rank runs in a step, with repetitions."""
    plan = build_plan(scenario)
    (program,) = lower_step(plan, scenario.schedule.order(1, plan.microbatches)).programs
    for task in program.tasks:
        if isinstance(task, ComputeTask):
            yield from (operation.kernel for operation in task.segment.operations if operation.kernel is not None)


def _normalized_size(batch: int, m: int, n: int, k: int) -> MatmulSize:
    """Autograd computes the gradient of transposed keys as its transpose, so batched matmuls count either way."""
    return (batch, *sorted((m, n)), k) if batch > 1 else (batch, m, n, k)  # type: ignore[return-value]


def _predicted_matmuls(scenario: Scenario) -> Counter[MatmulSize]:
    shapes = (kernel.shape for kernel in _step_kernels(scenario))
    return Counter(
        _normalized_size(shape.batch, shape.m, shape.n, shape.k) for shape in shapes if isinstance(shape, MatmulShape)
    )


def _executed_matmuls(scenario: Scenario) -> Counter[MatmulSize]:
    """Matmuls of a real step: [batch] m x n over k, seen by PyTorch's dispatcher."""
    counts: Counter[MatmulSize] = Counter()

    class MatmulRecorder(torch.utils._python_dispatch.TorchDispatchMode):  # type: ignore[misc, name-defined]
        def __torch_dispatch__(self, operator: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
            name = operator._schema.name
            if name in {"aten::mm", "aten::addmm", "aten::addmm_", "aten::bmm"}:
                a, b = args[-2:]
                batch = a.shape[0] if a.dim() == 3 else 1
                counts[_normalized_size(batch, a.shape[-2], b.shape[-1], a.shape[-1])] += 1
            return operator(*args, **(kwargs or {}))

    trainer, batch = build_trainer(scenario, CPU_DEVICE), random_batch(build_plan(scenario), CPU_DEVICE)
    with MatmulRecorder():
        trainer.run_passes(batch, PhaseTimer(CPU_DEVICE))
    return counts


@pytest.mark.parametrize("model", [LLAMA, GPT], ids=["llama", "gpt"])
@pytest.mark.parametrize("overrides", [(), ("model.qk_norm=true", "model.norm=rmsnorm"), ("model.layers=3",)])
def test_model_has_the_counted_parameters(model: dict[str, Any], overrides: tuple[str, ...]) -> None:
    scenario = small_scenario(model, *overrides)
    plan = build_plan(scenario)
    with torch.device("meta"):
        stage_model = build_stage(plan, plan.stages[0])
    assert sum(weight.numel() for weight in stage_model.parameters()) == parameter_count(scenario.model)


@pytest.mark.parametrize("model", [LLAMA, GPT], ids=["llama", "gpt"])
@pytest.mark.parametrize("attention", ["flash", "flash2", "standard"])
@pytest.mark.parametrize("recompute", ["none", "mode: selective", "mode: full", "layers: 1"])
@pytest.mark.parametrize("early_stop", ["true", "false"])
def test_step_executes_the_predicted_matmuls(
    model: dict[str, Any], attention: str, recompute: str, early_stop: str
) -> None:
    """Every matmul of forward, recomputation and both gradients, by shape and count."""
    recompute_mode = recompute if recompute == "none" else f"{{{recompute}, early_stop: {early_stop}}}"
    scenario = small_scenario(model, f"training.attention={attention}", f"training.recompute={recompute_mode}")
    assert _executed_matmuls(scenario) == _predicted_matmuls(scenario)


def test_torch_flop_counter_matches_the_simulated_flops() -> None:
    """Standard attention, which consists of matmuls; flash attention skips a half that the counter includes."""
    from torch.utils.flop_counter import FlopCounterMode

    scenario = small_scenario(LLAMA, "training.attention=standard")
    trainer, batch = build_trainer(scenario, CPU_DEVICE), random_batch(build_plan(scenario), CPU_DEVICE)
    with FlopCounterMode(display=False) as counter:
        trainer.run_passes(batch, PhaseTimer(CPU_DEVICE))
    assert counter.get_total_flops() == sum(kernel.flops for kernel in _step_kernels(scenario))


@pytest.mark.parametrize("bias", [False, True])
def test_gradient_accumulated_in_the_matmul_equals_autograd(bias: bool) -> None:
    torch.manual_seed(0)
    layer, x = FusedWgradLinear(8, 6, bias=bias, fused=True), torch.randn(2, 5, 8, requires_grad=True)
    upstream = torch.randn(2, 5, 6)
    expected = torch.autograd.grad(layer(x), [x, layer.weight], upstream)
    layer.gradient_buffer = torch.ones_like(layer.weight)
    (input_gradient,) = torch.autograd.grad(layer(x), [x], upstream)
    torch.testing.assert_close(input_gradient, expected[0])
    torch.testing.assert_close(layer.gradient_buffer, 1.0 + expected[1])


def test_bf16_weights_follow_fp32_masters_with_accumulated_gradients() -> None:
    """Gradients of two microbatches are accumulated in FP32; the compute weights are the updated masters, rounded."""
    scenario = small_scenario(LLAMA, "training.precision=bf16", "training.gradient_clipping=false")
    torch.manual_seed(0)
    trainer, batch = build_trainer(scenario, CPU_DEVICE), random_batch(build_plan(scenario), CPU_DEVICE)
    trainer.run_passes(batch, PhaseTimer(CPU_DEVICE))
    update = trainer.weight_update
    assert all(weight.grad is None and weight.dtype is torch.bfloat16 for weight in update.weights)
    initial = [master.detach().clone() for master in update._masters]
    assert all(master.grad is not None and master.grad.abs().sum() > 0 for master in update._masters)
    update.update_weights()
    for weight, master, old in zip(update.weights, update._masters, initial, strict=True):
        assert not torch.equal(master, old)
        assert torch.equal(weight, master.to(torch.bfloat16))


def test_training_reduces_the_loss() -> None:
    scenario = small_scenario(GPT)
    torch.manual_seed(0)
    trainer, batch = build_trainer(scenario, CPU_DEVICE), random_batch(build_plan(scenario), CPU_DEVICE)

    def loss() -> float:
        with torch.no_grad():
            return float(trainer.model(batch.tokens[0], batch.targets[0]))

    first = loss()
    for _ in range(30):
        trainer.weight_update.zero_gradients()
        trainer.run_passes(batch, PhaseTimer(CPU_DEVICE))
        trainer.weight_update.update_weights()
    assert loss() < first
