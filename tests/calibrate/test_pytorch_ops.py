"""Each kernel's routine computes what its shape says, and moves the bytes that the workload counts."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from clustersim.build import distinct_kernels
from clustersim.common.dtypes import DType
from clustersim.model import batch_transfer, gradient_kernels, memory_bound
from clustersim.model.attention import AttentionCore
from clustersim.model.kernels import (
    AttentionShape,
    Kernel,
    KernelKind,
    MatmulLayout,
    MatmulShape,
    MemoryBoundOp,
    MemoryBoundShape,
)
from clustersim.model.layer_stack import MlpType, MoeMlp
from clustersim.model.linear import matmul_kernel
from clustersim.model.moe_layer import moe_operators
from clustersim.model.operators import LayerShard
from clustersim.model.optimizer_kernels import gradient_norm_kernels, optimizer_step_kernels
from clustersim.model.overheads import Accumulation, BatchTransfer, Overheads
from clustersim.model.precision_recipe import mixed_precision
from clustersim.model.presets import load_preset
from clustersim.model.sharded_layer import RankContext
from clustersim.model.training import LossImplementation, Optimizer, Training
from clustersim.model.transformer import Norm
from clustersim.scenario import Scenario

torch = pytest.importorskip("torch")
routines = pytest.importorskip("calibrate.kernels.pytorch_ops")
from calibrate.kernels.pytorch_ops import matmul, optimizer  # noqa: E402 - after torch is known to be there

CPU = torch.device("cpu")
# Operators that move nothing, or one element of each row.
_FEW = ("detach", "empty", "profiler", "_local_scalar", "index", "nll_loss_forward")
ALL = Training(
    1024,
    1,
    recipe=mixed_precision(DType.FP16),
    overheads=Overheads(unscaling=True, widening=True, batches=BatchTransfer.PACKED),
)
FP32 = Training(8, 1, recipe=mixed_precision(DType.FP32, gradients=DType.FP32, master=None), fused=False)


@pytest.fixture(autouse=True)
def _seeded() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    torch.set_num_threads(threads)


def _touched(tensor: Any) -> int:
    """Bytes of distinct elements: a broadcast dimension (stride 0) is read once."""
    elements = 1
    for size, stride in zip(tensor.size(), tensor.stride(), strict=True):
        elements *= size if stride else 1
    return int(elements * tensor.element_size())


def _moved(action: Callable[[], Any]) -> int:
    """Bytes that the operators of an action read and write, as tests/workload/test_against_torch.py counts them."""
    leaves, moved = torch.utils._pytree.tree_leaves, 0

    class Counter(torch.utils._python_dispatch.TorchDispatchMode):  # type: ignore[misc, name-defined]
        def __torch_dispatch__(self, operator: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
            nonlocal moved
            result = operator(*args, **(kwargs or {}))
            declared = operator._schema
            is_view = any(given.alias_info and not given.alias_info.is_write for given in declared.ends_experts)
            if is_view or operator.__name__.startswith(_FEW):
                return result
            writes = [
                args[place]
                for place, given in enumerate(declared.arguments)
                if given.alias_info and given.alias_info.is_write and place < len(args)
            ]
            for tree in ((args, kwargs), writes or result):
                tensors = {id(leaf): leaf for leaf in leaves(tree) if isinstance(leaf, torch.Tensor)}
                moved += sum(map(_touched, tensors.values()))
            return result

    with Counter():
        action()
    return moved


def _forward(
    over: memory_bound.MemoryBoundSpec, rows: int, width: int, dtype: DType = DType.BF16, table: int = 0
) -> Kernel:
    return over.forward_kernel("test", dtype, over.shape_for(rows, width, table))


def _both(over: memory_bound.MemoryBoundSpec, rows: int, width: int, table: int = 0) -> list[Kernel]:
    return [
        _forward(over, rows, width, table=table),
        *over.backward_kernels("test", DType.BF16, over.shape_for(rows, width, table)),
    ]


def _counted() -> dict[str, Kernel]:
    """Kernels whose traffic the workload counts as PyTorch's own operators have it."""
    found = [
        *_both(memory_bound.norm_spec(Norm.RMSNORM, fused=False), 64, 4096),
        *_both(memory_bound.activation_spec(MlpType.GELU, fused=False), 64, 1024),
        _forward(memory_bound.activation_spec(MlpType.SWIGLU, fused=False), 64, 1024),
        # for queries and keys each; a 128th of the elements is small against angles only with many heads
        *_both(memory_bound.rotary_spec(fused=False), 64 * 16, 128, table=16),
        *_both(memory_bound.softmax_spec(fused=False), 128 * 64, 128),
        *_both(memory_bound.softcap_spec(fused=False), 128 * 64, 128),
        *_both(memory_bound.loss_spec(LossImplementation.VOCAB_PARALLEL), 32, 4096),
        _forward(memory_bound.loss_spec(LossImplementation.TORCH), 32, 4096),
        _forward(memory_bound.residual_spec(dropout=False, fused=False), 64, 1024),
        _forward(memory_bound.SCALED_SUM[False], 64, 1024),
        _forward(memory_bound.SCALE, 64, 1024),
        _forward(memory_bound.BIAS_GRADIENT, 64, 1024),
        *_weighting(64, 1024),
        memory_bound.copy_kernel("test", DType.BF16, 64 * 1024),
        *memory_bound.accumulate_kernels(
            "test", (64, 1024), gradient_dtype=DType.BF16, accumulator_dtype=DType.FP32, accumulation=Accumulation.ADDED
        ),
        *gradient_kernels.unscale_kernels(ALL, 2**20),
        *batch_transfer.batch_kernels(ALL),
        memory_bound.convert_kernel("test", DType.BF16, DType.FP32, (64, 1024)),
        _forward(memory_bound.BIAS_ADD, 64, 1024),
        *gradient_norm_kernels(FP32, 2**20),
        *(optimizer_step_kernels(replace(FP32, optimizer=item), 2**20)[0] for item in Optimizer),
    ]
    return {_words(kernel): kernel for kernel in found}


def _weighting(rows: int, width: int) -> tuple[Kernel, ...]:
    """Of an expert's activation, where it is not fused, both ways."""
    routed = MoeMlp(4, 1, width, MlpType.SWIGLU)
    model = load_preset("mixtral-8x7b")
    training = replace(FP32, sequence=rows)
    kernels = [
        kernel
        for operator in moe_operators(RankContext(model, training, LayerShard(1, rows, rows)), routed)
        for kernel in (*operator.forward, *operator.input_gradient)
    ]
    return tuple(item for item in kernels if item.name.startswith("experts.weighting"))


def _words(kernel: Kernel) -> str:
    shape = kernel.shape
    assert isinstance(shape, MemoryBoundShape)
    return f"{shape.routine.value}{' backward' * shape.backward}"


_COUNTED = _counted()


@pytest.mark.parametrize("name", _COUNTED)
def test_a_routine_moves_what_the_workload_counts(name: str) -> None:
    """Statistics of rows, masks and angles are the few per cent that the workload leaves out."""
    kernel = _COUNTED[name]
    action = routines.prepare_kernel(kernel, CPU)
    action()  # creates the optimizer's states
    assert _moved(action) == pytest.approx(kernel.bytes, rel=0.04)


def _scenario(model: str, *, fused: bool, attention: str, precision: str) -> Scenario:
    training = {"sequence": 64, "global_batch": 2, "microbatch": 2, "fused": fused, "attention": attention}
    mapping = {
        "model": {"preset": model, "layers": 2, "vocab": 1024},
        "cluster": {"name": "laptop", "gpus": 2},
        "layout": {"tp": 2},
        "training": {**training, "precision": precision, "loss": "torch"},
    }
    return Scenario.from_mapping(mapping)


@pytest.mark.parametrize("attention", ["flash", "standard"])
@pytest.mark.parametrize("model", ["llama-tiny", "gpt-tiny"])
def test_every_kernel_of_a_scenario_runs_on_a_cpu(model: str, attention: str) -> None:
    """In FP32 and as PyTorch runs the formulas, a CPU has all of them, tensor-parallel shards too."""
    for kernel in distinct_kernels(_scenario(model, fused=False, attention=attention, precision="fp32")):
        action = routines.prepare_kernel(kernel, CPU)
        action()
        action()
        assert routines.allocated_bytes(kernel, CPU) >= routines.touched_bytes(kernel) > 0.0


def test_what_a_cpu_has_no_kernel_for_is_said_by_name() -> None:
    found = {}
    for kernel in distinct_kernels(_scenario("llama-tiny", fused=True, attention="flash", precision="bf16")):
        try:
            routines.prepare_kernel(kernel, CPU)()
        except routines.UnsupportedKernel as reason:
            found[kernel.name.removesuffix(".input_gradient")] = str(reason)
    assert "PyTorch has none on a CPU" in found["mlp.up.weight_gradient"]  # BF16 products added to FP32
    assert "no fused kernel" in found["mlp.activation"]
    assert {name for name in found if not name.endswith("weight_gradient")} == {"mlp.activation", "attention.rotary"}


def test_weights_of_four_bits_cannot_be_unpacked_by_pytorch_alone() -> None:
    unpack = memory_bound.dequantize_kernel("test", DType.NF4, DType.BF16, rows=64, width=64)
    with pytest.raises(routines.UnsupportedKernel, match="dequantize: it is not measured"):
        routines.prepare_kernel(unpack, CPU)


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("operands", MatmulLayout)
def test_operands_lie_in_memory_as_autograds_do(operands: MatmulLayout, batch: int) -> None:
    """A linear layer's forward reads its weights [n, k] by columns; the weight gradient reads A [k, m] by columns."""
    a, b = matmul.matmul_operands(MatmulShape(2, 3, 5, batch=batch, operands=operands), DType.FP32, CPU)
    assert (a.shape[-2:], b.shape[-2:]) == ((2, 5), (5, 3))
    assert a.is_contiguous() == (operands is not MatmulLayout.TN)
    assert b.is_contiguous() == (operands is not MatmulLayout.NT)
    assert a.dim() == (2 if batch == 1 else 3)


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("operands", MatmulLayout)
def test_a_product_is_the_product_of_its_operands(operands: MatmulLayout, batch: int) -> None:
    shape = MatmulShape(4, 6, 8, batch=batch, operands=operands)
    torch.manual_seed(0)
    a, b = matmul.matmul_operands(shape, DType.FP32, CPU)
    torch.manual_seed(0)
    action = matmul.prepare_matmul(shape, DType.FP32, CPU)
    action()
    assert torch.allclose(action.result, a @ b)


def test_an_accumulated_product_is_added_at_every_run() -> None:
    shape = MatmulShape(4, 6, 8, operands=MatmulLayout.TN, accumulated=DType.FP32)
    torch.manual_seed(0)
    a, b = matmul.matmul_operands(shape, DType.FP32, CPU)
    torch.manual_seed(0)
    action = matmul.prepare_matmul(shape, DType.FP32, CPU)
    action()
    once = action.result.clone()
    action()
    assert torch.allclose(action.result - once, a @ b, atol=1e-5)


def test_an_fp8_product_is_near_the_exact_one() -> None:
    """E4M3 keeps 3 bits: each factor is off by at most 1/16, a sum of 64 of them by far less."""
    torch.manual_seed(0)
    action = matmul.prepare_matmul(MatmulShape(32, 16, 64), DType.FP8, CPU)
    torch.manual_seed(0)
    a, b = (torch.empty(rows, 64, dtype=torch.bfloat16).normal_() for rows in (32, 16))
    action()
    assert action.result.dtype is torch.bfloat16
    error = (action.result.float() - a.float() @ b.float().t()).abs().mean()
    assert error < 0.1 * (a.float() @ b.float().t()).abs().mean()


@pytest.mark.parametrize("shape", [MatmulShape(32, 16, 30), MatmulShape(32, 16, 32, accumulated=DType.FP32)])
def test_fp8_products_that_pytorch_has_not_are_unsupported(shape: MatmulShape) -> None:
    with pytest.raises(routines.UnsupportedKernel):
        matmul.prepare_matmul(shape, DType.FP8, CPU)


def test_attention_backward_gives_the_gradients_of_queries_keys_and_values() -> None:
    shape = AttentionShape(2, 16, 16, 4, 2, 8, causal=True)
    (core,) = AttentionCore(shape, DType.FP32, dropout=False, fused=True).flash_operators()
    forward, backward = (
        routines.prepare_kernel(core.forward[0], CPU),
        routines.prepare_kernel(core.input_gradient[0], CPU),
    )
    forward()
    backward()
    assert forward.result.shape == (2, 4, 16, 8)
    assert [item.shape for item in backward.result] == [(2, 16, 4, 8), (2, 16, 2, 8), (2, 16, 2, 8)]


def test_a_lookups_gradient_is_dense() -> None:
    shape = MemoryBoundShape(MemoryBoundOp.LOOKUP, 16, 8, backward=True, fused=True, table=100)
    action = routines.prepare_kernel(Kernel("test", KernelKind.EMBEDDING, DType.FP32, 0.0, 1.0, shape), CPU)
    action()
    (gradient,) = action.result
    assert gradient.shape == (100, 8)
    assert 1 <= int((gradient.abs().sum(1) > 0).sum()) <= 16


def test_positions_gradient_is_the_sum_over_sequences_in_the_gradients_format() -> None:
    shape = MemoryBoundShape(MemoryBoundOp.POSITIONS, 32, 8, backward=True, fused=True, table=16, formats=(DType.FP32,))
    action = routines.prepare_kernel(Kernel("test", KernelKind.EMBEDDING, DType.BF16, 0.0, 1.0, shape), CPU)
    action()
    assert (action.result.shape, action.result.dtype) == ((16, 8), torch.float32)


def test_an_update_is_over_tensors_that_have_the_elements_together() -> None:
    sizes = [
        tensor.numel() for tensor in optimizer.random_parameters(CPU, DType.FP32, 2 * optimizer.MAX_TENSOR_ELEMENTS + 5)
    ]
    assert sizes == [optimizer.MAX_TENSOR_ELEMENTS, optimizer.MAX_TENSOR_ELEMENTS, 5]
    assert [tensor.numel() for tensor in optimizer.random_parameters(CPU, DType.FP32, 7)] == [7]


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("form", Optimizer)
def test_mixed_precision_converts_gradients_and_refreshes_the_copy(form: Optimizer, fused: bool) -> None:
    """FP32 master weights, BF16 gradients: these are converted first, and a BF16 copy of the weights is written."""
    precision = mixed_precision(DType.BF16, gradients=DType.BF16, master=DType.FP32)
    training = replace(FP32, recipe=precision, optimizer=form, fused=fused)
    (kernel,) = optimizer_step_kernels(training, 1000)
    action = routines.prepare_kernel(kernel, CPU)
    seen: set[str] = set()

    class Names(torch.utils._python_dispatch.TorchDispatchMode):  # type: ignore[misc, name-defined]
        def __torch_dispatch__(self, operator: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.add(f"{operator.__name__.split('.')[0]} {[str(item.dtype) for item in _first_list(args)]}")
            return operator(*args, **(kwargs or {}))

    with Names():
        action()
    assert "_foreach_copy_ ['torch.float32']" in seen
    assert "_foreach_copy_ ['torch.bfloat16']" in seen
    assert any(name.startswith("_fused_") for name in seen) == fused


def _first_list(args: Any) -> list[Any]:
    return args[0] if args and isinstance(args[0], list) else []


def test_moments_in_another_format_than_the_weights_are_unsupported() -> None:
    (kernel,) = optimizer_step_kernels(
        replace(FP32, recipe=mixed_precision(DType.BF16, gradients=DType.BF16, master=None)), 1000
    )
    with pytest.raises(routines.UnsupportedKernel, match="moments in fp32 of weights in bf16"):
        routines.prepare_kernel(kernel, CPU)


def test_clipping_again_and_again_leaves_gradients_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    gradients = torch.randn(1000)
    before = gradients.clone()
    monkeypatch.setattr(optimizer, "random_parameters", lambda *_: [gradients])
    (_, clip) = gradient_norm_kernels(FP32, 1000)
    action = routines.prepare_kernel(clip, CPU)
    action()
    action()
    assert torch.equal(gradients, before)


def test_tf32_is_on_for_its_own_kernels_alone() -> None:
    shape = MatmulShape(2, 2, 2)
    for dtype, on in ((DType.TF32, True), (DType.FP32, False)):
        with routines.kernel_settings(matmul_kernel("test", dtype, shape, result_bytes=4), CPU):
            assert torch.backends.cuda.matmul.allow_tf32 is on
        assert torch.backends.cuda.matmul.allow_tf32 is False


def test_a_kernel_without_a_shape_is_unsupported() -> None:
    with pytest.raises(routines.UnsupportedKernel, match="nothing says what it computes"):
        routines.prepare_kernel(Kernel("cast", KernelKind.COPY, DType.BF16, 0.0, 8.0), CPU)


def test_large_operands_are_normal_too_and_keep_their_layout() -> None:
    """On a CPU a block of random numbers comes again and again."""
    from calibrate.kernels.pytorch_ops.random_tensors import fill_normal, normal_tensor

    large = normal_tensor(CPU, DType.FP32, 3, 2**20)
    assert large.mean().item() == pytest.approx(0.0, abs=0.01)
    assert large.std().item() == pytest.approx(1.0, abs=0.01)
    assert torch.equal(large[0], large[2])
    turned = torch.empty(5, 2**18).t()
    assert fill_normal(turned).stride() == (1, 2**18)
    assert float(turned.detach().abs().min()) >= 0.0 and turned.std().item() == pytest.approx(1.0, abs=0.01)
