"""Which matrices are orthogonalized at once, and in which rounds are they exchanged?"""

from collections import Counter
from collections.abc import Iterator, Sequence

from clustersim.model.optimizers import Muon, Soap
from clustersim.parallel.matrix_owners import MatrixCounts, SharedMatrix, count_matrices


def exchange_rounds(
    matrices: Sequence[SharedMatrix], optimizer: Muon | Soap, ranks: int
) -> Iterator[tuple[SharedMatrix, float]]:
    """The matrix or batch that each rank orthogonalizes in each round, and the elements that it exchanges for it."""
    counts = _batch_sizes(matrices, optimizer)
    for shared, total in sorted(count_matrices(matrices).items()):
        size = min(counts[shared], -(-total // ranks))
        full_rounds, remainder = divmod(total, size * ranks)
        last_size = -(-remainder // ranks)
        for count, exchanged in [(size, size * ranks)] * full_rounds + [(last_size, remainder)] * bool(remainder):
            yield shared.with_count(count), shared.matrix.elements * exchanged / ranks


def _batch_sizes(matrices: Sequence[SharedMatrix], optimizer: Muon | Soap) -> dict[SharedMatrix, int]:
    """How many equal matrices are orthogonalized at once: those of a layer, or one."""
    sizes: dict[SharedMatrix, int] = {}
    for shared in matrices:
        sizes[shared.single] = max(
            sizes.get(shared.single, 1),
            shared.matrix.count if (isinstance(optimizer, Muon) and optimizer.batched) else 1,
        )
    return sizes


def in_batches(matrices: Sequence[SharedMatrix], counts: MatrixCounts, optimizer: Muon | Soap) -> Counter[SharedMatrix]:
    """Matrices of one rank in the batches in which they are orthogonalized. matrices: of all ranks; counts: its own."""
    batches: Counter[SharedMatrix] = Counter()
    for shared, size in _batch_sizes(matrices, optimizer).items():
        full, remainder = divmod(counts.get(shared, 0), size)
        batches[shared.with_count(size)] += full
        batches[shared.with_count(max(remainder, 1))] += bool(remainder)
    return +batches
