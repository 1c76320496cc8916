"""Library files are read strictly: whatever is wrong in one is refused with the file, the key and what is legal."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from clustersim.collectives.library_files import load_dispatcher, load_library
from clustersim.common import data_files
from clustersim.common.errors import InputError
from clustersim.program.task import TokenDispatcher
from tests.sentences import parts

RING = "variants[0] (ring-LL)"
NVLS = "variants[9] (nvls-Simple)"


def _content() -> dict[str, Any]:
    return data_files.read_mapping(data_files.find_file("libraries", "nccl"))


def _refusal(folder: Path, content: object) -> str:
    """The message about a file with this content, without the file's name, with which it starts."""
    path = folder / "mine.yaml"
    path.write_text(yaml.safe_dump(content), encoding="utf-8")
    with pytest.raises(InputError) as caught:
        load_library(str(path))
    assert str(caught.value).startswith(f"{path}: ")
    return str(caught.value).removeprefix(f"{path}: ")


def _parent(content: Any, keys: list[str | int]) -> Any:
    for key in keys[:-1]:
        content = content[key]
    return content


def _refusal_of_value(folder: Path, keys: list[str | int], value: object) -> str:
    content = _content()
    _parent(content, keys)[keys[-1]] = value
    return _refusal(folder, content)


def _refusal_of_renaming(folder: Path, keys: list[str | int], name: str) -> str:
    content = _content()
    section = _parent(content, keys)
    section[name] = section.pop(keys[-1])
    return _refusal(folder, content)


def test_every_packaged_file_loads():
    assert [load_library(name).name for name in data_files.list_names("libraries")] == ["gloo", "nccl", "rccl"]
    for name in data_files.list_names("dispatchers"):
        assert load_dispatcher(TokenDispatcher(name)).name == name


def test_an_unknown_library_is_refused_with_the_nearest_name():
    with pytest.raises(InputError, match=r"did you mean nccl\?"):
        load_library("ncl")


@pytest.mark.parametrize(
    ("keys", "name", "unknown", "meant"),
    [
        (["follows_nccl_env"], "follow_nccl_env", "follow_nccl_env", "follows_nccl_env"),
        (["p2p_channels"], "p2p_channel", "p2p_channel", "p2p_channels"),
        (["generations", "nvlink4", "nvls"], "nvsl", "generations.nvlink4.nvsl", "generations.nvlink4.nvls"),
        (["networks", "roce", "latency"], "latancy", "networks.roce.latancy", "networks.roce.latency"),
        (["variants", 0, "ll_limited"], "ll_limit", f"{RING}.ll_limit", f"{RING}.ll_limited"),
        (
            ["variants", 0, "step_latency", "network_only"],
            "networkonly",
            f"{RING}.step_latency.networkonly",
            f"{RING}.step_latency.network_only",
        ),
    ],
)
def test_a_misspelt_optional_key_is_unknown(tmp_path, keys, name, unknown, meant):
    assert _refusal_of_renaming(tmp_path, keys, name) == f"{unknown}: unknown key; did you mean {meant}?"


@pytest.mark.parametrize(
    ("keys", "name", "missing", "present"),
    [
        (["launch"], "lanch", "launch", "lanch"),
        (["links", "nvlink"], "nvlnk", "links.nvlink", "links.nvlnk"),
        (["pipeline", "max_chunk"], "max_chunks", "pipeline.max_chunk", "pipeline.max_chunks"),
        (["networks", "efa", "efficiency"], "eficiency", "networks.efa.efficiency", "networks.efa.eficiency"),
        (["variants", 0, "startup"], "start_up", f"{RING}.startup", f"{RING}.start_up"),
        (["variants", 0, "step_latency", "pcie"], "pcie5", f"{RING}.step_latency.pcie", f"{RING}.step_latency.pcie5"),
    ],
)
def test_a_misspelt_required_key_is_missing_and_its_misspelling_is_named(tmp_path, keys, name, missing, present):
    assert _refusal_of_renaming(tmp_path, keys, name) == f"{missing}: is missing; the file has {present}"


@pytest.mark.parametrize(
    ("keys", "missing"),
    [
        (["published"], "published"),
        (["generations"], "generations"),
        (["links", "pcie", "efficiency"], "links.pcie.efficiency"),
        (["generations", "nvlink4", "nvls", "channels"], "generations.nvlink4.nvls.channels"),
        (["variants", 0, "protocol"], "variants[0] (ring-None).protocol"),
        (["variants", 9, "chunk_steps", "more_domains"], f"{NVLS}.chunk_steps.more_domains"),
    ],
)
def test_a_missing_key_is_named(tmp_path, keys, missing):
    content = _content()
    del _parent(content, keys)[keys[-1]]
    assert _refusal(tmp_path, content) == f"{missing}: is missing"


@pytest.mark.parametrize(
    ("keys", "value", "sentence"),
    [
        (["published"], "yes", "published: 'yes' is neither true nor false"),
        (["launch"], 8, "launch: 8 has no unit; a time is a string such as '1.3 us'"),
        (["pipeline"], "8 MB", "pipeline: '8 MB' is not a mapping of keys to values"),
        (["pipeline", "inter_domain_fraction"], 60, "pipeline.inter_domain_fraction: 60.0 is not a fraction of a"),
        (["generations", "nvlink5"], {}, "generations.nvlink5: is empty ... mapping"),
        (["generations", "nvlink5", "efficiency"], "0.8", "generations.nvlink5.efficiency: '0.8' is not a number"),
        (["generations", "nvlink5", "nvls", "channels"], [24], "generations.nvlink5.nvls.channels: [24] ... 2 values"),
        (
            ["generations", "nvlink5", "ll_max_bandwidth", 1],
            90,
            "generations.nvlink5.ll_max_bandwidth[1]: 90 ... no unit ... '400 Gbit/s'",
        ),
        (["networks", "tcpx", "unsupported"], "LL", "networks.tcpx.unsupported: 'LL' is not a list"),
        (["p2p_channels", "max_channels"], 32.5, "p2p_channels.max_channels: 32.5 ... whole number from 1 to"),
        (["variants"], {"ring": {}}, "variants: {'ring': {}} is not a list"),
        (["variants", 0], "ring", "variants[0]: 'ring' is not a mapping of keys to values"),
        (["variants", 0, "startup"], 6.6, f"{RING}.startup: 6.6 has no unit; a time is a string such as"),
        (["variants", 0, "startup"], "-1 us", f"{RING}.startup: '-1 us' is below zero"),
        (["variants", 0, "collectives"], "all_reduce", f"{RING}.collectives: 'all_reduce' is not a list"),
        (["variants", 0, "chunked"], 1, f"{RING}.chunked: 1 is neither true nor false"),
        (
            ["variants", 9, "chunk_steps", "one_domain", 1],
            "64 KiB",
            f"{NVLS}.chunk_steps.one_domain[1]: '64 KiB' is not a list",
        ),
    ],
)
def test_a_value_of_the_wrong_type_or_out_of_range_is_refused(tmp_path, keys, value, sentence):
    assert parts(sentence).match(_refusal_of_value(tmp_path, keys, value))


@pytest.mark.parametrize(
    ("keys", "name", "sentence"),
    [
        (["variants", 0, "algorithm"], "wring", "variants[0] (wring-LL).algorithm: 'wring' ... ring?"),
        (["variants", 0, "collectives", 0], "allreduce", f"{RING}.collectives[0]: 'allreduce' ... all_reduce?"),
        (["networks", "tcpx", "unsupported", 1], "LL129", "networks.tcpx.unsupported[1]: 'LL129' ... LL128?"),
    ],
)
def test_an_unknown_name_is_refused_with_the_nearest_one(tmp_path, keys, name, sentence):
    assert parts(sentence).fullmatch(_refusal_of_value(tmp_path, keys, name))


@pytest.mark.parametrize(
    ("keys", "name", "sentence"),
    [
        (["generations", "nvlink5"], "nvlnk5", "generations.nvlnk5: ... link technology ... nvlink5?"),
        (["networks", "infiniband"], "ib", "networks.ib: ... link technology ... any, efa,"),
        (
            ["generations", "nvlink5", "max_bus_bandwidth", "nvls"],
            "nvl",
            "generations.nvlink5.max_bus_bandwidth.nvl: 'nvl' ... nvls?",
        ),
    ],
)
def test_an_unknown_technology_or_algorithm_as_a_key_is_refused(tmp_path, keys, name, sentence):
    assert parts(sentence).match(_refusal_of_renaming(tmp_path, keys, name))


@pytest.mark.parametrize(
    ("keys", "old", "sentence"),
    [
        (["variants"], "offers", "offers: is called variants since 0.3"),
        (["pipeline", "max_chunk"], "chunk", "pipeline.chunk: is called max_chunk since 0.3"),
        (["networks", "efa1", "unsupported"], "without", "networks.efa1.without: is called unsupported since 0.3"),
        (["variants", 0, "step_latency"], "rounds", "variants.0.rounds: is called step_latency since 0.3"),
    ],
)
def test_a_renamed_key_is_refused_with_its_new_name(tmp_path, keys, old, sentence):
    assert _refusal_of_renaming(tmp_path, keys, old) == sentence


def test_a_file_that_is_not_a_mapping_is_refused(tmp_path):
    assert _refusal(tmp_path, ["nccl"]).startswith("holds a list")
