"""Benchmark ops compute what their kernel shapes state, and move the bytes that the model counts."""

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
from clustersim.model.optimizers import Optimizer
from clustersim.model.overheads import Accumulation, BatchTransfer, Overheads
from clustersim.model.precision_recipe import mixed_precision
from clustersim.model.presets import load_preset
from clustersim.model.sharded_layer import RankContext
from clustersim.model.training import ALL_FUSED, NONE_FUSED, LossImplementation, Training
from clustersim.model.transformer import Norm
from clustersim.scenario import Scenario

torch = pytest.importorskip("torch")
pytorch_ops = pytest.importorskip("calibrate.kernels.pytorch_ops")
from calibrate.kernels.pytorch_ops import matmul, optimizer  # noqa: E402 - after torch is known to be there

CPU_DEVICE = torch.device("cpu")
# Operators that move nothing, or one element per row.
_FREE_OPS = ("detach", "empty", "profiler", "_local_scalar", "index", "nll_loss_forward")
ALL_OVERHEADS_TRAINING = Training(
    1024,
    1,
    recipe=mixed_precision(DType.FP16),
    overheads=Overheads(unscale_gradients=True, upcast_gradients=True, batch_transfer=BatchTransfer.PACKED),
)
FP32_TRAINING = Training(8, 1, recipe=mixed_precision(DType.FP32, gradients=DType.FP32, master=None), fused=NONE_FUSED)
CLIPPED_TRAINING = replace(FP32_TRAINING, overheads=Overheads(scale_clipped_gradients=True))


@pytest.fixture(autouse=True)
def _seeded() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    torch.set_num_threads(threads)


def _distinct_bytes(tensor: Any) -> int:
    """Bytes of distinct elements: a broadcast dimension (stride 0) is read once."""
    elements = 1
    for size, stride in zip(tensor.size(), tensor.stride(), strict=True):
        elements *= size if stride else 1
    return int(elements * tensor.element_size())


def _measured_traffic(action: Callable[[], Any]) -> int:
    """Bytes that the operators of an action read and write, counted as in tests/model/test_against_torch.py."""
    leaves, moved = torch.utils._pytree.tree_leaves, 0

    class TrafficCounter(torch.utils._python_dispatch.TorchDispatchMode):  # type: ignore[misc, name-defined]
        def __torch_dispatch__(self, operator: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
            nonlocal moved
            result = operator(*args, **(kwargs or {}))
            declared = operator._schema
            is_view = any(argument.alias_info and not argument.alias_info.is_write for argument in declared.returns)
            if is_view or operator.__name__.startswith(_FREE_OPS):
                return result
            writes = [
                args[index]
                for index, argument in enumerate(declared.arguments)
                if argument.alias_info and argument.alias_info.is_write and index < len(args)
            ]
            for tree in ((args, kwargs), writes or result):
                tensors = {id(leaf): leaf for leaf in leaves(tree) if isinstance(leaf, torch.Tensor)}
                moved += sum(map(_distinct_bytes, tensors.values()))
            return result

    with TrafficCounter():
        action()
    return moved


def _forward_kernel(
    operator: memory_bound.MemoryBoundSpec, tokens: int, width: int, dtype: DType = DType.BF16, table: int = 0
) -> Kernel:
    return operator.forward_kernel("test", dtype, operator.shape_for(tokens, width, table))


def _forward_and_backward(
    operator: memory_bound.MemoryBoundSpec, tokens: int, width: int, table: int = 0
) -> list[Kernel]:
    return [
        _forward_kernel(operator, tokens, width, table=table),
        *operator.backward_kernels("test", DType.BF16, operator.shape_for(tokens, width, table)),
    ]


def _counted_kernels() -> dict[str, Kernel]:
    """Kernels whose traffic is counted as in PyTorch's own operators."""
    kernels = [
        *_forward_and_backward(memory_bound.norm_spec(Norm.RMSNORM, fused=False), 64, 4096),
        *_forward_and_backward(memory_bound.activation_spec(MlpType.GELU, fused=False), 64, 1024),
        _forward_kernel(memory_bound.activation_spec(MlpType.SWIGLU, fused=False), 64, 1024),
        # for queries and keys each; with many heads the rotary tables are small
        *_forward_and_backward(memory_bound.rotary_spec(fused=False), 64 * 16, 128, table=16),
        *_forward_and_backward(memory_bound.softmax_spec(fused=False), 128 * 64, 128),
        *_forward_and_backward(memory_bound.softcap_spec(fused=False), 128 * 64, 128),
        *_forward_and_backward(memory_bound.loss_spec(LossImplementation.VOCAB_PARALLEL), 32, 4096),
        _forward_kernel(memory_bound.loss_spec(LossImplementation.TORCH), 32, 4096),
        _forward_kernel(memory_bound.residual_spec(dropout=False, fused=False), 64, 1024),
        _forward_kernel(memory_bound.SCALED_SUM[False], 64, 1024),
        _forward_kernel(memory_bound.SCALE, 64, 1024),
        _forward_kernel(memory_bound.BIAS_GRADIENT, 64, 1024),
        *_weighting_kernels(64, 1024),
        memory_bound.copy_kernel("test", DType.BF16, 64 * 1024),
        *memory_bound.accumulate_kernels(
            "test", (64, 1024), gradient_dtype=DType.BF16, accumulator_dtype=DType.FP32, accumulation=Accumulation.ADDED
        ),
        *gradient_kernels.unscale_kernels(ALL_OVERHEADS_TRAINING, 2**20),
        *batch_transfer.batch_kernels(ALL_OVERHEADS_TRAINING),
        memory_bound.convert_kernel("test", DType.BF16, DType.FP32, (64, 1024)),
        _forward_kernel(memory_bound.BIAS_ADD, 64, 1024),
        *gradient_norm_kernels(CLIPPED_TRAINING, 2**20),
        *(
            optimizer_step_kernels(replace(FP32_TRAINING, optimizer=optimizer_type), 2**20)[0]
            for optimizer_type in (Optimizer.ADAM, Optimizer.SGD)
        ),
    ]
    return {_kernel_label(kernel): kernel for kernel in kernels}


def _weighting_kernels(tokens: int, width: int) -> tuple[Kernel, ...]:
    """Unfused scaling of an expert's activation by its probability, forward and backward."""
    moe = MoeMlp(4, 1, width, MlpType.SWIGLU)
    model = load_preset("mixtral-8x7b")
    training = replace(FP32_TRAINING, sequence=tokens)
    kernels = [
        kernel
        for operator in moe_operators(RankContext(model, training, LayerShard(1, tokens, tokens)), moe)
        for kernel in (*operator.forward, *operator.input_gradient)
    ]
    return tuple(
        weighting_kernel for weighting_kernel in kernels if weighting_kernel.name.startswith("experts.weighting")
    )


def _kernel_label(kernel: Kernel) -> str:
    shape = kernel.shape
    assert isinstance(shape, MemoryBoundShape)
    return f"{shape.routine.value}{' backward' * shape.backward}"


_COUNTED_KERNELS = _counted_kernels()


@pytest.mark.parametrize("name", _COUNTED_KERNELS)
def test_op_moves_the_counted_bytes(name: str) -> None:
    """Within 4 %: row statistics, masks and rotary tables are not counted."""
    kernel = _COUNTED_KERNELS[name]
    action = pytorch_ops.prepare_kernel(kernel, CPU_DEVICE)
    action()  # creates the optimizer states
    assert _measured_traffic(action) == pytest.approx(kernel.bytes, rel=0.04)


def _scenario(model: str, *, fused: bool, attention: str, precision: str) -> Scenario:
    training = {"sequence": 64, "global_batch": 2, "microbatch": 2, "fused": fused, "attention": attention}
    training |= {"overheads": {"accumulation": "fused" if fused else "added"}}
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
    """In FP32 with unfused formulas a CPU supports all of them, tensor-parallel shards too."""
    for kernel in distinct_kernels(_scenario(model, fused=False, attention=attention, precision="fp32")):
        action = pytorch_ops.prepare_kernel(kernel, CPU_DEVICE)
        action()
        action()
        assert pytorch_ops.allocated_bytes(kernel, CPU_DEVICE) >= pytorch_ops.touched_bytes(kernel) > 0.0


def test_kernels_unsupported_on_a_cpu_are_named() -> None:
    reasons = {}
    for kernel in distinct_kernels(_scenario("llama-tiny", fused=True, attention="flash", precision="bf16")):
        try:
            pytorch_ops.prepare_kernel(kernel, CPU_DEVICE)()
        except pytorch_ops.UnsupportedKernel as reason:
            reasons[kernel.name.removesuffix(".input_gradient")] = str(reason)
    assert "PyTorch has none on a CPU" in reasons["mlp.up.weight_gradient"]  # BF16 matmuls accumulated to FP32
    assert "no fused kernel" in reasons["mlp.activation"]
    assert {name for name in reasons if not name.endswith("weight_gradient")} == {"mlp.activation", "attention.rotary"}


def test_nf4_dequantization_is_unsupported() -> None:
    unpack = memory_bound.dequantize_kernel("test", DType.NF4, DType.BF16, rows=64, width=64)
    with pytest.raises(pytorch_ops.UnsupportedKernel, match="dequantize: it is not measured"):
        pytorch_ops.prepare_kernel(unpack, CPU_DEVICE)


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("operands", MatmulLayout)
def test_matmul_operands_have_the_layout_of_autograd(operands: MatmulLayout, batch: int) -> None:
    """A linear layer's forward reads its weights [n, k] by columns; the weight gradient reads A [k, m] by columns."""
    a, b = matmul.matmul_operands(MatmulShape(2, 3, 5, batch=batch, operands=operands), DType.FP32, CPU_DEVICE)
    assert (a.shape[-2:], b.shape[-2:]) == ((2, 5), (5, 3))
    assert a.is_contiguous() == (operands is not MatmulLayout.TN)
    assert b.is_contiguous() == (operands is not MatmulLayout.NT)
    assert a.dim() == (2 if batch == 1 else 3)


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("operands", MatmulLayout)
def test_matmul_is_the_product_of_its_operands(operands: MatmulLayout, batch: int) -> None:
    shape = MatmulShape(4, 6, 8, batch=batch, operands=operands)
    torch.manual_seed(0)
    a, b = matmul.matmul_operands(shape, DType.FP32, CPU_DEVICE)
    torch.manual_seed(0)
    action = matmul.prepare_matmul(shape, DType.FP32, CPU_DEVICE)
    action()
    assert torch.allclose(action.result, a @ b)


def test_accumulating_matmul_adds_at_every_run() -> None:
    shape = MatmulShape(4, 6, 8, operands=MatmulLayout.TN, accumulated=DType.FP32)
    torch.manual_seed(0)
    a, b = matmul.matmul_operands(shape, DType.FP32, CPU_DEVICE)
    torch.manual_seed(0)
    action = matmul.prepare_matmul(shape, DType.FP32, CPU_DEVICE)
    action()
    first_result = action.result.clone()
    action()
    assert torch.allclose(action.result - first_result, a @ b, atol=1e-5)


def test_fp8_matmul_is_near_the_exact_one() -> None:
    """E4M3 has 3 mantissa bits: the relative error of a factor is at most 1/16, of a sum of 64 far less."""
    torch.manual_seed(0)
    action = matmul.prepare_matmul(MatmulShape(32, 16, 64), DType.FP8, CPU_DEVICE)
    torch.manual_seed(0)
    a, b = (torch.empty(size, 64, dtype=torch.bfloat16).normal_() for size in (32, 16))
    action()
    assert action.result.dtype is torch.bfloat16
    error = (action.result.float() - a.float() @ b.float().t()).abs().mean()
    assert error < 0.1 * (a.float() @ b.float().t()).abs().mean()


@pytest.mark.parametrize("shape", [MatmulShape(32, 16, 30), MatmulShape(32, 16, 32, accumulated=DType.FP32)])
def test_fp8_matmuls_that_pytorch_lacks_are_unsupported(shape: MatmulShape) -> None:
    with pytest.raises(pytorch_ops.UnsupportedKernel):
        matmul.prepare_matmul(shape, DType.FP8, CPU_DEVICE)


def test_attention_backward_returns_query_key_and_value_gradients() -> None:
    shape = AttentionShape(2, 16, 16, 4, 2, 8, causal=True)
    (core,) = AttentionCore(shape, DType.FP32, dropout=False, fused=True).flash_operators()
    forward, backward = (
        pytorch_ops.prepare_kernel(core.forward[0], CPU_DEVICE),
        pytorch_ops.prepare_kernel(core.input_gradient[0], CPU_DEVICE),
    )
    forward()
    backward()
    assert forward.result.shape == (2, 4, 16, 8)
    assert [item.shape for item in backward.result] == [(2, 16, 4, 8), (2, 16, 2, 8), (2, 16, 2, 8)]


def test_lookup_gradient_is_dense() -> None:
    shape = MemoryBoundShape(MemoryBoundOp.LOOKUP, 16, 8, backward=True, fused=True, table=100)
    action = pytorch_ops.prepare_kernel(Kernel("test", KernelKind.EMBEDDING, DType.FP32, 0.0, 1.0, shape), CPU_DEVICE)
    action()
    (gradient,) = action.result
    assert gradient.shape == (100, 8)
    assert 1 <= int((gradient.abs().sum(1) > 0).sum()) <= 16


def test_position_gradient_is_summed_over_sequences() -> None:
    shape = MemoryBoundShape(MemoryBoundOp.POSITIONS, 32, 8, backward=True, fused=True, table=16, formats=(DType.FP32,))
    action = pytorch_ops.prepare_kernel(Kernel("test", KernelKind.EMBEDDING, DType.BF16, 0.0, 1.0, shape), CPU_DEVICE)
    action()
    assert (action.result.shape, action.result.dtype) == ((16, 8), torch.float32)


def test_update_tensors_have_the_given_number_of_elements() -> None:
    sizes = [
        tensor.numel()
        for tensor in optimizer.random_parameters(CPU_DEVICE, DType.FP32, 2 * optimizer.MAX_TENSOR_ELEMENTS + 5)
    ]
    assert sizes == [optimizer.MAX_TENSOR_ELEMENTS, optimizer.MAX_TENSOR_ELEMENTS, 5]
    assert [tensor.numel() for tensor in optimizer.random_parameters(CPU_DEVICE, DType.FP32, 7)] == [7]


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("form", [Optimizer.ADAM, Optimizer.SGD])
def test_mixed_precision_update_converts_gradients_and_copies_weights(form: Optimizer, fused: bool) -> None:
    """FP32 master weights, BF16 gradients: gradients are converted first, and a BF16 weight copy is written."""
    precision = mixed_precision(DType.BF16, gradients=DType.BF16, master=DType.FP32)
    training = replace(FP32_TRAINING, recipe=precision, optimizer=form, fused=ALL_FUSED if fused else NONE_FUSED)
    (kernel,) = optimizer_step_kernels(training, 1000)
    action = pytorch_ops.prepare_kernel(kernel, CPU_DEVICE)
    calls: set[str] = set()

    class CallRecorder(torch.utils._python_dispatch.TorchDispatchMode):  # type: ignore[misc, name-defined]
        def __torch_dispatch__(self, operator: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
            calls.add(
                f"{operator.__name__.split('.')[0]} {[str(tensor.dtype) for tensor in _first_list_argument(args)]}"
            )
            return operator(*args, **(kwargs or {}))

    with CallRecorder():
        action()
    assert "_foreach_copy_ ['torch.float32']" in calls
    assert "_foreach_copy_ ['torch.bfloat16']" in calls
    assert any(name.startswith("_fused_") for name in calls) == fused


def _first_list_argument(args: Any) -> list[Any]:
    return args[0] if args and isinstance(args[0], list) else []


def test_moments_in_another_format_than_weights_are_unsupported() -> None:
    (kernel,) = optimizer_step_kernels(
        replace(FP32_TRAINING, recipe=mixed_precision(DType.BF16, gradients=DType.BF16, master=None)), 1000
    )
    with pytest.raises(pytorch_ops.UnsupportedKernel, match="moments in fp32 of weights in bf16"):
        pytorch_ops.prepare_kernel(kernel, CPU_DEVICE)


def test_repeated_clipping_keeps_the_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    gradients = torch.randn(1000)
    original = gradients.clone()
    monkeypatch.setattr(optimizer, "random_parameters", lambda *_: [gradients])
    (_, clip) = gradient_norm_kernels(CLIPPED_TRAINING, 1000)
    action = pytorch_ops.prepare_kernel(clip, CPU_DEVICE)
    action()
    action()
    assert torch.equal(gradients, original)


def test_tf32_is_enabled_for_tf32_kernels_only() -> None:
    shape = MatmulShape(2, 2, 2)
    for dtype, on in ((DType.TF32, True), (DType.FP32, False)):
        with pytorch_ops.kernel_settings(matmul_kernel("test", dtype, shape, result_bytes=4), CPU_DEVICE):
            assert torch.backends.cuda.matmul.allow_tf32 is on
        assert torch.backends.cuda.matmul.allow_tf32 is False


def test_kernel_without_a_shape_is_unsupported() -> None:
    with pytest.raises(pytorch_ops.UnsupportedKernel, match="nothing says what it computes"):
        pytorch_ops.prepare_kernel(Kernel("cast", KernelKind.COPY, DType.BF16, 0.0, 8.0), CPU_DEVICE)


def test_large_random_operands_are_normal_and_keep_their_layout() -> None:
    """On a CPU a block of random numbers is repeated."""
    from calibrate.kernels.pytorch_ops.random_tensors import fill_normal, normal_tensor

    large = normal_tensor(CPU_DEVICE, DType.FP32, 3, 2**20)
    assert large.mean().item() == pytest.approx(0.0, abs=0.01)
    assert large.std().item() == pytest.approx(1.0, abs=0.01)
    assert torch.equal(large[0], large[2])
    transposed = torch.empty(5, 2**18).t()
    assert fill_normal(transposed).stride() == (1, 2**18)
    assert float(transposed.detach().abs().min()) >= 0.0 and transposed.std().item() == pytest.approx(1.0, abs=0.01)
