"""Which optimizer updates the weights, and what does it keep for each of them?

`Optimizer` are elementwise: each parameter is updated by itself, so a shard is updated like the whole. Adam keeps
two moments, SGD (momentum) and Lion (Chen et al. 2023, arXiv:2302.06675) one; Adafactor (Shazeer and Stern 2018,
arXiv:1804.04235), without a first moment, sums of rows and columns, which are not counted; 8-bit Adam (Dettmers et
al. 2021, arXiv:2110.02861; bitsandbytes) both moments in a byte each, with an FP32 scale for each block of 256.

Muon (Jordan et al. 2024; Liu et al. 2025, arXiv:2502.16982) is not: it replaces the momentum of a whole matrix by its
nearest orthogonal one (`model.newton_schulz`), and keeps the momentum alone. Embedding, output matrix, norms and
biases are updated by an elementwise optimizer; norms and biases inside layers, a few thousandths of their weights, are
counted with the matrices. Dion (Ahn et al. 2025, arXiv:2504.05295) replaces it by an orthonormal matrix of low rank r,
from one step of a power iteration that it keeps, too (`model.power_iteration`). SOAP (Vyas et al. 2024,
arXiv:2409.11321) is Adam in the eigenbases of Shampoo's factors (`model.soap`).
"""

from dataclasses import dataclass
from enum import Enum
from math import ceil
from typing import Final

from clustersim.common.dtypes import DType
from clustersim.common.units import Bytes

_SCALE_BLOCK: Final = 256  # parameters that share a scale (bitsandbytes, `optimizer_update_8bit_blockwise`)


class Optimizer(Enum):
    """An elementwise optimizer."""

    ADAM = "adam"
    SGD = "sgd"
    LION = "lion"
    ADAFACTOR = "adafactor"
    ADAM_8BIT = "adam8bit"

    def moment_bytes(self, moments: DType) -> Bytes:
        """Bytes of what it keeps for each parameter. moments: their format, unless they are quantized."""
        match self:
            case Optimizer.ADAM:
                return 2 * moments.bytes
            case Optimizer.ADAM_8BIT:
                return 2 * (1.0 + DType.FP32.bytes / _SCALE_BLOCK)
            case Optimizer.ADAFACTOR:
                return 0.0
        return moments.bytes


class MuonDistribution(Enum):
    """Which of the ranks that shard the weights orthogonalizes which matrices.

    REPLICATED: every rank has whole matrices, and does all of them; LAYER_WISE: weights are sharded by whole matrices
    (Megatron-LM's `LayerWiseDistributedOptimizer`); GATHER: the momentum of each matrix is gathered by every rank that
    holds a piece of it (Liu et al. 2025, section 2.3; DTensor's full_tensor); ALL_TO_ALL: as many matrices as there
    are ranks are exchanged at a time, so that each rank has a whole one, and back (microsoft/dion, muon.py).
    """

    REPLICATED = "replicated"
    LAYER_WISE = "layer_wise"
    GATHER = "gather"
    ALL_TO_ALL = "all_to_all"


class MuonTensorParallel(Enum):
    """What tensor-parallel ranks do with a matrix that they share (Megatron-LM's `--muon-tp-mode`).

    BLOCKWISE: each orthogonalizes its shard; DUPLICATED: all gather the matrix, and each does the whole; DISTRIBUTED:
    they sum the products of the shards with themselves.
    """

    BLOCKWISE = "blockwise"
    DUPLICATED = "duplicated"
    DISTRIBUTED = "distributed"


@dataclass(frozen=True, slots=True)
class MatrixOptimizer:
    """An optimizer of whole matrices.

    overlap: communication of matrices overlaps the computation of others; scalar: optimizer of the other weights;
    dense, experts: whether it is for the matrices of layers but their experts, and for those of experts.
    """

    overlap: bool = True
    scalar: Optimizer = Optimizer.ADAM
    dense: bool = True
    experts: bool = True

    def moment_bytes(self, moments: DType) -> Bytes:
        """Bytes of the momentum of each parameter."""
        return moments.bytes

    @property
    def name(self) -> str:
        """What scenarios call it."""
        return type(self).__name__.lower()


@dataclass(frozen=True, slots=True)
class Muon(MatrixOptimizer):
    """Muon for the matrices of layers.

    steps: of the Newton-Schulz iteration; distribution: None: the data-parallel strategy's; tensor_parallel: of
    matrices that tensor-parallel ranks share; symmetric: kernels compute one triangle of symmetric products
    (`--muon-use-syrk`); batched: equal matrices of a layer (experts) run in one batch.
    """

    steps: int = 5
    distribution: MuonDistribution | None = None
    tensor_parallel: MuonTensorParallel = MuonTensorParallel.DUPLICATED
    symmetric: bool = False
    batched: bool = False

    def distribution_for(self, zero_stage: int) -> MuonDistribution:
        """Who orthogonalizes what where a strategy of this ZeRO stage shards the weights."""
        return self.distribution or DISTRIBUTIONS_BY_ZERO_STAGE[zero_stage][0]


@dataclass(frozen=True, slots=True)
class Dion(MatrixOptimizer):
    """Dion for the matrices of layers. rank_fraction: of updates, relative to the smaller dimension of a matrix."""

    rank_fraction: float = 0.25

    def moment_bytes(self, moments: DType) -> Bytes:
        """Bytes of the momentum and of the iteration's [n, r] for [m, n]: exact if square, else an upper bound."""
        return MatrixOptimizer.moment_bytes(self, moments) * (1.0 + self.rank_fraction)

    def rank(self, rows: int, columns: int) -> int:
        """Rank of the update of a matrix."""
        return min(ceil(self.rank_fraction * min(rows, columns)), rows, columns)


@dataclass(frozen=True, slots=True)
class Soap(MatrixOptimizer):
    """SOAP for the matrices of layers. precondition_frequency: steps from one renewal of eigenbases to the next."""

    precondition_frequency: int = 1

    def moment_bytes(self, moments: DType) -> Bytes:
        """Bytes of both moments of each parameter; factors and eigenbases come on top (`model.soap`)."""
        return 2 * moments.bytes

    def distribution_for(self, zero_stage: int) -> MuonDistribution:
        """Who updates what: each rank all, or whole matrices where weights are sharded."""
        return MuonDistribution.LAYER_WISE if zero_stage else MuonDistribution.REPLICATED


AnyOptimizer = Optimizer | Muon | Dion | Soap
DISTRIBUTIONS_BY_ZERO_STAGE: Final = {
    0: (MuonDistribution.REPLICATED,),
    1: (MuonDistribution.LAYER_WISE, MuonDistribution.GATHER),
    2: (MuonDistribution.LAYER_WISE, MuonDistribution.GATHER),
    3: (MuonDistribution.ALL_TO_ALL, MuonDistribution.GATHER),
}
"""Distributions that fit how a strategy of each ZeRO stage shards weights, the usual one first."""
