"""Words of other tools get the key or name that they stand for, in one line; none of them is accepted."""

from collections.abc import Callable
from typing import Any

import pytest

from clustersim.common import data_files
from clustersim.common.errors import InputError
from clustersim.common.synonyms import KEY_SYNONYMS, NAME_SYNONYMS, VALUE_SYNONYMS, similar_preset
from clustersim.model.presets import code_presets
from clustersim.model.training import AttentionBackend
from clustersim.scenario import Scenario
from clustersim.scenario.config.data_parallel import DataParallelConfig
from clustersim.scenario.config.training import RecomputeMode
from clustersim.scenario.error_messages import LIST_OF_KEYS
from clustersim.scenario.schema import dotted_keys
from clustersim.schedules.registry import SCHEDULE_NAMES
from tests.sentences import parts


@pytest.mark.parametrize(
    ("override", "meant"),
    [
        ("vpp=2", "schedule: {interleaved: {chunks: 2}}"),
        ("layout.vpp=2", "schedule: {interleaved: {chunks: 2}}"),
        ("training.mbs=1", "training.microbatch"),
        ("gbs=64", "training.global_batch"),
        ("zero_stage=1", "layout.data: ddp, zero1"),
        ("layout.fsdp=true", "layout.data: ddp, zero1"),
        ("training.gradient_accumulation_steps=4", "training.global_batch ... microbatch x dp x accumulation"),
        ("training.per_device_train_batch_size=1", "training.microbatch"),
        ("cluster.num_nodes=2", "cluster.gpus"),
        ("world_size=16", "cluster.gpus"),
        ("training.Seq-Length=4096", "training.sequence"),
        ("model={preset: llama3-8b, num_hidden_layers: 4}", "model.layers"),
        ("cluster.nodes=2", "cluster.gpus, the GPUs of the job: nodes x GPUs per node"),
        ("tensor_parallelism=8", "layout.tp"),
        ("training.epochs=3", "economics.tokens"),
    ],
)
def test_keys_of_other_tools_name_the_key_here(refusal: Callable[..., str], override: str, meant: str) -> None:
    message = refusal(override)
    assert parts(f"unknown key; write {meant}").search(message)
    assert "\n" not in message


def test_a_required_key_under_another_name_is_not_missing_besides(mapping: dict[str, Any]) -> None:
    mapping["training"]["gbs"] = mapping["training"].pop("global_batch")
    with pytest.raises(InputError) as caught:
        Scenario.from_mapping(mapping)
    assert "training.gbs: unknown key; write training.global_batch" in str(caught.value)
    assert "missing" not in str(caught.value)


@pytest.mark.parametrize("override", ["training.learning_rate=1e-4", "lr=1e-4", "training.weight-decay=0.1"])
def test_settings_without_effect_on_a_step_are_left_out(refusal: Callable[..., str], override: str) -> None:
    assert parts("unknown key ... time of a step does not depend on it, leave it out").search(refusal(override))


@pytest.mark.parametrize(
    ("override", "meant"),
    [
        ("schedule=zero-bubble", "zb-1p"),
        ("schedule=vpp", "interleaved"),
        ("training.attention=flash_attention_2", "flash2"),
        ("training.precision=float8", "fp8"),
        ("training.recompute=checkpoint", "full"),
        ("layout.data=deepspeed", "zero3"),
        ("framework=torch", "pytorch"),
        ("framework=megatron-lm", "megatron"),
        ("framework=huggingface", "transformers"),
        ("model=gpt-3", "gpt3-1.3b or gpt3-2.7b or gpt3-6.7b or gpt3-13b or gpt3-175b"),
        ("model=deepseek", "deepseek-v2 or deepseek-v2-lite or deepseek-v3"),
        ("optimizer=adam", "diloco.optimizer or training.optimizer"),
    ],
)
def test_words_for_values_and_names_are_answered_with_what_is_meant(
    refusal: Callable[..., str], override: str, meant: str
) -> None:
    """Megatron-LM had been answered with megatron-llama, torch with torchtitan or torchtune, gpt-3 with gpt2-xl."""
    assert f"did you mean {meant}" in refusal(override)


def test_a_switch_for_recomputation_is_answered_with_its_values(refusal: Callable[..., str]) -> None:
    assert "write none, selective, full or {layers: 4}" in refusal("training.recompute=true")


def test_words_for_values_are_of_values_that_exist() -> None:
    values = {
        *SCHEDULE_NAMES, *DataParallelConfig.shorthands, *(each.value for each in AttentionBackend),
        *(each.value for each in RecomputeMode), *data_files.list_names("recipes"), "bf16", "fp16",
    }  # fmt: skip
    assert set(VALUE_SYNONYMS.values()) <= values
    assert not set(VALUE_SYNONYMS) & values


def test_every_synonym_stands_for_a_key_that_exists() -> None:
    keys = set(dotted_keys()) | {"cluster.node.gpus"}  # the cluster file's own
    for word, meant in KEY_SYNONYMS.items():
        key = meant.partition(",")[0].partition(":")[0]
        assert key in keys, word
    for category, meant_by_name in NAME_SYNONYMS.items():
        names = set(data_files.list_names(category))
        assert set(meant_by_name.values()) <= names
        assert not set(meant_by_name) & names


@pytest.mark.parametrize(
    ("override", "parts"),
    [
        ("cluster=h100", ["did you mean dgx-h100?", "azure-nd-h100-v5", "oci-h100"]),
        ("cluster=A100", ["did you mean dgx-a100?"]),
        ("cluster=h100-sxm-80gb", ["did you mean dgx-h100?", "oci-h100"]),
        ("cluster=hgx-h100", ["did you mean dgx-h100?"]),
        ("cluster=p5.48xlarge", ["did you mean aws-p5?"]),
        ("cluster=nd-h100-v5", ["did you mean azure-nd-h100-v5?"]),
        ("cluster.preset=h100", ["write cluster.name"]),
        ("cluster.topology=dgx-h100", ["write cluster.name"]),
        ("cluster.accelerator=a100", ["did you mean a100-sxm-80gb?", "a100-pcie-80gb"]),
        ("cluster=aws-trn2", ["AWS Trainium is not supported", "compiler of its own", "clustersim presets"]),
        ("cluster=tpu-v5p", ["a TPU is not supported", "choose GPUs of NVIDIA or AMD"]),
        ("cluster=v5e-256", ["a TPU is not supported"]),
        ("cluster=v5litepod-8", ["a TPU is not supported"]),
        ("cluster.accelerator=gaudi3", ["Intel Gaudi is not supported"]),
        ("cluster.accelerator=Trainium 2", ["AWS Trainium is not supported"]),
        ("cluster=nothing-like-it", ["the nearest are ", "clustersim presets lists all"]),
    ],
)
def test_names_of_clusters_and_chips(refusal: Callable[..., str], override: str, parts: list[str]) -> None:
    message = refusal(override)
    assert all(part in message for part in parts)
    assert message.count(",") < 8  # a sentence, not a list of all


@pytest.mark.parametrize(
    "name",
    [
        "meta-llama/Llama-3.1-8B",
        "https://huggingface.co/meta-llama/Llama-3.1-8B",
        "https://huggingface.co/meta-llama/Meta-Llama-3-8B/tree/main",
    ],
)
def test_a_repository_of_hugging_face_as_the_model(refusal: Callable[..., str], name: str) -> None:
    message = refusal(f"model={name}")
    assert "not downloaded" in message
    assert "model: {path: config.json}" in message
    assert "the preset llama3-8b" in message


def test_a_repository_as_the_path_of_the_model(refusal: Callable[..., str]) -> None:
    message = refusal("model={path: meta-llama/Llama-3.1-8B}")
    assert "no file or folder meta-llama/Llama-3.1-8B" in message
    assert "save its config.json" in message


def test_a_preset_is_suggested_only_at_its_size() -> None:
    assert similar_preset("Qwen/Qwen3-30B-A3B", code_presets()) == "qwen3-30b-a3b"
    assert similar_preset("deepseek-ai/DeepSeek-V3", code_presets()) == "deepseek-v3"
    assert similar_preset("Qwen/Qwen2.5-14B", code_presets()) is None


def test_a_key_of_no_tool_gets_the_nearest_few(refusal: Callable[..., str]) -> None:
    """It had been a paragraph of all keys that begin with `mode`, those of `model`."""
    message = refusal("training.mode=fast")
    assert "did you mean training.recompute.mode?" in message
    assert len(message) < 120
    message = refusal("training.zzz=1")
    assert LIST_OF_KEYS in message
    assert len(message) < 160


@pytest.mark.parametrize("text", ["a:\n\tb: 1\n", "a: 1\nb:\n  c: 2\n \td: 3\n"])
def test_tabs_are_called_tabs(text: str) -> None:
    with pytest.raises(InputError, match=r"line \d is indented with a tab; YAML allows spaces"):
        data_files.parse_yaml(text)


def test_other_mistakes_of_yaml_are_not_blamed_on_tabs() -> None:
    with pytest.raises(InputError, match="is not valid YAML"):
        data_files.parse_yaml("a: 'tab\t\n")
