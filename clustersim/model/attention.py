"""What does the attention core, softmax(Q K^T) V, compute, move and save?

Flash attention (Dao 2023, arXiv:2307.08691) is one kernel forward and one backward. It skips the masked
half, so it executes the causal factor of the full matrix's work; its backward recomputes the scores: five
matmuls instead of two, 2.5 times forward. A head dimension whose rows are not multiples of 16 bytes is
padded in copies of the operands, and output and gradients are sliced again (Dao-AILab/flash-attention,
flash_attn_interface.py; PyTorch's `scaled_dot_product_attention` does the same). It saves one logsumexp
per query and head (FP32) and no scores. Standard attention is two batched matmuls and a softmax over the
full, masked matrix, which it writes to memory and saves. A sliding window (Beltagy et al. 2020,
arXiv:2004.05150; Jiang et al. 2023, arXiv:2310.06825) leaves each query the last `window` keys: flash
attention skips the blocks outside it, standard attention masks them and saves no work. Soft-capped scores
(Gemma 2, arXiv:2408.00118, section 2) are free in flash attention here, and one more pass in standard
attention. ALiBi (Press et al. 2021, arXiv:2108.12409) is added in the matmul epilogue at no cost. An
attention sink (gpt-oss, arXiv:2508.10925, section 2.2; Xiao et al. 2023, arXiv:2309.17453) is one extra
score per head. Flash attention adds it to the softmax sum, and its gradient is one more sum over the
queries' statistics: Transformer Engine has cuDNN do so (`softmax_type` learnable; NVIDIA/cudnn-frontend,
include/cudnn_frontend/node/scaled_dot_product_flash_attention.h). Standard attention appends it to the
scores, a copy in each direction, and no fused softmax accepts these (Megatron-LM,
megatron/core/fusions/fused_softmax.py, `SoftmaxOne`). With `attention_copies` (Megatron-LM's
`ParallelAttention`, megatron/model/transformer.py) the output is reordered, and backward multiplies the
gradients of queries and keys by the score scale and concatenates those of queries, keys and values: one
copy for each. Those that flash attention needs are not counted. In a format with scales (Transformer
Engine's `fp8_dpa`) flash attention reads quantized queries, keys and values, and backward a quantized
output gradient, too; outputs and gradients are in the activation format. In MXFP8, whose blocks lie along
the reduction dimension, there are two copies of each operand, in FP8 one. Queries, keys and values are
saved by the operators that produce them, the output by the operator that reads it.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from clustersim.common.dtypes import DType
from clustersim.common.units import Flop
from clustersim.model import memory_bound
from clustersim.model.attention_spec import max_attended_keys, mean_attended_keys
from clustersim.model.kernels import AttentionShape, Kernel, KernelKind, MatmulLayout, MatmulShape
from clustersim.model.linear import matmul_kernel
from clustersim.model.memory_bound import MemoryBoundSpec
from clustersim.model.operators import Operator, ParallelRegion, assign_module
from clustersim.model.overheads import NO_OVERHEADS, Overheads
from clustersim.model.precision_recipe import OperandCast
from clustersim.model.quantization import quantize_kernels
from clustersim.model.recompute_modules import RecomputeModule
from clustersim.model.training import AttentionBackend

VECTOR_BYTES = 16  # bytes of one vectorized load: rows of a head must be multiples of it (flash_attn_interface.py)
_PADDED_TENSORS = 4  # queries, keys, values and output, or their gradients


def causal_factor(shape: AttentionShape) -> float:
    """Fraction of the score matrix that a causal mask and a window leave; 1 without a mask.

    The same under context parallelism (fewer queries than keys): a rank holds one chunk from the front and
    its mirror chunk from the back (zigzag, Llama 3 section 3.3.2), which on average attend to exactly the
    mean number of keys. Consecutive queries (`trailing`) are those of the last rank, which attends to most:
    (2 - 1 / cp) times the mean. With a window only the front of the sequence attends to fewer keys, so all ranks but
    the first do (w - 1) / (2 keys) more work.
    """
    if shape.packed is not None:
        return (shape.packed.mean if shape.causal else shape.packed.full) / shape.key
    if not shape.causal:
        return 1.0
    if not shape.trailing:
        return mean_attended_keys(shape.key, shape.window) / shape.key
    before = shape.key - shape.query
    attended = [keys * mean_attended_keys(keys, shape.window) if keys else 0.0 for keys in (shape.key, before)]
    return (attended[0] - attended[1]) / (shape.query * shape.key)


def full_matrix_flops(kernel: Kernel, shape: AttentionShape) -> Flop:
    """FLOP of an attention kernel by the model-FLOP convention: no causal halving, within window and documents."""
    full_keys = max_attended_keys(shape.key, shape.window) if shape.packed is None else shape.packed.full
    return kernel.flops / causal_factor(shape) * (full_keys / shape.key)


def flash_forward_flops(shape: AttentionShape) -> float:
    """FLOP of a flash attention forward: 2 b q k heads (head_dim + value head_dim) x causal factor."""
    full_flops = 2.0 * shape.batch * shape.query * shape.key * shape.heads * (shape.head_dim + shape.value_head_dim)
    return full_flops * causal_factor(shape)


@dataclass(frozen=True, slots=True)
class AttentionCore:
    """The attention core of one layer on one rank.

    dtype: of queries, keys, values and scores; softcap: scores are soft-capped; sinks: every head has a
    learned sink score; low_precision: scaled format of flash attention's matmuls, None: the activation
    format.
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
        """Number of sink parameters: one per head if there are sinks."""
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
        """Copies that pad queries, keys and values to rows of a multiple of 16 bytes, and unpad the output."""
        if self.shape.head_dim * self.dtype.bytes % VECTOR_BYTES == 0:
            return
        elements = self._query_elements + self._key_elements + self._value_elements + self._output_elements
        forward = replace(memory_bound.copy_kernel("attention.padding", self.dtype, elements), launches=_PADDED_TENSORS)
        backward = replace(forward, name="attention.padding.input_gradient")
        yield Operator("attention.padding", ParallelRegion.SHARDED, (forward,), (backward,), recompute_override=())

    def unpadding_operators(self) -> Iterator[Operator]:
        """Copies of the tokens that are no padding: queries, keys and values are gathered, the output is scattered.

        A scatter writes into zeros. flash_attn/bert_padding.py (`index_first_axis`, `pad_input`), which Transformers
        runs where a batch is padded (`_upad_input` in modeling_flash_attention_utils.py).
        """
        if not self.overheads.unpads_batches:
            return
        operands = self._query_elements + self._key_elements + self._value_elements
        yield Operator(
            "attention.unpadding",
            ParallelRegion.SHARDED,
            (*self._gather_kernels("gather", operands), *self._scatter_kernels("output", self._output_elements)),
            (*self._gather_kernels("gradient", self._output_elements), *self._scatter_kernels("gradients", operands)),
            recompute_override=(),
        )

    def _gather_kernels(self, name: str, elements: int) -> tuple[Kernel, ...]:
        return (memory_bound.copy_kernel(f"attention.unpadding.{name}", self.dtype, elements),)

    def _scatter_kernels(self, name: str, elements: int) -> tuple[Kernel, ...]:
        scatter = memory_bound.copy_kernel(f"attention.unpadding.{name}", self.dtype, elements)
        return (replace(scatter, name=f"{scatter.name}.zeros", bytes=scatter.bytes / 2), scatter)

    def flash_operators(self) -> Iterator[Operator]:
        """One fused kernel forward and one backward; dropout saves the random state only."""
        output_elements, logsumexp_bytes = self._output_elements, 4.0 * self._softmax_rows
        activation_bytes, operand_bytes = self.dtype.bytes, (self.low_precision or self.dtype).bytes
        flops, flops_per_score = flash_forward_flops(self.shape), self.shape.flops_per_score
        # reads q, k, v, writes the output; backward reads these and the output gradient, writes three gradients
        operand_elements = self._query_elements + self._key_elements + self._value_elements
        forward_bytes = operand_elements * operand_bytes + output_elements * activation_bytes + logsumexp_bytes
        backward_bytes = (operand_elements + output_elements) * (operand_bytes + activation_bytes) + logsumexp_bytes
        if self.sinks:  # per head; backward reads logsumexp and sums of each query once more
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
        """Kernels that quantize an operand of flash attention."""
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
        """Unfused attention: scores, softmax, dropout of the softmax, and its matmul with the values."""
        yield self._scores_operator()
        if self.softcap:
            yield self._score_matrix_operator("attention.softcap", memory_bound.softcap_spec(fused=self.fused))
        if self.sinks:
            yield self._sink_operator()
        softmax = self._score_matrix_operator("attention.softmax", self._softmax_spec)
        yield self._autocast_softmax(softmax) if self.overheads.autocast else softmax
        if self.dropout:
            yield self._score_matrix_operator("attention.dropout", memory_bound.SCORE_DROPOUT)
        yield self._context_operator()

    def _sink_operator(self) -> Operator:
        """Scores with the sink appended as one more column, whose gradient is the sum of that column's gradient."""
        name, elements = "attention.sink", self._softmax_rows * (self.shape.key + 1)
        forward = memory_bound.copy_kernel(name, self.dtype, elements)
        backward = replace(forward, name=f"{name}.input_gradient")
        return Operator(name, ParallelRegion.SHARDED, (forward,), (backward,), parameter_count=self._sink_count)

    def _batched_matmul(self, name: str, operands: MatmulLayout, *, m: int, n: int, k: int) -> Kernel:
        shape = MatmulShape(m, n, k, batch=self.shape.batch * self.shape.heads, operands=operands)
        return matmul_kernel(name, self.dtype, shape, result_bytes=self.dtype.bytes)

    def _autocast_softmax(self, softmax: Operator) -> Operator:
        """A softmax of FP32 copies of the scores, whose result is copied back, and saved in both formats."""
        elements = self._softmax_rows * self.shape.key
        wide, narrow = DType.FP32.bytes, self.dtype.bytes
        copy = memory_bound.copy_kernel("attention.softmax.autocast", self.dtype, elements)
        cast = replace(copy, bytes=float(elements * (wide + narrow)), launches=2)
        both = replace(cast, bytes=2 * cast.bytes)
        forward, backward = (
            tuple(replace(kernel, dtype=DType.FP32, bytes=kernel.bytes * wide / narrow) for kernel in kernels)
            for kernels in (softmax.forward, softmax.input_gradient)
        )
        return replace(
            softmax,
            forward=(both, *forward),
            input_gradient=(both, *backward),
            saved_bytes=softmax.saved_bytes + float(elements * wide),
        )

    @property
    def _softmax_spec(self) -> MemoryBoundSpec:
        """Softmax passes; fused only for the keys and heads the kernel supports (megatron/model/fused_softmax.py)."""
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
        """One copy kernel per element count, where the framework makes attention copies."""
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
    copies = (*core.unpadding_operators(), *core.padding_operators())
    return (*copies, *assign_module(core.flash_operators(), RecomputeModule.CORE_ATTENTION))
