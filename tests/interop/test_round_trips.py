"""Round trips of export and import: arguments are unchanged; a scenario comes back except for what is remarked."""

import shlex
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given
from hypothesis import strategies as st

from clustersim.common.errors import InputError
from clustersim.interop.export import ExportResult, differing_keys, export_scenario, stated_kernels
from clustersim.interop.import_result import ImportContext
from clustersim.interop.model_equivalence import models_equivalent
from clustersim.interop.registry import EXPORTERS, IMPORTERS
from clustersim.interop.torchtitan_flavors import FLAVORS
from clustersim.scenario import Scenario
from tests.conftest import examples
from tests.interop.repository_examples import MEGATRON, TORCHTITAN
from tests.interop.test_megatron import MLA, SMALL
from tests.sentences import parts
from tests.strategies import mappings


def import_text(program: str, text: str, gpus: int) -> Scenario:
    imported = IMPORTERS[program](text, "run", "dgx-h100", gpus, ImportContext())
    return Scenario.from_mapping(imported.mapping, default_name="run")


def export_as(program: str, scenario: Scenario) -> ExportResult:
    return export_scenario(scenario, EXPORTERS[program])


def round_trip(program: str, scenario: Scenario) -> Scenario:
    """A scenario by way of its arguments, on its own cluster."""
    reimported = IMPORTERS[program](
        export_as(program, scenario).text, scenario.name, "dgx-h100", scenario.layout.world_size, ImportContext()
    )
    mapping = {key: value for key, value in scenario.to_mapping().items() if key not in reimported.mapping}
    return Scenario.from_mapping({**mapping, **reimported.mapping, "cluster": scenario.to_mapping()["cluster"]})


def assert_round_trips(program: str, scenario: Scenario) -> None:
    """Export and import lose and change nothing."""
    export_result = export_as(program, scenario)
    assert export_result.differences == ()
    reimported = import_text(program, export_result.text, scenario.layout.world_size)
    assert models_equivalent(reimported.model, scenario.model)
    assert list(differing_keys(scenario, reimported)) == []
    assert EXPORTERS[program].render(reimported) == EXPORTERS[program].render(scenario)


@pytest.mark.parametrize("name", MEGATRON)
def test_megatron_s_examples_round_trip(name: str) -> None:
    assert_round_trips("megatron", import_text("megatron", *MEGATRON[name]))


@pytest.mark.parametrize("name", TORCHTITAN)
def test_torchtitan_s_examples_round_trip(name: str) -> None:
    text, gpus, _ = TORCHTITAN[name]
    assert_round_trips("torchtitan", import_text("torchtitan", text, gpus))


MEGATRON_CHOICES = (
    ["", "--overlap-grad-reduce", "--use-distributed-optimizer", "--use-distributed-optimizer --overlap-grad-reduce",
     "--use-distributed-optimizer --num-distributed-optimizer-instances 2", "--use-torch-fsdp2",
     "--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads", "--ddp-bucket-size 4000"],
    ["--bf16", "--fp16", "--fp16 --accumulate-allreduce-grads-in-fp32", "", "--bf16 --grad-reduce-in-bf16",
     "--bf16 --fp8-format hybrid", "--bf16 --fp8-format e4m3 --fp8-recipe tensorwise --fp8-param-gather",
     "--bf16 --fp8-format hybrid --first-last-layers-bf16 --num-layers-at-end-in-bf16 2",
     "--bf16 --use-precision-aware-optimizer --exp-avg-dtype bf16 --exp-avg-sq-dtype bf16"],
    ["", "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
     "--recompute-granularity full --recompute-method block --recompute-num-layers 1", "--recompute-activations",
     "--recompute-granularity selective --recompute-modules mlp core_attn"],
    ["", "--tensor-model-parallel-size 2", "--tensor-model-parallel-size 2 --sequence-parallel --tp-comm-overlap"],
    ["", "--context-parallel-size 2", "--context-parallel-size 2 --cp-comm-type a2a",
     "--context-parallel-size 4 --cp-comm-type a2a+p2p --hierarchical-context-parallel-sizes 2 2"],
    ["", "--optimizer lion", "--optimizer muon --muon-tp-mode distributed --muon-num-ns-steps 6"],
    ["", "--pipeline-model-parallel-size 2",
     "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 2",
     "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 4 --no-overlap-p2p-communication",
     "--pipeline-model-parallel-size 2 --decoder-first-pipeline-num-layers 3",
     "--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout 'Et|ttt|ttt|tL'", "--use-tp-pp-dp-mapping"],
    ["", "--swiglu --normalization RMSNorm --disable-bias-linear", "--swiglu --ffn-hidden-size 320",
     "--position-embedding-type rope --rotary-percent 0.5 --qk-layernorm", "--add-qkv-bias --disable-bias-linear",
     "--position-embedding-type none",
     "--group-query-attention --num-query-groups 2 --kv-channels 32", "--untie-embeddings-and-output-weights",
     "--window-size 31,0", "--window-size 31,0 --window-attn-skip-freq 3 --softmax-type learnable"],
    ["", "--hidden-dropout 0 --attention-dropout 0", "--clip-grad 0", "--cross-entropy-loss-fusion",
     "--cross-entropy-loss-fusion --cross-entropy-fusion-impl linear",
     "--attention-backend unfused", "--optimizer sgd", "--cuda-graph-impl local",
     "--mtp-num-layers 1 --position-embedding-type rope"],
)  # fmt: skip
MOE_CHOICES = (
    ["--moe-token-dispatcher-type alltoall", "", "--moe-token-dispatcher-type flex --moe-enable-deepep"],
    ["", "--cuda-graph-impl transformer_engine --cuda-graph-scope attn", "--expert-model-parallel-size 2",
     "--expert-model-parallel-size 4 --expert-tensor-parallel-size 1"],
    ["", "--moe-layer-freq 2", "--moe-layer-freq [0]*2+[1]*6", "--moe-layer-freq [0,1,1,1]*2",
     "--moe-layer-freq [1]*3+[0]*4+[1]*1"],
    ["", "--moe-shared-expert-intermediate-size 64 --moe-shared-expert-overlap", "--moe-ffn-hidden-size 96",
     "--moe-expert-capacity-factor 1.25 --moe-pad-expert-input-to-capacity",
     "--moe-router-score-function sigmoid --moe-router-enable-expert-bias",
     "--moe-router-num-groups 2 --moe-router-group-topk 1 --moe-router-topk 1"],
)  # fmt: skip


@st.composite
def megatron_arguments(draw: st.DrawFn) -> str:
    chosen = [draw(st.sampled_from(options)) for options in MEGATRON_CHOICES]
    if draw(st.booleans()):
        chosen += ["--num-experts 4 --sequence-parallel", *(draw(st.sampled_from(choices)) for choices in MOE_CHOICES)]
    return f"{SMALL.replace('--bf16', '')} --num-layers 8 --global-batch-size 16 {' '.join(chosen)}"


PROPERTY_SETTINGS = examples(100, suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow])


@PROPERTY_SETTINGS
@given(megatron_arguments())
def test_all_legal_megatron_arguments_round_trip(text: str) -> None:
    """As a launch script and as an experiment of Primus, which has the same arguments."""
    try:
        scenario = import_text("megatron", text, 16)
    except InputError:
        assume(False)
    assert_round_trips("megatron", scenario)
    assert_round_trips("primus", scenario)


def test_mla_round_trips() -> None:
    assert_round_trips("megatron", import_text("megatron", MLA, 64))


TITAN_CHOICES: dict[str, list[str]] = {
    "training": ["", "seq_len = 512", "local_batch_size = 4", "dtype = 'bfloat16'", "mixed_precision_param = 'float32'",
                 "enable_cpu_offload = true", "global_batch_size = 256"],
    "activation_checkpoint": ["", "mode = 'none'", "mode = 'full'\nearly_stop = true", "selective_ac_option = 'op'",
                              "selective_ac_option = '3'"],
    "compile": ["", "enable = true", "enable = true\ncomponents = ['loss']"],
}  # fmt: skip
TITAN_DEGREES = {
    "data_parallel_replicate_degree": [1, 1, 2],
    "tensor_parallel_degree": [1, 2],
    "context_parallel_degree": [1, 2],
    "pipeline_parallel_degree": [1, 2],
    "pipeline_parallel_schedule": ["1F1B", "GPipe", "Interleaved1F1B", "LoopedBFS", "ZBVZeroBubble", "DualPipeV"],
    "pipeline_parallel_microbatch_size": [1, 2],
    "pipeline_parallel_expert_parallel_overlap": [True, False],
    "pipeline_parallel_layers_per_stage": [None, None, 2, 4],
    "fsdp_reshard_after_forward": ["default", "always", "never"],
    "enable_async_tensor_parallel": [False, True],
    "expert_parallel_degree": [1, 2],
    "expert_tensor_parallel_degree": [1, 2],
    "expert_parallel_comm_backend": ["standard", "deepep"],
}


def toml(value: object) -> str:
    return str(value).lower() if isinstance(value, bool | int) else f'"{value}"'


@st.composite
def torchtitan_jobs(draw: st.DrawFn) -> str:
    debug_flavors = [model_flavor for model_flavor in FLAVORS if model_flavor.flavor.startswith("debug")]
    model = draw(st.sampled_from(debug_flavors))
    values_by_key = {key: draw(st.sampled_from(values)) for key, values in TITAN_DEGREES.items()}
    keys = [f"{key} = {toml(value)}" for key, value in values_by_key.items() if value is not None]
    converters = draw(
        st.sampled_from(["", "converters = ['float8']", "converters = ['float8', 'quantize.grouped_mm.float8']"])
    )
    recipe = draw(st.sampled_from(["", "recipe_name = 'rowwise'", "enable_fsdp_float8_all_gather = true"]))
    sections = [f"[{name}]\n{draw(st.sampled_from(values))}" for name, values in TITAN_CHOICES.items()]
    return "\n".join(
        [
            f"[model]\nname = '{model.name}'\nflavor = '{model.flavor}'\n{converters}",
            "[parallelism]",
            *keys,
            *sections,
            f"[quantize.linear.float8]\nfilter_fqns = ['output', 'router.gate']\n{recipe}",
        ]
    )


@PROPERTY_SETTINGS
@given(torchtitan_jobs())
def test_all_legal_torchtitan_jobs_round_trip(text: str) -> None:
    try:
        scenario = import_text("torchtitan", text, 16)
    except InputError:
        assume(False)
    assert_round_trips("torchtitan", scenario)


@st.composite
def scenarios(draw: st.DrawFn, program: str) -> Scenario:
    """A random scenario whose rank order and model layers the program may support."""
    mapping = draw(mappings())
    layout = mapping["layout"]
    if draw(st.integers(0, 9)):
        del layout["order"]
    if program == "torchtitan" and draw(st.integers(0, 9)):
        mapping["model"] = dict(
            next(model_flavor for model_flavor in FLAVORS if model_flavor.flavor == "debugmodel").model_section
        )
        layout |= {"sequence_parallel": True, "data": draw(st.sampled_from(["fsdp", "ddp"]))}
        layout |= {key: 1 for key in ("ep", "etp") if key in layout}
        mapping["training"]["recompute"] = draw(st.sampled_from(["none", "full", "selective_op", {"layers": 2}]))
    try:
        return Scenario.from_mapping(mapping)
    except InputError:
        assume(False)
        raise


@pytest.mark.parametrize("program", EXPORTERS)
@PROPERTY_SETTINGS
@given(data=st.data())
def test_lost_settings_are_remarked(program: str, data: st.DataObject) -> None:
    """For every scenario: either its export is rejected, or all differences are among the remarks."""
    scenario = data.draw(scenarios(program))
    try:
        export_result = export_as(program, scenario)
    except InputError as error:
        assert len(str(error).splitlines()) == 1
        return
    reimported = round_trip(program, scenario)
    framework = EXPORTERS[program].framework
    expected = scenario
    if scenario.framework.name != framework:  # whose kernels the scenario keeps
        expected = scenario.with_overrides(f"framework={framework}", *stated_kernels(scenario))
    remarked_keys = {difference.partition(":")[0] for difference in export_result.differences}
    assert {key for key, *_ in differing_keys(expected, reimported)} <= remarked_keys
    assert (expected.model.layer_count, expected.layout.degrees) == (
        reimported.model.layer_count,
        reimported.layout.degrees,
    )
    assert all(f"# not exported: {item}" in export_result.text for item in export_result.differences)


def test_a_default_without_an_argument_is_remarked() -> None:
    """Here the framework's overheads outside the model, which arguments do not set, field by field."""
    scenario = Scenario.from_mapping({**PLAN, "framework": "megatron"}, ["training.overheads=none"])
    remarked_keys = [difference.partition(":")[0] for difference in export_as("megatron", scenario).differences]
    assert "training.overheads.zero_grad" in remarked_keys
    assert len(remarked_keys) == len(set(remarked_keys))


def test_a_script_is_one_shell_command() -> None:
    text = export_as("megatron", import_text("megatron", *MEGATRON["deepseek-v3"])).text
    commands = [line for line in text.replace("\\\n", " ").splitlines() if line and not line.startswith("#")]
    assert len(commands) == 1
    arguments = shlex.split(commands[0])
    assert arguments[:6] == ["torchrun", "--nproc_per_node", "8", "--nnodes", "32", "pretrain_gpt.py"]
    assert arguments[arguments.index("--moe-layer-freq") + 1] == "[0]*3+[1]*58"


REJECTED: list[tuple[str, dict[str, Any], str]] = [
    (
        "megatron",
        {"model": "gemma2-9b"},
        "model: Megatron-LM ... final_logit_softcapping, attn_logit_softcapping, block",
    ),
    ("megatron", {"model": {"preset": "llama3-8b", "positions": "alibi"}}, "positions of llama3-8b"),
    ("megatron", {"schedule": "gpipe"}, "schedule: 'gpipe' cannot be expressed for Megatron-LM"),
    (
        "megatron",
        {"layout": {"tp": 2, "pp": 2, "data": {"hsdp": {"shard": 1}}}},
        "layout.data: 'hsdp' cannot be expressed for",
    ),
    (
        "megatron",
        {"training": {"recompute": "selective_op"}},
        "training.recompute.mode: 'selective_op' cannot be expressed for",
    ),
    ("torchtitan", {"model": "gpt3-1.3b"}, "torchtitan has no flavor of gpt3-1.3b"),
    ("torchtitan", {"layout": {"tp": 2, "pp": 2, "data": "zero1"}}, "torchtitan has no zero1; write ddp, fsdp or hsdp"),
    ("torchtitan", {"layout": {"tp": 2, "pp": 2}}, "data_parallel_shard_degree = -1"),
    ("torchtitan", {"model": {"preset": "llama3-8b", "vocab": 32000}}, "llama3 8B has another vocab"),
    ("torchtitan", {"schedule": "zb-1p"}, "schedule: torchtitan has no zb-1p by name"),
    (
        "torchtitan",
        {"layout": {"tp": 2, "pp": 2, "data": "fsdp"}},
        "layout.sequence_parallel: false cannot be expressed for",
    ),
    ("torchtitan", {"training": {"recompute": "selective"}}, "training.recompute: torchtitan has none, full"),
]
PLAN: dict[str, Any] = {
    "model": "llama3-8b",
    "cluster": {"name": "dgx-h100", "gpus": 8},
    "layout": {"tp": 2, "pp": 2, "dp": 2, "sequence_parallel": True, "data": "fsdp"},
    "training": {"sequence": 1024, "global_batch": 8},
}


@pytest.mark.parametrize(("program", "change", "message"), REJECTED)
def test_unsupported_scenarios_are_rejected(program: str, change: dict[str, Any], message: str) -> None:
    mapping = PLAN | change
    mapping["training"] = PLAN["training"] | change.get("training", {})
    with pytest.raises(InputError) as refused:
        export_as(program, Scenario.from_mapping(mapping, default_name="plan"))
    assert str(refused.value).startswith("plan: ")
    assert parts(message).search(str(refused.value))
