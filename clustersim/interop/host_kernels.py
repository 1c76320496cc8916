"""What did a step compute on the host itself, where it has no GPU?

On a CPU an operator's kernel is the operator: the ATen operator that computes for most of its time itself, and does
not only call others. It is launched by itself, on the thread that runs it; what is between two of them (Python,
autograd, dispatch) is time for which the kernels wait for the host. Gloo's collectives are annotations of its threads.
"""

import math
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, Final

import numpy as np

from clustersim.common.arrays import BoolArray, FloatArray, IntArray
from clustersim.interop.kineto_events import GLOO_PREFIX, NO_ID, HostCollective, RankEvents

_COLLECTIVE_THREADS: Final = 10**6  # added to threads: Gloo's threads are streams of their own
_MAX_NESTED: Final = 0.5  # share of an operator's time in operators within it, if it is a kernel itself
_COMPUTE_PREFIX: Final = "aten::"
_MATMULS: Final = frozenset({"mm", "addmm", "bmm", "baddbmm", "_grouped_mm", "mv", "dot"})
_ALL_REDUCE: Final = "all_reduce"
_REDUCTIONS: Final = {
    "c10d::allreduce_": _ALL_REDUCE,
    "c10d::_reduce_scatter_base_": "reduce_scatter",
    "c10d::reduce_scatter_": "reduce_scatter",
    "c10d::reduce_scatter_tensor_coalesced_": "reduce_scatter",
}
"""Collectives that Gloo runs as all-reduces, by the operators that issue them (ProcessGroupGloo.cpp)."""
_WITHOUT_COMPUTATION: Final = frozenset(
    {
        "alias", "as_strided", "as_strided_", "chunk", "contiguous", "detach", "detach_", "empty", "empty_like",
        "empty_strided", "expand", "expand_as", "flatten", "is_nonzero", "item", "lift_fresh", "narrow", "new_empty",
        "new_empty_strided", "numpy_T", "permute", "reshape", "resize_", "resolve_conj", "resolve_neg", "result_type",
        "select", "set_", "slice", "split", "split_with_sizes", "squeeze", "squeeze_", "swapaxes", "t", "to",
        "transpose", "transpose_", "unbind", "unflatten", "unsqueeze", "unsqueeze_", "view", "view_as",
        "_local_scalar_dense", "_reshape_alias", "_unsafe_view",
    }
)  # fmt: skip


def add_host_kernels(events: RankEvents, groups: Mapping[str, tuple[int, ...]]) -> None:
    """Add the computing operators and the collectives of a trace without a GPU to its kernels and launches.

    groups: ranks of each process group; Gloo does not say which one a collective is of, unless there is only one.
    """
    operators = events.operators
    start, duration, thread = operators.floats("start"), operators.floats("duration"), operators.integers("thread")
    name, ids = operators.integers("name"), operators.integers("id")
    computes = np.array([_computes(text) for text in events.names], dtype=np.bool_)[name]
    labels = np.stack([name, operators.integers("dims")])
    kernels = np.flatnonzero(_kernels((start, duration), thread, labels, computes)).tolist()
    for number, index in enumerate(kernels):
        text = events.names[int(name[index])]
        is_matmul = text.removeprefix(_COMPUTE_PREFIX) in _MATMULS
        events.add_host_kernel(
            f"{text} gemm" if is_matmul else text,
            (float(start[index]), float(duration[index])),
            ids=(int(thread[index]), number, int(ids[index])),
        )
    group = next(iter(groups.items())) if len(groups) == 1 else ("", ())
    for number, collective in enumerate(_named_as_called(events), start=len(kernels)):
        begin, end = collective.interval
        ids_of_collective = collective.thread + _COLLECTIVE_THREADS, number, NO_ID
        arguments = _collective_arguments(collective, *group)
        events.add_host_kernel(f"{GLOO_PREFIX}{collective.name}", (begin, end - begin), ids_of_collective, arguments)


def _named_as_called(events: RankEvents) -> Iterator[HostCollective]:
    """Gloo's collectives by the names of the calls that issued them, as its all-reduces may be reduce-scatters.

    A process group runs collectives in the order of their calls.
    """
    calls: dict[int, deque[tuple[float, str]]] = {}
    starts, names, dims = (events.operators.floats("start"), *map(events.operators.integers, ("name", "dims")))
    for index in np.argsort(starts, kind="stable").tolist():
        called = _REDUCTIONS.get(events.names[int(names[index])])
        if called is not None and dims[index] >= 0:
            elements = max(map(_elements, events.dims[int(dims[index])]), default=0)
            calls.setdefault(elements, deque()).append((float(starts[index]), called))
    for collective in sorted(events.host_collectives, key=lambda collective: collective.interval):
        waiting = calls.get(collective.elements)
        if collective.name == _ALL_REDUCE and waiting and waiting[0][0] <= collective.interval[0]:
            yield replace(collective, name=waiting.popleft()[1])
        else:
            yield collective


def _elements(argument: Any) -> int:
    """Elements of the tensors of one argument of an operator, of its shapes."""
    if not isinstance(argument, list):
        return 0
    is_shape = argument and all(type(size) is int for size in argument)
    return math.prod(argument) if is_shape else sum(map(_elements, argument))


def _collective_arguments(collective: HostCollective, group: str, ranks: tuple[int, ...]) -> dict[str, Any]:
    """Arguments as of a collective of NCCL; without a payload where the group is not known."""
    if not ranks:
        return {"Collective name": collective.name}
    is_gathered = "gather" in collective.name
    return {
        "Collective name": collective.name,
        "In msg nelems": collective.elements,
        "Out msg nelems": collective.elements * (len(ranks) if is_gathered else 1),
        "Group size": len(ranks),
        "dtype": collective.dtype.removeprefix("c10::"),
        "Process Group Name": group,
    }


def _computes(name: str) -> bool:
    return name.startswith(_COMPUTE_PREFIX) and name.removeprefix(_COMPUTE_PREFIX) not in _WITHOUT_COMPUTATION


def _kernels(
    times: tuple[FloatArray, FloatArray], thread: IntArray, labels: IntArray, computes: BoolArray
) -> BoolArray:
    """[operators] whether each is a kernel: it computes for most of its time itself, and is not part of another one.

    times: start and duration; labels: [2, operators] name and shapes: equal ones are kernels or not together, as any
    one of them may have been interrupted. One around another of its name only dispatches it, as DTensor does.
    """
    start, duration = times
    wraps = np.zeros(len(start), dtype=np.bool_)
    nested = np.zeros(len(start))
    parent = np.full(len(start), -1)
    for thread_id in np.unique(thread).tolist():
        own_operators = np.flatnonzero((thread == thread_id) & computes)
        own_operators = own_operators[np.lexsort((-duration[own_operators], start[own_operators]))]
        stack: list[int] = []
        for index in own_operators.tolist():
            while stack and start[stack[-1]] + duration[stack[-1]] <= start[index]:
                stack.pop()
            if stack:
                parent[index] = stack[-1]
                nested[stack[-1]] += duration[index]
                wraps[stack[-1]] |= labels[0, stack[-1]] == labels[0, index]
            stack.append(index)
    kinds = np.unique(labels, axis=1, return_inverse=True)[1].reshape(-1)
    shares = np.divide(nested, duration, out=np.zeros(len(start)), where=duration > 0.0)
    is_kernel = computes & ~wraps & (_medians(shares, kinds) <= _MAX_NESTED)
    is_part = np.zeros(len(start), dtype=np.bool_)
    for index in np.flatnonzero(parent >= 0)[np.argsort(start[parent >= 0], kind="stable")].tolist():
        is_part[index] = is_part[parent[index]] or is_kernel[parent[index]]
    selected: BoolArray = is_kernel & ~is_part
    return selected


def _medians(values: FloatArray, kinds: IntArray) -> FloatArray:
    """[n] the median of the values of each one's kind; kinds: 0 and up."""
    order = np.lexsort((values, kinds))
    counts = np.bincount(kinds)
    first = np.cumsum(counts) - counts
    medians: FloatArray = values[order][first + (counts - 1) // 2][kinds]
    return medians
