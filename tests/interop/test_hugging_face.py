"""axolotl's, Llama-Factory's and TrainingArguments' files are read; what defines another step is refused."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from clustersim.common.errors import InputError
from clustersim.interop import hub_models
from clustersim.interop.detect import detect_program
from clustersim.interop.hub_models import HubModel, find_preset, hub_model
from clustersim.interop.import_result import ImportContext, ImportResult
from clustersim.interop.registry import IMPORTERS
from clustersim.model.presets import all_presets
from clustersim.model.transformer import parameter_count
from clustersim.results.memory_check import check
from clustersim.scenario import Scenario
from clustersim.scenario.config.model import ModelConfig
from clustersim.scenario.file_cache import ReadCache
from clustersim.scenario.model import read_model

AXOLOTL: dict[str, Any] = {
    "base_model": "meta-llama/Llama-3.1-8B", "sequence_len": 4096, "sample_packing": True, "micro_batch_size": 2,
    "gradient_accumulation_steps": 4, "bf16": "auto", "gradient_checkpointing": True, "flash_attention": True,
    "optimizer": "adamw_torch_fused", "datasets": [{"path": "x"}], "learning_rate": 2e-5,
}  # fmt: skip
FACTORY: dict[str, Any] = {
    "model_name_or_path": "meta-llama/Llama-3.1-8B", "stage": "sft", "finetuning_type": "full", "cutoff_len": 4096,
    "packing": True, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 4, "bf16": True,
    "flash_attn": "fa2",
}  # fmt: skip
ARGUMENTS: dict[str, Any] = {
    "model_name_or_path": "meta-llama/Llama-3.1-8B", "per_device_train_batch_size": 2, "gradient_accumulation_steps": 4,
    "max_seq_length": 4096, "packing": True, "bf16": True, "gradient_checkpointing": True,
    "attn_implementation": "flash_attention_2",
}  # fmt: skip


def _import(content: dict[str, Any], folder: Path | None = None, gpus: int | None = 8, *overrides: str) -> ImportResult:
    text = yaml.safe_dump(content)
    kind = detect_program(text, "train.yaml")
    return IMPORTERS[kind](text, "train.yaml", "dgx-h100", gpus, ImportContext(folder, {}, overrides))


def test_the_three_programs_say_the_same() -> None:
    """8 GPUs with 2 sequences each, 4 times: 64 sequences a step."""
    expected = {
        "model": "llama3-8b",
        "cluster": {"name": "dgx-h100", "gpus": 8},
        "layout": {"data": "ddp"},
        "training": {
            "sequence": 4096, "global_batch": 64, "microbatch": 2, "precision": {"compute": "bf16"},
            "recompute": "full", "attention": "flash2",
        },
        "framework": "transformers",
    }  # fmt: skip
    for content in (AXOLOTL, FACTORY, ARGUMENTS):
        result = _import(content)
        assert result.mapping == expected
        assert (result.ignored_arguments, result.assumptions) == ((), ())
        Scenario.from_mapping(dict(result.mapping), default_name="x")


def test_programs_are_told_apart() -> None:
    kinds = [detect_program(yaml.safe_dump(one), "a.yaml") for one in (AXOLOTL, FACTORY, ARGUMENTS)]
    assert kinds == ["axolotl", "llama-factory", "transformers"]
    with pytest.raises(InputError, match="it is axolotl's"):
        IMPORTERS["llama-factory"](yaml.safe_dump(AXOLOTL), "a.yaml", "dgx-h100", 8, ImportContext())


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_deepspeed_s_json_next_to_the_file_gives_the_stage(tmp_path: Path, stage: int) -> None:
    zero = {"stage": stage, "offload_optimizer": {"device": "cpu"}}
    (tmp_path / "ds.json").write_text(json.dumps({"zero_optimization": zero, "train_batch_size": "auto"}))
    for content in (AXOLOTL, FACTORY, ARGUMENTS):
        mapping = _import({**content, "deepspeed": "configs/ds.json"}, tmp_path).mapping
        assert mapping["layout"] == {"data": f"zero{stage}"}
        assert mapping["framework"] == "deepspeed"
        assert mapping["training"]["offload"] == {"optimizer": True, "update": "sequential"}
    with pytest.raises(InputError, match=r"deepspeed: other\.json is not here"):
        _import({**ARGUMENTS, "deepspeed": "other.json"}, tmp_path)


@pytest.mark.parametrize("stage", [7, [2], "two", None])
def test_a_stage_that_is_none_is_named(stage: object) -> None:
    with pytest.raises(InputError, match=r"deepspeed: stage .* is none; 0 to 3 are"):
        _import({**ARGUMENTS, "deepspeed": {"zero_optimization": {"stage": stage}}})


@pytest.mark.parametrize(("zero", "data"), [(True, "zero1"), (False, "ddp"), (None, "ddp")])
def test_zero_that_is_no_section(zero: object, data: str) -> None:
    """A bool is how DeepSpeed's first releases turned stage 1 on."""
    assert _import({**ARGUMENTS, "deepspeed": {"zero_optimization": zero}}).mapping["layout"]["data"] == data


def test_a_device_in_place_of_a_section_is_offloaded_to() -> None:
    zero = {"stage": 2, "offload_optimizer": "cpu"}
    mapping = _import({**ARGUMENTS, "deepspeed": {"zero_optimization": zero}}).mapping
    assert mapping["training"]["offload"] == {"optimizer": True, "update": "sequential"}


@pytest.mark.parametrize(
    ("stage", "overlap_comm", "data"),
    [
        (0, True, "ddp"),
        (1, True, {"zero": {"stage": 1, "overlap": True}}),
        (2, True, {"zero": {"stage": 2, "overlap": True}}),
        (2, False, "zero2"),
        (2, "auto", "zero2"),
        (3, True, "zero3"),
    ],
)
def test_gradients_overlap_where_deepspeed_is_asked_to(stage: int, overlap_comm: object, data: object) -> None:
    """overlap_comm is false by default, except in stage 3, whose strategy overlaps anyway."""
    deepspeed = {"zero_optimization": {"stage": stage, "overlap_comm": overlap_comm}}
    mapping = _import({**ARGUMENTS, "deepspeed": deepspeed}).mapping
    assert mapping["layout"]["data"] == data
    Scenario.from_mapping(dict(mapping), default_name="x")


def test_accelerate_s_configuration_next_to_the_file_says_how_it_is_launched(tmp_path: Path) -> None:
    accelerate = {
        "distributed_type": "FSDP", "num_processes": 16, "mixed_precision": "bf16",
        "fsdp_config": {"fsdp_sharding_strategy": "SHARD_GRAD_OP", "fsdp_offload_params": False},
    }  # fmt: skip
    path = tmp_path / "accelerate_fsdp.yaml"
    path.write_text(yaml.safe_dump(accelerate), encoding="utf-8")
    mapping = _import(ARGUMENTS, tmp_path, None).mapping
    assert mapping["cluster"]["gpus"] == 16
    assert mapping["layout"]["data"] == {"fsdp": {"reshard_after_forward": False}}
    deepspeed = {"distributed_type": "DEEPSPEED", "num_processes": 4, "deepspeed_config": {"zero_stage": 3}}
    path.write_text(yaml.safe_dump(deepspeed), encoding="utf-8")
    assert _import(ARGUMENTS, tmp_path, None).mapping["layout"]["data"] == "zero3"


@pytest.mark.parametrize(
    ("keys", "layout"),
    [
        ({"cp_size": 8}, {"cp": 8, "cp_kind": "all_gather", "data": "fsdp"}),
        ({"cp_size": 4, "cp_comm_strategy": "alltoall"}, {"cp": 4, "cp_kind": "ring", "data": "fsdp"}),
        ({"sp_size": 8}, {"cp": 8, "cp_kind": "ulysses", "data": "fsdp"}),
        (
            {"cp_size": 2, "tp_size": 2, "dp_replicate_size": 2, "dp_shard_size": 2},
            {"tp": 2, "cp": 2, "cp_kind": "all_gather", "data": {"hsdp": {"shard": 2}}},
        ),
    ],
)
def test_accelerate_s_parallelism_splits_sequences(
    tmp_path: Path, keys: dict[str, Any], layout: dict[str, Any]
) -> None:
    assert _import(ARGUMENTS, _launched(tmp_path, keys), 16).mapping["layout"] == layout


@pytest.mark.parametrize(
    ("keys", "sentence"),
    [
        ({"cp_sise": 2}, "did you mean cp_size?"),
        ({"cp_size": 0}, "parallelism_config_cp_size: 0 is not a whole number above 0"),
        ({"cp_comm_strategy": "p2p"}, "'p2p' is not read; allgather and alltoall is"),
        ({"cp_size": 2, "sp_size": 2}, "one of them splits sequences"),
    ],
)
def test_another_parallelism_of_accelerate_is_refused_by_key(
    tmp_path: Path, keys: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(InputError, match=re.escape(sentence)):
        _import(ARGUMENTS, _launched(tmp_path, keys), 16)


def test_chunked_losses_and_offloaded_checkpoints_of_trl() -> None:
    change = {"loss_type": "chunked_nll", "gradient_checkpointing": True}
    training = _import({**ARGUMENTS, **change, "gradient_checkpointing_kwargs": {"offload": True}}).mapping["training"]
    assert (training["loss"], training["recompute"]) == ("chunked_nll", "full")
    assert training["offload"] == {"activations": "all"}


def _launched(folder: Path, parallelism: dict[str, Any]) -> Path:
    keys = {f"parallelism_config_{key}": value for key, value in parallelism.items()}
    configuration = {"distributed_type": "FSDP", "fsdp_config": {"fsdp_version": 2}, "parallelism_config": keys}
    (folder / "accelerate.yaml").write_text(yaml.safe_dump(configuration), encoding="utf-8")
    return folder


def test_fsdp_of_axolotl() -> None:
    sharded = {**AXOLOTL, "fsdp": ["full_shard", "auto_wrap"], "fsdp_config": {"fsdp_offload_params": True}}
    mapping = _import(sharded).mapping
    assert (mapping["layout"]["data"], mapping["training"]["offload"]) == ("fsdp", {"parameters": True})
    hybrid = _import({**AXOLOTL, "fsdp_version": 2, "dp_shard_size": 8, "dp_replicate_size": 2}, None, 16).mapping
    assert hybrid["layout"]["data"] == {"hsdp": {"shard": 8}}


def test_adapters() -> None:
    axolotl = _import({**AXOLOTL, "adapter": "qlora", "load_in_4bit": True, "lora_r": 32, "lora_target_linear": True})
    factory = _import(
        {**FACTORY, "finetuning_type": "lora", "lora_rank": 32, "lora_target": "all", "quantization_bit": 4}
    )
    assert axolotl.mapping["training"]["lora"] == factory.mapping["training"]["lora"]
    assert axolotl.mapping["training"]["lora"] == {"rank": 32, "targets": "all", "base": "nf4"}
    form = r"model.language_model.layers.[\d]+.(mlp|cross_attn|self_attn).(up|down|gate|q|v)_proj"
    every_layer = _import({**AXOLOTL, "adapter": "lora", "lora_target_modules": form}).mapping["training"]["lora"]
    assert every_layer["targets"] == ["up_proj", "down_proj", "gate_proj", "q_proj", "v_proj"]
    named = _import({**FACTORY, "finetuning_type": "lora", "lora_target": "q_proj, v_proj"}).mapping
    assert named["training"]["lora"]["targets"] == ["q_proj", "v_proj"]
    few_bits = _import({**AXOLOTL, "adapter": "lora", "optimizer": "lion_8bit"})
    assert any("lion_8bit" in remark for remark in few_bits.assumptions)


def test_llama_factory_recomputes_unless_told_not_to() -> None:
    assert "recompute" not in _import({**FACTORY, "disable_gradient_checkpointing": True}).mapping["training"]


def test_liger_s_loss_is_fused_with_the_matrix() -> None:
    liger = _import({**AXOLOTL, "liger_fused_linear_cross_entropy": True})
    assert liger.mapping["training"]["loss"] == "liger"


def test_axolotl_s_tiles_of_mlps_are_read() -> None:
    """As many tokens as the model is wide, or a number of tiles."""
    tiled = _import({**AXOLOTL, "tiled_mlp": True}).mapping["training"]
    assert tiled["tiled_mlp"] is True
    shards = _import({**AXOLOTL, "tiled_mlp": True, "tiled_mlp_num_shards": 4}).mapping["training"]
    assert shards["tiled_mlp"] == {"tokens": -(-tiled["sequence"] // 4)}


@pytest.mark.parametrize(
    ("content", "change", "sentence"),
    [
        (AXOLOTL, {"rl": "dpo"}, "rl: preference"),
        (ARGUMENTS, {"beta": 0.1}, "beta: preference"),
        (ARGUMENTS, {"num_generations": 8}, "num_generations: preference"),
        (FACTORY, {"stage": "rm"}, "stage: 'rm'"),
        (FACTORY, {"finetuning_type": "oft"}, "finetuning_type: 'oft'"),
        (FACTORY, {"tensor_model_parallel_size": 2}, "tensor_model_parallel_size: Megatron"),
        (AXOLOTL, {"optimizer": "adopt_adamw"}, "optimizer: 'adopt_adamw' is not modelled"),
        (AXOLOTL, {"optimizer": "lion_8bit"}, "optimizer: 'lion_8bit' is not modelled"),
        (AXOLOTL, {"load_in_8bit": True}, "adapters alone"),
        (FACTORY, {"export_dir": "out"}, r"export_dir:.*merging or inference"),
        (AXOLOTL, {"micro_batch_size": 0}, "micro_batch_size: 0 is not a whole number"),
        (ARGUMENTS, {"max_seq_length": None}, "has no sequence_len"),
        (AXOLOTL, {"attn_implementation": "paged", "flash_attention": None}, "attn_implementation: 'paged'"),
        (AXOLOTL, {"base_model": "someone/unheard-of"}, r"save its config\.json as unheard-of/config\.json next to"),
        (AXOLOTL, {"base_model": "someone/Llama-3.2-4B"}, r"such as the similar --set model=|--set model=llama3-8b"),
        (AXOLOTL, {"tensor_parallel_size": 3}, "8 GPUs are no multiple of tp 3"),
    ],
)
def test_another_step_is_refused_by_key(content: dict[str, Any], change: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InputError, match=sentence) as refused:
        _import({**content, **change})
    assert "\n" not in str(refused.value)


def test_gpus_are_asked_for_and_unknown_keys_reported() -> None:
    with pytest.raises(InputError, match="how many GPUs"):
        _import(AXOLOTL, None, None)
    assert _import({**AXOLOTL, "use_scattermoe": True}).ignored_arguments == ("use_scattermoe",)


def test_a_model_is_a_folder_a_preset_or_what_the_user_sets(tmp_path: Path) -> None:
    folder = tmp_path / "my-model"
    folder.mkdir()
    (folder / "config.json").write_text("{}", encoding="utf-8")
    context = ImportContext(tmp_path)
    beside = HubModel({"path": str(folder / "config.json")})
    assert hub_model("my-model", "x", context) == hub_model("someone/my-model", "x", context) == beside
    assert hub_model("NousResearch/Meta-Llama-3-70B-Instruct", "x", context) == HubModel("llama3-70b")
    assert "model" not in _import({**AXOLOTL, "base_model": "a/b"}, None, 8, "model.path").mapping


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("meta-llama/Llama-3.2-1B-Instruct", 1_235_814_400),
        ("meta-llama/Llama-3.2-3B", 3_212_749_824),
        ("TinyLlama/TinyLlama_v1.1", 1_100_048_384),
        ("openlm-research/open_llama_3b_v2", 3_426_473_600),
        ("Qwen/Qwen2.5-0.5B", 494_032_768),
        ("Qwen/Qwen2.5-1.5B-Instruct", 1_543_714_304),
        ("Qwen/Qwen2.5-3B", 3_085_938_688),
        ("Qwen/Qwen2.5-14B", 14_770_033_664),
        ("Qwen/Qwen2.5-32B-Instruct", 32_763_876_352),
        ("Qwen/Qwen3-0.6B", 596_049_920),
        ("Qwen/Qwen3-1.7B", 1_720_574_976),
        ("Qwen/Qwen3-4B-Instruct-2507", 4_022_468_096),
        ("Qwen/Qwen3-14B", 14_768_307_200),
        ("Qwen/Qwen3-32B", 32_762_123_264),
        ("mistralai/Mixtral-8x7B-v0.1", 46_702_792_704),
        ("Qwen/Qwen2.5-7B-Instruct", 7_615_616_512),
    ],
)
def test_names_of_the_hub_have_their_published_counts(name: str, count: int) -> None:
    section = hub_model(name, "x", ImportContext()).section
    model = read_model(ModelConfig.model_validate(section), Path(), 1, ReadCache())
    assert parameter_count(model) == count


@pytest.mark.parametrize(
    ("name", "preset"),
    [
        ("unsloth/Llama-3.2-1B-Instruct-bnb-4bit", "llama3.2-1b"),
        ("NousResearch/Hermes-3-Llama-3.1-8B", "llama3-8b"),
        ("huggyllama/llama-7b", "llama2-7b"),
        ("deepseek-ai/DeepSeek-R1-Distill-Qwen-14B", "qwen2.5-14b"),
        ("mistralai/Mistral-Small-24B-Instruct-2501", "mistral-small-24b"),
        ("Qwen/Qwen3-30B-A3B-Instruct-2507", "qwen3-30b-a3b"),
        ("Qwen/Qwen2-0.5B", "qwen2.5-0.5b"),
        ("allenai/OLMo-2-1124-13B-Instruct", "olmo2-13b"),
        ("microsoft/phi-4-reasoning-plus", None),
        ("google/gemma-3-27b-it", None),  # of text_models
        ("meta-llama/Llama-3.2-11B-Vision-Instruct", None),
        ("mistralai/Mistral-7B-v0.2", None),
        ("/hub/models--meta-llama--Meta-Llama-3.1-405B/snapshots/222de096", "llama3-405b"),
        ("open-r1/Qwen2.5-Math-7B-RoPE-300k", "qwen2.5-7b"),
        ("a" * 100_000, None),
    ],
)
def test_names_of_releases_with_equal_layers_are_one_model(name: str, preset: str | None) -> None:
    assert find_preset(name, "names") == preset


def test_each_preset_of_the_table_is_there() -> None:
    """A form's first alternatives in the places of its groups make a name, which must be a preset's."""
    table = yaml.safe_load(Path(hub_models.__file__).with_name("hub_models.yaml").read_text(encoding="utf-8"))
    presets = all_presets()
    for forms in (table["names"], table["text_models"]):
        for form, preset in forms.items():
            sizes = [group.split("|") for group in re.findall(r"\(((?:[\w.\\-]+\|)+[\w.\\-]+)\)", form)] or [[""]]
            names = {re.sub(r"\{\d\}", size.replace("\\", ""), preset) for size in sizes[-1]}
            assert names <= set(presets), form


def test_of_multimodal_models_the_text_model_is_read_and_said() -> None:
    result = _import({**AXOLOTL, "base_model": "Qwen/Qwen2.5-VL-7B-Instruct"})
    assert result.mapping["model"] == "qwen2.5-7b"
    assert any("without the encoder of images" in remark for remark in result.assumptions)


@pytest.mark.parametrize(
    ("name", "optimizer"),
    [
        ("adamw_bnb_8bit", "adam8bit"), ("paged_adamw_8bit", "adam8bit"), ("adamw_8bit", "adam8bit"),
        ("lion_32bit", "lion"), ("adafactor", "adafactor"), ("sgd", "sgd"), ("muon", "muon"),
        ("paged_adamw_32bit", None), ("adamw_torch", None),
    ],
)  # fmt: skip
def test_optimizers_are_those_of_the_scenario(name: str, optimizer: str | None) -> None:
    training = _import({**AXOLOTL, "optimizer": name}).mapping["training"]
    assert training.get("optimizer") == optimizer


def test_frozen_weights_of_eight_bits_take_a_byte_each() -> None:
    result = _import({**AXOLOTL, "adapter": "lora", "lora_r": 8, "load_in_8bit": True})
    assert result.mapping["training"]["lora"]["base"] == "int8"
    eight, four, none = (
        check(
            Scenario.from_mapping(
                {
                    **result.mapping,
                    "training": {**result.mapping["training"], "lora": {"rank": 8, "targets": "all", "base": base}},
                },
                default_name="x",
            )
        ).peak_memory_bytes
        for base in ("int8", "nf4", "none")
    )
    assert four < eight < none


def test_fp8_is_the_recipe_of_the_program() -> None:
    axolotl = _import({**AXOLOTL, "fp8": True}).mapping["training"]["precision"]
    factory = _import({**FACTORY, "fp8": True}).mapping["training"]["precision"]
    assert (axolotl, factory) == ({"compute": "fp8-tensorwise"}, {"compute": "fp8-rowwise"})


def test_axolotl_s_sequences_are_512_tokens_by_default() -> None:
    assert _import({**AXOLOTL, "sequence_len": None}).mapping["training"]["sequence"] == 512


@pytest.mark.parametrize("section", ["fsdp.json", 2, ["full_shard"]])
def test_an_fsdp_section_that_is_no_mapping_is_refused(section: object) -> None:
    with pytest.raises(InputError, match=r"fsdp_config: .* is no mapping; write what it holds"):
        _import({**ARGUMENTS, "fsdp": "full_shard", "fsdp_config": section})
