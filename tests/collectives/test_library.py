"""Collective libraries are data files: packaged ones load, invalid ones are refused with a message."""

import pytest

from clustersim.collectives.library import load_library
from clustersim.common import data_files
from clustersim.common.errors import InputError
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


def test_unknown_library_is_refused_with_the_nearest_name():
    with pytest.raises(InputError, match=r"did you mean nccl\?"):
        load_library("ncl")


@pytest.mark.parametrize(
    ("old", "new", "sentence"),
    [
        ("algorithm: ring", "algorithm: wring", r"no algorithm 'wring'; did you mean ring\?"),
        ("startup: 6.6 us", "startup: 6.6", r"6\.6 has no unit"),
        ("launch: 8 us\n", "", "launch"),
        ("[send_recv, shift, all_to_all]", "[sendrecv]", "sendrecv"),
    ],
)
def test_an_invalid_library_file_is_refused_with_its_path(tmp_path, old, new, sentence):
    text = data_files.find_file("libraries", "nccl").read_text(encoding="utf-8")
    assert old in text
    path = tmp_path / "broken.yaml"
    path.write_text(text.replace(old, new), encoding="utf-8")
    with pytest.raises(InputError, match=sentence) as caught:
        load_library(str(path))
    assert str(path) in str(caught.value)
