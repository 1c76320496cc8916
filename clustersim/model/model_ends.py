"""What is before a model's first layer and behind its last one, if it is no table of tokens and no logits of them?

An image or a video (or its latent values) is cut into patches, each of which a matrix maps to one token (Dosovitskiy
et al. 2020, arXiv:2010.11929, section 3.1; a convolution whose stride is its kernel is the same matrix). Behind the
last layer a classifier reads one token of each sample, attention pools all of them into one (Zhai et al. 2023,
arXiv:2303.15343), or nothing follows.
"""

from dataclasses import dataclass, replace
from math import prod
from typing import Final

from clustersim.model.conditioning import Modulation


@dataclass(frozen=True, slots=True)
class PatchEmbedding:
    """Samples cut into patches.

    input_size, patch_size: along each dimension, such as (height, width) or (frames, height, width); channels: values
    at each point; bias: the matrix has one; class_tokens: learned tokens in front of the patches; position_rows: of a
    table of positions that is interpolated and added, where positions are rotary besides (Qwen3-VL).
    """

    input_size: tuple[int, ...]
    patch_size: tuple[int, ...]
    channels: int
    bias: bool = True
    class_tokens: int = 0
    position_rows: int = 0

    @property
    def patches(self) -> int:
        """Number of patches of a sample.

        >>> PatchEmbedding((224, 224), (16, 16), 3, class_tokens=1).patches
        196
        """
        return prod(size // patch for size, patch in zip(self.input_size, self.patch_size, strict=True))

    @property
    def tokens(self) -> int:
        """Number of tokens of a sample."""
        return self.patches + self.class_tokens

    @property
    def patch_elements(self) -> int:
        """Values of a patch."""
        return self.channels * prod(self.patch_size)

    def parameter_count(self, hidden: int) -> int:
        """Parameters of the matrix, of the learned tokens and of the table."""
        return hidden * (self.patch_elements + self.bias + self.class_tokens + self.position_rows)

    def resized(self, size: tuple[int, ...]) -> "PatchEmbedding":
        """Patches of samples of another size; of an image as few frames as a patch has."""
        frames = self.patch_size[: len(self.patch_size) - len(size)]
        return replace(self, input_size=(*frames, *size))


@dataclass(frozen=True, slots=True)
class HeadMultiplications:
    """Multiplications of a sample's activations and weights (or each other) in a head.

    of_input: those whose result needs the gradient of the last layer's output; others: all other ones.
    """

    of_input: int = 0
    others: int = 0


class ModelHead:
    """What follows a model's last layer, behind its final norm; subclasses are frozen dataclasses.

    norm_copies: widths of the residual stream that the final norm learns a vector for (1 but for merged tokens).
    """

    __slots__ = ()

    @property
    def norm_copies(self) -> int:
        """Number of hidden widths that the final norm has weights for, all its copies together."""
        return 1

    def parameter_count(self, hidden: int) -> int:  # noqa: ARG002 - of the protocol
        """Parameters behind the final norm."""
        return 0

    def multiplications(self, hidden: int, tokens: int) -> HeadMultiplications:  # noqa: ARG002 - of the protocol
        """Multiplications of a sample with `tokens` tokens."""
        return HeadMultiplications()


@dataclass(frozen=True, slots=True)
class VocabularyHead(ModelHead):
    """Logits of every token over the vocabulary, and their loss: their sizes are counted with the vocabulary."""


@dataclass(frozen=True, slots=True)
class NoHead(ModelHead):
    """Nothing but the final norm."""


@dataclass(frozen=True, slots=True)
class Classifier(ModelHead):
    """Logits of one token of each sample over some classes, and their loss."""

    classes: int

    def parameter_count(self, hidden: int) -> int:
        """Matrix and bias."""
        return self.classes * (hidden + 1)

    def multiplications(self, hidden: int, tokens: int) -> HeadMultiplications:  # noqa: ARG002 - of the protocol
        """Those of one token."""
        return HeadMultiplications(self.classes * hidden)


@dataclass(frozen=True, slots=True)
class AttentionPool(ModelHead):
    """A learned query attends to all tokens of a sample; a norm, an MLP of width `ffn` and a residual add follow.

    SigLIP's `SiglipMultiheadAttentionPoolingHead` (transformers, models/siglip/modeling_siglip.py).
    """

    heads: int
    ffn: int

    def parameter_count(self, hidden: int) -> int:
        """The query; matrices and biases of attention and MLP; the norm."""
        attention, mlp = 4 * (hidden * hidden + hidden), 2 * hidden * self.ffn + self.ffn + hidden
        return hidden + attention + 2 * hidden + mlp

    def multiplications(self, hidden: int, tokens: int) -> HeadMultiplications:
        """Keys and values of every token; all other matrices and the scores of one query."""
        single = 2 * hidden * hidden + 2 * hidden * self.ffn + 2 * tokens * hidden
        return HeadMultiplications(2 * hidden * hidden * tokens, single)


@dataclass(frozen=True, slots=True)
class PatchHead(ModelHead):
    """A matrix that maps every token to the values of its patch, and their squared error.

    outputs: values of a patch; modulation: scale and shift of the final norm; drops: tokens of a sample that are of no
    patch (of a text in the sequence).
    """

    outputs: int
    modulation: Modulation
    drops: int = 0

    def parameter_count(self, hidden: int) -> int:
        """Matrix, bias and modulation."""
        return self.outputs * (hidden + 1) + self.modulation.parameter_count(hidden)

    def multiplications(self, hidden: int, tokens: int) -> HeadMultiplications:
        """Those of every patch, and of the modulation."""
        return HeadMultiplications(
            (tokens - self.drops) * self.outputs * hidden, self.modulation.multiplications(hidden)
        )


@dataclass(frozen=True, slots=True)
class Projector(ModelHead):
    """Matrices that map an encoder's tokens to those of a language model, with GELU between them.

    widths: of their outputs, the last is that of the language model; merge: neighbouring tokens that become one, as
    wide as all of them (pixel unshuffle); drops: tokens of a sample that do not go on (class tokens); norms_merged: the
    final norm is over merged tokens; copies: further projectors with norms over merged tokens, of layers before the
    last, whose results are added in the language model's first layers (Qwen3-VL's deepstack).
    """

    widths: tuple[int, ...]
    merge: int = 1
    drops: int = 0
    norms_merged: bool = False
    copies: int = 0

    @property
    def norm_copies(self) -> int:
        """The final norm's width, and those of the copies' norms."""
        return (self.merge if self.norms_merged else 1) + self.copies * self.merge

    def projected_tokens(self, tokens: int) -> int:
        """Tokens that the language model gets of a sample with `tokens` tokens.

        >>> Projector((4096, 4096), drops=1).projected_tokens(577)
        576
        """
        return (tokens - self.drops) // self.merge

    def sizes(self, hidden: int) -> tuple[tuple[int, int], ...]:
        """(inputs, outputs) of each matrix."""
        return tuple(zip((hidden * self.merge, *self.widths[:-1]), self.widths, strict=True))

    def parameter_count(self, hidden: int) -> int:
        """Matrices and biases."""
        return (1 + self.copies) * sum((inputs + 1) * outputs for inputs, outputs in self.sizes(hidden))

    def multiplications(self, hidden: int, tokens: int) -> HeadMultiplications:
        """Those of every projected token."""
        count = (1 + self.copies) * self.projected_tokens(tokens)
        first, *others = (count * inputs * outputs for inputs, outputs in self.sizes(hidden))
        return HeadMultiplications(first, sum(others))


VOCABULARY_HEAD: Final = VocabularyHead()
