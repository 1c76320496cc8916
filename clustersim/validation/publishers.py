"""Who published a source of measured steps? `published/publishers.yaml` says it where one has published several."""

from collections.abc import Mapping
from functools import lru_cache
from typing import Final

from clustersim.common.data_files import read_mapping
from clustersim.validation.cases import PUBLISHED_FOLDER

PUBLISHERS_FILE: Final = PUBLISHED_FOLDER / "publishers.yaml"


def publisher_of(source: str) -> str:
    """The publisher of a source; the source itself where nobody is named."""
    return _publisher_by_source().get(source, source)


@lru_cache(maxsize=1)
def _publisher_by_source() -> Mapping[str, str]:
    return {source: publisher for publisher, sources in read_mapping(PUBLISHERS_FILE).items() for source in sources}
