"""Which sizes of a model does the accelerator have no fast kernels for?

What `hardware.alignment` says of an accelerator, asked of every size that a rank's operands have rows of: the hidden
size, its part of the MLP, of the heads and of the vocabulary, and the head dimension of the attention core.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from clustersim.hardware.accelerator import Accelerator
from clustersim.hardware.alignment import VECTOR
from clustersim.model.training import Attention
from clustersim.scenario.nearest_values import around, multiples_around
from clustersim.scenario.resolved import Setup


@dataclass(frozen=True, slots=True)
class _Size:
    """A size of the model. key: in the file; split: ranks that share it; of: how often it is in what is shared."""

    key: str
    value: int
    split: int = 1
    of: int = 1

    @property
    def row(self) -> int:
        """Elements of a rank's rows."""
        return -(-self.value * self.of // self.split)


def badly_sized(scenario: Setup) -> Iterator[str]:
    """Sentences about sizes that take longer than others near them, with those."""
    for accelerator in scenario.cluster.kinds()[0]:
        yield from _unaligned(scenario, accelerator)
        yield from _heads(scenario, accelerator)


def _unaligned(scenario: Setup, accelerator: Accelerator) -> Iterator[str]:
    elements, rate = _vector(scenario), accelerator.alignment.unaligned
    for size in _sizes(scenario) if rate < 1.0 else ():
        if size.row % elements:
            rank = f" on each of tp {size.split}" if size.split > 1 else ""
            yield (
                f"model.{size.key} {size.value}: rows of {size.row} elements{rank} are no multiple of {VECTOR} bytes, "
                f"so that matrix products with them take about {1.0 / rate:.1f} times as long on {accelerator.name}; "
                f"{_fitting(size, elements)} fits"
            )


def _vector(scenario: Setup) -> int:
    """Elements of activations in what is loaded at once."""
    return int(VECTOR / scenario.training.recipe.activations.bytes)


def _sizes(scenario: Setup) -> Iterator[_Size]:
    model, tp = scenario.model, scenario.layout.tp
    yield _Size("hidden", model.hidden)
    for ffn in dict.fromkeys(mlp.ffn for mlp in model.mlps):
        yield _Size("ffn", ffn, tp)
    for heads, head_dim in dict.fromkeys((attention.heads, attention.head_dim) for attention in model.attentions):
        yield _Size("head_dim", head_dim, tp, heads)
    yield _Size("vocab", model.vocab, tp)


def _fitting(size: _Size, elements: int) -> str:
    """The nearest values whose rows have a multiple of so many elements, however often they are in a row."""
    return multiples_around(size.value, elements * (size.split if size.of == 1 else 1))


def _heads(scenario: Setup, accelerator: Accelerator) -> Iterator[str]:
    standard = scenario.training.attention is Attention.STANDARD
    for head_dim in dict.fromkeys(attention.head_dim for attention in scenario.model.attentions):
        yield from (_products if standard else _padded)(scenario, accelerator, head_dim)


def _products(scenario: Setup, accelerator: Accelerator, head_dim: int) -> Iterator[str]:
    elements, rate = _vector(scenario), accelerator.alignment.batched
    if rate < 1.0 and head_dim % elements:
        yield (
            f"model.head_dim {head_dim}: rows of heads are no multiple of {VECTOR} bytes, so that the products of "
            f"standard attention take about {1.0 / rate:.0f} times as long on {accelerator.name}; "
            f"{multiples_around(head_dim, elements)} fits"
        )


def _padded(scenario: Setup, accelerator: Accelerator, head_dim: int) -> Iterator[str]:
    alignment = accelerator.alignment
    computed = alignment.padded(head_dim)
    if computed > head_dim:
        copies = ", with copies of its operands" if head_dim % _vector(scenario) else ""
        yield (
            f"model.head_dim {head_dim}: flash attention on {accelerator.name} computes it as {computed}{copies}; "
            f"{around(head_dim, [*alignment.head_dims, computed])} fits"
        )
