"""What is one operator of a layer on one rank, and which shard of the layer does the rank hold?

An operator has forward and backward kernels, parameters, and activations that it saves for backward.
Backward is split as in pipeline schedules: the input gradient (B) and the weight gradient (W). Reference:
Narayanan et al. 2021 (arXiv:2104.04473) section 2.3 for tensor parallelism, Korthikanti et al. 2022
(arXiv:2205.05198) section 4.2 for sequence parallelism.
"""

from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass, replace
from enum import Enum
from itertools import chain, repeat

from clustersim.common.dtypes import DType
from clustersim.common.enums import IdentityEnum
from clustersim.common.units import Bytes
from clustersim.model.documents import PackedBatch
from clustersim.model.image_counts import PackedImages
from clustersim.model.kernels import Kernel, MatmulShape, PackedKeys
from clustersim.model.linear import LinearLayer
from clustersim.model.recompute_modules import ModuleMembership, RecomputeModule
from clustersim.model.weight_matrices import WeightMatrix

DENSE = "dense"
"""Parameter group of weights that every token passes."""
EXPERTS = "experts"
"""Parameter group of expert weights, which only the tokens routed to them pass."""
LOW_PRECISION_LAYERS = "low_precision"
"""Parameter group of layers whose matrices are stored or gathered in the matmul format, with norms."""
QUANTIZED = "quantized"
"""Parameter group of frozen matrices that are stored in fewer bits than they are computed with."""
MATRICES = "matrices"
"""Parameter group of layers whose matrices an optimizer orthogonalizes, with norms."""
FROZEN = "frozen"
"""Parameter group of weights that are not trained, of a model with other parts that are."""
ENCODER = "encoder"
"""Parameter group of an encoder with degrees of its own."""
FROZEN_ENCODER = "frozen encoder"
"""Parameter group of such an encoder's weights that are not trained."""
ADAPTERS = "adapters"
"""Parameter group of trained LoRA adapters of frozen matrices."""
INDEXER = "indexer"
"""Parameter group of indexers of sparse attention that are trained alone."""


class ParallelRegion(Enum):
    """How an operator is parallelized within a layer.

    SHARDED: split over tp by heads, columns or vocabulary; REPLICATED: not split, or by sequence; EXPERT:
    runs on the ranks of the experts that tokens were dispatched to.
    """

    SHARDED = "sharded"
    EXPERT = "routed"
    REPLICATED = "replicated"


class RegionInput(Enum):
    """Which input of its sharded region an operator reads, if it is not the region's first operator.

    SAME: the one that the first operator reads; OTHER: another activation, which enters the region for it.
    """

    SAME = "same"
    OTHER = "other"


@dataclass(frozen=True, slots=True)
class LayerShard:
    """What one rank holds of a microbatch and of a layer.

    batch: sequences in the microbatch; sequence: tokens of each on this rank (global sequence / cp); keys:
    tokens that queries of this rank attend to (global sequence); sequence_parallel: norms, residuals and
    dropout run on sequence / tp tokens; ep, etp: expert-parallel and expert-tensor-parallel size;
    permute_after_dispatch: a token is sent once to each rank that holds its experts and is copied per expert
    there, not before; receives_indices: with indices of its experts; load_factor: tokens that this rank's experts
    receive over their mean.
    exchanging_ranks: context-parallel ranks that exchange tokens for heads around attention; gathers_keys: they gather
    all keys and values; ring_blocks: kernels of attention, one for each block of keys of a ring (1: one for all);
    repeats_kv: keys and values are copied for each query head first;
    consecutive: this rank has the last tokens of a sequence, not chunks from both its ends;
    packed_batch: the step's packed documents, or a microbatch's images, None: sequences are single ones.
    """

    batch: int
    sequence: int
    keys: int
    tp: int = 1
    sequence_parallel: bool = False
    ep: int = 1
    etp: int = 1
    permute_after_dispatch: bool = False
    receives_indices: bool = False
    load_factor: float = 1.0
    exchanging_ranks: int = 1
    gathers_keys: bool = False
    ring_blocks: int = 1
    repeats_kv: bool = False
    consecutive: bool = False
    packed_batch: PackedBatch | PackedImages | None = None

    def packed_keys(self, window: int | None) -> PackedKeys | None:
        """Keys that queries attend to where documents are packed; None: they are not."""
        return None if self.packed_batch is None else self.packed_batch.keys(window)

    def core_heads(self, heads: int) -> int:
        """Heads of attention's core on this rank, of `heads` before ranks exchange tokens for heads; at least one."""
        return max(1, heads // self.exchanging_ranks)

    @property
    def core_queries(self) -> int:
        """Queries of each sequence in attention's core on this rank."""
        return self.sequence * self.exchanging_ranks

    @property
    def tokens(self) -> int:
        """Tokens of SHARDED operators."""
        return self.batch * self.sequence

    def vocab_rows(self, vocab_size: int) -> int:
        """Rows of a vocabulary-sized table on one rank, rounded up where tp does not divide them."""
        return -(-vocab_size // self.tp)

    @property
    def residual_tokens(self) -> int:
        """Tokens of REPLICATED operators."""
        return self.tokens // self.tp if self.sequence_parallel else self.tokens


class TpCombine(Enum):
    """How the ranks of a group combine their shards of a tensor.

    GATHER of columns; SUM of terms; SUM_SCATTER: the sum, of which each rank keeps its part; EXCHANGE: each rank's part
    of the sequence for its part of the heads, or back.
    """

    GATHER = "gathered"
    SUM = "summed"
    SUM_SCATTER = "summed and scattered"
    EXCHANGE = "exchanged"


class ShardAxis(IdentityEnum):
    """The ranks that a collective within a sharded region is over: tensor-parallel or context-parallel ones."""

    TENSOR = "tensor"
    CONTEXT = "context"


@dataclass(frozen=True, slots=True)
class TpCollective:
    """A collective over tensor- or context-parallel ranks on a tensor within a sharded region.

    full_bytes: of the combined tensor, or of what one rank exchanges; tensor_name: for labels.
    """

    combine: TpCombine
    full_bytes: Bytes
    tensor_name: str = "adapter"
    axis: ShardAxis = ShardAxis.TENSOR


@dataclass(frozen=True, slots=True)
class TpCollectives:
    """Collectives of an operator in a sharded region, by when they run in forward and backward."""

    after_forward: tuple[TpCollective, ...] = ()
    before_backward: tuple[TpCollective, ...] = ()
    after_input_gradient: tuple[TpCollective, ...] = ()


@dataclass(frozen=True, slots=True)
class Operator:
    """One operator of a layer on one rank.

    parameter_count: parameters on this rank, of the parameter group `parameter_group`; reused_parameters: those of an
    earlier layer that it uses again; saved_bytes: activations saved from forward to backward if nothing is
    recomputed; deferred_wgrad_bytes: held from the input gradient to the weight gradient where the two run separately
    (its input and its output gradient); memberships: recomputable modules that it belongs to; reads_module: the
    module whose output is its `wgrad_input_bytes`; recompute_override: kernels that selective recomputation by
    operations runs again (None: all of forward), saving `saved_output_bytes` of the other outputs; region_input:
    which input of its region it reads if it is not the first operator (None: an output of the region); linear: its
    linear layer; wgrad_input_bytes: bytes of `saved_bytes` that only its weight gradient reads;
    backward_output_bytes: bytes of its output that its own backward reads, too, where the following operator saves
    them; trainable: its parameters have gradients; saves_full_input: it saves its input unsharded under sequence
    parallelism; tp_collectives: its collectives within a sharded region; dequantized_bytes: weights that exist in the
    matmul format while it runs; saves_outputs: backward needs something that exists only after forward has run (a mask,
    statistics, its output); region_input_bytes: full bytes of the activation that enters its region for it, None: as
    wide as the residual stream; cached_cast_elements: weight elements whose quantized copies are made once per step and
    cached; matrices: its weights as matrices; temporary_bytes: what exists only while its backward runs;
    gradient_bytes: gradients of rows of experts that its backward holds at once; overwritten_bytes: bytes of
    `saved_bytes` in whose place it writes its gradients; forward_only: no gradient passes it, so that its collectives
    have none either.
    """

    name: str
    region: ParallelRegion
    forward: tuple[Kernel, ...]
    input_gradient: tuple[Kernel, ...] = ()
    weight_gradient: tuple[Kernel, ...] = ()
    parameter_count: int = 0
    reused_parameters: int = 0
    parameter_group: str = DENSE
    saved_bytes: Bytes = 0.0
    deferred_wgrad_bytes: Bytes = 0.0
    memberships: tuple[ModuleMembership, ...] = ()
    reads_module: RecomputeModule | None = None
    recompute_override: tuple[Kernel, ...] | None = None
    saved_output_bytes: Bytes = 0.0
    temporary_bytes: Bytes = 0.0
    gradient_bytes: Bytes = 0.0
    overwritten_bytes: Bytes = 0.0
    region_input: RegionInput | None = None
    linear: LinearLayer | None = None
    wgrad_input_bytes: Bytes = 0.0
    backward_output_bytes: Bytes = 0.0
    trainable: bool = True
    saves_full_input: bool = False
    tp_collectives: TpCollectives = TpCollectives()
    dequantized_bytes: Bytes = 0.0
    saves_outputs: bool = False
    region_input_bytes: Bytes | None = None
    cached_cast_elements: int = 0
    matrices: tuple[WeightMatrix, ...] = ()
    forward_only: bool = False

    def is_in_modules(self, modules: Set[RecomputeModule]) -> bool:
        """Whether it belongs to one of the modules."""
        return any(membership.module in modules for membership in self.memberships)

    def saved_bytes_with_recompute(self, recomputed: Set[RecomputeModule]) -> Bytes:
        """Bytes saved from forward to backward where some modules are recomputed."""
        input_discarded = self.reads_module in recomputed
        if self.is_in_modules(recomputed):
            return (
                0.0
                if input_discarded
                else min(membership.input_bytes for membership in self.memberships if membership.module in recomputed)
            )
        return self.saved_bytes - self.wgrad_input_bytes if input_discarded else self.saved_bytes

    @property
    def gradient_count(self) -> int:
        """Number of parameters that have gradients."""
        return self.parameter_count if self.trainable else 0

    @property
    def recompute_kernels(self) -> tuple[Kernel, ...]:
        """Kernels that selective recomputation by operations runs again."""
        return self.forward if self.recompute_override is None else self.recompute_override

    @property
    def weight_products(self) -> tuple[Kernel, ...]:
        """Forward's products of activations with weights, which are not batched."""
        return tuple(kernel for kernel in self.forward if _product_shape(kernel) is not None)

    @property
    def kernels_but_weight_products(self) -> tuple[Kernel, ...]:
        """Kernels that run again where results of products with weights are saved."""
        products = self.weight_products
        return tuple(kernel for kernel in self.forward if kernel not in products)

    @property
    def saves_for_backward(self) -> bool:
        """Whether autograd saves anything for its backward: inputs, outputs, or weights."""
        return bool(self.input_gradient or self.weight_gradient)


def join_operators(operators: Sequence[Operator], like: Operator) -> Operator:
    """Linear operators of one input or one after the other as a single one, in all else as one of them (`like`)."""
    return replace(
        like,
        linear=None,
        forward=tuple(kernel for operator in operators for kernel in operator.forward),
        input_gradient=tuple(kernel for operator in operators for kernel in operator.input_gradient),
        weight_gradient=tuple(kernel for operator in operators for kernel in operator.weight_gradient),
        parameter_count=sum(operator.parameter_count for operator in operators),
        saved_bytes=sum(operator.saved_bytes for operator in operators),
        deferred_wgrad_bytes=sum(operator.deferred_wgrad_bytes for operator in operators),
        wgrad_input_bytes=sum(operator.wgrad_input_bytes for operator in operators),
        cached_cast_elements=sum(operator.cached_cast_elements for operator in operators),
        matrices=tuple(matrix for operator in operators for matrix in operator.matrices),
    )


def assign_module(operators: Iterable[Operator], module: RecomputeModule, input_bytes: Bytes = 0.0) -> list[Operator]:
    """Assign operators to a module. input_bytes: bytes of the module's inputs that the first of them saves."""
    sizes = chain((input_bytes,), repeat(0.0))
    return [
        replace(operator, memberships=(*operator.memberships, ModuleMembership(module, size)))
        for operator, size in zip(operators, sizes, strict=False)
    ]


def mark_module_reader(operators: Sequence[Operator], module: RecomputeModule) -> list[Operator]:
    """Operators of which the first reads the output of a module."""
    return [replace(operator, reads_module=module) for operator in operators[:1]] + list(operators[1:])


def early_stop_count(operators: Sequence[Operator]) -> int:
    """Number of operators that recomputation runs until everything that backward needs is saved (early stop).

    torch.utils.checkpoint without `use_reentrant` runs a forward again under hooks that count saved tensors,
    and stops at the last (`_recomputation_hook` raises `_StopRecomputationError`). Autograd saves inputs
    before an operator runs and outputs after it, so a last linear layer is not run again, nor a residual add
    after it, which saves nothing.
    """
    last_saving = max((index for index, operator in enumerate(operators) if operator.saves_for_backward), default=-1)
    return last_saving + 1 if last_saving < 0 or operators[last_saving].saves_outputs else last_saving


@dataclass(frozen=True, slots=True)
class LayerOperators:
    """Operators of a layer in forward order.

    input_bytes: layer input on this rank, which is all that full recomputation saves; has_backward: backward runs
    through it; forward_bytes: what exists while such a layer runs forward.
    """

    operators: tuple[Operator, ...]
    input_bytes: Bytes
    has_backward: bool = True
    forward_bytes: Bytes = 0.0

    @property
    def parameter_count(self) -> int:
        """Parameters on this rank."""
        return sum(operator.parameter_count for operator in self.operators)

    @property
    def parameters_by_group(self) -> dict[str, int]:
        """Parameters on this rank by parameter group."""
        counts: dict[str, int] = {}
        for operator in self.operators:
            counts[operator.parameter_group] = counts.get(operator.parameter_group, 0) + operator.parameter_count
        return counts

    @property
    def used_parameters_by_group(self) -> dict[str, int]:
        """The same with those of earlier layers that it uses again, which are gathered and reduced for it, too."""
        counts = self.parameters_by_group
        for operator in self.operators:
            if operator.reused_parameters:
                counts[operator.parameter_group] += operator.reused_parameters
        return counts

    @property
    def saved_bytes(self) -> Bytes:
        """Bytes saved for backward if nothing is recomputed."""
        return sum(operator.saved_bytes for operator in self.operators)

    def saved_bytes_with_recompute(self, recomputed: Set[RecomputeModule]) -> Bytes:
        """Bytes saved for backward where some modules are recomputed."""
        return sum(operator.saved_bytes_with_recompute(recomputed) for operator in self.operators)

    @property
    def saved_product_bytes(self) -> Bytes:
        """Bytes of the results of products with weights but the last one, which nothing reads in backward."""
        products = [kernel for operator in self.operators for kernel in operator.weight_products]
        return sum(_result_bytes(kernel) for kernel in products[:-1])

    @property
    def deferred_wgrad_bytes(self) -> Bytes:
        """Bytes held from the input gradients to the weight gradients where these run separately."""
        return sum(operator.deferred_wgrad_bytes for operator in self.operators)


def _product_shape(kernel: Kernel) -> MatmulShape | None:
    """The shape of a matmul that is not batched."""
    return kernel.shape if isinstance(kernel.shape, MatmulShape) and kernel.shape.batch == 1 else None


def _result_bytes(kernel: Kernel) -> Bytes:
    """Bytes of the result of a product, which has 16 bits an element or more."""
    shape = _product_shape(kernel)
    return 0.0 if shape is None else shape.m * shape.n * max(kernel.dtype.bytes, DType.BF16.bytes)


def label_layer(layer: LayerOperators, label: str) -> LayerOperators:
    """The layer with names of operators and kernels that begin with a label."""
    operators = tuple(
        replace(
            operator,
            name=f"{label}.{operator.name}",
            forward=_label_kernels(operator.forward, label),
            input_gradient=_label_kernels(operator.input_gradient, label),
            weight_gradient=_label_kernels(operator.weight_gradient, label),
            recompute_override=None
            if operator.recompute_override is None
            else _label_kernels(operator.recompute_override, label),
        )
        for operator in layer.operators
    )
    return replace(layer, operators=operators)


def _label_kernels(kernels: Iterable[Kernel], label: str) -> tuple[Kernel, ...]:
    return tuple(replace(kernel, name=f"{label}.{kernel.name}") for kernel in kernels)
