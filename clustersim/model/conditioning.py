"""What does a diffusion transformer know besides its patches, and how do its layers use it?

A vector per sample comes from the time step (and a class, a guidance scale, a pooled text): small MLPs, whose sum each
layer maps to shifts, scales and gates of its branches (adaLN-Zero, Peebles and Xie 2022, arXiv:2212.09748, section
3.2). Where layers share that matrix, each adds a table of its own to its result (adaLN-single, PixArt-alpha,
arXiv:2310.00426, section 2.3; Wan 2.1, arXiv:2503.20314, section 4.2). A text's tokens are mapped to the model's width;
layers attend to them across (cross-attention), or they are part of the sequence (Esser et al. 2024, arXiv:2403.03206,
section 4; FLUX.1), in some layers with weights of their own.
"""

from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True, slots=True)
class Modulation:
    """Shifts, scales and gates of a layer.

    vectors: their number; shares_matrix: a table of the layer is added to what one matrix of the model gives all
    layers; else the layer has a matrix of its own.
    """

    vectors: int
    shares_matrix: bool = False

    def parameter_count(self, hidden: int) -> int:
        """The table, or the matrix and its bias."""
        return self.vectors * hidden * (1 if self.shares_matrix else hidden + 1)

    def multiplications(self, hidden: int) -> int:
        """Multiplications of a sample's vector and the matrix."""
        return 0 if self.shares_matrix else self.vectors * hidden * hidden


@dataclass(frozen=True, slots=True)
class TextInput:
    """A text's tokens, which another, frozen model has encoded.

    tokens: of each sample; width: of the encoder's; matrices: that map them to the model's width; joins: they are part
    of the sequence.
    """

    tokens: int
    width: int
    matrices: int
    joins: bool = False

    def sizes(self, hidden: int) -> tuple[tuple[int, int], ...]:
        """(inputs, outputs) of each matrix."""
        return tuple(pairwise((self.width, *self.matrices * (hidden,))))


@dataclass(frozen=True, slots=True)
class Conditioning:
    """What a diffusion transformer reads besides patches.

    vectors: widths of the inputs of two-matrix MLPs, one for each of a sample's vectors; classes: rows of a table of
    class labels; shared_vectors: shifts, scales and gates that one matrix gives all layers; text: its tokens.
    """

    vectors: tuple[int, ...] = (256,)
    classes: int = 0
    shared_vectors: int = 0
    text: TextInput | None = None

    def vector_sizes(self, hidden: int) -> tuple[tuple[int, int], ...]:
        """(inputs, outputs) of each matrix that a sample's vectors pass."""
        mlps = tuple(size for width in self.vectors for size in ((width, hidden), (hidden, hidden)))
        return (*mlps, (hidden, self.shared_vectors * hidden)) if self.shared_vectors else mlps

    def parameter_count(self, hidden: int) -> int:
        """Matrices, biases and the table."""
        text = () if self.text is None else self.text.sizes(hidden)
        matrices = sum((inputs + 1) * outputs for inputs, outputs in (*self.vector_sizes(hidden), *text))
        return matrices + self.classes * hidden

    def multiplications(self, hidden: int) -> tuple[int, int]:
        """Multiplications of a sample whose input has no gradient, and all others."""
        vectors = [inputs * outputs for inputs, outputs in self.vector_sizes(hidden)]
        first = sum(width * hidden for width in self.vectors)
        if self.text is None:
            return first, sum(vectors) - first
        text = [self.text.tokens * inputs * outputs for inputs, outputs in self.text.sizes(hidden)]
        return first + text[0], sum(vectors) - first + sum(text[1:])
