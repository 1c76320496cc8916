"""Consistency checks of MoE layers with layout and LoRA.

Each reports in one sentence which numbers conflict and which nearby values are allowed.
"""

from collections.abc import Iterator

from clustersim.model.layer_stack import MoeMlp
from clustersim.model.lora import Projection
from clustersim.model.moe_expert_load import MeasuredExpertLoad
from clustersim.parallel.layout import Layout
from clustersim.parallel.mesh import PIPELINE
from clustersim.parallel.token_dispatch import runs_on
from clustersim.program.task import TokenDispatcher
from clustersim.scenario.nearest_values import divisors
from clustersim.scenario.resolved import ResolvedScenario
from clustersim.scenario.validation_rules.remedies import Problem, Remedy


def check_expert_parallelism(scenario: ResolvedScenario) -> Iterator[str]:
    """Check that there are experts if ep or etp is above 1."""
    layout, model = scenario.layout, scenario.model
    if not scenario.model.distinct_routed_moes and layout.has_expert_mesh:
        key, degree = ("ep", layout.ep) if layout.ep > 1 else ("etp", layout.effective_etp)
        yield f"layout.{key}: {degree} spreads experts, but {model.name} has none; leave it out"


def check_dispatcher(scenario: ResolvedScenario) -> Iterator[str]:
    """Check that the GPUs run the dispatcher's kernels, and that its SM count is one that they have."""
    dispatcher, sm_count = scenario.layout.dispatcher, scenario.layout.dispatcher_num_sms
    kinds = scenario.cluster.accelerator_kinds()[0]
    available_sms = min(accelerator_kind.compute_units for accelerator_kind in kinds)
    for accelerator in kinds:
        if not runs_on(dispatcher, accelerator):
            yield (
                f"layout.dispatcher: {dispatcher.value} runs on AMD's GPUs, and {accelerator.name} is none; write "
                f"{TokenDispatcher.DEEPEP.value} or {TokenDispatcher.ALL_TO_ALL.value}"
            )
    if sm_count is not None and not dispatcher.has_custom_kernels:
        yield f"layout.dispatcher_num_sms: {sm_count}, but {dispatcher.value} runs the library's kernels; leave it out"
    elif sm_count is not None and sm_count > available_sms:
        yield (
            f"layout.dispatcher_num_sms: {sm_count}, but a GPU has {available_sms} multiprocessors; "
            f"{available_sms} is the most"
        )


def check_framework_dispatcher(scenario: ResolvedScenario) -> Iterator[Problem]:
    """Check that the framework has the token dispatcher."""
    dispatcher, framework = scenario.layout.dispatcher.value, scenario.framework
    supported = framework.supported_layouts.dispatchers
    if scenario.layout.ep > 1 and dispatcher not in supported:
        yield Problem(
            f"layout.dispatcher: {dispatcher} is not in {framework.name}",
            Remedy("layout.dispatcher", tuple((name,) for name in supported)),
        )


def check_parallel_folding(scenario: ResolvedScenario) -> Iterator[str]:
    """Check that ep x etp can be folded onto tp x cp x dp (Megatron-LM's parallel folding)."""
    if scenario.model.distinct_routed_moes:
        yield from _check_expert_ranks(scenario.layout.as_configured)


def check_sequence_parallel(scenario: ResolvedScenario) -> Iterator[str]:
    """Check that MoE layers with tensor parallelism have sequence parallelism."""
    layout = scenario.layout
    if scenario.model.distinct_routed_moes and layout.tp > 1 and not layout.sequence_parallel:
        yield (
            f"layout.sequence_parallel: false, so all tp {layout.tp} ranks would send the same tokens to experts, "
            "which Megatron-LM refuses; write true"
        )


def check_expert_sharding(scenario: ResolvedScenario) -> Iterator[str]:
    """Check that ep divides the experts, and etp their width."""
    for routed_mlp in scenario.model.distinct_routed_moes:
        yield from _check_sharding(scenario, routed_mlp)


def _check_expert_ranks(layout: Layout) -> Iterator[str]:
    """Check that ep x etp divides the ranks of tp x cp x dp."""
    rank_count = layout.tp * layout.cp * layout.dp
    if rank_count % (layout.ep * layout.effective_etp):
        yield Problem(
            f"layout.ep: {layout.ep} x etp {layout.effective_etp} does not divide the {rank_count} ranks of tp x cp "
            "x dp that experts are folded onto",
            *_expert_remedies(layout, rank_count),
        )
    elif layout.has_expert_mesh:
        yield from _check_folding_constraints(layout)


def _check_folding_constraints(layout: Layout) -> Iterator[str]:
    """Check axis order, strategy and shard size of layouts whose expert mesh differs from the dense mesh."""
    if layout.is_pipelined and layout.order[-1] != PIPELINE.name:
        valid_order = [*(axis for axis in layout.order if axis != PIPELINE.name), PIPELINE.name]
        yield Problem(
            f"layout.order: {list(layout.order)} has pp before its end, which experts on ranks of their own need last",
            Remedy("layout.order", ((valid_order,),)),
        )
    if layout.data.is_single_process:
        yield f"layout.data: data_parallel copies the whole model to each GPU, and ep is {layout.ep}; use ddp"
    rank_count, shard_size = layout.tp * (layout.data.shard_size or 0), layout.data.shard_size
    if shard_size and layout.cp * layout.dp % shard_size == 0 and rank_count % (layout.ep * layout.effective_etp):
        key = "zero_hpz_partition_size" if layout.data.zero_hpz_partition_size else "shard"
        yield Problem(
            f"layout.data: {key} {shard_size} x tp {layout.tp} = {rank_count} ranks are one copy of the weights, which "
            f"ep {layout.ep} x etp {layout.effective_etp} does not divide",
            *_expert_remedies(layout, rank_count),
        )


def _expert_remedies(layout: Layout, rank_count: int) -> Iterator[Remedy]:
    """Degrees of experts that divide the ranks: ep, or else a smaller etp."""
    etp = layout.effective_etp
    yield Remedy.nearest("layout.ep", layout.ep, (ep for ep in divisors(rank_count) if rank_count % (ep * etp) == 0))
    smaller = [degree for degree in divisors(rank_count) if degree < etp and rank_count % (layout.ep * degree) == 0]
    yield Remedy.nearest("layout.etp", etp, smaller)


def check_expert_load(scenario: ResolvedScenario) -> Iterator[str]:
    """Check that a measured expert load has the model's number of experts and MoE layers."""
    load, model = scenario.training.expert_load, scenario.model
    routed_mlps = model.moe_layers
    if load is None:
        return
    if not routed_mlps:
        yield f"training.expert_load: {model.name} has no experts; leave it out"
    if not isinstance(load, MeasuredExpertLoad):
        return
    if load.varies_by_layer and len(load.token_counts) != len(routed_mlps):
        yield (
            f"training.expert_load.tokens_per_expert: {len(load.token_counts)} lists, and {model.name} has "
            f"{len(routed_mlps)} "
            "routed layers; "
            f"write one list of all layers, or {len(routed_mlps)}"
        )
        return
    for list_number, (token_counts, routed) in enumerate(zip(load.token_counts, routed_mlps, strict=False), start=1):
        if len(token_counts) != routed.experts:
            yield (
                f"training.expert_load.tokens_per_expert: list {list_number} is of {len(token_counts)} experts, and "
                f"{model.name} "
                "has "
                f"{routed.experts}; write as many"
            )


def check_routers(scenario: ResolvedScenario) -> Iterator[str]:
    """Check that top_k, num_groups, group_topk and capacity_factor of the routers are consistent."""
    for distinct_moe in scenario.model.distinct_moes:
        router, top_k = distinct_moe.router, distinct_moe.top_k
        if top_k > distinct_moe.experts:
            yield Problem(
                f"model.experts: top_k {top_k} is above the {distinct_moe.experts} experts",
                Remedy("model.experts.top_k", ((distinct_moe.experts,),)),
            )
        elif distinct_moe.experts % router.num_groups:
            experts = distinct_moe.experts
            yield Problem(
                f"model.experts: num_groups {router.num_groups} does not divide the {experts} experts",
                Remedy.nearest("model.experts.num_groups", router.num_groups, divisors(experts)),
            )
        elif router.group_topk is not None and router.group_topk > router.num_groups:
            yield Problem(
                f"model.experts: group_topk {router.group_topk} is above the {router.num_groups} groups",
                Remedy("model.experts.group_topk", ((router.num_groups,),)),
            )
        elif router.group_topk is not None and top_k > (
            reachable_experts := router.group_topk * distinct_moe.experts // router.num_groups
        ):
            reachable_text = f"the {reachable_experts} experts that group_topk {router.group_topk} leaves"
            yield f"model.experts: top_k {top_k} is above {reachable_text}; raise group_topk"
        elif distinct_moe.capacity_factor is not None:
            yield from _check_capacity(scenario, distinct_moe.capacity_factor, distinct_moe.experts / top_k)


def _check_capacity(scenario: ResolvedScenario, capacity: float, max_capacity: float) -> Iterator[str]:
    if capacity > max_capacity:
        yield (
            f"model.experts: capacity_factor {capacity:g} is above {max_capacity:g}, at which every expert "
            "takes every token"
        )
    if (dispatcher := scenario.layout.dispatcher) is not TokenDispatcher.ALL_TO_ALL:
        yield (
            f"layout.dispatcher: {dispatcher.value} sends as many rows as there are, and experts have a capacity; "
            f"{TokenDispatcher.ALL_TO_ALL.value} pads and drops"
        )


def _check_sharding(scenario: ResolvedScenario, routed: MoeMlp) -> Iterator[str]:
    layout, name = scenario.layout, scenario.model.name
    if routed.experts % layout.ep:
        yield Problem(
            f"layout.ep: {layout.ep} does not divide the {routed.experts} experts of {name}",
            Remedy.nearest("layout.ep", layout.ep, divisors(routed.experts)),
        )
    if routed.ffn % layout.effective_etp:
        yield Problem(
            f"layout.etp: {layout.effective_etp} does not divide expert width {routed.ffn} of {name}",
            Remedy.nearest("layout.etp", layout.effective_etp, divisors(routed.ffn)),
        )
    if routed.shared % layout.tp:
        yield Problem(
            f"layout.tp: {layout.tp} does not divide shared width {routed.shared} of {name}",
            Remedy.nearest("layout.tp", layout.tp, divisors(routed.shared)),
        )


def check_lora_experts(scenario: ResolvedScenario) -> Iterator[str]:
    """Check that LoRA does not target experts, nor quantize them as its base."""
    lora, model = scenario.training.lora, scenario.model
    if lora is None or not model.distinct_routed_moes:
        return
    mlp_projections = {Projection.GATE, Projection.UP, Projection.DOWN}
    if any(mlp_projections.intersection(target.projections) for target in lora.targets):
        yield Problem(
            f"training.lora.targets: {model.name} has experts, for which adapters are not modelled",
            Remedy("training.lora.targets", (("attention",),)),
            Remedy("training.lora", ((None,),)),
        )
    if lora.base is not None:
        yield f"training.lora.base: {lora.base.value} of experts is not modelled, and {model.name} has some; write none"
