"""What does one GPU kernel compute and move?

A kernel is described by what it computes and moves, never by how long that takes: FLOP executed, bytes
read and written in device memory, and the shape that a cost model needs to see tile and wave effects.
"""

from dataclasses import dataclass, replace
from typing import Final

from clustersim.common.dtypes import DType
from clustersim.common.enums import IdentityEnum
from clustersim.common.units import Bytes, Flop


class KernelKind(IdentityEnum):
    """Kernel families that share one cost model."""

    MATMUL = "matmul"
    # Matmuls of equal sizes with one matrix per expert: in one kernel, or one kernel per expert on several streams.
    GROUPED_MATMUL = "grouped_matmul"
    STREAMED_MATMULS = "streamed_matmuls"
    ATTENTION_FORWARD = "attention_forward"  # flash attention: one fused kernel
    ATTENTION_BACKWARD = "attention_backward"
    NORM = "norm"
    ACTIVATION = "activation"
    ROTARY = "rotary"
    RESIDUAL = "residual"
    DROPOUT = "dropout"
    SOFTMAX = "softmax"  # of standard (not flash) attention, with scale and mask
    EMBEDDING = "embedding"
    LOSS = "loss"  # softmax cross-entropy
    OPTIMIZER = "optimizer"
    COPY = "copy"
    CAST = "cast"  # quantization into a format with scales
    SCAN = "scan"  # one kernel of a chunk-parallel scan: linear attention, state spaces
    SPARSE_ATTENTION = "sparse_attention"  # one kernel of attention to selected keys, or of their selection


TENSOR_CORE_KINDS: Final = frozenset(
    {
        KernelKind.MATMUL,
        KernelKind.GROUPED_MATMUL,
        KernelKind.STREAMED_MATMULS,
        KernelKind.ATTENTION_FORWARD,
        KernelKind.ATTENTION_BACKWARD,
    }
)
"""Kernels that run on tensor cores (matrix units); all others are memory-bound."""


ATTENTION_KINDS: Final = frozenset({KernelKind.ATTENTION_FORWARD, KernelKind.ATTENTION_BACKWARD})
"""Flash attention."""


GROUPED_MATMUL_KINDS: Final = frozenset({KernelKind.STREAMED_MATMULS, KernelKind.GROUPED_MATMUL})
"""Grouped matmuls of experts."""


class MatmulLayout(IdentityEnum):
    """Memory layout of the operands A[m, k] and B[k, n] of a matmul, as in BLAS: N row-major, T transposed.

    With weights [outputs, inputs], a linear layer's forward is NT, its input gradient NN, its weight gradient
    TN.
    """

    NT = "NT"
    NN = "NN"
    TN = "TN"


@dataclass(frozen=True, slots=True)
class MatmulShape:
    """C[m, n] = A[m, k] B[k, n], `batch` times.

    accumulated: format of the result that the matmul accumulates into in its epilogue (the gradient buffer);
    None: the result is overwritten.
    """

    m: int
    n: int
    k: int
    batch: int = 1
    operands: MatmulLayout = MatmulLayout.NT
    accumulated: DType | None = None

    @property
    def contiguous_elements(self) -> tuple[int, int, int]:
        """Number of contiguous elements in memory (inner dimension) of A, B and C."""
        match self.operands:
            case MatmulLayout.NT:
                return self.k, self.k, self.n
            case MatmulLayout.NN:
                return self.k, self.n, self.n
            case MatmulLayout.TN:
                return self.m, self.n, self.n


@dataclass(frozen=True, slots=True)
class PackedKeys:
    """Keys that queries attend to within packed documents.

    mean: of all queries, causal; full: without a causal mask; longest: of one document, or the window.
    """

    mean: float
    full: float
    longest: int


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """softmax(Q K^T) V of `batch` sequences: queries [query, heads, head_dim], keys [key, kv_heads, head_dim].

    window: how many keys, its own among them, a causal query attends to; None: all before it; value_dim: head
    dimension of values [key, kv_heads, value_dim] and outputs, where it differs from that of queries and keys
    (MLA); trailing: the queries are the last ones of the keys' sequence, not a sample that attends to the mean;
    packed: they attend to keys of their own documents alone, None: to all.
    """

    batch: int
    query: int
    key: int
    heads: int
    kv_heads: int
    head_dim: int
    causal: bool
    window: int | None = None
    value_dim: int | None = None
    trailing: bool = False
    packed: PackedKeys | None = None

    @property
    def value_head_dim(self) -> int:
        """The head dimension of values and outputs."""
        return self.head_dim if self.value_dim is None else self.value_dim

    def flops_per_score(self, *, backward: bool) -> int:
        """FLOP of flash attention per score: forward QK^T and PV; backward five matmuls, one of them recomputed.

        Of the five (Dao 2023, arXiv:2307.08691, section 4.1) the scores and the gradients of queries and keys
        have the head dimension of keys, the gradients of the softmax and of the values that of values.
        """
        return (
            2 * (3 * self.head_dim + 2 * self.value_head_dim) if backward else 2 * (self.head_dim + self.value_head_dim)
        )


class MemoryBoundOp(IdentityEnum):
    """Operation of a memory-bound kernel: pointwise, reduction, or data movement."""

    LAYERNORM = "layernorm"
    RMSNORM = "rmsnorm"
    GELU = "gelu"
    SWIGLU = "swiglu"  # silu(gate) x up, both halves of one tensor of 2 x width columns
    ROTARY = "rotary"  # rotate-half; table: positions
    ROTARY_COMPLEX = "rotary_complex"  # pairs of elements as complex numbers; fused: conversions by a compiler
    RESIDUAL = "residual"  # sum of two tensors
    RESIDUAL_DROPOUT = "residual_dropout"  # residual + dropout(branch)
    DROPOUT = "dropout"
    SOFTMAX = "softmax"  # of scores [rows, width], with a causal mask and a scale
    SOFTCAP = "softcap"  # cap x tanh(x / cap)
    LOSS_TORCH = "loss_torch"  # log-softmax and negative log-likelihood of logits [rows, width]
    LOSS_VOCAB_PARALLEL = "loss_vocab_parallel"  # Megatron-LM's, one operation after the other in FP32
    LOSS_FUSED = "loss_fused"
    LOSS_CHUNKED = "loss_chunked"
    Z_LOSS = "z_loss"  # squared logarithm of the sum of exponentials of logits [rows, width]
    TOP_K = "top_k"  # the `table` largest of each row of logits [rows, width], their softmax, and the selection mask
    TOP_K_SIGMOID = "top_k_sigmoid"  # the same with sigmoid scores, selected by scores plus a bias per column
    TOP_K_GROUPED = "top_k_grouped"  # the same, selected from the best groups of columns (group-limited routing)
    BALANCE = "balance"  # load-balancing loss of logits [rows, width]
    ROW_MAP = "row_map"  # source row of each of `table` permuted tokens, from the selection mask [rows, width]
    PERMUTE = "permute"  # rows [rows, width] gathered into another order, table / rows copies of each
    UNPERMUTE = "unpermute"  # rows [rows, width] that are sums of table / rows rows each
    WEIGHTING = "weighting"  # rows [rows, width], each times a scalar, in formats[0] if any; backward: both gradients
    LOOKUP = "lookup"  # rows of a table [table, width]; backward: its dense gradient
    POSITIONS = "positions"  # a table of positions [table, width] added; backward: the sum over sequences
    BIAS_GRADIENT = "bias_gradient"  # sum over the rows
    BIAS_ADD = "bias_add"  # a vector [width] added to every row
    COPY = "copy"  # in the kernel's format, or written in formats[0]
    ACCUMULATE = "accumulate"  # a gradient in the kernel's format added to one in formats[0]
    ADAM = (
        "adam"  # one update in the kernel's format; formats: of gradients, moments, and a copy of the weights, if any
    )
    SGD = "sgd"  # with momentum; formats as for ADAM
    UPDATE = "update"  # a pass of any other optimizer
    MERGE = "merge"  # partial results of attention, or their gradients, added up in FP32
    FACTORIZATION = "factorization"  # QR or Cholesky, of a matrix [rows, width]
    SCALED_SUM = "scaled_sum"  # a tensor and a multiple of another
    SCALE = "scale"  # a multiple of a tensor
    DEQUANTIZE = "dequantize"  # weights [rows, width] in the kernel's format, from those in formats[0] and their scales
    QUANTIZE = "quantize"  # a copy in each of the formats, with scales; table: read passes over the operand
    ZERO = "zero"  # a tensor set to zero
    UNSCALE = "unscale"  # in-place multiple of a tensor, and whether all of it is finite
    CAUSAL_MASK = "causal_mask"  # a matrix [rows, width] of ones, its lower triangle, and the mask of its zeros
    CAUSAL_CONV1D = "causal_conv1d"  # of `table` taps over a sequence, one filter per column, with SiLU
    CAUSAL_CONV1D_CUDA = "causal_conv1d_cuda"  # the same, of Dao-AILab/causal-conv1d
    GATED_RMSNORM = "gated_rmsnorm"  # RMSNorm of rows, times an activation of a gate
    L2NORM = "l2norm"  # rows divided by their Euclidean norm
    SILU = "silu"
    GATE = "gate"  # a tensor times the sigmoid of another
    GRADIENT_NORM = "gradient_norm"
    GRADIENT_CLIP = "gradient_clip"
    PASS_OVERHEAD = "pass_overhead"  # of a profiled step: what no operator does, for each forward pass of a microbatch
    STEP_OVERHEAD = "step_overhead"  # the same for each step


TOP_K_OPS: Final = frozenset({MemoryBoundOp.TOP_K, MemoryBoundOp.TOP_K_SIGMOID, MemoryBoundOp.TOP_K_GROUPED})
"""Operations that select experts."""
TOKEN_ROUTING_OPS: Final = frozenset(
    {*TOP_K_OPS, MemoryBoundOp.ROW_MAP, MemoryBoundOp.PERMUTE, MemoryBoundOp.UNPERMUTE}
)
"""Operations that route tokens to their experts and back."""


@dataclass(frozen=True, slots=True)
class MemoryBoundShape:
    """A memory-bound operation over [rows, width] elements.

    backward: its input gradient; fused: one kernel that passes every operand once, not one kernel per term of
    the formula as in eager PyTorch; table: rows looked up, copied or added by position, number of selected
    experts, or read passes of a quantization; formats: of additional operands, see MemoryBoundOp.
    """

    routine: MemoryBoundOp
    rows: int
    width: int
    backward: bool = False
    fused: bool = False
    table: int = 0
    formats: tuple[DType, ...] = ()

    @property
    def elements(self) -> int:
        """Elements of the tensor that the operation is over."""
        return self.rows * self.width


class ScanRoutine(IdentityEnum):
    """The recurrence of a scan; the value is its name in files.

    SSD: Mamba 2's state space dual; SELECTIVE_SCAN: Mamba 1's; GATED_DELTA_RULE: gated delta net; KDA: Kimi Delta
    Attention, whose decay differs by key dimension; LIGHTNING: linear attention with one constant decay per head; DPLR:
    RWKV-7's, whose transition is diagonal plus low rank.
    """

    SSD = "ssd"
    SELECTIVE_SCAN = "selective_scan"
    GATED_DELTA_RULE = "gated_delta_rule"
    KDA = "kda"
    LIGHTNING = "lightning"
    DPLR = "dplr"


@dataclass(frozen=True, slots=True)
class ScanShape:
    """One kernel of a scan over `batch` sequences: states [heads, key_dim, value_dim], in chunks of `chunk` tokens."""

    routine: ScanRoutine
    batch: int
    sequence: int
    heads: int
    key_dim: int
    value_dim: int
    chunk: int
    backward: bool = False


class SparseRoutine(IdentityEnum):
    """What a kernel of sparse attention does; the value is its name in files.

    LIGHTNING_INDEXER: scores of all keys, sums over heads of weighted rectified products; backward: their gradients at
    the selected keys; INDEX_TOP_K: selection of the keys with the highest scores; INDEXER_LOSS: how much all heads
    attend to each selected key, summed, which the indexer learns; SPARSE_MLA: attention of all heads to one key and
    value per selected token. NSA_COMPRESSED, NSA_SELECTED: attention to compressed keys, and to the keys of selected
    blocks; NSA_SCORES: scores of compressed keys for the selection.
    """

    LIGHTNING_INDEXER = "lightning_indexer"
    INDEX_TOP_K = "index_top_k"
    INDEXER_LOSS = "indexer_loss"
    SPARSE_MLA = "sparse_mla"
    NSA_COMPRESSED = "nsa_compressed"
    NSA_SCORES = "nsa_scores"
    NSA_SELECTED = "nsa_selected"


@dataclass(frozen=True, slots=True)
class SparseAttentionShape:
    """One kernel of sparse attention of `batch` sequences: queries [sequence, heads, key_dim], values of value_dim.

    selected: keys of each query that it works on; 0: all.
    """

    routine: SparseRoutine
    batch: int
    sequence: int
    heads: int
    key_dim: int
    value_dim: int
    selected: int
    backward: bool = False


KernelShape = MatmulShape | AttentionShape | MemoryBoundShape | ScanShape | SparseAttentionShape


@dataclass(frozen=True, slots=True)
class Kernel:
    """One kernel on one rank.

    flops: FLOP executed (a causal attention kernel skips the masked half, and counts only what it does);
    bytes: read and written in device memory if every operand passes once; shape: what it computes, None if
    unknown; launches: number of device kernels in an unfused implementation (1 when fused); host_calls:
    tensor operations that a host loop issues one by one instead; is_over_weights: its rows are those of a weight
    or its gradient, whatever the number of tokens; host_sync: the host waits for its result before it launches more.
    """

    name: str
    kind: KernelKind
    dtype: DType
    flops: Flop
    bytes: Bytes
    shape: KernelShape | None = None
    launches: int = 1
    host_calls: int = 0
    is_over_weights: bool = False
    host_sync: bool = False

    def scale_rows(self, ratio: float) -> "Kernel":
        """The kernel with its rows scaled by `ratio`, at least one row; weight matrices stay as they are.

        The rows of a matmul are those of its result; of a weight gradient (TN) those that it sums over.
        """
        if self.is_over_weights:
            return self
        match self.shape:
            case MatmulShape() as matmul:
                row_count = matmul.k if matmul.operands is MatmulLayout.TN else matmul.m
                new_rows = max(1, round(row_count * ratio))
                new_shape = (
                    replace(matmul, k=new_rows) if matmul.operands is MatmulLayout.TN else replace(matmul, m=new_rows)
                )
                weight_bytes = self.dtype.bytes * matmul.n * matmul.k * matmul.batch
                if matmul.operands is MatmulLayout.TN:
                    weight_bytes = self.bytes - self.dtype.bytes * matmul.k * (matmul.m + matmul.n) * matmul.batch
                new_bytes = weight_bytes + (self.bytes - weight_bytes) * new_rows / row_count
                return replace(self, flops=self.flops * new_rows / row_count, bytes=new_bytes, shape=new_shape)
            case MemoryBoundShape() as memory_bound:
                new_rows = max(1, round(memory_bound.rows * ratio))
                is_quantize = memory_bound.routine is MemoryBoundOp.QUANTIZE
                table = memory_bound.table if is_quantize else round(memory_bound.table * new_rows / memory_bound.rows)
                actual_ratio, shape = new_rows / memory_bound.rows, replace(memory_bound, rows=new_rows, table=table)
                return replace(self, flops=self.flops * actual_ratio, bytes=self.bytes * actual_ratio, shape=shape)
        return replace(self, flops=self.flops * ratio, bytes=self.bytes * ratio)

    def split_into(self, split_count: int) -> "Kernel":
        """One of `split_count` kernels that do the same work: a matmul split by rows, attention by keys.

        The operand that is not split (B of a matmul, queries and output of attention) passes with every kernel.
        """
        match self.shape:
            case MatmulShape(m, n, k) as matmul:
                rows = -(-m // split_count)
                bytes_ratio = (rows * k + rows * n + k * n) / (m * k + m * n + k * n)
                shape: KernelShape = replace(matmul, m=rows)
                return replace(self, flops=self.flops / split_count, bytes=self.bytes * bytes_ratio, shape=shape)
            case AttentionShape() as attention:
                queries, keys = attention.query * attention.heads, attention.key * attention.kv_heads
                bytes_ratio = (queries + keys / split_count) / (queries + keys)
                shape = replace(attention, key=-(-attention.key // split_count))
                return replace(self, flops=self.flops / split_count, bytes=self.bytes * bytes_ratio, shape=shape)
            case MemoryBoundShape() as memory_bound:
                shape = replace(memory_bound, rows=-(-memory_bound.rows // split_count))
                return replace(self, flops=self.flops / split_count, bytes=self.bytes / split_count, shape=shape)
        return replace(self, flops=self.flops / split_count, bytes=self.bytes / split_count)


def format_kernel_shape(shape: KernelShape | None) -> str:
    """Shape of a kernel as text; empty if unknown."""
    match shape:
        case MatmulShape(m, n, k, batch, operands, accumulated):
            batch_note = f", batch {batch}" if batch > 1 else ""
            return f"{operands.value} m {m}, n {n}, k {k}{batch_note}{', accumulated' if accumulated else ''}"
        case AttentionShape():
            return (
                f"batch {shape.batch}, queries {shape.query}, keys {shape.key}, heads {shape.heads}, "
                f"kv heads {shape.kv_heads}, head dim {shape.head_dim}{', causal' if shape.causal else ''}"
                f"{'' if shape.window is None else f', window {shape.window}'}"
            )
        case MemoryBoundShape(operation, row_count, width, backward, fused):
            target_formats = (
                " and ".join(dtype.value for dtype in shape.formats) if operation is MemoryBoundOp.QUANTIZE else ""
            )
            options = (
                f"{', backward' * backward}{'' if fused else ', unfused'}"
                f"{f', into {target_formats}' if target_formats else ''}"
            )
            return f"{operation.value} {f'{row_count} x ' if row_count > 1 else ''}{width}{options}"
        case ScanShape(routine, batch, sequence, heads, key_dim, value_dim, chunk, backward):
            return (
                f"{routine.value} batch {batch}, sequence {sequence}, heads {heads}, state {key_dim} x {value_dim}, "
                f"chunks of {chunk}{', backward' * backward}"
            )
        case SparseAttentionShape(routine, batch, sequence, heads, key_dim, value_dim, selected, backward):
            return (
                f"{routine.value} batch {batch}, sequence {sequence}, heads {heads}, head dim {key_dim} and {value_dim}"
                f"{f', {selected} keys each' if selected else ''}{', backward' * backward}"
            )
    return ""
