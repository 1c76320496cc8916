"""Framework files: packaged ones are complete and sourced; an invalid file is rejected in one clear sentence."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from clustersim.common import data_files
from clustersim.common.dtypes import DType
from clustersim.common.errors import InputError
from clustersim.common.mapping_reader import merge_mappings
from clustersim.model.framework import MeasuredHostUse
from clustersim.model.framework_files import load_framework
from clustersim.model.training import (
    ALL_FUSED,
    AttentionBackend,
    FullRecompute,
    FusedKernel,
    LossImplementation,
    NoRecompute,
    SelectiveOpRecompute,
)
from clustersim.scenario.config.data_parallel import DataParallelConfig
from clustersim.scenario.config.schedule import ScheduleConfig
from tests.sentences import parts

OPTIONAL_SECTIONS = ("layout", "kernels", "overheads", "supported_layouts", "versions", "releases", "recipes")


@pytest.fixture
def content() -> dict[str, Any]:
    return data_files.read_mapping(data_files.find_file("frameworks", "pytorch"))


@pytest.fixture
def written(tmp_path: Path) -> Callable[[dict[str, Any]], Path]:
    def write(content: dict[str, Any]) -> Path:
        path = tmp_path / "mine.yaml"
        path.write_text(yaml.safe_dump(content))
        return path

    return write


def complete_content(name: str) -> dict[str, Any]:
    """A file's content over that of the files that it is like; versions, releases and recipes are each file's own."""
    content = data_files.read_mapping(data_files.find_file("frameworks", name))
    if "like" not in content:
        return content
    base = complete_content(content["like"])
    own_sections = {"versions", "releases", "recipes"} & content.keys()
    for section in {"versions", "releases", "recipes"} - own_sections:
        base.pop(section, None)
        base["sources"].pop(section, None)
    return merge_mappings(base, content)


@pytest.mark.parametrize("name", data_files.list_names("frameworks"))
def test_every_shipped_framework_loads_and_has_a_source_for_every_number(name: str) -> None:
    framework = load_framework(name)
    assert framework.name == name
    assert framework.fragmentation >= 1.0
    assert (framework.launch_seconds > 0.0) is (name != "ideal")
    content = complete_content(name)
    optional_sections = [key for key in OPTIONAL_SECTIONS if key in content]
    assert set(content["sources"]) == {*content["memory"], *content["host"], *content["checkpoint"], *optional_sections}


@pytest.mark.parametrize("name", data_files.list_names("frameworks"))
def test_supported_features_are_scenario_values(name: str) -> None:
    runs = load_framework(name).supported_layouts
    assert {*runs.data, *runs.data_with_pipeline} <= DataParallelConfig.shorthands.keys()
    assert {*runs.schedules} <= ScheduleConfig.shorthands.keys()
    assert {*runs.data_with_pipeline} <= {*runs.data}
    assert "1f1b" in runs.schedules
    assert {*runs.axes} <= {"tp", "cp", "pp", "ep"}
    assert "pp" in runs.axes or runs.schedules == ("1f1b",)


@pytest.mark.parametrize(
    ("version", "eager", "compiled", "fuses_optimizer", "early_stop"),
    [
        ("2023-12-01", "torch_fp32", "torch_fp32", False, True),
        ("2024-06-11", "torch_fp32", "torch_fp32", False, True),
        ("2024-06-12", "torch", "torch", False, True),
        ("2024-11-01", "torch", "compiled", False, True),
        ("2025-02-23", "torch", "torch", False, True),
        ("2025-02-24", "torch", "torch", True, True),
        ("2025-07-01", "torch", "compiled", True, True),
        ("2026-03-13", "torch", "compiled", True, False),
        ("2026-07-01", "fused_linear", "fused_linear", True, False),
        ("", "fused_linear", "fused_linear", True, False),
    ],
)
def test_versions_of_torchtitan_are_what_its_commits_changed(
    version: str, eager: str, compiled: str, fuses_optimizer: bool, early_stop: bool
) -> None:
    framework = load_framework("torchtitan", version)
    assert framework.kernels.loss.value == eager
    assert framework.with_compiled().kernels.loss.value == compiled
    assert (FusedKernel.OPTIMIZER in framework.kernels.fused) is fuses_optimizer
    assert (framework.early_stop, framework.with_compiled().early_stop) == (early_stop, True)


@pytest.mark.parametrize(
    ("name", "version", "sentence"),
    [
        ("torchtitan", "2023-11-30", "version: '2023-11-30' of torchtitan is unknown.*date of its code, 2023-12-01 or"),
        ("torchtitan", "0.2.0", r"version: '0\.2\.0' of torchtitan is unknown; write the date of its code"),
        ("pytorch", "latest", "version: 'latest' of pytorch is unknown; write a release, such as 2.10"),
        ("megatron", "0.9", r"version: '0\.9' of megatron.*one version only"),
    ],
)
def test_unknown_versions_are_rejected(name: str, version: str, sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        load_framework(name, version)


@pytest.mark.parametrize(
    ("name", "release", "listed"),
    [
        ("pytorch", "2.1", "2.10"),
        ("pytorch", "2.9.1", "2.10"),
        ("pytorch", "2.10.1", ""),
        ("transformers", "4.55.2", "4.57"),
        ("transformers", "5.18", ""),
        ("deepspeed", "0.9", "0.18"),
    ],
)
def test_a_release_is_the_first_listed_one_that_is_not_older(name: str, release: str, listed: str) -> None:
    assert replace(load_framework(name, release), version=listed) == load_framework(name, listed)


def test_recipes_of_megatron_bridge_run_other_kernels() -> None:
    """Its library's recipes are what is run without a recipe; those of NVIDIA's tables fuse the router."""
    unnamed, library = load_framework("megatron-bridge"), load_framework("megatron-bridge", recipe="library")
    performance = load_framework("megatron-bridge", recipe="performance")
    assert (unnamed.recipe, library.recipe, performance.recipe) == ("", "library", "performance")
    assert replace(library, recipe="") == unnamed
    assert (library.overheads.router_unfused, performance.overheads.router_unfused) == (True, False)
    assert not library.overheads.permute_unfused
    assert (library.kernels.gradients, performance.kernels.gradients) == (DType.FP32, DType.BF16)
    assert library.kernels.loss is performance.kernels.loss is LossImplementation.FUSED


@pytest.mark.parametrize(
    ("name", "recipe", "sentence"),
    [
        ("megatron-bridge", "perfomance", r"recipe: 'perfomance' of megatron-bridge.*perf"),
        ("megatron-bridge", "zzz", r"recipe: 'zzz' of megatron-bridge.*library, performance"),
        ("pytorch", "library", r"recipe: 'library' of pytorch.*no recipes"),
    ],
)
def test_unknown_recipes_are_rejected(name: str, recipe: str, sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        load_framework(name, recipe=recipe)


@pytest.mark.parametrize("key", ["versions", "releases", "recipes"])
def test_versions_and_recipes_are_mappings_of_keys(key: str, written: Callable[[dict[str, Any]], Path]) -> None:
    path = written({"description": "mine", "like": "pytorch", key: ["fast"], "sources": {}})
    with pytest.raises(InputError, match=rf"mine\.yaml: {key}:.*mapping of {key}"):
        load_framework(str(path))


@pytest.mark.parametrize(
    ("name", "fused", "loss", "gradients"),
    [
        ("accelerate", {"optimizer"}, "torch", "bf16"),
        ("deepspeed", {"optimizer"}, "torch", "bf16"),
        ("composer", set(), "compiled", "bf16"),
        ("torchtune", {"optimizer"}, "chunked", "fp32"),
        ("litgpt", {"optimizer"}, "torch", "fp32"),
        ("fms-fsdp", set(), "torch", "bf16"),
        ("olmo-core", set(), "torch", "fp32"),
        ("nanotron", {"norm", "rotary", "optimizer"}, "vocab_parallel", "fp32"),
        ("internevo", {"norm", "rotary", "activation", "residual", "softmax"}, "fused", "bf16"),
        ("megatron-llama", {"norm", "residual", "softmax", "optimizer"}, "vocab_parallel", "fp32"),
        ("paddle", {"norm", "rotary", "activation", "optimizer"}, "vocab_parallel", "fp32"),
        ("maxtext", {kind.value for kind in ALL_FUSED}, "compiled", "bf16"),
        ("llm.c", {kind.value for kind in ALL_FUSED}, "fused", "bf16"),
    ],
)
def test_kernels_of_each_software(name: str, fused: set[str], loss: str, gradients: str) -> None:
    kernels = load_framework(name).kernels
    assert {kind.value for kind in kernels.fused} == fused
    assert (kernels.loss.value, kernels.gradients.value) == (loss, gradients)


@pytest.mark.parametrize("name", ["maxtext", "paxml", "llm.c"])
def test_programs_without_python_between_kernels_launch_faster(name: str) -> None:
    framework, pytorch = load_framework(name), load_framework("pytorch")
    assert 0.0 < framework.launch_seconds < pytorch.launch_seconds
    assert 0.0 < framework.backward_launch_seconds < pytorch.backward_launch_seconds
    assert framework.measured_host_use is MeasuredHostUse.NOTHING


def test_a_file_is_like_another_except_for_its_own_keys(written: Callable[[dict[str, Any]], Path]) -> None:
    own_keys = {
        "description": "mine",
        "like": "pytorch",
        "kernels": {"fused": ["norm"], "gradients": "bf16"},
        "sources": {"kernels": "mine"},
    }
    mine, base = load_framework(str(written(own_keys))), load_framework("pytorch")
    assert mine.kernels == replace(base.kernels, fused=frozenset({FusedKernel.NORM}), gradients=DType.BF16)
    assert replace(mine, name=base.name, kernels=base.kernels) == base


def test_a_file_that_is_like_itself_is_rejected(written: Callable[[dict[str, Any]], Path]) -> None:
    path = written({"description": "mine"})
    path.write_text(f"description: mine\nlike: {path}\n")
    with pytest.raises(InputError, match=r"like: .*mine\.yaml is like this file; name another one"):
        load_framework(str(path))


def test_versions_may_be_written_as_dates(written: Callable[[dict[str, Any]], Path]) -> None:
    path = written({"description": "mine"})
    path.write_text(
        "description: mine\nlike: pytorch\nversions: {2025-03-01: {kernels: {fused: [norm]}}}\nsources: {}\n"
    )
    assert load_framework(str(path), "2025-04-01").kernels.fused == {FusedKernel.NORM}


def test_unknown_kinds_of_kernels_are_rejected(written: Callable[[dict[str, Any]], Path]) -> None:
    path = written({"description": "mine", "like": "pytorch", "kernels": {"fused": ["nrom"]}, "sources": {}})
    with pytest.raises(InputError, match=r"kernels\.fused: 'nrom' is unknown; did you mean norm"):
        load_framework(str(path))


def test_compiled_layers_are_fused_and_the_optimizer_is_not() -> None:
    compiled = load_framework("pytorch").with_compiled().kernels
    assert compiled.fused == ALL_FUSED - {FusedKernel.OPTIMIZER}
    assert load_framework("torchtitan").with_compiled().kernels.fused == ALL_FUSED


def test_the_default_framework_is_pytorch() -> None:
    assert load_framework() == load_framework("pytorch")


def test_megatron_2021_launches_more_slowly() -> None:
    older, pytorch = load_framework("megatron-2021"), load_framework("pytorch")
    assert (
        older.launch_seconds + older.backward_launch_seconds > pytorch.launch_seconds + pytorch.backward_launch_seconds
    )


def test_cuda_graphs_need_a_framework_with_a_graph_cost() -> None:
    captured = load_framework("pytorch").with_cuda_graphs()
    assert captured.uses_cuda_graphs
    assert captured.graph_launch_seconds == pytest.approx(12.5e-6)
    with pytest.raises(InputError, match="cuda_graphs: megatron-2021 captures none; leave it out"):
        load_framework("megatron-2021").with_cuda_graphs()


def test_compiling_needs_a_framework_with_measured_compiled_launches() -> None:
    assert load_framework("pytorch").with_compiled().compiled
    with pytest.raises(InputError, match="torch_compile: megatron compiles no layers"):
        load_framework("megatron").with_compiled()


def test_explicit_launch_times_take_precedence_over_records() -> None:
    torch = load_framework("pytorch")
    assert torch.with_launch_seconds(None, None) == torch
    assert torch.measured_host_use is MeasuredHostUse.TORCH
    explicit = torch.with_launch_seconds(0.0, None)
    assert (explicit.launch_seconds, explicit.backward_launch_seconds, explicit.measured_host_use) == (
        0.0,
        0.0,
        MeasuredHostUse.NOTHING,
    )


@pytest.mark.parametrize(
    ("name", "measured"), [("megatron", MeasuredHostUse.EAGER), ("megatron-2021", MeasuredHostUse.NOTHING)]
)
def test_host_samples_apply_to_software_with_equivalent_launches(name: str, measured: MeasuredHostUse) -> None:
    assert load_framework(name).measured_host_use is measured


def test_a_path_works_like_a_name_and_units_are_converted(
    content: dict[str, Any], written: Callable[[dict[str, Any]], Path]
) -> None:
    content["memory"] = {
        "fragmentation": 1.25,
        "communicator": "2 MiB",
        "workspace": "3 MiB",
        "grouped_workspace": "1 MiB",
    }
    content["host"]["launch"] = "7 us"
    framework = load_framework(str(written(content)))
    assert (framework.fragmentation, framework.communicator_bytes) == (1.25, 2.0 * 2**20)
    assert (framework.workspace_bytes, framework.grouped_workspace_bytes) == (3.0 * 2**20, 2.0**20)
    assert framework.name == "mine"
    assert framework.launch_seconds == pytest.approx(7e-6)


def test_a_zero_launch_time_is_allowed(content: dict[str, Any], written: Callable[[dict[str, Any]], Path]) -> None:
    content["host"]["launch"] = "0 us"
    assert load_framework(str(written(content))).launch_seconds == 0.0


@pytest.mark.parametrize(
    ("path", "value", "sentence"),
    [
        (("memory", "fragmentation"), 0.9, "memory.fragmentation: 0.9 is not a number from 1 up"),
        (("memory", "communicator"), "688 us", "memory.communicator: '688 us' has unit 'us'"),
        (("memory", "reserve"), "1 GB", "memory.reserve: unknown key"),
        (("host", "launch"), 10, "host.launch: 10 has no unit"),
        (("host", "launch"), "-1 us", "host.launch: '-1 us' is "),
        (("host", "lunch"), "1 us", "host.lunch: unknown key; did you mean host.launch?"),
        (("host", "measured_host_use"), "dtensor", "host.measured_host_use: 'dtensor' ... eager, nothing, torch"),
        (("hosts",), {}, "hosts: unknown key; did you mean host?"),
        (("host",), "10 us", "host: '10 us' is not a mapping"),
        (("description",), "", "description: '' is not a text"),
    ],
)
def test_a_wrong_value_is_refused_with_file_key_and_value(
    content: dict[str, Any], written: Callable[[dict[str, Any]], Path], path: tuple[str, ...], value: object,
    sentence: str,
) -> None:  # fmt: skip
    section = content
    for key in path[:-1]:
        section = section[key]
    section[path[-1]] = value
    framework_file = written(content)
    with pytest.raises(InputError) as caught:
        load_framework(str(framework_file))
    assert parts(sentence).search(str(caught.value))
    assert str(framework_file) in str(caught.value)


@pytest.mark.parametrize("key", ["description", "memory", "host", "sources"])
def test_a_missing_key_is_named(content: dict[str, Any], written: Callable[[dict[str, Any]], Path], key: str) -> None:
    del content[key]
    with pytest.raises(InputError, match=f"{key}: is missing"):
        load_framework(str(written(content)))


def test_a_misspelt_name_suggests_the_nearest() -> None:
    with pytest.raises(InputError, match=r"'megatron-2921'; did you mean megatron-2021\?"):
        load_framework("megatron-2921")


def test_moe_models_have_a_separate_launch_time_where_the_file_has_one() -> None:
    megatron, pytorch = load_framework("megatron"), load_framework("pytorch")
    moe_framework = megatron.with_moe_launches()
    assert moe_framework.launch_seconds == moe_framework.backward_launch_seconds == megatron.moe_launch_seconds
    assert megatron.launch_seconds < moe_framework.launch_seconds
    assert megatron.with_moe_launches(2.0).launch_seconds == 2.0 * moe_framework.launch_seconds
    assert pytorch.with_moe_launches() == pytorch
    assert moe_framework.with_moe_launches() == moe_framework
    assert megatron.with_launch_seconds(2e-6, None).with_moe_launches().launch_seconds == 2e-6
    slower, compiled = pytorch.with_moe_launches(2.0), pytorch.with_compiled()
    assert slower.backward_launch_seconds == 2.0 * pytorch.backward_launch_seconds
    assert compiled.with_moe_launches(2.0) == compiled
    assert pytorch.with_launch_seconds(2e-6, None).with_moe_launches(2.0).launch_seconds == 2e-6


def test_fragmentation_is_one_number_or_one_for_each_recomputation(
    content: dict[str, Any], written: Callable[[dict[str, Any]], Path]
) -> None:
    content["memory"]["fragmentation"] = {"none": 1.1, "selective": 1.2, "full": 1.3}
    framework = load_framework(str(written(content)))
    policies = NoRecompute(), SelectiveOpRecompute(), FullRecompute()
    assert [framework.fragmentation_with(policy) for policy in policies] == [1.1, 1.2, 1.3]
    content["memory"]["fragmentation"] = 1.4
    framework = load_framework(str(written(content)))
    assert [framework.fragmentation_with(policy) for policy in policies] == [1.4, 1.4, 1.4]


@pytest.mark.parametrize(
    ("fragmentation", "sentence"),
    [
        ({"none": 1.1, "selective": 1.2}, "memory.fragmentation.full: is missing"),
        ({"none": 1.1, "selective": 0.2, "full": 1.2}, "memory.fragmentation.selective: 0.2 ... number from 1 up"),
        ({"none": 1.1, "selective": 1.2, "fully": 1.2}, "memory.fragmentation.full: is missing"),
    ],
)
def test_incomplete_fragmentation_is_refused(
    fragmentation: dict[str, float],
    sentence: str,
    content: dict[str, Any],
    written: Callable[[dict[str, Any]], Path],
) -> None:
    content["memory"]["fragmentation"] = fragmentation
    with pytest.raises(InputError, match=parts(sentence)):
        load_framework(str(written(content)))


@pytest.mark.parametrize(
    ("name", "version"), [("pytorch", "2.10"), ("transformers", "4.57"), ("accelerate", "1.12"), ("deepspeed", "0.18")]
)
def test_pytorch_before_2_11_takes_flash_attention_2(name: str, version: str) -> None:
    assert load_framework(name, version).kernels.attention is AttentionBackend.FLASH2
    assert load_framework(name).kernels.attention is AttentionBackend.SDPA
