"""PyTorch as the reference: bytes that eager operators move and keep, counted in its operator trace on the CPU.

Bytes moved are the distinct elements of every operator's arguments and results (views move nothing, in-place
operators read and write); bytes kept are what autograd saves, each storage once, without parameters. CPU and
CUDA run the same composite operators for these; where one CPU operator is several CUDA kernels its launches
are not checked.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from clustersim.common.dtypes import DType
from clustersim.model import memory_bound
from clustersim.model.layer_stack import MlpType
from clustersim.model.layers import LayerShard
from clustersim.model.optimizer_kernels import gradient_norm_kernels, optimizer_step_kernels
from clustersim.model.optimizers import Optimizer
from clustersim.model.overheads import Overheads
from clustersim.model.precision_recipe import mixed_precision
from clustersim.model.presets import load_preset
from clustersim.model.training import NONE_FUSED, AttentionBackend, LossImplementation, Training
from clustersim.model.transformer import Norm, TransformerModel, resize_model
from tests.uniform_models import model_dimensions, uniform_layer

torch = pytest.importorskip("torch")
functional = torch.nn.functional
TOKENS, WIDTH = 64, 4096
ELEMENTS = TOKENS * WIDTH


def _distinct_bytes(tensor: Any) -> int:
    """Bytes of distinct elements: a broadcast dimension (stride 0) is read once."""
    elements = 1
    for size, stride in zip(tensor.size(), tensor.stride(), strict=True):
        elements *= size if stride else 1
    return int(elements * tensor.element_size())


def _unique_tensors(tree: Any) -> list[Any]:
    leaves = torch.utils._pytree.tree_leaves(tree)
    return list({id(leaf): leaf for leaf in leaves if isinstance(leaf, torch.Tensor)}.values())


@dataclass
class _MovedBytes:
    bytes: int = 0
    launches: int = 0


def _measure_moved_bytes(action: Callable[[], Any]) -> tuple[_MovedBytes, Any]:
    """Run an action; return the bytes its operators move, the number of those that move any, and its result."""
    trace = _MovedBytes()

    class Counter(torch.utils._python_dispatch.TorchDispatchMode):  # type: ignore[misc, name-defined]
        def __torch_dispatch__(self, operator: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = operator(*args, **(kwargs or {}))
            schema = operator._schema
            is_view = any(given.alias_info and not given.alias_info.is_write for given in schema.returns)
            skipped = ("detach", "empty", "profiler", "_local_scalar", "_record_function")
            if is_view or operator.__name__.startswith(skipped):
                return result
            written = [
                tensor
                for position, declared in enumerate(schema.arguments)
                if declared.alias_info and declared.alias_info.is_write and position < len(args)
                for tensor in _unique_tensors(args[position])
            ]
            results = written or _unique_tensors(result)
            trace.bytes += sum(map(_distinct_bytes, _unique_tensors((args, kwargs)) + results))
            trace.launches += 1
            return result

    with Counter():
        result = action()
    return trace, result


def _saved_bytes(action: Callable[[], Any], parameters: list[Any]) -> int:
    """Bytes that autograd saves while an action runs, each storage once, without parameters."""
    storages: dict[int, int] = {}
    saved_tensors = []

    def pack(tensor: Any) -> Any:
        storage = tensor.untyped_storage()
        storages[storage.data_ptr()] = storage.nbytes()
        saved_tensors.append(tensor)  # keeps the address from being used again
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = action()
    del result
    parameter_storages = {tensor.untyped_storage().data_ptr() for tensor in parameters}
    return sum(size for address, size in storages.items() if address not in parameter_storages)


def _random(*shape: int) -> Any:
    return torch.randn(*shape, dtype=torch.bfloat16, requires_grad=True)


def _rms_norm(x: Any, weight: Any) -> Any:
    """As in Hugging Face's LlamaRMSNorm."""
    upcast = x.float()
    variance = upcast.pow(2).mean(-1, keepdim=True)
    return weight * (upcast * torch.rsqrt(variance + 1e-5)).to(x.dtype)


def _swiglu(gate: Any, up: Any) -> Any:
    return functional.silu(gate) * up


def _rotate(x: Any, cosine: Any, sine: Any) -> Any:
    """As in Hugging Face's apply_rotary_pos_emb."""
    half = x.shape[-1] // 2
    rotated = torch.cat((-x[..., half:], x[..., :half]), dim=-1)
    return x * cosine + rotated * sine


def _rotate_complex(x: Any, angles: Any) -> Any:
    """As in torchtitan's apply_rotary_emb_complex."""
    pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * angles).flatten(2).type_as(x)


@dataclass(frozen=True)
class _OperatorCase:
    """An operator and its formula in PyTorch. constants: not differentiated."""

    operator: memory_bound.MemoryBoundSpec
    formula: Callable[..., Any]
    inputs: tuple[Any, ...]
    constants: tuple[Any, ...] = ()
    elements: int = ELEMENTS

    def run(self) -> Any:
        return self.formula(*self.inputs, *self.constants)


def _masked_softmax(scores: Any, mask: Any) -> Any:
    return torch.softmax(scores.masked_fill(mask, float("-inf")), dim=-1)


def _cases() -> dict[str, _OperatorCase]:
    x, other, weight = _random(TOKENS, WIDTH), _random(TOKENS, WIDTH), _random(WIDTH)
    angles = [torch.ones(TOKENS, 1, 128, dtype=torch.bfloat16) for _ in "cs"]
    mask = torch.triu(torch.ones(256, 256, dtype=torch.bool), 1)
    scores = _random(16, 256, 256)
    return {
        "rms norm": _OperatorCase(memory_bound.norm_spec(Norm.RMSNORM, fused=False), _rms_norm, (x, weight)),
        "swiglu": _OperatorCase(memory_bound.activation_spec(MlpType.SWIGLU, fused=False), _swiglu, (x, other)),
        "gelu": _OperatorCase(memory_bound.activation_spec(MlpType.GELU, fused=False), functional.gelu, (x,)),
        "rotary": _OperatorCase(
            memory_bound.rotary_spec(fused=False),
            _rotate,
            (x.detach().view(TOKENS, 32, 128).requires_grad_(),),
            (*angles,),
        ),
        "rotary of complex numbers": _OperatorCase(
            memory_bound.rotary_spec(fused=False, is_complex=True),
            _rotate_complex,
            (x.detach().view(TOKENS, 32, 128).requires_grad_(),),
            (torch.ones(TOKENS, 1, 64, dtype=torch.complex64),),
        ),
        "softmax": _OperatorCase(
            memory_bound.softmax_spec(fused=False), _masked_softmax, (scores,), (mask,), elements=16 * 256 * 256
        ),
    }


_CASES = _cases()


@pytest.mark.parametrize("name", _CASES)
def test_unfused_operators_move_the_bytes_that_pytorch_moves(name: str) -> None:
    """Per-row statistics, masks and angles are small compared with the activation: 2 % covers them."""
    case = _CASES[name]
    forward, result = _measure_moved_bytes(case.run)
    gradient = torch.ones_like(result)
    backward, _ = _measure_moved_bytes(lambda: torch.autograd.grad(result, case.inputs, gradient))
    for passes, trace in ((case.operator.forward, forward), (case.operator.backward, backward)):
        assert passes is not None
        assert passes.bytes(DType.BF16, case.elements) == pytest.approx(trace.bytes, rel=0.02)
        assert passes.launches == trace.launches


@pytest.mark.parametrize("name", _CASES)
def test_unfused_operators_keep_what_autograd_saves(name: str) -> None:
    case = _CASES[name]
    saved = _saved_bytes(case.run, [tensor for tensor in (*case.inputs, *case.constants) if tensor.numel() < ELEMENTS])
    assert case.operator.saved.bytes(DType.BF16, case.elements) == pytest.approx(saved, rel=0.01)


def test_a_residual_is_one_kernel_forward_and_none_backward() -> None:
    x, other = _random(TOKENS, WIDTH), _random(TOKENS, WIDTH)
    residual = memory_bound.residual_spec(dropout=False, fused=False)
    forward, result = _measure_moved_bytes(lambda: x + other)
    gradient = torch.ones_like(result)
    backward, _ = _measure_moved_bytes(lambda: torch.autograd.grad(result, (x, other), gradient))
    assert residual.forward.bytes(DType.BF16, ELEMENTS) == forward.bytes
    assert residual.backward is None
    assert backward.bytes == 0


def test_the_loss_keeps_fp32_log_probabilities() -> None:
    logits, targets = _random(TOKENS, WIDTH), torch.zeros(TOKENS, dtype=torch.long)
    saved = _saved_bytes(lambda: functional.cross_entropy(logits.float(), targets), [])
    assert memory_bound.loss_spec(LossImplementation.TORCH).saved.bytes(DType.BF16, ELEMENTS) == pytest.approx(
        saved, rel=0.01
    )


def test_dtensors_loss_of_a_sharded_vocabulary_reads_and_writes_logits_ten_times(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """To FP32, maximum, difference, exponential, sum, difference; what is reduced over the ranks is a row's."""
    dtensor_loss = pytest.importorskip("torch.distributed.tensor.parallel.loss")
    monkeypatch.setattr(dtensor_loss.funcol, "all_reduce", lambda tensor, **_: tensor)
    logits = _random(TOKENS, WIDTH)
    moved, _ = _measure_moved_bytes(lambda: dtensor_loss._log_softmax(logits.float(), -1, False, None, 0))
    spec = memory_bound.loss_spec(LossImplementation.TORCH, is_sharded=True)
    assert spec.forward.bytes(DType.BF16, ELEMENTS) == pytest.approx(moved.bytes, rel=0.02)


@pytest.mark.parametrize("optimizer", [Optimizer.ADAM, Optimizer.SGD])
def test_unfused_update_moves_what_foreach_moves(optimizer: Optimizer) -> None:
    full = mixed_precision(DType.FP32, gradients=DType.FP32, master=None, moments=DType.FP32)
    training = Training(1, 1, recipe=full, optimizer=optimizer, fused=NONE_FUSED)
    weight = torch.nn.Parameter(torch.randn(ELEMENTS))
    weight.grad = torch.randn(ELEMENTS)
    torch_optimizer = {
        Optimizer.ADAM: lambda: torch.optim.AdamW([weight], lr=1e-3, foreach=True),
        Optimizer.SGD: lambda: torch.optim.SGD([weight], lr=1e-3, momentum=0.9, foreach=True),
    }[optimizer]()
    torch_optimizer.step()  # creates the states
    trace, _ = _measure_moved_bytes(torch_optimizer.step)
    (step,) = optimizer_step_kernels(training, ELEMENTS)
    assert step.bytes == pytest.approx(trace.bytes, rel=1e-3)


def test_scaled_gradients_move_what_clip_grad_norm_moves() -> None:
    recipe, overheads = (
        mixed_precision(DType.FP32, gradients=DType.FP32, master=None),
        Overheads(scale_clipped_gradients=True),
    )
    training = Training(1, 1, recipe=recipe, fused=NONE_FUSED, overheads=overheads)
    weight = torch.nn.Parameter(torch.randn(ELEMENTS))
    weight.grad = torch.randn(ELEMENTS)
    trace, _ = _measure_moved_bytes(lambda: torch.nn.utils.clip_grad_norm_([weight], 1.0, foreach=True))
    expected = sum(kernel.bytes for kernel in gradient_norm_kernels(training, ELEMENTS))
    assert expected == pytest.approx(trace.bytes, rel=1e-3)


class _TorchLayer:
    """One transformer layer in plain PyTorch: GPT or Llama family, no dropout, as many KV heads as heads."""

    def __init__(self, model: TransformerModel) -> None:
        self.model = model
        h, ffn = model.hidden, model_dimensions(model).ffn
        up = 2 * ffn if model_dimensions(model).mlp is MlpType.SWIGLU else ffn
        shapes = {
            "query": (h, h),
            "key": (h, h),
            "value": (h, h),
            "out": (h, h),
            "up": (up, h),
            "down": (h, ffn),
            "norm": (h,),
            "shift": (h,),
        }
        self.weights = {name: _random(*shape) for name, shape in shapes.items()}

    def norm(self, x: Any) -> Any:
        if self.model.norm is Norm.RMSNORM:
            return _rms_norm(x, self.weights["norm"])
        return functional.layer_norm(x, (self.model.hidden,), self.weights["norm"], self.weights["shift"])

    def activation(self, x: Any) -> Any:
        if model_dimensions(self.model).mlp is MlpType.GELU:
            return functional.gelu(x)
        gate, up = x.chunk(2, dim=-1)
        return _swiglu(gate, up)

    def attend(self, x: Any, attention: AttentionBackend) -> Any:
        batch, sequence, hidden = x.shape
        split = (batch, sequence, model_dimensions(self.model).heads, model_dimensions(self.model).head_dim)
        # three matmuls: views of one would keep the unrotated queries and keys with the values
        projections = (functional.linear(x, self.weights[name]) for name in ("query", "key", "value"))
        query, key, value = (projection.reshape(split).transpose(1, 2) for projection in projections)
        if self.model.norm is Norm.RMSNORM:
            angle = torch.ones(sequence, model_dimensions(self.model).head_dim, dtype=torch.bfloat16)
            query, key = _rotate(query, angle, angle), _rotate(key, angle, angle)
        if attention is AttentionBackend.FLASH:
            result = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        else:
            result = torch.softmax(query @ key.transpose(2, 3), dim=-1) @ value
        return functional.linear(result.transpose(1, 2).reshape(batch, sequence, hidden), self.weights["out"])

    def __call__(self, x: Any, attention: AttentionBackend) -> Any:
        x = x + self.attend(self.norm(x), attention)
        activated = self.activation(functional.linear(self.norm(x), self.weights["up"]))
        return x + functional.linear(activated, self.weights["down"])


def _small_model(name: str) -> TransformerModel:
    changes = {"hidden": 256, "ffn": 704, "heads": 4, "kv_heads": 4, "head_dim": 64, "max_positions": 512}
    return resize_model(load_preset(name), dropout=False, linear_bias=False, qkv_bias=False, **changes)


@pytest.mark.parametrize("name", ["gpt-tiny", "llama-tiny"])
def test_a_full_layer_keeps_what_autograd_saves(name: str) -> None:
    """Flash attention, BF16. Norm statistics and rotary angles are the few per cent that are not counted."""
    model = _small_model(name)
    training = Training(sequence=512, global_batch=2, microbatch=2, fused=NONE_FUSED)
    torch_layer = _TorchLayer(model)
    x = _random(2, 512, model.hidden)
    saved = _saved_bytes(lambda: torch_layer(x, AttentionBackend.FLASH), list(torch_layer.weights.values()))
    assert uniform_layer(model, training, LayerShard(2, 512, 512)).saved_bytes == pytest.approx(saved, rel=0.02)


@pytest.mark.parametrize("name", ["gpt-tiny", "llama-tiny"])
def test_a_full_layer_has_the_flops_that_torchs_counter_counts(name: str) -> None:
    from torch.utils.flop_counter import FlopCounterMode

    model = _small_model(name)
    training = Training(sequence=512, global_batch=2, microbatch=2, attention=AttentionBackend.STANDARD)
    torch_layer = _TorchLayer(model)
    with FlopCounterMode(display=False) as counter:
        torch_layer(_random(2, 512, model.hidden), AttentionBackend.STANDARD).sum().backward()
    operators = uniform_layer(model, training, LayerShard(2, 512, 512)).operators
    kernels = [
        k for operator in operators for k in operator.forward + operator.input_gradient + operator.weight_gradient
    ]
    assert sum(kernel.flops for kernel in kernels) == counter.get_total_flops()
