"""What does Dion compute and move: a power iteration that ranks share?

Of a matrix whose momentum M is [m, n] (n the rows of the weight, which FSDP shards) and that keeps Q [n, r]
(microsoft/dion@0a059a4, dion/dion.py, `dion_update_fsdp`): M += G; P = M Q; P is made orthonormal; R = M^T P;
M -= (1 - mu) P R^T; Q = R with normalized columns; weights are decayed and lose P Q^T. Four products of 2 m n r FLOP
in the format of the momentum. Ranks that share n each have a part of the sum P: as many equal matrices as there are
ranks are worked on at a time, and each sums one P (reduce-scatter), orthonormalizes it, and all gather them; norms of
R's columns are summed.

P becomes orthonormal by a randomized Cholesky QR in FP32 (`orthogonalize`): a sketch S P with k = 1.25 r rows, rounded
up to 128 (2 k m r), its QR without Q (2 r^2 (k - r / 3)), P R^-1 (m r^2), its Gram matrix (2 m r^2), a Cholesky
factorization (r^3 / 3) and P R^-1 again (m r^2); of a P that is not taller than wide by a plain QR (4 m^2 (r - m / 3)).
Factorizations reach a share of FP32 vector units alone (`topologies/scans`, factorization).

Elementwise, in the format of the states: the gradient is added to the momentum (3); each of the two products that are
added is written, scaled (2), its target scaled (2) and added (3); R's columns are squared and summed (1) and divided
(2).
"""

from dataclasses import dataclass
from math import ceil

from clustersim.common.dtypes import DType
from clustersim.common.units import Bytes
from clustersim.model.kernels import Kernel, KernelKind, MatmulLayout, MatmulShape, MemoryBoundOp, MemoryBoundShape
from clustersim.model.linear import matmul_kernel
from clustersim.model.optimizer_kernels import elementwise_update_kernel
from clustersim.model.optimizers import Dion
from clustersim.model.precision_recipe import WeightFormats
from clustersim.model.weight_matrices import WeightMatrix

_OVERSAMPLING = 1.25
_SKETCH_MULTIPLE = 128
_ADDED_PASSES = 2 + 2 + 3  # of what a product is added to


@dataclass(frozen=True, slots=True)
class PowerIteration:
    """The update of `count` equal matrices of which this rank has a shard each, and orthonormalizes some products.

    m, n: dimensions of a shard of the momentum, n sharded; r: rank; orthonormalized: matrices whose product this rank
    makes orthonormal; formats: of weights and momentum.
    """

    m: int
    n: int
    r: int
    count: int
    orthonormalized: int
    formats: WeightFormats

    @property
    def product_bytes(self) -> Bytes:
        """Bytes of P of all matrices."""
        return float(self.count * self.m * self.r * self.formats.moments.bytes)

    @property
    def norm_bytes(self) -> Bytes:
        """Bytes of the squared norms of the columns of R of all matrices."""
        return float(self.count * self.r * DType.FP32.bytes)

    def project(self) -> tuple[Kernel, ...]:
        """P = M Q."""
        return (self._product("project", MatmulShape(self.m, self.r, self.n, self.count)),)

    def orthonormalize(self) -> tuple[Kernel, ...]:
        """P with orthonormal columns."""
        m, r = self.m, self.r
        if m <= r:
            return (self._factorization("qr", 4.0 * m**2 * (r - m / 3)),)
        k = _SKETCH_MULTIPLE * ceil(_OVERSAMPLING * r / _SKETCH_MULTIPLE)
        sketch = self._product("sketch", MatmulShape(k, r, m, self.orthonormalized, MatmulLayout.NN))
        gram = self._fp32_product("gram", MatmulShape(r, r, m, self.orthonormalized, MatmulLayout.TN))
        solve = self._fp32_product(
            "solve", MatmulShape(m, r, -(-r // 2), self.orthonormalized, MatmulLayout.NN)
        )  # a triangle
        factors = (("qr", 2.0 * r**2 * (k - r / 3)), ("cholesky", r**3 / 3))
        qr, cholesky = (self._factorization(name, flops) for name, flops in factors)
        return sketch, qr, solve, gram, cholesky, solve

    def update(self) -> tuple[Kernel, ...]:
        """R = M^T P, and the momentum without its projection; R's columns are squared."""
        back = self._product("project_back", MatmulShape(self.n, self.r, self.m, self.count, MatmulLayout.TN))
        squares = self._elementwise("column_norm", self.n * self.r, self.formats.moments, 1)
        return back, *self._add_product("error_feedback", self.formats.moments), squares

    def apply(self) -> tuple[Kernel, ...]:
        """Q of normalized columns, and the weights, with a copy in the compute format if they have one."""
        normalize = self._elementwise("column_normalize", self.n * self.r, self.formats.moments, 2)
        kernels = normalize, *self._add_product("update", self.formats.updated)
        copy = self.formats.master_copy
        if copy is None:
            return kernels
        size = float(self.count * self.m * self.n * (self.formats.stored.bytes + copy.bytes))
        return *kernels, elementwise_update_kernel(
            "optimizer.copy", self.formats.updated, self.count * self.m * self.n, size
        )

    def _add_product(self, name: str, target: DType) -> tuple[Kernel, ...]:
        shape = MatmulShape(self.m, self.n, self.r, self.count)
        return self._product(name, shape), self._elementwise(f"{name}.add", self.m * self.n, target, _ADDED_PASSES)

    def _product(self, name: str, shape: MatmulShape) -> Kernel:
        dtype = self.formats.moments
        return matmul_kernel(f"optimizer.power_iteration.{name}", dtype, shape, result_bytes=dtype.bytes)

    def _fp32_product(self, name: str, shape: MatmulShape) -> Kernel:
        name = f"optimizer.power_iteration.{name}"
        return matmul_kernel(name, DType.FP32, shape, result_bytes=DType.FP32.bytes)

    def _factorization(self, name: str, flops: float) -> Kernel:
        shape = MemoryBoundShape(MemoryBoundOp.FACTORIZATION, self.orthonormalized * self.r, self.r, fused=True)
        size = 2.0 * shape.elements * DType.FP32.bytes
        name = f"optimizer.power_iteration.{name}"
        return Kernel(name, KernelKind.OPTIMIZER, DType.FP32, self.orthonormalized * flops, size, shape)

    def _elementwise(self, name: str, elements: int, dtype: DType, passes: int) -> Kernel:
        size = float(self.count * elements * passes * dtype.bytes)
        return elementwise_update_kernel(f"optimizer.{name}", dtype, self.count * elements, size, max(1, passes // 2))


def power_iteration(
    matrix: WeightMatrix, optimizer: Dion, formats: WeightFormats, *, ranks: int, orthonormalized: int
) -> PowerIteration:
    """The iteration of as many matrices as `matrix` counts, the rows of each sharded over `ranks` ranks.

    orthonormalized: matrices of which this rank orthonormalizes the product.
    """
    shard = -(-matrix.outputs // ranks)
    rank = optimizer.rank(matrix.inputs, matrix.outputs)
    return PowerIteration(matrix.inputs, shard, rank, matrix.count, orthonormalized, formats)


def momentum_sum_kernel(formats: WeightFormats, parameter_count: float) -> Kernel:
    """The gradient added to the momentum."""
    size = parameter_count * (2 * formats.moments.bytes + formats.gradients.bytes)
    return elementwise_update_kernel("optimizer.momentum", formats.updated, round(parameter_count), size)
