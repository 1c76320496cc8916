"""Mixture-of-experts (MoE) layers in a scenario file: which layers have experts, and error messages."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from clustersim import Scenario, simulate
from clustersim.common.errors import InputError
from clustersim.model.layer_stack import DenseMlp, LayerSpec, MlpType, MoeMlp, Router, ScoreFunction, layer_specs
from clustersim.model.layers import LayerShard, ParallelRegion, transformer_layer
from clustersim.model.moe_expert_load import MeasuredExpertLoad
from clustersim.model.presets import code_presets, load_preset
from clustersim.model.training import Training
from clustersim.model.transformer import parameter_count
from clustersim.scenario.validation_rules.warnings import find_warnings

BASE_MAPPING: dict[str, Any] = {
    "model": "mixtral-8x7b",
    "cluster": {"name": "dgx-h100", "gpus": 64},
    "layout": {"tp": 2, "pp": 4, "sequence_parallel": True},
    "training": {"sequence": 2048, "global_batch": 64},
}
INLINE = "hidden: 1024, heads: 8, vocab: 1024"
PARAMETER_OFFLOAD = {"offload": {"parameters": True}}
MOE_OPTIONS = "count: 8, top_k: 2, ffn: 512"


def load_scenario(model: str) -> Scenario:
    return Scenario.from_mapping(BASE_MAPPING, overrides=[f"model={model}"])


def layer_kinds(model: str) -> str:
    """One letter for each layer: d for a dense MLP, m for an MoE layer."""
    letters = {DenseMlp: "d", MoeMlp: "m"}
    return "".join(
        letters[type(spec.mlp)] for spec in layer_specs(load_scenario(model).model.stack) if spec.mlp is not None
    )


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (f"{{{INLINE}, layers: 4, experts: {{{MOE_OPTIONS}}}}}", "mmmm"),
        (f"{{{INLINE}, layers: 4, ffn: 2048, experts: {{{MOE_OPTIONS}, dense_layers: 1}}}}", "dmmm"),
        (f"{{{INLINE}, layers: 6, ffn: 2048, experts: {{{MOE_OPTIONS}, interleave_moe_layer_step: 2}}}}", "dmdmdm"),
        (
            f"{{{INLINE}, layers: 6, ffn: 2048, experts: {{{MOE_OPTIONS}, interleave_moe_layer_step: 2, "
            f"dense_layers: 2}}}}",
            "dddmdm",
        ),
        (f"{{{INLINE}, ffn: 2048, stack: [{{layers: 1}}, {{layers: 3, experts: {{{MOE_OPTIONS}}}}}]}}", "dmmm"),
        (
            f"{{{INLINE}, ffn: 64, experts: {{{MOE_OPTIONS}}}, stack: [{{layers: 1, experts: 0}}, {{layers: 3}}]}}",
            "dmmm",
        ),
        ("{preset: llama3-8b, layers: 2, experts: {count: 8, top_k: 2}}", "mm"),
        ("{preset: glm-4.5, layers: 5}", "dddmm"),
        ("{preset: glm-4.5, layers: 5, experts: {dense_layers: 1}}", "dmmmm"),
        ("{preset: mixtral-8x7b, layers: 3, ffn: 4096, experts: 0}", "ddd"),
        ("{preset: mixtral-8x7b, layers: 3, ffn: 4096, experts: {dense_layers: 1}}", "dmm"),
    ],
)
def test_moe_layer_positions(model: str, expected: str) -> None:
    assert layer_kinds(model) == expected


def test_expert_keys_are_read() -> None:
    written = "{count: 8, top_k: 2, ffn: 512, shared: 1024, shared_gate: true, bias: true, router: sigmoid}"
    routed = MoeMlp(
        8, 2, 512, MlpType.SWIGLU, shared=1024, shared_gate=True, bias=True, router=Router(ScoreFunction.SIGMOID)
    )
    assert load_scenario(f"{{preset: llama3-8b, experts: {written}}}").model.distinct_moes == (routed,)


def test_router_groups_limit_and_bias() -> None:
    written = "{count: 8, top_k: 2, num_groups: 4, group_topk: 2, router_bias: true}"
    (routed,) = load_scenario(f"{{preset: llama3-8b, experts: {written}}}").model.distinct_moes
    assert routed.router == Router(ScoreFunction.SOFTMAX, num_groups=4, group_topk=2, bias=True)
    assert routed.ffn == 14336, "experts are as wide as the MLP that they replace"


def test_omitted_expert_keys_come_from_the_preset() -> None:
    """Four more experts in all 32 layers: three matrices each, and one row of the router weight."""
    added_parameters = parameter_count(load_scenario("{preset: mixtral-8x7b, experts: 12}").model) - parameter_count(
        load_scenario("mixtral-8x7b").model
    )
    assert added_parameters == 32 * 4 * (3 * 4096 * 14336 + 4096)


@pytest.mark.parametrize("name", [name for name, preset in code_presets().items() if preset.model.distinct_moes])
def test_scenario_round_trip(name: str) -> None:
    """By preset name, and with every MoE layer changed."""
    plain = Scenario.from_mapping(BASE_MAPPING | {"layout": {}}, overrides=[f"model={name}"])
    assert Scenario.from_mapping(plain.to_mapping()) == plain
    changed = plain.with_overrides("model.experts.top_k=1")
    assert Scenario.from_mapping(changed.to_mapping()) == changed
    assert {distinct_moe.top_k for distinct_moe in changed.model.distinct_moes} == {1}
    assert changed.with_overrides(f"model={name}").model == plain.model


@pytest.mark.parametrize(
    ("model", "sentence"),
    [
        ("{preset: mixtral-8x7b, experts: {top_k: 9}}", r"model.experts: top_k 9 is above the 8 experts; top_k 8 fits"),
        ("{preset: mixtral-8x7b, experts: {router: soft}}", r"model.experts.router: 'soft' is unknown; .*softmax"),
        ("{preset: mixtral-8x7b, experts: {counts: 4}}", r"model.experts.counts: unknown key; did you mean count\?"),
        ("{preset: mixtral-8x7b, experts: {count: -1}}", r"model.experts.count: -1 is too small"),
        ("{preset: mixtral-8x7b, experts: {top_k: 0}}", r"model.experts.top_k: 0 is too small; .* 1"),
        ("{preset: mixtral-8x7b, experts: 0}", r"ffn: the model has no dense MLP, .*; give ffn"),
        ("{preset: mixtral-8x7b, ffn: 1, experts: {count: 0, top_k: 2}}", r"count of 0, and top_k"),
        ("{preset: mixtral-8x7b, ffn: 1024}", r"model: ffn: mixtral-8x7b has no dense MLP; experts.ffn"),
        ("{preset: mixtral-8x7b, experts: {dense_layers: 1}}", r"ffn: the model has no dense MLP, .*; give ffn"),
        ("{preset: mixtral-8x7b, experts: {dense_layers: 32}}", r"dense_layers: 32 leaves none of the 32 layers"),
        (
            "{preset: mixtral-8x7b, experts: {interleave_moe_layer_step: 33}}",
            r"experts.interleave_moe_layer_step: 33 is above the 32 layers",
        ),
        ("{preset: mistral-7b, experts: {top_k: 2}}", r"experts: missing keys: count.*\{count: 8, top_k: 2\}"),
        ("{preset: mistral-7b, experts: 8}", r"experts: missing keys: top_k.*\{count: 8, top_k: 2\}"),
        ("{preset: mistral-7b, ffn: 1, experts: {count: 8, top_k: 2, ffn: 2}}", r"ffn: mistral-7b has no dense MLP"),
        ("{preset: mixtral-8x7b, experts: {num_groups: 3}}", "num_groups 3.*8 experts; num_groups 2 or 4"),
        (
            "{preset: mixtral-8x7b, experts: {num_groups: 4, group_topk: 5}}",
            r"group_topk 5 is above the 4 groups; group_topk 4 fits",
        ),
        (
            "{preset: mixtral-8x7b, experts: {num_groups: 8, group_topk: 1}}",
            "top_k 2.*1 experts that group_topk 1 leaves.*group_topk",
        ),
        (
            "{preset: mixtral-8x7b, experts: {capacity_factor: 0}}",
            r"model\.experts\.capacity_factor: 0.*number above 0",
        ),
        (
            "{preset: mixtral-8x7b, experts: {capacity_factor: 4.5}}",
            r"capacity_factor 4.5 is above 4, at which every "
            r"expert takes",
        ),
        ("{preset: mixtral-8x7b, stack: [{layers: 1, ffn: 9}, {layers: 31}]}", r"stack: ffn.*dense MLP.*experts\.ffn"),
        (
            f"{{preset: mistral-7b, stack: [{{layers: 32, ffn: 9, experts: {{{MOE_OPTIONS}}}}}]}}",
            r"stack: has both ffn and experts.ffn",
        ),
        (
            "{preset: mixtral-8x7b, stack: [{layers: 32, experts: {interleave_moe_layer_step: 2}}]}",
            r"model.stack.0.experts.interleave_moe_layer_step: unknown key",
        ),
    ],
)
def test_invalid_expert_settings_have_one_line_errors(model: str, sentence: str) -> None:
    with pytest.raises(InputError, match=sentence) as refused:
        load_scenario(model)
    assert "\n" not in str(refused.value)


def test_capacity_needs_alltoall_dispatcher() -> None:
    with pytest.raises(InputError, match=r"layout.dispatcher: deepep sends as many rows .* capacity; alltoall pads"):
        load_scenario("{preset: mixtral-8x7b, experts: {capacity_factor: 1.5}}").with_overrides(
            "layout={ep: 8, dispatcher: deepep}"
        )


def test_loads_of_experts_with_a_capacity_warn_that_they_change_nothing() -> None:
    """Every expert takes its capacity; `none` says dropless, also where a recipe would pad."""
    padded = load_scenario("{preset: mixtral-8x7b, experts: {capacity_factor: 1.0}}").with_overrides(
        "training.expert_load=0.3"
    )
    dropless = padded.with_overrides("model.experts.capacity_factor=none")
    assert dropless.model.distinct_moes[0].capacity_factor is None
    warned = [any("expert_load" in text for text in find_warnings(scenario)) for scenario in (padded, dropless)]
    assert warned == [True, False]


def test_expert_flops_scale_with_capacity_factor() -> None:
    def expert_flops(capacity: float | None) -> float:
        (routed,) = load_scenario("mixtral-8x7b").model.distinct_moes
        training = Training(sequence=2048, global_batch=1, microbatch=1)
        model = replace(load_preset("mixtral-8x7b"), stack=())
        spec = LayerSpec(None, replace(routed, capacity_factor=capacity))
        operators = transformer_layer(model, spec, training, LayerShard(1, 2048, 2048)).operators
        return sum(
            kernel.flops
            for operator in operators
            if operator.region is ParallelRegion.EXPERT
            for kernel in operator.forward
        )

    assert expert_flops(1.0) == expert_flops(None)
    assert expert_flops(0.5) == pytest.approx(expert_flops(None) / 2, rel=1e-3)  # the activation's few FLOP among them


def test_unused_dense_ffn_width_is_accepted() -> None:
    """As in Qwen 3's config.json files."""
    assert layer_kinds(f"{{{INLINE}, layers: 2, ffn: 2048, experts: {{{MOE_OPTIONS}}}}}") == "mm"


def test_inline_moe_model_needs_expert_ffn() -> None:
    with pytest.raises(InputError, match=r"missing keys: ffn; give them"):
        load_scenario(f"{{{INLINE}, layers: 4, experts: {{count: 8, top_k: 2}}}}")


@pytest.mark.parametrize(
    ("layout", "training", "problem"),
    [
        ({"tp": 2}, {}, r"sequence_parallel: false, so all tp 2 ranks .* Megatron-LM refuses; write true"),
        ({"ep": 3}, {}, r"layout.ep: 3 x etp 1 does not divide the 64 ranks .*; ep 2 or 4 fits"),
        ({"ep": 4, "etp": 32}, {}, r"layout.ep: 4 x etp 32 does not divide the 64 ranks .*; ep 2 fits"),
        ({"ep": 16}, {}, r"layout\.ep: 16.*8 experts of mixtral-8x7b; ep 8"),
        ({"ep": 1, "etp": 64, "tp": 1}, {}, None),
        (
            {"ep": 4, "pp": 2, "order": ["tp", "pp", "cp", "dp"]},
            {},
            r"layout.order: .*; order \[tp, cp, dp, pp\] fits",
        ),
        ({"pp": 2, "order": ["tp", "pp", "cp", "dp"]}, {}, None),
        (
            {"ep": 8},
            {"expert_load": {"tokens_per_expert": [1, 2]}},
            "tokens_per_expert: list 1.*2 experts.*mixtral-8x7b has 8",
        ),
        (
            {"ep": 8},
            {"expert_load": {"tokens_per_expert": [[1] * 8] * 3}},
            r"tokens_per_expert: 3 lists, and mixtral-8x7b has 32 routed",
        ),
        (
            {"ep": 8},
            {"expert_load": {"tokens_per_expert": [1] * 7 + [-1]}},
            r"tokens_per_expert: -1.* in list 1 is no number of tokens",
        ),
        (
            {"ep": 8},
            {"expert_load": {"tokens_per_expert": [0] * 8}},
            r"tokens_per_expert: list 1 has no tokens at all",
        ),
        ({"ep": 8}, {"expert_load": {"tokens_per_expert": []}}, r"tokens_per_expert: \[\].*\[\[120"),
        ({"ep": 8}, {"expert_load": -0.1}, r"expert_load: -0\.1.*0 and 10; 0\.3"),
        (
            {"ep": 8},
            {"expert_load": {"seed": 1}},
            "expert_load:.*coefficient_of_variation or.*tokens_per_expert, one of the two",
        ),
        ({"ep": 8}, {"expert_load": "even"}, r"expert_load: 'even' is unknown; write balanced, "),
        ({"ep": 8}, {"expert_load": 0.3}, None),
        ({"ep": 8}, {"expert_load": "balanced"}, None),
        ({"ep": 8, "data": {"hsdp": {"shard": 4}}}, {}, r"shard 4 x tp 1 = 4 ranks are one copy .*; ep 4 fits"),
        ({"ep": 4, "data": {"hsdp": {"shard": 4}}}, {}, None),
        ({"ep": 8, "data": {"zero": {"stage": 1, "shard": 4}}}, {}, r"which ep 8 x etp 1 does not divide; ep 4 fits"),
        ({"ep": 8, "pp": 8, "data": "fsdp"}, PARAMETER_OFFLOAD, "ep 8 x etp 1 leaves nothing.*optimizer: true"),
        ({"ep": 4, "pp": 8, "data": "fsdp"}, PARAMETER_OFFLOAD, None),
        ({"data": "deepspeed_zero3"}, {}, r"deepspeed_zero3.*model\.experts; fsdp and zero3"),
        ({"ep": 8}, {"lora": 8}, r"lora.targets: mixtral-8x7b has experts, .*; targets attention fits"),
        ({"ep": 8}, {"lora": {"rank": 8, "targets": "attention"}}, None),
        (
            {"ep": 8},
            {"lora": {"rank": 8, "targets": "attention", "base": "nf4"}},
            r"lora\.base: nf4 of experts.*mixtral-8x7b.*none",
        ),
    ],
)
def test_unsupported_expert_combinations_are_rejected(
    layout: dict[str, Any], training: dict[str, Any], problem: str | None
) -> None:
    mapping = {**BASE_MAPPING, "layout": layout, "training": BASE_MAPPING["training"] | training}
    if problem is None:
        assert Scenario.from_mapping(mapping).layout.world_size == 64
        return
    with pytest.raises(InputError, match=problem):
        Scenario.from_mapping(mapping)


def test_torch_data_parallel_rejects_expert_parallelism() -> None:
    mapping = {**BASE_MAPPING, "cluster": {"name": "dgx-h100", "gpus": 8}, "layout": {"ep": 8, "data": "data_parallel"}}
    with pytest.raises(InputError, match=r"data_parallel.*ep is 8; use ddp"):
        Scenario.from_mapping(mapping)


@pytest.mark.parametrize(
    ("layout", "sentence"),
    [
        ("dispatcher_num_sms: 32", "dispatcher_num_sms: 32.*alltoall.*leave it out"),
        ("dispatcher: hybridep, dispatcher_num_sms: 133", "133, but a GPU has 132 multiprocessors; 132 is the most"),
        ("dispatcher: hybridep, dispatcher_num_sms: 0", "layout.dispatcher_num_sms"),
    ],
)
def test_invalid_dispatcher_sm_counts_are_rejected(layout: str, sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        load_scenario("{preset: mixtral-8x7b}").with_overrides(f"layout={{ep: 8, {layout}}}")


def test_dispatchers_of_other_frameworks_are_rejected() -> None:
    allgather = "layout={ep: 8, dispatcher: allgather}"
    assert load_scenario("mixtral-8x7b").with_overrides(allgather, "framework=megatron").layout.ep == 8
    with pytest.raises(InputError, match=r"layout\.dispatcher: allgather.*torchtitan; dispatcher alltoall or"):
        load_scenario("mixtral-8x7b").with_overrides(allgather, "framework=torchtitan")


def test_more_dispatcher_sms_are_never_slower() -> None:
    """Until the links are the bottleneck; without the key the dispatcher's default SM count applies."""
    plan = "layout={{ep: 8, dispatcher: hybridep, dispatcher_num_sms: {sms}}}"
    few_sms, default_sms, more_sms = (
        load_scenario("{preset: mixtral-8x7b}").with_overrides(plan.format(sms=sm_count)) for sm_count in (4, 16, 32)
    )
    unspecified = load_scenario("{preset: mixtral-8x7b}").with_overrides("layout={ep: 8, dispatcher: hybridep}")
    step_times = [simulate(scenario).step_time for scenario in (few_sms, default_sms, more_sms, unspecified)]
    assert step_times[0] > step_times[1] >= step_times[2]
    assert step_times[3] == step_times[1]


def write_plan(folder: Path, counts: str) -> Path:
    """A plan whose expert loads are in a file of their own."""
    (folder / "counts.csv").write_text(counts)
    mapping = {
        "model": "mixtral-8x7b",
        "cluster": {"name": "dgx-h100", "gpus": 8},
        "layout": {"ep": 8},
        "training": {"sequence": 4096, "global_batch": 64, "expert_load": {"tokens_per_expert": "counts.csv"}},
    }
    plan = folder / "plan.yaml"
    plan.write_text(yaml.safe_dump(mapping))
    return plan


@pytest.mark.parametrize("separator", [",", ", ", " ", "\t", ";"])
def test_token_counts_are_read_from_a_file(tmp_path: Path, separator: str) -> None:
    """And are in the scenario of a result, which needs no file."""
    counts = [5.0, 1.0, 2.0, 3.0, 4.0, 8.0, 6.0, 7.0]
    scenario = Scenario.load(write_plan(tmp_path, f"# layer 0\n{separator.join(f'{count:g}' for count in counts)}\n"))
    assert scenario.training.expert_load == MeasuredExpertLoad((tuple(counts),))
    assert tmp_path / "counts.csv" in scenario.files
    (tmp_path / "counts.csv").unlink()
    written = simulate(scenario).to_json()["scenario"]
    assert written["training"]["expert_load"] == {"tokens_per_expert": [counts]}
    assert Scenario.from_mapping(written).training == scenario.training


def test_a_file_may_have_a_line_for_each_layer(tmp_path: Path) -> None:
    layers = [[float(1 + (layer + expert) % 5) for expert in range(8)] for layer in range(32)]
    scenario = Scenario.load(write_plan(tmp_path, "\n".join(",".join(map(str, counts)) for counts in layers)))
    assert scenario.training.expert_load == MeasuredExpertLoad(tuple(map(tuple, layers)))


@pytest.mark.parametrize(
    ("counts", "sentence"),
    [
        ("", r"training.expert_load.tokens_per_expert: .*counts.csv has no numbers; write those of a layer's experts"),
        ("1,2\n3,x\n", r"tokens_per_expert:.*counts\.csv, line 2: 'x'.*0 or more"),
        ("1,-2\n", r"counts.csv, line 1: '-2' is no number of tokens"),
        ("0 0 0\n", r"counts\.csv, line 1: has no tokens.*at least one expert"),
        ("1 2 3\n", "tokens_per_expert: list 1.*3 experts, and mixtral-8x7b has 8"),
    ],
)
def test_files_of_token_counts_are_checked(tmp_path: Path, counts: str, sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        Scenario.load(write_plan(tmp_path, counts))


def test_a_missing_file_of_token_counts_is_named(tmp_path: Path) -> None:
    plan = write_plan(tmp_path, "1")
    (tmp_path / "counts.csv").unlink()
    with pytest.raises(InputError, match=r"training.expert_load.tokens_per_expert: .*counts.csv"):
        Scenario.load(plan)
