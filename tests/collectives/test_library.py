"""The packaged libraries support every collective and choose among the variants meant for it."""

import pytest

from clustersim.collectives.library_files import load_library
from clustersim.program.task import CollectiveType


@pytest.mark.parametrize("name", ["nccl", "rccl", "gloo"])
def test_packaged_libraries_support_every_collective(name):
    library = load_library(name)
    for kind in (collective_type for collective_type in CollectiveType if not collective_type.is_token_routing):
        assert library.variants_for(kind)


def test_hierarchical_is_available_only_if_forced():
    library = load_library("nccl")
    assert "hierarchical" not in {variant.algorithm for variant in library.variants_for(CollectiveType.ALL_REDUCE)}
    assert "hierarchical" in library.algorithms_for(CollectiveType.ALL_REDUCE)
