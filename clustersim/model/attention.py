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
from clustersim.model.kernels import AttentionShape, Kernel, KernelKind, MatmulShape, Operands
from clustersim.model.linear import product
from clustersim.model.memory_bound import Streaming
from clustersim.model.operators import Operator, Region, within
from clustersim.model.overheads import NONE, Overheads
from clustersim.model.precision_recipe import Cast
from clustersim.model.quantization import quantize
from clustersim.model.recompute_modules import Module
from clustersim.model.training import Attention

VECTOR = 16  # bytes that a kernel loads at once: head dimensions are multiples of it (flash_attn_interface.py)
_COPIED = 4  # tensors: queries, keys, values and result, or the gradients of these


def causal_factor(shape: AttentionShape) -> float:
    """Share of the score matrix that a causal mask and a window leave, 1 without a mask.

    Under context parallelism (fewer queries than keys) it is the same: a rank holds a piece from the front and its
    mirror piece from the back (zigzag, Llama 3 section 3.3.2), which together see exactly the average number of keys.
    With a window only the front of the sequence sees fewer, so all ranks but the first do (w - 1) / (2 keys) more.
    """
    if not shape.causal:
        return 1.0
    return seen_keys(shape.key, shape.window) / shape.key


def seen_keys(keys: int, window: int | None) -> float:
    """How many keys a causal query sees, the mean over as many queries: (keys + 1) / 2.

    With a window of w, w (2 keys - w + 1) / (2 keys): the first w queries see 1 to w keys, all others w.
    """
    reached = reached_keys(keys, window)
    return reached * (2 * keys - reached + 1) / (2 * keys)


def reached_keys(keys: int, window: int | None) -> int:
    """How many keys a causal query sees at most."""
    return keys if window is None else min(window, keys)


def full_matrix(kernel: Kernel, shape: AttentionShape) -> Flop:
    """FLOP of a kernel by the convention: no causal halving, and as many keys for each query as its window has."""
    return kernel.flops / causal_factor(shape) * (reached_keys(shape.key, shape.window) / shape.key)


def flash_flops(shape: AttentionShape) -> float:
    """FLOP of a flash attention forward: 2 b q k heads (head_dim + that of values) x causal factor."""
    full = 2.0 * shape.batch * shape.query * shape.key * shape.heads * (shape.head_dim + shape.values)
    return full * causal_factor(shape)


@dataclass(frozen=True, slots=True)
class Core:
    """The attention core of one layer on one rank.

    dtype: of queries, keys, values and scores; softcap: of these; sinks: every head has a learned score of its own;
    narrow: the format with scales of flash attention's products, None: they have none.
    """

    shape: AttentionShape
    dtype: DType
    dropout: bool
    fused: bool
    softcap: bool = False
    overheads: Overheads = NONE
    sinks: bool = False
    narrow: DType | None = None

    @property
    def _parameters(self) -> int:
        """A score of each head."""
        return self.shape.heads if self.sinks else 0

    @property
    def _statistics(self) -> int:
        return self.shape.batch * self.shape.heads * self.shape.query

    @property
    def _queries(self) -> int:
        return self.shape.batch * self.shape.query * self.shape.heads * self.shape.head_dim

    @property
    def _keys(self) -> int:
        return self.shape.batch * self.shape.key * self.shape.kv_heads * self.shape.head_dim

    @property
    def _values(self) -> int:
        return self.shape.batch * self.shape.key * self.shape.kv_heads * self.shape.values

    @property
    def _results(self) -> int:
        return self.shape.batch * self.shape.query * self.shape.heads * self.shape.values

    def padding(self) -> Iterator[Operator]:
        """Copies of queries, keys and values with rows of 16 bytes, and of the result without what was added."""
        if self.shape.head_dim * self.dtype.bytes % VECTOR == 0:
            return
        elements = self._queries + self._keys + self._values + self._results
        copied = replace(memory_bound.copy("attention.padding", self.dtype, elements), launches=_COPIED)
        back = replace(copied, name="attention.padding.input_gradient")
        yield Operator("attention.padding", Region.SHARDED, (copied,), (back,), again=())

    def flash(self) -> Iterator[Operator]:
        """One fused kernel each way; dropout keeps the random state only."""
        results, logarithms = self._results, 4.0 * self._statistics
        width, read = self.dtype.bytes, (self.narrow or self.dtype).bytes
        flops, scores = flash_flops(self.shape), self.shape.score_flops
        # reads q, k, v, writes the result; backward reads these and the result's gradient, writes three gradients
        operands = self._queries + self._keys + self._values
        read_forward = operands * read + results * width + logarithms
        read_backward = (operands + results) * (read + width) + logarithms
        if self.sinks:  # of each head; backward reads logarithms and sums of each query once more
            read_forward += self._parameters * width
            read_backward += 2 * (self._parameters * width + logarithms)
        dtype = self.narrow or self.dtype
        forward = Kernel("attention.core", KernelKind.ATTENTION_FORWARD, dtype, flops, read_forward, self.shape)
        backward = Kernel(
            "attention.core.input_gradient",
            KernelKind.ATTENTION_BACKWARD,
            dtype,
            scores(backward=True) / scores(backward=False) * flops,
            read_backward,
            self.shape,
        )
        yield Operator(
            "attention.core",
            Region.SHARDED,
            (*self._cast("input", operands), forward),
            (*self._cast("output_gradient", results), backward),
            parameters=self._parameters,
            kept=logarithms,
            again=(),
            results=results * width + logarithms,
            returned=results * width,
            saves_late=True,
        )

    def _cast(self, of: str, elements: int) -> tuple[Kernel, ...]:
        """What flash attention reads, brought into its format."""
        if self.narrow is None:
            return ()
        cast = Cast(reads=1, copies=1 if self.narrow is DType.FP8 else 2)
        return quantize(f"attention.core.cast_{of}", cast, (elements, 1), wide=self.dtype, narrow=self.narrow)

    def standard(self) -> Iterator[Operator]:
        """Scores, softmax, dropout of the softmax, and its product with the values."""
        yield self._scores()
        if self.softcap:
            yield self._matrix_pass("attention.softcap", memory_bound.softcap(fused=self.fused))
        if self.sinks:
            yield self._sink()
        yield self._matrix_pass("attention.softmax", self._softmax)
        if self.dropout:
            yield self._matrix_pass("attention.dropout", memory_bound.SCORE_DROPOUT)
        yield self._context()

    def _sink(self) -> Operator:
        """Scores with one more column, whose gradient is the sum of that column's."""
        name, elements = "attention.sink", self._statistics * (self.shape.key + 1)
        copied = memory_bound.copy(name, self.dtype, elements)
        back = replace(copied, name=f"{name}.input_gradient")
        return Operator(name, Region.SHARDED, (copied,), (back,), parameters=self._parameters)

    def _product(self, name: str, operands: Operands, *, m: int, n: int, k: int) -> Kernel:
        shape = MatmulShape(m, n, k, batch=self.shape.batch * self.shape.heads, operands=operands)
        return product(name, self.dtype, shape, result=self.dtype.bytes)

    @property
    def _softmax(self) -> Streaming:
        """Fused only for as many keys and heads as the kernel takes (Megatron-LM, megatron/model/fused_softmax.py)."""
        if self.sinks:
            return memory_bound.softmax(fused=False)
        most = self.overheads.softmax_keys
        outside = most is not None and (self.shape.key > most or self.shape.batch * self.shape.heads % 4 != 0)
        return memory_bound.MEGATRON_SOFTMAX if self.fused and outside else memory_bound.softmax(fused=self.fused)

    def _copies(self, name: str, *elements: int) -> tuple[Kernel, ...]:
        """Copies of so many elements each, where attention makes them."""
        if not self.overheads.attention_copies:
            return ()
        return tuple(memory_bound.copy(name, self.dtype, element) for element in elements)

    def _scores(self) -> Operator:
        query, key, head = self.shape.query, self.shape.key, self.shape.head_dim
        queries, keys = self._queries, self._keys
        backward = (
            self._product("attention.scores.query_gradient", Operands.NN, m=query, n=head, k=key),
            self._product("attention.scores.key_gradient", Operands.TN, m=key, n=head, k=query),
            *self._copies("attention.scores.scale_gradient", queries, keys),
            *self._copies("attention.split_gradient", queries + keys + self._values),
        )
        forward = self._product("attention.scores", Operands.NT, m=query, n=key, k=head)
        return Operator("attention.scores", Region.SHARDED, (forward,), backward)

    def _context(self) -> Operator:
        query, key, head = self.shape.query, self.shape.key, self.shape.values
        backward = (
            self._product("attention.context.score_gradient", Operands.NT, m=query, n=key, k=head),
            self._product("attention.context.value_gradient", Operands.TN, m=key, n=head, k=query),
        )
        forward = self._product("attention.context", Operands.NN, m=query, n=head, k=key)
        reordered = self._copies("attention.context.reorder", self._results)
        return Operator("attention.context", Region.SHARDED, (forward, *reordered), backward)

    def _matrix_pass(self, name: str, over: Streaming) -> Operator:
        scores = over.over(self._statistics, self.shape.key)
        return Operator(
            name,
            Region.SHARDED,
            (over.forward_kernel(name, self.dtype, scores),),
            over.backward_kernels(name, self.dtype, scores),
            kept=over.kept.bytes(self.dtype, scores.elements),
            saves_late=over.saves_late,
        )


def operators(core: Core, attention: Attention) -> tuple[Operator, ...]:
    """The operators of the attention core, in forward order."""
    if attention is Attention.STANDARD:
        return tuple(within(core.standard(), Module.CORE))
    return (*core.padding(), *within(core.flash(), Module.CORE))
