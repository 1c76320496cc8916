"""What does the attention core compute, move and keep: the part without parameters, softmax(Q K^T) V?

Flash attention (Dao 2023, arXiv:2307.08691) is one kernel forward and one backward; it skips the masked half, so it
executes the causal factor of the full matrix's work, and its backward computes the scores again: five products
instead of two, 2.5 times forward. A head dimension whose rows are no multiples of 16 bytes is filled up in copies of
the operands, and the result and the gradients are cut again (Dao-AILab/flash-attention, flash_attn_interface.py;
PyTorch's `scaled_dot_product_attention` does the same). It keeps a logarithm per query and head (FP32) and no scores.
Standard attention is two batched products around a softmax over the full, masked matrix, which it writes to memory and
keeps.
A sliding window (Beltagy et al. 2020, arXiv:2004.05150; Jiang et al. 2023, arXiv:2310.06825) leaves each query the last
`window` keys: flash attention skips the blocks outside it, standard attention masks them and saves nothing. Soft-capped
scores (Gemma 2, arXiv:2408.00118, section 2) cost flash attention nothing here, standard attention one more pass. ALiBi
(Press et al. 2021, arXiv:2108.12409) is added in the product's epilogue, for nothing.
A sink (gpt-oss, arXiv:2508.10925, section 2.2; Xiao et al. 2023, arXiv:2309.17453) is one score of each head beside
those of the keys. Flash attention adds it where it sums, and its gradient is one more sum over the queries' statistics:
Transformer Engine has cuDNN do so (`softmax_type` learnable; NVIDIA/cudnn-frontend,
include/cudnn_frontend/node/scaled_dot_product_flash_attention.h). Standard attention puts it behind the scores, a copy
each way, and no fused softmax takes these (Megatron-LM, megatron/core/fusions/fused_softmax.py, `SoftmaxOne`).
With `attention_copies` (Megatron-LM's `ParallelAttention`, megatron/model/transformer.py) the result is put in order,
and backward multiplies the gradients of queries and keys by the scale of the scores and joins those of queries, keys
and values, as the product was split: a copy each. Those that flash attention needs are not counted.
In a format with scales (Transformer Engine's `fp8_dpa`) flash attention reads casts of queries, keys and values, and
backward one of the result's gradient, too; results and gradients are in the format of activations. In MXFP8, whose
blocks are along what a product sums over, there are two copies of each, in FP8 one.
The queries, keys and values are kept by the operators that make them, the result by the operator that reads it.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from clustersim.common.dtypes import DType
from clustersim.common.units import Flop
from clustersim.model import memory_bound
from clustersim.model.kernels import AttentionShape, Kernel, KernelKind, MatmulLayout, MatmulShape
from clustersim.model.linear import matmul_kernel
from clustersim.model.memory_bound import MemoryBoundSpec
from clustersim.model.operators import Operator, ParallelRegion, assign_module
from clustersim.model.overheads import NO_OVERHEADS, Overheads
from clustersim.model.precision_recipe import OperandCast
from clustersim.model.quantization import quantize_kernels
from clustersim.model.recompute_modules import RecomputeModule
from clustersim.model.training import AttentionBackend

VECTOR_BYTES = 16  # bytes that a kernel loads at once: head dimensions are multiples of it (flash_attn_interface.py)
_PADDED_TENSORS = 4  # tensors: queries, keys, values and result, or the gradients of these


def causal_factor(shape: AttentionShape) -> float:
    """Share of the score matrix that a causal mask and a window leave, 1 without a mask.

    Under context parallelism (fewer queries than keys) it is the same: a rank holds a piece from the front and its
    mirror piece from the back (zigzag, Llama 3 section 3.3.2), which together see exactly the average number of keys.
    With a window only the front of the sequence sees fewer, so all ranks but the first do (w - 1) / (2 keys) more.
    """
    if not shape.causal:
        return 1.0
    return mean_attended_keys(shape.key, shape.window) / shape.key


def mean_attended_keys(keys: int, window: int | None) -> float:
    """How many keys a causal query sees, the mean over as many queries: (keys + 1) / 2.

    With a window of w, w (2 keys - w + 1) / (2 keys): the first w queries see 1 to w keys, all others w.
    """
    max_keys = max_attended_keys(keys, window)
    return max_keys * (2 * keys - max_keys + 1) / (2 * keys)


def max_attended_keys(keys: int, window: int | None) -> int:
    """How many keys a causal query sees at most."""
    return keys if window is None else min(window, keys)


def full_matrix_flops(kernel: Kernel, shape: AttentionShape) -> Flop:
    """FLOP of a kernel by the convention: no causal halving, and as many keys for each query as its window has."""
    return kernel.flops / causal_factor(shape) * (max_attended_keys(shape.key, shape.window) / shape.key)


def flash_forward_flops(shape: AttentionShape) -> float:
    """FLOP of a flash attention forward: 2 b q k heads (head_dim + that of values) x causal factor."""
    full_flops = 2.0 * shape.batch * shape.query * shape.key * shape.heads * (shape.head_dim + shape.value_head_dim)
    return full_flops * causal_factor(shape)


@dataclass(frozen=True, slots=True)
class AttentionCore:
    """The attention core of one layer on one rank.

    dtype: of queries, keys, values and scores; softcap: of these; sinks: every head has a learned score of its own;
    narrow: the format with scales of flash attention's products, None: they have none.
    """

    shape: AttentionShape
    dtype: DType
    dropout: bool
    fused: bool
    softcap: bool = False
    overheads: Overheads = NO_OVERHEADS
    sinks: bool = False
    low_precision: DType | None = None

    @property
    def _sink_count(self) -> int:
        """A score of each head."""
        return self.shape.heads if self.sinks else 0

    @property
    def _softmax_rows(self) -> int:
        return self.shape.batch * self.shape.heads * self.shape.query

    @property
    def _query_elements(self) -> int:
        return self.shape.batch * self.shape.query * self.shape.heads * self.shape.head_dim

    @property
    def _key_elements(self) -> int:
        return self.shape.batch * self.shape.key * self.shape.kv_heads * self.shape.head_dim

    @property
    def _value_elements(self) -> int:
        return self.shape.batch * self.shape.key * self.shape.kv_heads * self.shape.value_head_dim

    @property
    def _output_elements(self) -> int:
        return self.shape.batch * self.shape.query * self.shape.heads * self.shape.value_head_dim

    def padding_operators(self) -> Iterator[Operator]:
        """Copies of queries, keys and values with rows of 16 bytes, and of the result without what was added."""
        if self.shape.head_dim * self.dtype.bytes % VECTOR_BYTES == 0:
            return
        elements = self._query_elements + self._key_elements + self._value_elements + self._output_elements
        forward = replace(memory_bound.copy_kernel("attention.padding", self.dtype, elements), launches=_PADDED_TENSORS)
        backward = replace(forward, name="attention.padding.input_gradient")
        yield Operator("attention.padding", ParallelRegion.SHARDED, (forward,), (backward,), recompute_override=())

    def flash_operators(self) -> Iterator[Operator]:
        """One fused kernel each way; dropout keeps the random state only."""
        output_elements, logsumexp_bytes = self._output_elements, 4.0 * self._softmax_rows
        activation_bytes, operand_bytes = self.dtype.bytes, (self.low_precision or self.dtype).bytes
        flops, flops_per_score = flash_forward_flops(self.shape), self.shape.flops_per_score
        # reads q, k, v, writes the result; backward reads these and the result's gradient, writes three gradients
        operand_elements = self._query_elements + self._key_elements + self._value_elements
        forward_bytes = operand_elements * operand_bytes + output_elements * activation_bytes + logsumexp_bytes
        backward_bytes = (operand_elements + output_elements) * (operand_bytes + activation_bytes) + logsumexp_bytes
        if self.sinks:  # of each head; backward reads logarithms and sums of each query once more
            forward_bytes += self._sink_count * activation_bytes
            backward_bytes += 2 * (self._sink_count * activation_bytes + logsumexp_bytes)
        dtype = self.low_precision or self.dtype
        forward = Kernel("attention.core", KernelKind.ATTENTION_FORWARD, dtype, flops, forward_bytes, self.shape)
        backward = Kernel(
            "attention.core.input_gradient",
            KernelKind.ATTENTION_BACKWARD,
            dtype,
            flops_per_score(backward=True) / flops_per_score(backward=False) * flops,
            backward_bytes,
            self.shape,
        )
        yield Operator(
            "attention.core",
            ParallelRegion.SHARDED,
            (*self._cast_kernels("input", operand_elements), forward),
            (*self._cast_kernels("output_gradient", output_elements), backward),
            parameter_count=self._sink_count,
            saved_bytes=logsumexp_bytes,
            recompute_override=(),
            saved_output_bytes=output_elements * activation_bytes + logsumexp_bytes,
            backward_output_bytes=output_elements * activation_bytes,
            saves_outputs=True,
        )

    def _cast_kernels(self, operand: str, elements: int) -> tuple[Kernel, ...]:
        """What flash attention reads, brought into its format."""
        if self.low_precision is None:
            return ()
        cast = OperandCast(reads=1, copies=1 if self.low_precision is DType.FP8 else 2)
        return quantize_kernels(
            f"attention.core.cast_{operand}",
            cast,
            (elements, 1),
            high_precision=self.dtype,
            low_precision=self.low_precision,
        )

    def standard_operators(self) -> Iterator[Operator]:
        """Scores, softmax, dropout of the softmax, and its product with the values."""
        yield self._scores_operator()
        if self.softcap:
            yield self._score_matrix_operator("attention.softcap", memory_bound.softcap_spec(fused=self.fused))
        if self.sinks:
            yield self._sink_operator()
        yield self._score_matrix_operator("attention.softmax", self._softmax_spec)
        if self.dropout:
            yield self._score_matrix_operator("attention.dropout", memory_bound.SCORE_DROPOUT)
        yield self._context_operator()

    def _sink_operator(self) -> Operator:
        """Scores with one more column, whose gradient is the sum of that column's."""
        name, elements = "attention.sink", self._softmax_rows * (self.shape.key + 1)
        forward = memory_bound.copy_kernel(name, self.dtype, elements)
        backward = replace(forward, name=f"{name}.input_gradient")
        return Operator(name, ParallelRegion.SHARDED, (forward,), (backward,), parameter_count=self._sink_count)

    def _batched_matmul(self, name: str, operands: MatmulLayout, *, m: int, n: int, k: int) -> Kernel:
        shape = MatmulShape(m, n, k, batch=self.shape.batch * self.shape.heads, operands=operands)
        return matmul_kernel(name, self.dtype, shape, result_bytes=self.dtype.bytes)

    @property
    def _softmax_spec(self) -> MemoryBoundSpec:
        """Fused only for as many keys and heads as the kernel takes (Megatron-LM, megatron/model/fused_softmax.py)."""
        if self.sinks:
            return memory_bound.softmax_spec(fused=False)
        max_keys = self.overheads.softmax_keys
        is_unsupported = max_keys is not None and (
            self.shape.key > max_keys or self.shape.batch * self.shape.heads % 4 != 0
        )
        return (
            memory_bound.MEGATRON_SOFTMAX
            if self.fused and is_unsupported
            else memory_bound.softmax_spec(fused=self.fused)
        )

    def _copy_kernels(self, name: str, *element_counts: int) -> tuple[Kernel, ...]:
        """Copies of so many elements each, where attention makes them."""
        if not self.overheads.attention_copies:
            return ()
        return tuple(memory_bound.copy_kernel(name, self.dtype, elements) for elements in element_counts)

    def _scores_operator(self) -> Operator:
        query, key, head = self.shape.query, self.shape.key, self.shape.head_dim
        queries, keys = self._query_elements, self._key_elements
        backward = (
            self._batched_matmul("attention.scores.query_gradient", MatmulLayout.NN, m=query, n=head, k=key),
            self._batched_matmul("attention.scores.key_gradient", MatmulLayout.TN, m=key, n=head, k=query),
            *self._copy_kernels("attention.scores.scale_gradient", queries, keys),
            *self._copy_kernels("attention.split_gradient", queries + keys + self._value_elements),
        )
        forward = self._batched_matmul("attention.scores", MatmulLayout.NT, m=query, n=key, k=head)
        return Operator("attention.scores", ParallelRegion.SHARDED, (forward,), backward)

    def _context_operator(self) -> Operator:
        query, key, head = self.shape.query, self.shape.key, self.shape.value_head_dim
        backward = (
            self._batched_matmul("attention.context.score_gradient", MatmulLayout.NT, m=query, n=key, k=head),
            self._batched_matmul("attention.context.value_gradient", MatmulLayout.TN, m=key, n=head, k=query),
        )
        forward = self._batched_matmul("attention.context", MatmulLayout.NN, m=query, n=head, k=key)
        reorder = self._copy_kernels("attention.context.reorder", self._output_elements)
        return Operator("attention.context", ParallelRegion.SHARDED, (forward, *reorder), backward)

    def _score_matrix_operator(self, name: str, spec: MemoryBoundSpec) -> Operator:
        scores = spec.shape_for(self._softmax_rows, self.shape.key)
        return Operator(
            name,
            ParallelRegion.SHARDED,
            (spec.forward_kernel(name, self.dtype, scores),),
            spec.backward_kernels(name, self.dtype, scores),
            saved_bytes=spec.saved.bytes(self.dtype, scores.elements),
            saves_outputs=spec.saves_outputs,
        )


def attention_operators(core: AttentionCore, backend: AttentionBackend) -> tuple[Operator, ...]:
    """The operators of the attention core, in forward order."""
    if backend is AttentionBackend.STANDARD:
        return tuple(assign_module(core.standard_operators(), RecomputeModule.CORE_ATTENTION))
    return (*core.padding_operators(), *assign_module(core.flash_operators(), RecomputeModule.CORE_ATTENTION))
