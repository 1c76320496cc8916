"""Which dimensions of a model have no fast kernels on the accelerator?

Applies the accelerator's alignment rules (`hardware.alignment`) to every dimension that is the row length of
a rank's operands: the hidden size, its shards of MLP, heads and vocabulary, and the head dimension of the
attention core.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from clustersim.hardware.accelerator import Accelerator
from clustersim.hardware.alignment import ALIGNMENT_BYTES
from clustersim.model.training import AttentionBackend
from clustersim.scenario.nearest_values import nearest_multiples, nearest_values
from clustersim.scenario.resolved import ResolvedScenario


@dataclass(frozen=True, slots=True)
class _ModelSize:
    """A dimension of the model.

    key: in the file; shard_count: ranks that share it; multiplicity: repetitions in the sharded dimension
    (heads for head_dim).
    """

    key: str
    value: int
    shard_count: int = 1
    multiplicity: int = 1

    @property
    def row_elements(self) -> int:
        """Row length on one rank, in elements."""
        return -(-self.value * self.multiplicity // self.shard_count)


def alignment_warnings(scenario: ResolvedScenario) -> Iterator[str]:
    """Warnings about dimensions with slow kernels, each with nearby fast values."""
    for accelerator in scenario.cluster.accelerator_kinds()[0]:
        yield from _unaligned_sizes(scenario, accelerator)
        yield from _head_dim_warnings(scenario, accelerator)


def _unaligned_sizes(scenario: ResolvedScenario, accelerator: Accelerator) -> Iterator[str]:
    vector_elements, unaligned_rate = _vector_elements(scenario), accelerator.alignment.unaligned_rate
    is_slow = unaligned_rate < 1.0 and not scenario.training.overheads.shape_padding
    for size in _model_sizes(scenario) if is_slow else ():
        if size.row_elements % vector_elements:
            rank = f" on each of tp {size.shard_count}" if size.shard_count > 1 else ""
            yield (
                f"model.{size.key} {size.value}: rows of {size.row_elements} elements{rank} are no multiple of "
                f"{ALIGNMENT_BYTES} bytes, "
                f"so that matmuls with them take about {1.0 / unaligned_rate:.1f} times as long on "
                f"{accelerator.name}; "
                f"{_suggest_size(size, vector_elements)} fits"
            )


def _vector_elements(scenario: ResolvedScenario) -> int:
    """Activation elements per vector load."""
    return int(ALIGNMENT_BYTES / scenario.training.recipe.activations.bytes)


def _model_sizes(scenario: ResolvedScenario) -> Iterator[_ModelSize]:
    model, tp = scenario.model, scenario.layout.tp
    yield _ModelSize("hidden", model.hidden)
    for ffn in dict.fromkeys(mlp.ffn for mlp in model.distinct_dense_mlps):
        yield _ModelSize("ffn", ffn, tp)
    for heads, head_dim in dict.fromkeys(
        (distinct_attention.heads, distinct_attention.head_dim) for distinct_attention in model.distinct_attentions
    ):
        yield _ModelSize("head_dim", head_dim, tp, heads)
    yield _ModelSize("vocab", model.vocab, tp)


def _suggest_size(size: _ModelSize, elements: int) -> str:
    """The nearest values whose rows are multiples of `elements`, whatever their multiplicity."""
    return nearest_multiples(size.value, elements * (size.shard_count if size.multiplicity == 1 else 1))


def _head_dim_warnings(scenario: ResolvedScenario, accelerator: Accelerator) -> Iterator[str]:
    is_standard = scenario.training.attention is AttentionBackend.STANDARD
    for head_dim in dict.fromkeys(
        distinct_attention.head_dim for distinct_attention in scenario.model.distinct_attentions
    ):
        yield from (_unaligned_standard_attention if is_standard else _padded_flash_attention)(
            scenario, accelerator, head_dim
        )


def _unaligned_standard_attention(scenario: ResolvedScenario, accelerator: Accelerator, head_dim: int) -> Iterator[str]:
    vector_elements, batched_rate = _vector_elements(scenario), accelerator.alignment.batched_unaligned_rate
    if batched_rate < 1.0 and head_dim % vector_elements:
        yield (
            f"model.head_dim {head_dim}: rows of heads are no multiple of {ALIGNMENT_BYTES} bytes, so that the "
            "matmuls of "
            f"standard attention take about {1.0 / batched_rate:.0f} times as long on {accelerator.name}; "
            f"{nearest_multiples(head_dim, vector_elements)} fits"
        )


def _padded_flash_attention(scenario: ResolvedScenario, accelerator: Accelerator, head_dim: int) -> Iterator[str]:
    alignment = accelerator.alignment
    padded_dim = alignment.padded_head_dim(head_dim)
    if padded_dim > head_dim:
        copies = ", with copies of its operands" if head_dim % _vector_elements(scenario) else ""
        yield (
            f"model.head_dim {head_dim}: flash attention on {accelerator.name} computes it as {padded_dim}{copies}; "
            f"{nearest_values(head_dim, [*alignment.head_dims, padded_dim])} fits"
        )
