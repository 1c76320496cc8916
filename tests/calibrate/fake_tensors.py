"""Tensors of a fake GPU: they are on `meta`, and every operation on them is a kernel of `fake_cuda`.

A kernel takes the maximum of its FLOP (as `torch.utils.flop_counter` counts them) at the SM clock and of the
traffic of its operands and results through cache and memory. Values are not computed: every scalar that is
read is 1. `torch.compile` returns the function uncompiled.
"""

import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry
from torch.utils.weak import WeakTensorKeyDictionary

from calibrate.kernels.formulas import compiled
from tests.calibrate.fake_cuda import FakeCuda
from tests.calibrate.fake_gpu import FakeKernel

_META = torch.device("meta")
_IS_CUDA, _DEVICE = Tensor.is_cuda.__get__, Tensor.device.__get__  # type: ignore[attr-defined]
_SCALAR_METHODS = (Tensor.item, Tensor.__float__, Tensor.__int__, Tensor.__bool__, Tensor.tolist)
_RELATIVE_SPEED = {torch.float32: 1 / 16, torch.float64: 1 / 16, torch.float8_e4m3fn: 2.0, torch.float8_e5m2: 2.0}
_RELATIVE_SPEED[torch.float4_e2m1fn_x2] = 4.0
_SCALED_MATMULS = {"aten._scaled_mm_v2", "aten._scaled_grouped_mm"}
_FREE_OPS = {"aten.detach", "aten.alias", "aten.empty", "aten.empty_strided", "aten.empty_like", "aten._unsafe_view"}


@contextmanager
def fake_cuda_tensors(cuda: FakeCuda) -> Iterator[FakeCuda]:
    """Within the context, tensors can be created on the fake `cuda` device and computed with."""
    compiled.cache_clear()
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(torch, "compile", _skip_compile))
        stack.enter_context(_MetaDeviceMode(cuda))
        stack.enter_context(_FakeKernelMode(cuda))
        yield cuda
    compiled.cache_clear()


def _skip_compile(function: Any = None, **_: Any) -> Any:
    return function if function is not None else _skip_compile


class _MetaDeviceMode(TorchFunctionMode):
    """Redirects the `cuda` device to `meta`; copies from and to the host; scalars."""

    def __init__(self, cuda: FakeCuda) -> None:
        super().__init__()
        self._cuda = cuda
        self._host = WeakTensorKeyDictionary()
        scalar_handlers = dict.fromkeys(
            _SCALAR_METHODS, self._scalar
        )  # handlers whose result is used where it is not None
        getters = {_IS_CUDA: self._is_cuda, _DEVICE: self._device}
        self._handlers: dict[Any, Callable[..., Any]] = {
            **scalar_handlers,
            **getters,
            Tensor.copy_: self._copy,
            Tensor.random_: self._random,
        }

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.device:
            return func(*args, **(kwargs or {}))
        meta_kwargs = {name: _to_meta(value) for name, value in (kwargs or {}).items()}
        if func is Tensor.pin_memory or meta_kwargs.pop("pin_memory", False):
            self._cuda.check_call("pinned")
            return self._pinned(func, args, meta_kwargs)
        handler = self._handlers.get(func)
        if handler is not None and args and isinstance(args[0], Tensor):
            result = handler(*args)
            if result is not None:
                return result
        if func is Tensor.cuda:
            func, args = Tensor.to, (args[0], _META)
        return func(*map(_to_meta, args), **meta_kwargs)

    def _scalar(self, tensor: Tensor) -> float | None:
        if not tensor.is_meta:
            return None
        self._cuda.synchronize()
        return 1.0

    def _is_cuda(self, tensor: Tensor, *_: Any) -> bool | None:
        return None if self._on_host(tensor) else True

    def _device(self, tensor: Tensor, *_: Any) -> torch.device | None:
        return None if self._on_host(tensor) else torch.device("cuda", torch.cuda.current_device())

    def _copy(self, target: Tensor, source: Tensor, *_: Any) -> Tensor | None:
        if self._on_host(target) is self._on_host(source):
            return None
        size = target.numel() * target.element_size()
        self._cuda.launch(FakeKernel(seconds=size / self._cuda.chip.link, load=0.1))
        return target

    def _random(self, tensor: Tensor) -> Tensor | None:
        return tensor if tensor in self._host else None

    def _pinned(self, func: Any, args: Any, options: dict[str, Any]) -> Tensor:
        """Pinned host memory, of which only the size is kept."""
        tensor = args[0].to("meta") if func is Tensor.pin_memory else func(*args, **options | {"device": _META})
        self._host[tensor] = None
        return tensor

    def _on_host(self, tensor: Tensor) -> bool:
        return not tensor.is_meta or tensor in self._host


def _to_meta(value: Any) -> Any:
    is_cuda_name = isinstance(value, str) and value.split(":")[0] == "cuda"
    return _META if is_cuda_name or (isinstance(value, torch.device) and value.type == "cuda") else value


class _FakeKernelMode(TorchDispatchMode):
    """Every operation on `meta` tensors is a kernel, and its results occupy device memory."""

    def __init__(self, cuda: FakeCuda) -> None:
        super().__init__()
        self._cuda = cuda
        self._finalizers: dict[int, Any] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = kwargs or {}
        op_name = str(func).rpartition(".")[0]
        inputs = _meta_tensors((args, options))
        if inputs:
            self._cuda.check_call(op_name)
        result = func(*args, **options)
        outputs = _meta_tensors(result)
        if not (inputs or outputs):
            return result
        for tensor in outputs:
            self._allocate(tensor)
        if not (func.is_view or op_name in _FREE_OPS):
            self._cuda.launch(_kernel_work(self._cuda, func, (args, options, result)))
        return result

    def _allocate(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._finalizers:
            return
        size, gpu = -(-storage.nbytes() // 512) * 512.0, self._cuda.gpu()
        self._cuda.allocate(size)
        self._finalizers[key] = weakref.finalize(storage, self._release, key, size, gpu)

    def _release(self, key: int, size: float, gpu: Any) -> None:
        self._finalizers.pop(key, None)
        self._cuda.free(size, gpu)


def _meta_tensors(tree: Any) -> list[Tensor]:
    """The GPU tensors among arguments or results."""
    if isinstance(tree, Tensor):
        return [tree] if tree.is_meta else []
    if isinstance(tree, dict):
        tree = tree.values()
    elif not isinstance(tree, (list, tuple)):
        return []
    return [tensor for item in tree for tensor in _meta_tensors(item)]


def _kernel_work(cuda: FakeCuda, func: Any, call: tuple[Any, dict[str, Any], Any]) -> FakeKernel:
    args, kwargs, result = call
    chip, inputs, outputs = cuda.chip, _meta_tensors((args, kwargs)), _meta_tensors(result)
    count = flop_registry.get(func._overloadpacket)
    flops = _scaled_flops(func, args)
    if count is not None:
        options = {name: value for name, value in kwargs.items() if name not in ("out", "out_dtype")}
        shapes = [arg for arg in args if not isinstance(arg, torch.dtype)]
        flops = float(count(*shapes, **options, out_val=result))
    dtype = min(inputs or outputs, key=Tensor.element_size).dtype  # an addend may have a higher precision
    speed = _RELATIVE_SPEED.get(dtype, 1.0)
    if dtype is torch.float32 and torch.backends.cuda.matmul.allow_tf32:
        speed = 0.5
    written_storages = {tensor.untyped_storage()._cdata for tensor in outputs}
    return FakeKernel(
        cycles=flops / (chip.flop_per_cycle * speed),
        seconds=chip.min_kernel_seconds,
        load=1.0 if flops else 0.6,
        reads=tuple(_access(tensor) for tensor in inputs if tensor.untyped_storage()._cdata not in written_storages),
        writes=tuple(_access(tensor) for tensor in outputs),
    )


def _scaled_flops(func: Any, args: Any) -> float:
    """FLOP of scaled matmuls, which `torch.utils.flop_counter` does not support."""
    if str(func).rpartition(".")[0] not in _SCALED_MATMULS:
        return 0.0
    a, b = args[:2]
    packed = 2 if a.dtype is torch.float4_e2m1fn_x2 else 1
    return 2.0 * packed * a.shape[0] * a.shape[1] * b.shape[-1]


def _access(tensor: Tensor) -> tuple[int, float]:
    storage = tensor.untyped_storage()
    return storage._cdata, float(min(tensor.numel() * tensor.element_size(), storage.nbytes()))
