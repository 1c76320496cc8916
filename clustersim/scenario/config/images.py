"""What may a scenario file say about the images of a sequence?

images: 4
images: {mean: 4, coefficient_of_variation: 0.8, seed: 0}    # gamma variates
images: {counts: [0, 1, 1, 6]}
images: {mean: 2, sizes: [336, [720, 1280]]}
"""

from typing import Annotated, ClassVar, Self

from pydantic import Field, model_validator

from clustersim.common.errors import format_value
from clustersim.model.image_counts import ImageCounts
from clustersim.scenario.config_reader import MAX_WIDTH, ConfigModel, config_error, value_parser
from clustersim.scenario.id_ranges import MAX_SEED

_MAX_VARIATION = 10.0
_MAX_DIMENSIONS = 3  # frames, height, width


def _parse_mean(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= MAX_WIDTH:
        raise config_error(f"{format_value(value)} is no mean number of images; write a number above 0, such as 4")
    return float(value)


def _parse_input_size(value: object) -> tuple[int, ...]:
    """The sizes of a sample; one number is that of a square image."""
    sizes = [value, value] if isinstance(value, int) and not isinstance(value, bool) else value
    if not isinstance(sizes, list | tuple) or not 1 <= len(sizes) <= _MAX_DIMENSIONS:
        raise config_error(f"{format_value(value)} is no size; write pixels, such as 384, or [height, width]")
    for size in sizes:
        if isinstance(size, bool) or not isinstance(size, int) or not 1 <= size <= MAX_WIDTH:
            raise config_error(f"{format_value(size)} is no number of pixels; 1 to {MAX_WIDTH:,} fits")
    return tuple(sizes)


InputSize = Annotated[
    tuple[int, ...], value_parser(_parse_input_size, "pixels, or a list of sizes", "384", schema_type=int | list[int])
]
"""Sizes of a sample."""


class ImagesConfig(ConfigModel):
    """`model.encoder.images`: images of a sequence; a bare number is the mean, of which all have as many."""

    shorthand_key: ClassVar[str | None] = "mean"
    example: ClassVar[str] = "4, {mean: 4, coefficient_of_variation: 0.8} or {counts: [0, 1, 6]}"
    mean: Annotated[float | None, value_parser(_parse_mean, "a number above 0", "4")] = None
    """images of a sequence, in the mean; without variation microbatch times it is a whole number; left out: counts"""
    coefficient_of_variation: Annotated[float | None, Field(gt=0, le=_MAX_VARIATION)] = None
    """standard deviation of a sequence's images over their mean (gamma variates); left out: all have the mean"""
    counts: Annotated[list[Annotated[int, Field(ge=0, le=MAX_WIDTH)]], Field(min_length=1)] | None = None
    """images of a sequence, each number as likely as the others; left out: a mean"""
    sizes: Annotated[list[InputSize], Field(min_length=1)] | None = None
    """sizes of an image as those of input_size, each as likely as the others, packed; left out: all have input_size"""
    seed: Annotated[int, Field(ge=0, le=MAX_SEED)] = 0
    """of the random draws"""

    @model_validator(mode="after")
    def _check_source(self) -> Self:
        if (self.mean is None) == (self.counts is None):
            raise config_error(f"images are a mean, or a list of counts: {self.example}")
        if self.counts is not None and self.coefficient_of_variation is not None:
            raise config_error("coefficient_of_variation is of a mean, and counts is a list; leave it out")
        if self.counts is not None and not any(self.counts):
            raise config_error("counts has no image at all; write layers: 0 for no encoder")
        if self._has_fraction and self.sizes is not None:
            raise config_error(f"sizes are of whole images, and each sequence has {self.mean:g}; write counts: [0, 1]")
        return self

    @property
    def _has_fraction(self) -> bool:
        """Whether all sequences have the same number of images, which is no whole one."""
        return self.mean is not None and self.coefficient_of_variation is None and not self.mean.is_integer()

    def image_counts(self, tokens: tuple[int, ...]) -> ImageCounts | None:
        """What sequences' images are drawn from; None: all have as many of one size. tokens: of images of the sizes."""
        counts = tuple(self.counts or ())
        if self.coefficient_of_variation is None and not counts:
            if not tokens:
                return None
            counts = (int(self.mean or 0),)
        mean, variation = (0.0, 0.0) if counts else (self.mean or 0.0, self.coefficient_of_variation or 0.0)
        return ImageCounts(counts, mean, variation, self.seed, tokens)

    @property
    def expected(self) -> float:
        """Mean number of images of a sequence."""
        return (self.mean or 0.0) if self.counts is None else sum(self.counts) / len(self.counts)
