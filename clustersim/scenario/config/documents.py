"""What may a scenario file say about documents that are packed into sequences?

documents: {mean: 2000, sigma: 1.5, seed: 0}    # log-normal
documents: {lengths: [512, 4096, 32768]}
"""

from typing import Annotated, ClassVar, Self

from pydantic import Field, model_validator

from clustersim.model.documents import ContextSharding, Documents, SequenceOrder
from clustersim.scenario.config_reader import MAX_TOKENS, ConfigModel, TokenCount, config_error, enum_parser
from clustersim.scenario.id_ranges import MAX_SEED

_MAX_DRAWS = 1_000
_MAX_SIGMA = 4.0  # one standard deviation is a factor of 55


class DocumentsConfig(ConfigModel):
    """`training.documents`: lengths of packed documents, within which attention stays; a bare number is the mean."""

    shorthand_key: ClassVar[str | None] = "mean"
    example: ClassVar[str] = "{mean: 2000, sigma: 1.5} or {lengths: [512, 4096]}"
    mean: Annotated[float, Field(ge=1, le=MAX_TOKENS)] | None = None
    """mean of log-normal lengths in tokens; left out: lengths are a list"""
    sigma: Annotated[float, Field(ge=0, le=_MAX_SIGMA)] = 1.0
    """standard deviation of the logarithm of lengths"""
    lengths: Annotated[list[TokenCount], Field(min_length=1)] | None = None
    """lengths in tokens, each as likely as the others; left out: log-normal"""
    seed: Annotated[int, Field(ge=0, le=MAX_SEED)] = 0
    """of the random draws"""
    sharding: Annotated[ContextSharding, enum_parser(ContextSharding)] = ContextSharding.SEQUENCE
    """what context-parallel ranks share: the chunks of a sequence, or each document"""
    order: Annotated[SequenceOrder, enum_parser(SequenceOrder)] = SequenceOrder.DRAWN
    """of sequences over microbatches and replicas: as drawn, or by the work of their attention"""
    draws: Annotated[int, Field(ge=1, le=_MAX_DRAWS)] = 1
    """steps that are simulated, each with documents of the next seed, for percentiles of the step time"""

    @model_validator(mode="after")
    def _check_source(self) -> Self:
        if (self.mean is None) == (self.lengths is None):
            raise config_error(f"lengths are log-normal with a mean, or a list: {self.example}")
        if self.lengths is not None and "sigma" in self.model_fields_set:
            raise config_error("sigma is of log-normal lengths, and lengths is a list; leave it out")
        return self

    def packed_documents(self) -> Documents:
        """The documents as the simulator represents them."""
        lengths, mean, sigma = ((), self.mean or 0.0, self.sigma) if self.lengths is None else (self.lengths, 0.0, 0.0)
        return Documents(tuple(lengths), mean, sigma, self.seed, self.sharding, self.order, self.draws)
