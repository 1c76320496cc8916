"""Who published a source of measured steps? `published/publishers.yaml` says it where one has published several."""

from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from typing import Final, TypeVar

from clustersim.common.data_files import read_mapping
from clustersim.validation.cases import PUBLISHED_FOLDER

PUBLISHERS_FILE: Final = PUBLISHED_FOLDER / "publishers.yaml"
T = TypeVar("T")


def publisher_of(source: str) -> str:
    """The publisher of a source; the source itself where nobody is named."""
    return _publisher_by_source().get(source, source)


def by_source(sources: Iterable[str], of_publisher: Callable[[str], T]) -> dict[str, T]:
    """By source, what a function gives for its publisher, for which it is asked once."""
    publishers = {source: publisher_of(source) for source in sources}
    values = {publisher: of_publisher(publisher) for publisher in dict.fromkeys(publishers.values())}
    return {source: values[publisher] for source, publisher in publishers.items()}


@lru_cache(maxsize=1)
def _publisher_by_source() -> Mapping[str, str]:
    return {source: publisher for publisher, sources in read_mapping(PUBLISHERS_FILE).items() for source in sources}
