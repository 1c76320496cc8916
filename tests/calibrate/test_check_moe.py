"""The mixture that is trained is the one that is simulated: same parameters, same products, experts chosen evenly."""

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from clustersim.lowering.training_step import lower_step
from clustersim.model.kernels import GROUPED_MATMUL_KINDS, MatmulLayout, MatmulShape
from clustersim.model.transformer import parameter_count
from clustersim.program.task import ComputeTask
from clustersim.scenario import Scenario
from tests.calibrate.check_scenarios import LLAMA, one_thread, scenario

torch = pytest.importorskip("torch")

from calibrate.check.moe import MoeLayer, _balancing_logits  # noqa: E402 - torch first
from calibrate.check.phase_timer import PhaseTimer  # noqa: E402
from calibrate.check.supported import build_plan, build_trainer, require_supported  # noqa: E402
from calibrate.check.torch_model import build_stage  # noqa: E402
from calibrate.check.trainer import random_batch, training_step  # noqa: E402
from clustersim.common.errors import InputError  # noqa: E402

CPU = torch.device("cpu")
MIXTURE = "model.experts={count: 8, top_k: 2, ffn: 48}"
SIGMOID = "model.experts={count: 16, top_k: 4, ffn: 48, router: sigmoid, router_bias: true, groups: 8, limit: 4}"
SHARED = "model.experts={count: 8, top_k: 2, ffn: 48, shared: 32, dense_layers: 1}"
APART = ("cluster.gpus=2", "layout={ep: 2, data: ddp}", "training.microbatch=1")
Product = tuple[int, int, int, int]


@pytest.fixture(autouse=True)
def _alone() -> Iterator[None]:
    torch.manual_seed(0)
    with one_thread():
        yield


def _predicted(given: Scenario) -> Counter[Product]:
    """Grouped products of a step: groups, rows of each, and the other two sizes."""
    plan, found = build_plan(given), Counter[Product]()
    (program,) = lower_step(plan, given.schedule.order(1, plan.microbatches)).programs
    blocks = [task.segment for task in program.tasks if isinstance(task, ComputeTask)]
    for kernel in (
        operation.kernel for block in blocks for operation in block.operations if operation.kernel is not None
    ):
        match kernel.shape:
            case MatmulShape(m, n, k, groups, operands) if kernel.kind in GROUPED_MATMUL_KINDS:
                found[(groups, k, m, n) if operands is MatmulLayout.TN else (groups, m, n, k)] += 1
    return found


def _run(given: Scenario) -> Counter[Product]:
    """The same of a real step, as PyTorch's dispatcher sees them; the weights' gradient may be made transposed."""
    found: Counter[Product] = Counter()

    class Products(torch.utils._python_dispatch.TorchDispatchMode):  # type: ignore[misc, name-defined]
        def __torch_dispatch__(self, operator: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if operator._schema.name == "aten::_grouped_mm":
                (a, b), ends = args[:2], (kwargs or {}).get("offs", args[2] if len(args) > 2 else None)
                groups = len(ends)
                assert ends.diff().unique().numel() == 1  # chosen evenly
                if b.dim() == 3:
                    found[groups, len(a) // groups, b.shape[-1], a.shape[-1]] += 1
                else:
                    found[groups, a.shape[-1] // groups, a.shape[0], b.shape[-1]] += 1
            return operator(*args, **(kwargs or {}))

    trainer, batch = build_trainer(given, CPU), random_batch(build_plan(given), CPU)
    with Products():
        trainer.run_passes(batch, PhaseTimer(CPU))
    return found


@pytest.mark.parametrize("experts", [MIXTURE, SIGMOID, SHARED], ids=["softmax", "sigmoid", "shared"])
def test_the_mixture_has_the_parameters_that_are_counted(experts: str) -> None:
    given = scenario(LLAMA, experts)
    plan = build_plan(given)
    with torch.device("meta"):
        made = build_stage(plan, plan.stages[0])
    assert sum(weight.numel() for weight in made.parameters()) == parameter_count(given.model)


def test_a_rank_holds_its_own_experts() -> None:
    """Half of the experts' weights, and all others."""
    whole, half = build_plan(scenario(LLAMA, MIXTURE)), build_plan(scenario(LLAMA, MIXTURE, *APART))
    with torch.device("meta"):
        both = [build_stage(plan, plan.stages[0]) for plan in (whole, half)]
    all_weights, own = (sum(weight.numel() for weight in made.parameters()) for made in both)
    assert all_weights - own == 2 * 4 * 3 * 48 * 64  # layers, experts, matrices


@pytest.mark.parametrize("experts", [MIXTURE, SIGMOID, SHARED], ids=["softmax", "sigmoid", "shared"])
def test_a_step_multiplies_the_experts_matrices_that_are_counted(experts: str) -> None:
    given = scenario(LLAMA, experts)
    predicted = _predicted(given)
    assert _run(given) == predicted and predicted


@pytest.mark.parametrize(("tokens", "top_k", "count"), [(32, 2, 8), (30, 4, 6), (5, 3, 8)])
def test_experts_are_chosen_in_turn(tokens: int, top_k: int, count: int) -> None:
    """As often as each other, or once more; all of a token's are different."""
    from clustersim.model.layer_stack import MlpType, MoeMlp

    marks = _balancing_logits(tokens, MoeMlp(count, top_k, 4, MlpType.SWIGLU)) > 0
    assert marks.sum(1).tolist() == [top_k] * tokens
    rows = marks.sum(0)
    assert int(rows.max() - rows.min()) <= 1


def test_training_a_mixture_makes_the_loss_smaller() -> None:
    given = scenario(LLAMA, MIXTURE)
    trainer, batch = build_trainer(given, CPU), random_batch(build_plan(given), CPU)

    def loss() -> float:
        with torch.no_grad():
            return float(trainer.model(batch.tokens[0], batch.targets[0]))

    first = loss()
    routers = [module.router.weight for module in trainer.model.modules() if isinstance(module, MoeLayer)]
    before = [weight.detach().clone() for weight in routers]
    for _ in range(10):
        training_step(trainer, batch, PhaseTimer(CPU))
    assert loss() < first
    assert all(not torch.equal(old, new) for old, new in zip(before, routers, strict=True))


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (("cluster.gpus=2", "layout.pp=2"), "experts beside tp, pp or etp"),
        (("cluster.gpus=2", "layout.data=fsdp"), "experts can be checked beside ddp alone"),
        ((*APART, "layout.dispatcher=allgather"), "layout.dispatcher: torch has all_to_all alone"),
        (("model.experts={count: 8, top_k: 2, ffn: 48, capacity: 1.5}",), "capacity, bias and shared_gate"),
        (("training.overheads.router_loss=true",), "a loss of experts' load cannot be checked"),
        (("training.recompute=full",), "experts beside fused kernels or full recomputation"),
        (("training.overheads.grouping=loop",), "set grouping to kernel"),
        (("training.overheads.permute_unfused=false",), "permute_unfused and router_unfused to true"),
    ],
)
def test_what_experts_cannot_be_trained_with_is_refused(overrides: tuple[str, ...], sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        require_supported(scenario(LLAMA, MIXTURE, *overrides))


def test_one_expert_is_a_dense_mlp() -> None:
    given = scenario(LLAMA, "model.experts={count: 1, top_k: 1, ffn: 48}")
    require_supported(given)
    assert not any(isinstance(module, MoeLayer) for module in build_trainer(given, CPU).model.modules())
