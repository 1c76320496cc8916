"""Values of a scenario file and the objects they resolve to; error messages of wrong keys and values."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from clustersim.common import data_files
from clustersim.common.dtypes import DType
from clustersim.common.errors import InputError
from clustersim.model.framework import GraphCapture
from clustersim.model.framework_files import load_framework
from clustersim.model.layer_stack import MlpType
from clustersim.model.precision_recipe import PrecisionRecipe, mixed_precision
from clustersim.model.recompute_modules import RecomputeModule
from clustersim.model.training import (
    AttentionBackend,
    DotsSaveableRecompute,
    FullRecompute,
    NoRecompute,
    SelectiveOpRecompute,
    SelectiveRecompute,
)
from clustersim.model.transformer import PositionEncoding
from clustersim.parallel.data_parallel_strategy import (
    DdpStrategy,
    FullyShard,
    NaiveDataParallel,
    ReductionFrequency,
    Zero1,
    Zero2,
)
from clustersim.program.task import CollectiveType
from clustersim.scenario import Contention, Scenario, Symmetry
from clustersim.schedules.gpipe import GPipe
from clustersim.schedules.interleaved import Interleaved
from clustersim.schedules.one_f_one_b import OneFOneB
from clustersim.schedules.zero_bubble import ZeroBubble
from tests.sentences import parts
from tests.uniform_models import model_dimensions

Refusal = Callable[..., str]


def test_preset_dimensions_can_be_overridden(mapping: dict[str, Any]) -> None:
    mapping["model"] = {"preset": "llama3-8b", "layers": 8}
    model = Scenario.from_mapping(mapping).model
    assert (model.layer_count, model.hidden, model_dimensions(model).mlp) == (8, 4096, MlpType.SWIGLU)


def test_inline_model_uses_family_defaults(mapping: dict[str, Any]) -> None:
    mapping["model"] = {"family": "gpt", "layers": 4, "hidden": 1024, "ffn": 4096, "heads": 16, "vocab": 51200}
    model = Scenario.from_mapping(mapping).model
    assert (model_dimensions(model).kv_heads, model_dimensions(model).head_dim, model_dimensions(model).mlp) == (
        16,
        64,
        MlpType.GELU,
    )
    assert (model.positions, model.tied_embeddings, model.max_positions) == (PositionEncoding.LEARNED, True, 8192)


@pytest.mark.parametrize(
    ("written", "strategy"),
    [
        ("ddp", DdpStrategy()),
        ({"ddp": {"bucket": "10 MiB", "overlap": False}}, DdpStrategy(bucket=10 * 2**20, overlap=False)),
        ("fsdp", FullyShard(copies=True)),
        (
            {"fsdp": {"prefetch": 2, "reshard_after_forward": False}},
            FullyShard(prefetch=2, reshard_after_forward=False, copies=True),
        ),
        ({"fsdp": {"copies": False}}, FullyShard()),  # FSDP1's flat parameters
        ("zero1", Zero1()),
        ("zero2", Zero2(overlap_param_gather=True)),
        ({"zero": {"stage": 2, "overlap_param_gather": False}}, Zero2()),
        ({"zero": {"stage": 2, "overlap": False}}, Zero2(overlap=False, overlap_param_gather=True)),
        (
            "zero3",
            FullyShard(copies=True, all_reduce=ReductionFrequency.LAST_MICROBATCH),
        ),  # as MiCS, when sharded over a subset of the ranks
        ("fsdp", FullyShard(copies=True)),
        ({"hsdp": {"shard": 8}}, FullyShard(copies=True, shard=8)),
        (
            {"hsdp": {"shard": 8, "all_reduce": "last_microbatch", "reduce": "every_microbatch"}},
            FullyShard(
                copies=True,
                shard=8,
                all_reduce=ReductionFrequency.LAST_MICROBATCH,
                reduce=ReductionFrequency.PER_MICROBATCH,
            ),
        ),
        (
            {"fsdp": {"zero_hpz_partition_size": 8, "reshard_after_forward": True}},
            FullyShard(copies=True, zero_hpz_partition_size=8, reshard_after_forward=True),
        ),
        ({"zero": {"stage": 1, "shard": 8}}, Zero1(shard=8)),
        (
            {"zero": {"stage": 2, "reduce": "last_microbatch"}},
            Zero2(overlap_param_gather=True, reduce=ReductionFrequency.LAST_MICROBATCH),
        ),
        (
            {"zero": {"stage": 3, "shard": 8}},
            FullyShard(copies=True, shard=8, all_reduce=ReductionFrequency.LAST_MICROBATCH),
        ),
        ({"ddp": {"bucket": "megatron"}}, DdpStrategy(bucket=None)),
        ({"zero": {"stage": 1, "bucket": "megatron"}}, Zero1()),
        ({"zero": {"stage": 2, "bucket": "500 MB"}}, Zero2(bucket=500e6, overlap_param_gather=True)),
        ({"ddp": None}, DdpStrategy()),
    ],
)
def test_data_parallel_strategy_name_or_options(mapping: dict[str, Any], written: object, strategy: object) -> None:
    mapping["layout"]["data"] = written
    assert Scenario.from_mapping(mapping).layout.data == strategy


def test_torch_data_parallel_is_limited_to_one_node(mapping: dict[str, Any], refusal: Refusal) -> None:
    mapping |= {"cluster": {"name": "dgx-h100", "gpus": 8}, "layout": {"data": "data_parallel"}}
    assert Scenario.from_mapping(mapping).layout.data == NaiveDataParallel()
    assert "one node of 8 GPUs" in refusal("cluster.gpus=16")


@pytest.mark.parametrize(
    ("written", "schedule"),
    [
        ("1f1b", OneFOneB()),
        ("zb-1p", ZeroBubble(1)),
        ({"zb-2p": {}}, ZeroBubble(2)),
        ("gpipe", GPipe()),
        ("interleaved", Interleaved(2)),
        ({"interleaved": {"chunks": 4}}, Interleaved(4)),
    ],
)
def test_schedule_name_or_options(mapping: dict[str, Any], written: object, schedule: object) -> None:
    mapping["schedule"] = written
    assert Scenario.from_mapping(mapping).schedule == schedule


@pytest.mark.parametrize(
    ("written", "precision"),
    [
        ("bf16", mixed_precision(DType.BF16)),
        ("fp16", mixed_precision(DType.FP16)),
        ("fp32", mixed_precision(DType.FP32, master=None)),
        (
            {"compute": "bf16", "master": "none"},
            mixed_precision(DType.BF16, master=None),
        ),
        (
            {"gradients": "bf16", "moments": "bf16"},
            mixed_precision(DType.BF16, gradients=DType.BF16, moments=DType.BF16),
        ),
        (
            {"compute": "fp32", "master": "fp32"},
            mixed_precision(DType.FP32),
        ),
    ],
)
def test_compute_dtype_sets_default_dtypes(
    mapping: dict[str, Any], written: object, precision: PrecisionRecipe
) -> None:
    mapping["training"]["precision"] = written
    assert Scenario.from_mapping(mapping).training.recipe == precision


@pytest.mark.parametrize(
    ("written", "recompute"),
    [
        ("none", NoRecompute()),
        ("selective", SelectiveRecompute()),
        ("selective_op", SelectiveOpRecompute()),
        ("dots_with_no_batch_dims_saveable", DotsSaveableRecompute()),
        ("full", FullRecompute()),
        ({"layers": 3}, FullRecompute(layers=3)),
        ({"modules": ["core_attn"]}, SelectiveRecompute()),
        ({"mode": "selective", "modules": ["mlp"]}, SelectiveRecompute(frozenset({RecomputeModule.MLP}))),
        (
            {"mode": "none", "modules": ["mlp", "layernorm"]},
            SelectiveRecompute(frozenset({RecomputeModule.LAYERNORM, RecomputeModule.MLP})),
        ),
    ],
)
def test_recompute_modes(mapping: dict[str, Any], written: object, recompute: object) -> None:
    mapping["training"]["recompute"] = written
    assert Scenario.from_mapping(mapping).training.recompute == recompute


def test_framework_is_packaged_or_a_relative_file(mapping: dict[str, Any], tmp_path: Path) -> None:
    assert Scenario.from_mapping(mapping).framework == load_framework("pytorch")
    assert Scenario.from_mapping(mapping | {"framework": "megatron-2021"}).framework == load_framework("megatron-2021")
    content = data_files.read_mapping(data_files.find_file("frameworks", "pytorch"))
    content["host"]["launch"] = "5 us"
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(content))
    plan = tmp_path / "plan.yaml"
    plan.write_text(yaml.safe_dump(mapping | {"framework": "./mine.yaml"}))
    framework = Scenario.load(plan).framework
    assert framework.name == "mine"
    assert framework.launch_seconds == pytest.approx(5e-6)


@pytest.mark.parametrize("attention", [backend for backend in AttentionBackend if backend.value != "flash4"])
def test_attention_implementations(mapping: dict[str, Any], attention: AttentionBackend) -> None:
    mapping["training"]["attention"] = attention.value
    assert Scenario.from_mapping(mapping).training.attention is attention


def test_network_contention_setting(mapping: dict[str, Any]) -> None:
    assert Scenario.from_mapping(mapping).cost.network is Contention.SHARED
    assert Scenario.from_mapping(mapping, overrides=["cost.network=uncontended"]).cost.network is Contention.UNCONTENDED
    with pytest.raises(InputError, match=r"cost\.network: .*shred.*did you mean shared"):
        Scenario.from_mapping(mapping, overrides=["cost.network=shred"])


def test_yaml_off_disables_symmetry(mapping: dict[str, Any]) -> None:
    scenario = Scenario.from_mapping(mapping, overrides=["cost.symmetry=off", "cost.collectives.all_reduce=ring"])
    assert scenario.cost.symmetry is Symmetry.OFF
    assert scenario.cost.nccl_overrides.forced == {CollectiveType.ALL_REDUCE: "ring"}


def test_omitted_dp_is_derived(mapping: dict[str, Any]) -> None:
    del mapping["layout"]["dp"]
    assert Scenario.from_mapping(mapping).layout.dp == 8
    assert Scenario.from_mapping(mapping, overrides=["cluster.gpus=128"]).layout.dp == 16


def test_omitted_gpu_count_is_the_layout_size(mapping: dict[str, Any]) -> None:
    mapping["cluster"] = "dgx-h100"
    assert Scenario.from_mapping(mapping).cluster.gpu_count == 64


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("layout.tpp=4", "plan.yaml: layout.tpp: unknown key; did you mean tp?"),
        ("modle=x", "plan.yaml: modle: unknown key; did you mean model?"),
        ("training.precision.comput=bf16", "training.precision.comput: ... compute?"),
        ("layout.data.zero.stag=1", "layout.data.zero.stag: unknown key; did you mean stage?"),
        ("schedule.gpipe.chunks=2", "schedule.gpipe.chunks: unknown key; gpipe has no options"),
        ("model.laers=2", "model.laers: unknown key; did you mean layers?"),
        ("model=llama3-9b", "model: ... 'llama3-9b' ... llama3-8b?"),
        ("cluster=dgx-h10", "cluster: ... 'dgx-h10' ... dgx-h100?"),
        ("tp=4", "plan.yaml: tp: unknown key; did you mean layout.tp?"),
        ("layout.gpus=4", "layout.gpus: unknown key; did you mean cluster.gpus?"),
        ("cluster.fabric.spine.oversub=7", "unknown key; did you mean fabric.spine.oversubscription?"),
        ("schedule=1F1B", "schedule: '1F1B' is unknown; did you mean 1f1b?"),
        ("training.precision=BF16", "training.precision: 'BF16' is unknown; did you mean bf16?"),
        ("schedule=1f1", "schedule: '1f1' is unknown; did you mean 1f1b?"),
        ("layout.data=fspd", "layout.data: 'fspd' is unknown; did you mean fsdp?"),
        ("training.attention=flash5", "training.attention: 'flash5' is unknown; did you mean flash"),
        ("framework=pytorh", "framework: ... 'pytorh' ... pytorch?"),
        ("layout.overlap_p2p_com=false", "layout.overlap_p2p_com: ... overlap_p2p_comm?"),
        ("layout.data.ddp.copies=true", "layout.data.ddp.copies: unknown key"),
        ("training.recompute=ful", "training.recompute: 'ful' is unknown; did you mean full?"),
        ("training.precision=bf1", "training.precision: 'bf1' is unknown; did you mean bf16?"),
        ("cost.collectives.all_reduc=ring", "'all_reduc' is no collective; did you mean all_reduce?"),
        (
            "cost.collectives.all_reduce=rin",
            "cost.collectives.all_reduce: library nccl ... 'rin' for all_reduce ... ring?",
        ),
    ],
)
def test_misspelt_names_suggest_the_nearest(refusal: Refusal, override: str, sentence: str) -> None:
    assert parts(sentence).search(refusal(override))


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("layout.data={ddp: {bucket: 25}}", "layout.data.ddp.bucket: 25 has no unit"),
        ("layout.data={ddp: {bucket: 25 parsec}}", "layout.data.ddp.bucket: '25 parsec' has unit 'parsec'"),
        ("layout.data={ddp: {bucket: 25 us}}", "layout.data.ddp.bucket: '25 us' has unit 'us'"),
        ("layout.data={ddp: {bucket: 0 B}}", "'0 B' is not above zero"),
        ("layout.data={ddp: {bucket: -1 MB}}", "'-1 MB' is not above zero"),
        ("layout.tp=", "layout.tp: nothing is not a whole number"),
        ("cost.symmetry=on", "cost.symmetry: true is unknown; choose one of auto, off"),
        ("layout={tp: 1, tp: 2}", "tp is given twice, in line 1; keep one"),
        ("cluster.fabric.spine.oversubscription=0", "cluster: cluster dgx-h100: fabric.spine.oversubscription"),
        ("training.sequence=16k", "training.sequence: '16k' ... whole number; write 16384 or 16000"),
        ("training.sequence=2.5", "training.sequence: 2.5 is not a whole number"),
        ("training.sequence=0", "training.sequence: 0 ... smallest ... 1"),
        ("layout.tp=-4", "layout.tp: -4 is too small; the smallest legal value is 1"),
        ("layout.tp=true", "layout.tp: true is not a whole number"),
        ("layout.sequence_parallel=3", "layout.sequence_parallel: 3 is neither true nor false"),
        ("layout.data.zero.stage=4", "layout.data.zero.stage: 4 ... largest ... 3"),
        ("layout.data={ddp: {}, fsdp: {}}", "layout.data: ... exactly one of ddp, fsdp, hsdp, zero, deepspeed_zero3,"),
        ("layout.schedule=gpipe", "layout.schedule: ... schedule, a key of the whole file?"),
        ("layout.data=hsdp", "layout.data.hsdp.shard: is missing; write shard: 8"),
        ("layout.data={hsdp: 64}", "layout.data.hsdp: 64 ... mapping ... {shard: 64}"),
        ("layout.data={zero: 3}", "layout.data.zero: 3 ... mapping ... {stage: 1}, 2 or 3"),
        ("layout.data.hsdp.shard=0", "layout.data.hsdp.shard: 0 ... smallest ... 1"),
        ("layout.data={hsdp: {shard: 3}}", "layout.data: shard 3 ... 8 ranks (dp 8)"),
        ("layout.data={hsdp: {shard: 3}}", "weights; shard 2 or 4 fits"),
        (
            "layout.data={fsdp: {zero_hpz_partition_size: 9}}",
            "layout.data: zero_hpz_partition_size 9 ... 8 ranks (dp 8)",
        ),
        ("layout.data={fsdp: {zero_hpz_partition_size: 2}}", "none ... pipeline ... parameters ... stay); leave it"),
        (
            "layout={tp: 4, dp: 16, data: {fsdp: {zero_hpz_partition_size: 2, reshard_after_forward: false}}}",
            "zero_hpz_partition_size 2 ... backward's gathers ... (reshard_after_forward is false)",
        ),
        (
            "layout.data={hsdp: {shard: 2, zero_hpz_partition_size: 2}}",
            "layout.data.hsdp: has both shard and zero_hpz_partition_size",
        ),
        (
            "layout.data={zero: {stage: 1, zero_hpz_partition_size: 2}}",
            "zero_hpz_partition_size is of ZeRO stage 3; this is 1",
        ),
        ("layout.data={zero: {stage: 1, prefetch: 2}}", "layout.data.zero: prefetch is of ZeRO stage 3; this is 1"),
        (
            "layout.data={zero: {stage: 3, bucket: 1 MB}}",
            "bucket is of ZeRO stage 1 and 2; this is 3",
        ),
        ("layout.data={zero: {stage: 1, reduce: last_microbatch}}", "reduce is of ZeRO stage 2 and 3; this is 1"),
        ("layout.data={fsdp: {reduce: last}}", "'last' is unknown; did you mean last_microbatch?"),
        ("layout.data={ddp: {bucket: megatrn}}", "'megatrn' ... number and a unit ... '80 GiB', or megatron"),
        ("layout.order=[tp, dp]", "must name every axis once, such as [tp, cp, dp, pp]"),
        ("cluster.gpus=1000000000", "cluster.gpus: 1,000,000,000 ... largest ... 1,048,576"),
        ("training=3", "training: 3 is not a mapping of keys to values"),
        ("model={layers: 4}", "model: missing keys: hidden, heads, vocab, ffn"),
        ("model={preset: llama3-8b, path: config.json}", "keep one"),
        ("training={global_batch: 128}", "training.sequence: is missing"),
        ("training.recompute={mode: selective, layers: 2}", "layers are recomputed in full"),
        ("training.recompute={mode: selective_op, layers: 2}", "layers are recomputed in full"),
        ("training.recompute={modules: [core]}", "'core' is unknown; did you mean core_attn?"),
        ("training.recompute={modules: [layernorms]}", "'layernorms' is unknown; did you mean layernorm?"),
        ("training.recompute={modules: []}", "training.recompute.modules"),
        ("training.recompute={modules: mlp}", "training.recompute.modules"),
        ("training.recompute={modules: [mlp], layers: 2}", "modules are recomputed selectively"),
        ("training.recompute={modules: [mlp], mode: full}", "modules are recomputed selectively"),
        (
            "layout.async_tensor_model_parallel_allreduce=3",
            "layout.async_tensor_model_parallel_allreduce: 3 ... true nor false",
        ),
        ("framework=", "framework: nothing ... mapping ... name, version, recipe, cuda_graphs"),
    ],
)
def test_wrong_values_are_rejected_with_valid_ones(refusal: Refusal, override: str, sentence: str) -> None:
    assert parts(sentence).search(refusal(override))


def test_all_errors_are_listed_at_once(refusal: Refusal) -> None:
    lines = refusal("layout.tp=0", "training.sequence=x", "cost.symmetry=maybe").splitlines()
    assert lines[0] == "plan.yaml: 3 problems"
    assert [line.split(":")[0] for line in lines[1:]] == ["  - layout.tp", "  - training.sequence", "  - cost.symmetry"]


def test_non_mapping_content_raises_input_error() -> None:
    for content in ({}, {"model": []}, {1: 2}, {"model": None, "cluster": 3, "training": "x"}):
        with pytest.raises(InputError, match="scenario: "):
            Scenario.from_mapping(content)  # type: ignore[arg-type]


def test_framework_cuda_graphs_key(mapping: dict[str, Any]) -> None:
    captured = Scenario.from_mapping(mapping | {"framework": {"name": "pytorch", "cuda_graphs": True}})
    assert captured.framework == load_framework("pytorch").with_cuda_graphs()
    assert Scenario.from_mapping(captured.to_mapping()).framework == captured.framework
    partially_captured = Scenario.from_mapping(
        mapping | {"framework": {"name": "megatron", "cuda_graphs": "outside_experts"}}
    )
    assert partially_captured.framework.graph_capture is GraphCapture.OUTSIDE_EXPERTS
    with pytest.raises(InputError, match="framework: cuda_graphs: megatron-2021 captures none"):
        Scenario.from_mapping(mapping | {"framework": {"name": "megatron-2021", "cuda_graphs": True}})


def test_framework_launch_and_compiled_keys(mapping: dict[str, Any]) -> None:
    framework = {"name": "pytorch", "launch": "7 us", "backward_launch": "9 us", "torch_compile": True}
    scenario = Scenario.from_mapping(mapping | {"framework": framework})
    assert scenario.framework == load_framework("pytorch").with_compiled().with_launch_seconds(7e-6, 9e-6)
    assert Scenario.from_mapping(scenario.to_mapping()).framework == scenario.framework
    with pytest.raises(InputError, match="framework: torch_compile: megatron compiles no layers"):
        Scenario.from_mapping(mapping | {"framework": {"name": "megatron", "torch_compile": True}})
    with pytest.raises(InputError, match="launch: '-1 us' is below zero; write e"):
        Scenario.from_mapping(mapping | {"framework": {"launch": "-1 us"}})
    with pytest.raises(InputError, match="launch: 7 has no unit"):
        Scenario.from_mapping(mapping | {"framework": {"launch": 7}})


@pytest.mark.parametrize(("name", "stops"), [("pytorch", True), ("megatron-2021", False)])
def test_recompute_early_stop_default_and_override(mapping: dict[str, Any], name: str, stops: bool) -> None:
    scenario_mapping = {**mapping, "framework": name}

    def has_early_stop(recompute: Any) -> bool:
        training = {**scenario_mapping["training"], "recompute": recompute}
        return Scenario.from_mapping({**scenario_mapping, "training": training}).training.early_stop

    assert has_early_stop("full") is stops
    assert has_early_stop({"mode": "full", "early_stop": not stops}) is not stops
