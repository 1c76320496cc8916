"""The trained MoE model matches the simulated one: same parameters, same matmuls, experts chosen evenly."""

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from clustersim.lowering.training_step import lower_step
from clustersim.model.kernels import GROUPED_MATMUL_KINDS, MatmulLayout, MatmulShape
from clustersim.model.transformer import parameter_count
from clustersim.program.task import ComputeTask
from clustersim.scenario import Scenario
from tests.calibrate.check_scenarios import LLAMA, single_thread, small_scenario

torch = pytest.importorskip("torch")

from calibrate.check.moe import MoeLayer, _balancing_logits  # noqa: E402 - torch first
from calibrate.check.phase_timer import PhaseTimer  # noqa: E402
from calibrate.check.supported import build_plan, build_trainer, require_supported  # noqa: E402
from calibrate.check.torch_model import build_stage  # noqa: E402
from calibrate.check.trainer import random_batch, training_step  # noqa: E402
from clustersim.common.errors import InputError  # noqa: E402

CPU_DEVICE = torch.device("cpu")
SOFTMAX_MOE = "model.experts={count: 8, top_k: 2, ffn: 48}"
SIGMOID_MOE = (
    "model.experts={count: 16, top_k: 4, ffn: 48, router: sigmoid, router_bias: true, num_groups: 8, group_topk: 4}"
)
SHARED_EXPERT_MOE = "model.experts={count: 8, top_k: 2, ffn: 48, shared: 32, dense_layers: 1}"
EP_OVERRIDES = ("cluster.gpus=2", "layout={ep: 2, data: ddp}", "training.microbatch=1")
MatmulSize = tuple[int, int, int, int]


@pytest.fixture(autouse=True)
def _seeded_single_thread() -> Iterator[None]:
    torch.manual_seed(0)
    with single_thread():
        yield


def _predicted_matmuls(scenario: Scenario) -> Counter[MatmulSize]:
    """Grouped matmuls of a step: groups, rows of each, and the other two sizes."""
    plan, counts = build_plan(scenario), Counter[MatmulSize]()
    (program,) = lower_step(plan, scenario.schedule.order(1, plan.microbatches)).programs
    blocks = [task.segment for task in program.tasks if isinstance(task, ComputeTask)]
    for kernel in (
        operation.kernel for segment in blocks for operation in segment.operations if operation.kernel is not None
    ):
        match kernel.shape:
            case MatmulShape(m, n, k, groups, operands) if kernel.kind in GROUPED_MATMUL_KINDS:
                counts[(groups, k, m, n) if operands is MatmulLayout.TN else (groups, m, n, k)] += 1
    return counts


def _executed_matmuls(scenario: Scenario) -> Counter[MatmulSize]:
    """The same of a real step, seen by PyTorch's dispatcher; weight gradients may be computed transposed."""
    counts: Counter[MatmulSize] = Counter()

    class GroupedMatmulRecorder(torch.utils._python_dispatch.TorchDispatchMode):  # type: ignore[misc, name-defined]
        def __torch_dispatch__(self, operator: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if operator._schema.name == "aten::_grouped_mm":
                (a, b), offsets = args[:2], (kwargs or {}).get("offs", args[2] if len(args) > 2 else None)
                groups = len(offsets)
                assert offsets.diff().unique().numel() == 1  # chosen evenly
                if b.dim() == 3:
                    counts[groups, len(a) // groups, b.shape[-1], a.shape[-1]] += 1
                else:
                    counts[groups, a.shape[-1] // groups, a.shape[0], b.shape[-1]] += 1
            return operator(*args, **(kwargs or {}))

    trainer, batch = build_trainer(scenario, CPU_DEVICE), random_batch(build_plan(scenario), CPU_DEVICE)
    with GroupedMatmulRecorder():
        trainer.run_passes(batch, PhaseTimer(CPU_DEVICE))
    return counts


@pytest.mark.parametrize("experts", [SOFTMAX_MOE, SIGMOID_MOE, SHARED_EXPERT_MOE], ids=["softmax", "sigmoid", "shared"])
def test_moe_model_has_the_counted_parameters(experts: str) -> None:
    scenario = small_scenario(LLAMA, experts)
    plan = build_plan(scenario)
    with torch.device("meta"):
        model = build_stage(plan, plan.stages[0])
    assert sum(weight.numel() for weight in model.parameters()) == parameter_count(scenario.model)


def test_expert_parallel_rank_holds_its_local_experts() -> None:
    """Half of the experts' weights, and all others."""
    full_plan, sharded_plan = (
        build_plan(small_scenario(LLAMA, SOFTMAX_MOE)),
        build_plan(small_scenario(LLAMA, SOFTMAX_MOE, *EP_OVERRIDES)),
    )
    with torch.device("meta"):
        models = [build_stage(plan, plan.stages[0]) for plan in (full_plan, sharded_plan)]
    full_count, local_count = (sum(weight.numel() for weight in model.parameters()) for model in models)
    assert full_count - local_count == 2 * 4 * 3 * 48 * 64  # layers, experts, matrices


@pytest.mark.parametrize("experts", [SOFTMAX_MOE, SIGMOID_MOE, SHARED_EXPERT_MOE], ids=["softmax", "sigmoid", "shared"])
def test_step_executes_the_predicted_grouped_matmuls(experts: str) -> None:
    scenario = small_scenario(LLAMA, experts)
    predicted = _predicted_matmuls(scenario)
    assert _executed_matmuls(scenario) == predicted and predicted


@pytest.mark.parametrize(("tokens", "top_k", "count"), [(32, 2, 8), (30, 4, 6), (5, 3, 8)])
def test_balancing_logits_choose_experts_evenly(tokens: int, top_k: int, count: int) -> None:
    """Experts are chosen equally often up to one; all experts of a token are different."""
    from clustersim.model.layer_stack import MlpType, MoeMlp

    routing_map = _balancing_logits(tokens, MoeMlp(count, top_k, 4, MlpType.SWIGLU)) > 0
    assert routing_map.sum(1).tolist() == [top_k] * tokens
    tokens_per_expert = routing_map.sum(0)
    assert int(tokens_per_expert.max() - tokens_per_expert.min()) <= 1


def test_training_a_moe_model_reduces_the_loss() -> None:
    scenario = small_scenario(LLAMA, SOFTMAX_MOE)
    trainer, batch = build_trainer(scenario, CPU_DEVICE), random_batch(build_plan(scenario), CPU_DEVICE)

    def loss() -> float:
        with torch.no_grad():
            return float(trainer.model(batch.tokens[0], batch.targets[0]))

    first = loss()
    routers = [module.router.weight for module in trainer.model.modules() if isinstance(module, MoeLayer)]
    initial = [weight.detach().clone() for weight in routers]
    for _ in range(10):
        training_step(trainer, batch, PhaseTimer(CPU_DEVICE))
    assert loss() < first
    assert all(not torch.equal(old, new) for old, new in zip(initial, routers, strict=True))


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (("cluster.gpus=2", "layout.pp=2"), "experts with tp, pp or etp"),
        (("cluster.gpus=2", "layout.data=fsdp"), "experts can be checked with ddp only"),
        ((*EP_OVERRIDES, "layout.dispatcher=allgather"), "layout.dispatcher: torch has all_to_all alone"),
        (
            ("model.experts={count: 8, top_k: 2, ffn: 48, capacity_factor: 1.5}",),
            "capacity_factor, bias and shared_gate",
        ),
        (("training.overheads.router_loss=true",), "a loss of experts' load cannot be checked"),
        (("training.recompute=full",), "experts with fused kernels or full recomputation"),
        (("training.overheads.grouping=loop",), "set grouping to kernel"),
        (("training.overheads.permute_unfused=false",), "permute_unfused and router_unfused to true"),
    ],
)
def test_unsupported_moe_scenarios_are_refused(overrides: tuple[str, ...], sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        require_supported(small_scenario(LLAMA, SOFTMAX_MOE, *overrides))


def test_a_single_expert_is_a_dense_mlp() -> None:
    scenario = small_scenario(LLAMA, "model.experts={count: 1, top_k: 1, ffn: 48}")
    require_supported(scenario)
    assert not any(isinstance(module, MoeLayer) for module in build_trainer(scenario, CPU_DEVICE).model.modules())
