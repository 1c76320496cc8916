"""Experiments of AMD's Primus: what its own files set, its own keys, and experiments that are written."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from clustersim.common.errors import InputError
from clustersim.interop.detect import detect_program
from clustersim.interop.import_result import ImportContext, ImportResult
from clustersim.interop.megatron_import import import_megatron
from clustersim.interop.primus_export import primus_experiment
from clustersim.interop.primus_yaml import common_defaults
from clustersim.interop.registry import IMPORTERS
from clustersim.scenario import Scenario
from tests.sentences import parts

LINE = "--num-layers 8 --hidden-size 512 --num-attention-heads 8 --seq-length 256 --micro-batch-size 2 "
LINE += "--global-batch-size 64 --bf16 --swiglu --ffn-hidden-size 1536 --normalization RMSNorm --disable-bias-linear "
LINE += "--position-embedding-type rope --untie-embeddings-and-output-weights --hidden-dropout 0.0 "
LINE += "--attention-dropout 0.0 --vocab-size 32000 --use-distributed-optimizer "
MODEL = """
extends: [language_model.yaml]
num_layers: 8
hidden_size: 512
num_attention_heads: 8
ffn_hidden_size: 1536
normalization: RMSNorm
position_embedding_type: rope
hidden_dropout: 0.0
attention_dropout: 0.0
vocab_size: 32000
"""
LANGUAGE_MODEL = """
num_layers: 24
untie_embeddings_and_output_weights: true
add_bias_linear: false
swiglu: true
sequence_parallel: true
tp_comm_overlap_ag: true
num_experts: null
"""
MODULE = """
extends: [../module_base.yaml]
bf16: true
use_distributed_optimizer: true
micro_batch_size: 2
global_batch_size: 16
seq_length: 1024
img_h: 224
enable_zero_bubble: true
main_grads_dtype: fp32
"""


def experiment(framework: str = "megatron", **overrides: Any) -> str:
    trainer = {"framework": framework, "config": "pre_trainer.yaml", "model": "small.yaml", "overrides": overrides}
    return yaml.safe_dump({"work_group": "amd", "modules": {"pre_trainer": trainer}})


STEP: Mapping[str, Any] = {"global_batch_size": 64, "seq_length": 256}


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A folder of experiments inside a checkout whose module's file is not there."""
    models = tmp_path / "primus/configs/models/megatron"
    models.mkdir(parents=True)
    (models / "small.yaml").write_text(MODEL)
    (models / "language_model.yaml").write_text(LANGUAGE_MODEL)
    folder = tmp_path / "examples"
    folder.mkdir()
    return folder


def imported(text: str, folder: Path, gpus: int = 8, **definitions: str) -> ImportResult:
    return IMPORTERS["primus"](text, "run.yaml", "dgx-h100", gpus, ImportContext(folder, definitions))


def sections(mapping: Mapping[str, Any]) -> tuple[object, ...]:
    scenario = Scenario.from_mapping({**mapping, "model": {**mapping["model"], "name": "same"}})
    return scenario.model, scenario.layout, scenario.training


def test_what_primus_files_set_counts(checkout: Path) -> None:
    """Nothing in the experiment says BF16, the distributed optimizer or the microbatch: Primus' module does."""
    assert sections(imported(experiment(**STEP), checkout).mapping) == sections(
        import_megatron(LINE, "run", gpu_count=8).mapping
    )


def test_the_module_s_file_of_the_checkout_is_read(checkout: Path) -> None:
    """Its values count where the experiment says nothing, and none of them is reported as passed over."""
    modules = checkout.parent / "primus/configs/modules/megatron"
    modules.mkdir(parents=True)
    (modules.parent / "module_base.yaml").write_text("trainable: false\nfile_sink_level: DEBUG\n")
    (modules / "pre_trainer.yaml").write_text(MODULE.replace("micro_batch_size: 2", "micro_batch_size: 4"))
    result = imported(experiment(**STEP, my_own_key=3), checkout)
    assert result.mapping["training"]["microbatch"] == 4
    assert result.mapping["training"]["precision"] == {"compute": "bf16"}
    assert result.ignored_arguments == ("--my-own-key",)


def test_overrides_turn_off_what_primus_files_turn_on(checkout: Path) -> None:
    text = experiment(**STEP, use_distributed_optimizer=False, bf16=False, fp16=True, add_bias_linear=True)
    mapping = imported(text, checkout).mapping
    assert mapping["layout"]["data"] == {"ddp": {"bucket": "megatron", "overlap": False}}
    assert mapping["training"]["precision"]["compute"] == "fp16"
    assert mapping["model"]["linear_bias"] is True


@pytest.mark.parametrize(("written", "is_on"), [(1, True), (0, False), ("${SP:1}", True), (True, True)])
def test_switches_may_be_numbers(written: object, is_on: bool, checkout: Path) -> None:
    text = experiment(**STEP, tensor_model_parallel_size=2, sequence_parallel=written)
    assert ("sequence_parallel" in imported(text, checkout).mapping["layout"]) is is_on


def test_turbo_s_experts_are_dispatched_by_deepep(checkout: Path) -> None:
    moe = {"num_experts": 8, "moe_ffn_hidden_size": 512, "expert_model_parallel_size": 8}
    on = {**STEP, **moe, "enable_primus_turbo": True, "use_turbo_deepep": True, "turbo_deepep_num_cu": 64}
    result = imported(experiment(**on), checkout)
    assert (result.mapping["layout"]["dispatcher"], result.mapping["layout"]["dispatcher_num_sms"]) == ("deepep", 64)
    assert any("Primus-Turbo" in sentence for sentence in result.assumptions)
    off = imported(experiment(**{**on, "enable_primus_turbo": False}), checkout)
    assert off.mapping["layout"]["dispatcher"] == "allgather"
    staged = imported(experiment(**{**on, "use_turbo_deepep": False, "turbo_sync_free_moe_stage": 2}), checkout)
    assert staged.mapping["layout"]["dispatcher"] == "deepep"
    assert staged.mapping["training"]["overheads"] == {"permute_unfused": False, "router_unfused": False}


def test_virtual_stages_that_megatron_computes_have_no_effect(checkout: Path) -> None:
    text = experiment(**STEP, pipeline_model_parallel_size=2, virtual_pipeline_model_parallel_size=2)
    result = imported(text, checkout)
    assert "schedule" not in result.mapping
    assert any("num_virtual_stages_per_pipeline_rank" in sentence for sentence in result.assumptions)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"lfm_layer_types": ["conv"]}, "layers of Primus' own are not known"),
        ({"experimental_attention_variant": "gated_delta_net"}, "gated_delta_net: layers of Primus' own"),
        ({"model_type": "flux_schnell"}, "'flux_schnell' is no decoder of text"),
        ({"lora": {"enabled": True, "dim": 16}}, "lora: leave it out, and write training.lora"),
        ({"patch_zero_bubble": True, "pipeline_model_parallel_size": 2}, "write schedule: zb-1p"),
        (
            {"patch_primus_pipeline": True, "pp_algorithm": "v-half", "pipeline_model_parallel_size": 2},
            "'v-half' is not read",
        ),
        ({"recompute_layer_ids": "0,3"}, "recompute_layer_ids: its layers are not read"),
        ({"data_parallel_replicate_degree": 2}, "write layout.data: hsdp"),
    ],
)
def test_another_step_is_refused(overrides: Mapping[str, Any], message: str, checkout: Path) -> None:
    with pytest.raises(InputError, match=parts(message)):
        imported(experiment(**STEP, **overrides), checkout)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("model: small.yaml", "model: other.yaml", "other.yaml is not here ... Primus' checkout"),
        ("config: pre_trainer.yaml", "config: sft.yaml", "sft.yaml is not here"),
        ("config: pre_trainer.yaml", "a: b", "config: is missing, as Primus would say, too"),
        ("framework: megatron", "framework: maxtext", "'maxtext' is not read"),
        ("pre_trainer:", "post_trainer:", "modules: post_trainer: nothing but pre_trainer is read"),
        ("model: small.yaml", "model: small.yaml\n    trainer_class: Flux", "Flux: its step is not known"),
    ],
)
def test_files_that_are_not_here_are_named(old: str, new: str, message: str, checkout: Path) -> None:
    with pytest.raises(InputError, match=parts(message)):
        imported(experiment(**STEP).replace(old, new), checkout)


def test_an_experiment_is_written_in_primus_words() -> None:
    """Primus passes over keys that are no argument's name in Python, and takes language_model.yaml's values."""
    flags = LINE.replace("--swiglu", "").replace("--bf16", "--fp8-format hybrid --bf16")
    scenario = Scenario.from_mapping(import_megatron(flags, "run", gpu_count=8).mapping)
    trainer = yaml.safe_load(primus_experiment(scenario))["modules"]["pre_trainer"]
    overrides = trainer["overrides"]
    assert (trainer["config"], trainer["model"]) == ("pre_trainer.yaml", "language_model.yaml")
    assert overrides["add_bias_linear"] is False
    assert overrides["fp8"] == "hybrid"
    assert overrides["swiglu"] is False
    assert overrides["sequence_parallel"] is False
    assert not {"disable_bias_linear", "fp8_format"} & {*overrides}
    assert {name for name, value in common_defaults().items() if isinstance(value, bool)} <= {*overrides}


TITAN_MODEL = "model: {name: llama3, flavor: 8B, converters: [primus_turbo]}\n"
TITAN_TOML = """
[model]
name = "llama3"
flavor = "8B"
[training]
local_batch_size = 4
seq_len = 8192
[activation_checkpoint]
mode = "full"
[parallelism]
tensor_parallel_degree = 2
[compile]
enable = true
"""
TITAN_STEP: Mapping[str, Any] = {
    "training": {"local_batch_size": "${MBS:4}", "seq_len": 8192, "mock_data": True},
    "parallelism": {"tensor_parallel_degree": 2},
    "primus_turbo": {"enable_primus_turbo": True},
}


def titan(folder: Path, **overrides: Any) -> ImportResult:
    models = folder / "primus/configs/models/torchtitan"
    models.mkdir(parents=True)
    (models / "small.yaml").write_text(TITAN_MODEL, encoding="utf-8")
    text = experiment("torchtitan", **TITAN_STEP, **overrides)
    assert detect_program(text, "run.yaml") == "primus"
    return imported(text, folder / "examples", 16)


def test_primus_on_torchtitan_is_torchtitan_s_job(tmp_path: Path) -> None:
    """With layers that are compiled, as Primus' module says."""
    result = titan(tmp_path, activation_checkpoint={"mode": "full"})
    assert result.mapping == IMPORTERS["torchtitan"](TITAN_TOML, "job.toml", "dgx-h100", 16, ImportContext()).mapping
    assert result.ignored_arguments == ("[training] mock_data",)
    assert any("Primus-Turbo" in remark for remark in result.assumptions)


def test_primus_recomputes_nothing_unless_told(tmp_path: Path) -> None:
    """Where torchtitan recomputes every second layer."""
    assert titan(tmp_path).mapping["training"]["recompute"] == "none"
