"""Import of torchtitan job files, in the form of its examples."""

from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

from clustersim import simulate
from clustersim.common.errors import InputError
from clustersim.interop.model_equivalence import models_equivalent
from clustersim.interop.torchtitan_flavors import FLAVORS, flavor_model, matching_flavor
from clustersim.interop.torchtitan_import import import_torchtitan
from clustersim.interop.torchtitan_pipeline import torchtitan_layer_split
from clustersim.model.presets import load_preset
from clustersim.model.training import FullRecompute
from clustersim.model.transformer import parameter_count
from clustersim.parallel.data_parallel_strategy import DdpStrategy, FullyShard
from clustersim.scenario import Scenario
from clustersim.validation.case_scenario import scenario_mapping
from clustersim.validation.cases import read_cases
from tests.interop.repository_examples import TORCHTITAN
from tests.sentences import parts

STEPS = Path(str(files("clustersim.validation") / "published" / "steps.csv"))
NO_EARLY_STOP = {"early_stop": False}
MODEL = '[model]\nname = "llama3"\nflavor = "8B"\n'


def import_mapping(text: str, gpus: int | None = None) -> dict[str, Any]:
    return dict(import_torchtitan(text, "job", gpu_count=gpus).mapping)


def import_scenario(text: str, gpus: int | None = None) -> Scenario:
    return Scenario.from_mapping(import_mapping(text, gpus))


def parallelism_section(keys: str, model: str = MODEL) -> str:
    return f"{model}[parallelism]\n{keys}\n"


@pytest.mark.parametrize("name", TORCHTITAN)
def test_the_examples_are_read_completely(name: str) -> None:
    text, gpus, preset_name = TORCHTITAN[name]
    import_result = import_torchtitan(text, name, gpu_count=gpus)
    imported = Scenario.from_mapping(import_result.mapping)
    assert imported.layout.world_size == gpus
    assert import_result.ignored_arguments == ()
    if preset_name is not None:
        assert parameter_count(imported.model) == parameter_count(load_preset(preset_name))


def test_llama_3_405b_is_fsdp_16_with_tp_8_in_fp8() -> None:
    text, gpus, _ = TORCHTITAN["llama3_405b"]
    imported = import_scenario(text, gpus)
    layout, training = imported.layout, imported.training
    assert (layout.tp, layout.dp, layout.pp, layout.sequence_parallel, layout.tp_comm_overlap) == (8, 16, 1, True, True)
    assert layout.data == FullyShard(copies=True)
    assert (training.global_batch, training.microbatch) == (32, 2)
    assert (training.recompute, training.is_fully_fused, training.early_stop) == (FullRecompute(), True, True)
    assert imported.to_mapping()["training"]["precision"] == {"compute": "fp8-tensorwise", "gathered": "fp8"}


def test_a_published_run_equals_its_job_file() -> None:
    """Llama 3 8B on 8 H100, FSDP2 and compiled layers, of December 2024: before AdamW was fused, attention cuDNN's.

    Its loss was not compiled; recomputation of compiled layers stops early in any case. An imported job is of the
    newest version, which differs in how experts run, of which there are none.
    """
    job = parallelism_section("data_parallel_shard_degree = 8") + "[training]\nlocal_batch_size = 2\nseq_len = 8192\n"
    job += "[activation_checkpoint]\nselective_ac_option = 'op'\n[compile]\nenable = true\ncomponents = ['model']\n"
    job += "[optimizer]\nimplementation = 'foreach'\n"
    case = next(
        read_case
        for read_case in read_cases(STEPS, ["case_id"])
        if read_case.text("case_id") == "titan-T1-fsdp+compile"
    )
    from_job, from_case = import_scenario(job), Scenario.from_mapping(scenario_mapping(case))
    assert models_equivalent(from_job.model, from_case.model)
    assert replace(from_job.layout, async_tensor_model_parallel_allreduce=False) == from_case.layout
    of_case = {"attention": from_case.training.attention, "overheads": from_case.training.overheads}
    assert replace(from_job.training, **of_case) == from_case.training


def test_an_imported_job_can_be_simulated() -> None:
    text, gpus, _ = TORCHTITAN["debug_model"]
    assert simulate(import_scenario(text, gpus)).step_time > 0.0


def test_defaults_are_torchtitan_s() -> None:
    """A debug model, 8 sequences of 2,048 tokens on each rank, every second layer recomputed, PyTorch's loss."""
    mapping = import_mapping("[model]\nname = 'llama3'", 2)
    assert mapping["model"]["hidden"] == 256
    assert mapping["layout"] == {"deallocate_pipeline_outputs": False, "data": "fsdp"}
    assert mapping["framework"] == "torchtitan"
    assert mapping["training"] == {
        "sequence": 2048, "global_batch": 16, "microbatch": 8, "precision": {"compute": "bf16"},
        "recompute": {"layers": 3, "early_stop": False}, "loss": "torch", "fused": ["optimizer"],
    }  # fmt: skip


@pytest.mark.parametrize(
    ("keys", "gpus", "data"),
    [
        ("", 8, FullyShard(copies=True)),
        ("data_parallel_replicate_degree = 4", 8, FullyShard(copies=True, shard=2)),
        ("data_parallel_replicate_degree = 2\ncontext_parallel_degree = 2", 16, FullyShard(copies=True, shard=8)),
        ("data_parallel_replicate_degree = 8", 8, DdpStrategy(bucket=100 * 2**20)),
        ('fsdp_reshard_after_forward = "never"', 8, FullyShard(copies=True, reshard_after_forward=False)),
        ('fsdp_reshard_after_forward = "always"', 8, FullyShard(copies=True, reshard_after_forward=True)),
    ],
)
def test_replicate_and_shard_degrees_select_the_strategy(keys: str, gpus: int, data: object) -> None:
    """Weights are sharded over `shard` times the context-parallel ranks."""
    assert import_scenario(parallelism_section(keys), gpus).layout.data == data


def test_fixed_degrees_set_the_number_of_gpus() -> None:
    imported = import_scenario(parallelism_section("data_parallel_shard_degree = 4\ntensor_parallel_degree = 8"))
    assert (imported.cluster.gpu_count, imported.layout.dp) == (32, 4)


@pytest.mark.parametrize(
    ("name", "ours", "chunks"),
    [
        ("1F1B", "1f1b", 1),
        ("GPipe", "gpipe", 1),
        ("Interleaved1F1B", "interleaved", 2),
        ("LoopedBFS", "bfs", 2),
        ("ZBVZeroBubble", "zb-v", 2),
        ("DualPipeV", "dualpipev", 2),
    ],
)
def test_schedules_have_their_stages(name: str, ours: str, chunks: int) -> None:
    text = parallelism_section(f'pipeline_parallel_degree = 4\npipeline_parallel_schedule = "{name}"')
    imported = import_scenario(text + "[training]\nlocal_batch_size = 16", 8)
    assert imported.schedule.name == ours
    assert imported.placement.max_chunks == chunks
    assert (imported.microbatch_count, imported.training.microbatch) == (16, 1)


@pytest.mark.parametrize(("layers", "stages"), [(32, 4), (126, 16), (80, 16), (61, 8), (6, 2), (3, 5)])
def test_layers_are_split_evenly_with_embedding_and_head(layers: int, stages: int) -> None:
    """Counting embedding and head as one layer each, stages differ by at most one, the larger ones first."""
    counts = torchtitan_layer_split(layers, stages)
    assert counts is not None
    slots = [counts[0] + 1, *counts[1:-1], counts[-1] + 1]
    assert sum(counts) == layers
    assert slots == sorted(slots, reverse=True)
    assert slots[0] - slots[-1] in (0, 1)


def test_layers_per_stage_and_module_lists_are_equivalent() -> None:
    keys = "pipeline_parallel_degree = 2\npipeline_parallel_schedule = 'Interleaved1F1B'\n"
    debug = "[model]\nflavor = 'debugmodel'\n"
    by_layers = import_mapping(parallelism_section(f"{keys}pipeline_parallel_layers_per_stage = 2", debug), 2)
    modules = '[["tok_embeddings", "layers.0"], ["layers.1", "layers.2"], ["layers.3", "layers.4"], '
    modules += '["layers.5", "norm", "output"]]'
    by_modules = import_mapping(parallelism_section(f"{keys}module_fqns_per_model_part = {modules}", debug), 2)
    assert by_layers["layout"]["layers_per_stage"] == [1, 2, 2, 1] == by_modules["layout"]["layers_per_stage"]
    assert by_layers["schedule"] == {"interleaved": {"chunks": 2}} == by_modules["schedule"]


def test_experts_use_tp_without_expert_parallelism() -> None:
    moe_model = '[model]\nname = "llama4"\nflavor = "debugmodel"\n'
    keys = "tensor_parallel_degree = 2\nexpert_tensor_parallel_degree = 1\n"
    assert import_scenario(parallelism_section(keys, moe_model), 8).layout.effective_etp == 2
    folded = import_scenario(parallelism_section(f"{keys}expert_parallel_degree = 4", moe_model), 8).layout
    assert (folded.ep, folded.effective_etp) == (4, 1)


@pytest.mark.parametrize(
    ("sections", "key", "value"),
    [
        ("[activation_checkpoint]\nmode = 'none'", "recompute", "none"),
        ("[activation_checkpoint]\nselective_ac_option = 'op'", "recompute", {**NO_EARLY_STOP, "mode": "selective_op"}),
        ("[activation_checkpoint]\nselective_ac_option = '4'", "recompute", {**NO_EARLY_STOP, "layers": 8}),
        ("[activation_checkpoint]\nselective_ac_option = '1'", "recompute", {**NO_EARLY_STOP, "mode": "full"}),
        ("[compile]\nenable = true", "fused", ["norm", "rotary", "activation", "residual", "softmax", "optimizer"]),
        ("[compile]\nenable = true", "loss", "compiled"),
        ("[compile]\nenable = true\ncomponents = ['loss']", "fused", ["optimizer"]),
        ("[compile]\nenable = true\ncomponents = ['loss']", "loss", "compiled"),
        ("[compile]\nenable = true\ncomponents = ['model']", "loss", "torch"),
        ("[optimizer]\nimplementation = 'foreach'", "fused", []),
        ("[training]\ndtype = 'bfloat16'", "precision", {"compute": "bf16", "master": "none", "moments": "bf16"}),
        ("[training]\nmixed_precision_param = 'float32'", "precision", {"compute": "fp32"}),
        ("[training]\nglobal_batch_size = 64", "global_batch", 64),
        ("[training]\nenable_cpu_offload = true", "offload", {"parameters": True}),
    ],
)  # fmt: skip
def test_keys_of_training(sections: str, key: str, value: object) -> None:
    mapping = import_mapping(f"{MODEL}{sections}", 4)
    assert mapping["training"][key] == value
    Scenario.from_mapping(mapping)


@pytest.mark.parametrize(
    ("converter", "section", "precision"),
    [
        ("quantize.linear.float8", "quantize.linear.float8", {"compute": "fp8-tensorwise"}),
        ("float8", "quantize.linear.float8", {"compute": "fp8-tensorwise"}),
        ("quantize.linear.mx", "quantize.linear.mx", {"compute": "mxfp8-torchao"}),
    ],
)
def test_converters_set_the_precision(converter: str, section: str, precision: object) -> None:
    sections = f"[{section}]\nfilter_fqns = ['output']\n"
    text = MODEL + f"converters = ['{converter}']\n"
    assert import_mapping(text + sections, 4)["training"]["precision"] == precision
    assert import_mapping(MODEL + sections, 4)["training"]["precision"] == {"compute": "bf16"}


@pytest.mark.parametrize(("method", "kind"), [("allgather", "all_gather"), ("alltoall", "ring")])
def test_rotation_of_keys_is_a_kind_of_context_parallelism(method: str, kind: str) -> None:
    keys = f"[parallelism]\ncontext_parallel_degree = 2\ncontext_parallel_rotate_method = '{method}'\n"
    assert Scenario.from_mapping(import_mapping(MODEL + keys, 4)).layout.cp_kind.value == kind


def test_an_optimizer_in_backward_has_no_gradients_to_clip() -> None:
    training = import_mapping(MODEL + "[optimizer]\nearly_step_in_backward = true\n", 4)["training"]
    assert (training["optimizer_in_backward"], training["gradient_clipping"]) == (True, False)


def test_unsupported_keys_are_named_where_they_have_an_effect() -> None:
    text = MODEL + "[optimizer]\nimplementation = 'for-loop'\n[fault_tolerance]\nenable = true\n[parallelism]\n"
    text += "context_parallel_load_balancer = 'ptrr'\n"
    always_named = ("[fault_tolerance]",)
    assert import_torchtitan(text, "job", gpu_count=4).ignored_arguments == always_named
    unsupported = import_torchtitan(f"{text}context_parallel_degree = 2", "job", gpu_count=4).ignored_arguments
    assert set(unsupported) == {*always_named, "[parallelism] context_parallel_load_balancer"}


@pytest.mark.parametrize("flavor", FLAVORS, ids=lambda flavor: f"{flavor.name} {flavor.flavor}")
def test_a_flavor_is_found_by_its_model(flavor: Any) -> None:
    """And by its attention, where models are the same with masks between documents and without."""
    matching = matching_flavor(flavor_model(flavor), flavor.attention)
    assert matching is not None
    assert (matching.name, matching.attention) == (flavor.name, flavor.attention)
    assert flavor_model(matching).stack == flavor_model(flavor).stack


@pytest.mark.parametrize(
    ("name", "flavor", "billions"),
    [
        ("llama3", "8B", 8.03), ("llama3", "405B", 405.9), ("llama4", "17bx16e", 107.8), ("llama4", "17bx128e", 400.7),
        ("deepseek_v3", "16B", 15.7), ("deepseek_v3", "236B", 235.7), ("deepseek_v3", "671B", 671.0),
        ("qwen3", "0.6B", 0.6), ("qwen3", "14B", 14.8), ("qwen3", "32B", 32.8), ("qwen3", "30B-A3B", 30.5),
        ("gpt_oss", "20b", 20.9), ("gpt_oss", "120b", 116.8),
    ],
)  # fmt: skip
def test_flavors_have_the_published_parameter_counts(name: str, flavor: str, billions: float) -> None:
    """Llama 4 without its vision part (109 B and 400 B in all)."""
    model = next(
        flavor_model(model_flavor)
        for model_flavor in FLAVORS
        if (model_flavor.name, model_flavor.flavor) == (name, flavor)
    )
    assert parameter_count(model) / 1e9 == pytest.approx(billions, rel=0.007)


REJECTED = [
    ("", "has no sections of a torchtitan job"),
    ("[model", "is not TOML"),
    ("[[model]]\nname = 'llama3'", "model ... section ... [model]"),
    ("[compile]\ncomponents = 'model'", "'model' is not a list of words"),
    ("seq_len = 8", "seq_len stands in no section"),
    ("[paralelism]\n", "did you mean parallelism?"),
    ("[parallelism]\ntensor_parallel_degre = 2", "did you mean tensor_parallel_degree?"),
    ("[parallelism]\ntensor_parallel_degree = '2'", "[parallelism] tensor_parallel_degree: '2' ... whole number"),
    ("[parallelism]\ntensor_parallel_degree = true", "true is not a whole number"),
    ("[parallelism]\ntensor_parallel_degree = 0", "0 is less than 1"),
    ("[parallelism]\nenable_async_tensor_parallel = 1", "1 is not true or false"),
    ("[parallelism]\nenable_async_tensor_parallel = true", "needs [compile] enable = true"),
    ("[parallelism]\npipeline_parallel_schedule = '1f1b'", "did you mean 1F1B?"),
    ("[parallelism]\npipeline_parallel_schedule = 'InterleavedZeroBubble'", "InterleavedZeroBubble"),
    ("[parallelism]\ntensor_parallel_degree = 3", "8 GPUs ... multiple of replicate 1 x cp 1 x tp 3 x pp 1 = 3"),
    ("[parallelism]\ndata_parallel_shard_degree = 3", "8 GPUs, but shard 3 x replicate 1"),
    (
        "[parallelism]\ndata_parallel_replicate_degree = 4\ntensor_parallel_degree = 2",
        "data_parallel_shard_degree = -1 with other parallelism",
    ),
    (
        "[parallelism]\npipeline_parallel_degree = 2\npipeline_parallel_layers_per_stage = 9",
        "1F1B does not run 2 stages on each pipeline rank",
    ),
    (
        "[parallelism]\npipeline_parallel_degree = 8\npipeline_parallel_layers_per_stage = 3",
        "3 makes 12 stages ... multiple of 8 pipeline ranks",
    ),
    (
        "[parallelism]\npipeline_parallel_degree = 8\nmodule_fqns_per_model_part = [['layers.1']]",
        "is not tok_embeddings",
    ),
    ("[training]\nglobal_batch_size = 12", "12 is no multiple of 8 sequences x 8 replicas"),
    (
        "[parallelism]\npipeline_parallel_degree = 2\n[training]\nglobal_batch_size = 64",
        "write local_batch_size = 16",
    ),
    ("[training]\nmixed_precision_param = 'float16'", "'float16' is not known"),
    ("[activation_checkpoint]\nmode = 'memory_budget'", "write selective"),
    ("[activation_checkpoint]\nselective_ac_option = 2", "2 is not a text in quotes"),
    ("[activation_checkpoint]\nselective_ac_option = 'two'", 'neither "op" nor such as "2"'),
    ("[optimizer]\nname = 'Muon'", "'Muon' is not known"),
    ("[model]\nname = 'lama3'", "did you mean llama3?"),
    ("[model]\nflavor = '8b_fex'", "8B_flex"),
    ("[model]\nconverters = ['fp8']", "is not known"),
    ("[model]\nconverters = ['float8']", 'other layers than ["output"]'),
    (
        "[model]\nconverters = ['float8']\n[quantize.linear.float8]\nfilter_fqns = ['output']\n"
        "recipe_name = 'rowwise'\nenable_fsdp_float8_all_gather = true",
        "goes without recipe_name",
    ),
    ("[model]\nname = 'qwen3'\nflavor = '8B'\n[parallelism]\npipeline_parallel_degree = 2", "no pipeline of qwen3"),
]


@pytest.mark.parametrize(("text", "message"), REJECTED)
def test_unsupported_jobs_are_rejected(text: str, message: str) -> None:
    job = text if "[model" in text or not text.startswith("[") else MODEL + text
    with pytest.raises(InputError, match=parts(message)) as refused:
        import_torchtitan(job, "job", gpu_count=8)
    assert str(refused.value).startswith("job: ")


def test_an_open_number_of_gpus_must_be_given() -> None:
    with pytest.raises(InputError, match=r"--gpus.*multiple of replicate 1 x cp 1 x tp 2 x pp 1 = 2"):
        import_torchtitan(parallelism_section("tensor_parallel_degree = 2"), "job")
