"""Remedies of communication: what is overlapped, how weights are sharded, how tokens travel to their experts."""

import json
from collections.abc import Callable, Iterator
from typing import Any, Final

from clustersim.parallel.data_parallel_strategy import (
    BucketedStrategy,
    DataParallelStrategy,
    DdpStrategy,
    NaiveDataParallel,
    Zero1,
)
from clustersim.parallel.mesh import CONTEXT, DATA, EXPERT, PIPELINE, TENSOR
from clustersim.program.task import TokenDispatcher
from clustersim.scenario.changes.catalogue.remedy import Alternative, explaining, remedy, setting
from clustersim.scenario.changes.expert_parallel import ep_fits_domains, feasible_ep_degrees, fused_dispatcher
from clustersim.scenario.changes.scenario_change import (
    Baseline,
    ChangeSubject,
    InapplicableChangeError,
    ScenarioChange,
)
from clustersim.scenario.changes.step_losses import StepLoss
from clustersim.scenario.config.data_parallel import DataParallelConfig
from clustersim.scenario.nearest_values import divisors
from clustersim.scenario.scenario import Scenario

_DATA_LOSSES: Final = StepLoss.exposed(DATA, CONTEXT) | {StepLoss.WAIT}
_EXPERT_LOSSES: Final = StepLoss.exposed(EXPERT) | {StepLoss.WAIT, StepLoss.SLOWED}
_TENSOR_LOSSES: Final = StepLoss.exposed(TENSOR)
_OVERLAP: Final = "layout.overlap_moe_expert_parallel_comm=true"
_CHUNKS: Final = (2, 3, 4)


def _data_options(scenario: Scenario) -> tuple[str, dict[str, Any]]:
    """Kind of the data-parallel strategy as the scenario names it, and its options."""
    raw = scenario.raw_mapping.get("layout", {}).get("data", "ddp")
    expanded = DataParallelConfig.expand_shorthand(raw)
    kind, options = next(iter(expanded.items())) if isinstance(expanded, dict) else (str(raw), {})
    return str(kind), dict(options or {})


def _has_moe(scenario: Scenario) -> bool:
    return bool(scenario.model.distinct_routed_moes)


def _data_option(option: str) -> Callable[[Baseline], Iterator[Alternative]]:
    """The present strategy with an option such as `overlap=true`."""
    return lambda baseline: iter((Alternative((f"layout.data.{_data_options(baseline.scenario)[0]}.{option}",)),))


def _data_remedy(
    name: str,
    label: str,
    find_alternatives: Callable[[Baseline], Iterator[Alternative]],
    can_help: Callable[[DataParallelStrategy, bool], bool],
    addresses: frozenset[StepLoss] = _DATA_LOSSES,
    *,
    needs: str = "",
) -> ScenarioChange:
    """A remedy of data parallelism.

    can_help: of a strategy over several ranks, with a pipeline or without; needs: the strategy that it ends with, which
    the framework has to have ("": the present one).
    """

    def is_relevant(scenario: Scenario) -> bool:
        layout = scenario.layout
        supported = scenario.framework.supported_layouts.strategies(is_pipelined=layout.is_pipelined)
        is_supported = not needs or needs in supported
        return layout.dp * layout.cp > 1 and is_supported and can_help(layout.data, layout.is_pipelined)

    return remedy(name, label, ChangeSubject.LAYOUT, addresses, find_alternatives, is_relevant=is_relevant)


def _hybrid_sharding(baseline: Baseline) -> Iterator[Alternative]:
    """Shard over few ranks, then more: all-gathers and reduce-scatters span the fewest where the first one fits."""
    scenario, layout = baseline.scenario, baseline.scenario.layout
    ranks = layout.dp * layout.cp
    kind, options = _data_options(scenario)
    for shards in (layout.cp * divisor for divisor in divisors(layout.dp)[:-1]):
        if shards > 1:
            sharded = {"hsdp" if kind == "fsdp" else kind: options | {"shard": shards}}
            yield Alternative((f"layout.data={json.dumps(sharded)}",), f": over {shards:,} of {ranks:,}")


def _more_prefetch(baseline: Baseline) -> Iterator[Alternative]:
    ahead = baseline.scenario.layout.data.prefetch_depth + 1
    option = f"layout.data.{_data_options(baseline.scenario)[0]}.prefetch={ahead}"
    yield Alternative((option,), f": {ahead} units")


def _flag_setting(
    field: str, label: str, addresses: frozenset[StepLoss], can_help: Callable[[Scenario], bool]
) -> ScenarioChange:
    """A flag of the layout turned on. can_help: whether a scenario has communication that it is about."""
    return setting(
        field,
        label,
        ChangeSubject.LAYOUT,
        addresses,
        (f"layout.{field}=true",),
        lambda scenario: can_help(scenario) and not getattr(scenario.layout, field),
    )


def _has_tensor_parallelism(scenario: Scenario) -> bool:
    return scenario.layout.tp > 1


def _splits_encoder(scenario: Scenario) -> bool:
    """Whether ranks that share a sequence split an encoder, or all run it."""
    layout = scenario.layout
    has_ranks = layout.tp * layout.cp > 1 and (layout.encoder_tp is None or layout.encoder_tp > 1)
    return scenario.model.encoder is not None and has_ranks and layout.encoder_dp is None


def _other_dispatcher(baseline: Baseline) -> Iterator[Alternative]:
    """A fused dispatch kernel (DeepEP, HybridEP) in place of the library's all-to-all, or the reverse."""
    present = baseline.scenario.layout.dispatcher
    other = TokenDispatcher.ALL_TO_ALL if present.has_custom_kernels else fused_dispatcher(baseline.scenario)
    yield Alternative((f"layout.dispatcher={other.value}",), f": {other.value}, not {present.value}")


def _experts_across_domains(*, within: bool) -> Callable[[Baseline], Iterator[Alternative]]:
    """The largest ep whose groups stay within NVLink domains, or the smallest whose groups do not."""

    def find_alternatives(baseline: Baseline) -> Iterator[Alternative]:
        scenario = baseline.scenario
        degrees = [ep for ep in feasible_ep_degrees(scenario) if ep_fits_domains(scenario, ep) is within]
        if not degrees:
            raise InapplicableChangeError(f"no legal ep is {'inside' if within else 'across'} NVLink domains")
        etp = scenario.layout.effective_etp
        for ep in reversed(degrees) if within else degrees:
            yield Alternative((f"layout.ep={ep}", f"layout.etp={etp}"), f": ep {ep}, not {scenario.layout.ep}")

    return find_alternatives


def _whole_experts(baseline: Baseline) -> Iterator[Alternative]:
    """Experts that are not cut: etp 1, and the same ep or one that is larger by as much."""
    layout = baseline.scenario.layout
    for ep in dict.fromkeys((layout.ep * layout.effective_etp, layout.ep)):
        yield Alternative(("layout.etp=1", f"layout.ep={ep}"), f": etp 1, ep {ep}")


def _overlapped_experts(baseline: Baseline) -> Iterator[Alternative]:
    """Weight gradients delayed, or not; in a pipeline whose schedule cannot pair passes also with several chunks."""
    shared = ("layout.moe_shared_expert_overlap=false",) if baseline.scenario.layout.moe_shared_expert_overlap else ()
    for schedule, detail in (((), ""), *((_chunks(chunks), f", {chunks} chunks") for chunks in _CHUNKS)):
        for delayed in (("layout.delay_wgrad_compute=true",), ()):
            yield Alternative((_OVERLAP, *delayed, *shared, *schedule), detail)


def _can_overlap_gathers(scenario: Scenario) -> bool:
    """Whether the framework can gather what it gathers at the end of a step while the next forward runs."""
    layout, strategy = scenario.layout, scenario.layout.data
    return (
        isinstance(strategy, Zero1)
        and layout.dp * layout.cp > 1
        and strategy.overlap
        and not strategy.overlap_param_gather
        and f"zero{strategy.zero_stage}" in scenario.framework.layout_defaults.optional_gathers
    )


def _can_overlap_shared_experts(scenario: Scenario) -> bool:
    layout = scenario.layout
    has_shared = any(moe.shared for moe in scenario.model.distinct_moes)
    sends_chosen_tokens = layout.ep > 1 and layout.dispatcher is not TokenDispatcher.ALL_GATHER
    return has_shared and sends_chosen_tokens and not layout.overlap_moe_expert_parallel_comm


def _chunks(chunks: int) -> tuple[str, ...]:
    return (f"schedule.interleaved.chunks={chunks}",)


def _can_fuse_routing(scenario: Scenario) -> bool:
    overheads = scenario.training.overheads
    return _has_moe(scenario) and (overheads.router_unfused or overheads.permute_unfused)


def _moe_remedy(
    name: str,
    label: str,
    find_alternatives: Callable[[Baseline], Iterator[Alternative]],
    can_help: Callable[[Scenario], bool],
    addresses: frozenset[StepLoss] = _EXPERT_LOSSES,
) -> ScenarioChange:
    return remedy(
        name,
        label,
        ChangeSubject.LAYOUT,
        addresses,
        find_alternatives,
        is_relevant=lambda scenario: _has_moe(scenario) and can_help(scenario),
    )


OVERLAP_REMEDIES: Final = explaining(
    _data_remedy(
        "data_parallel_overlap",
        "data-parallel communication overlapped with compute",
        _data_option("overlap=true"),
        lambda strategy, _: not (isinstance(strategy, NaiveDataParallel) or strategy.overlap),
    ),
    remedy(
        "overlap_param_gather",
        "updated parameters gathered while the next forward runs",
        ChangeSubject.LAYOUT,
        _DATA_LOSSES,
        _data_option("overlap_param_gather=true"),
        is_relevant=_can_overlap_gathers,
    ),
    _flag_setting(
        "tp_comm_overlap",
        "tensor-parallel communication overlapped with its matmuls (user buffers)",
        _TENSOR_LOSSES,
        lambda scenario: _has_tensor_parallelism(scenario) and not scenario.cross_domain_tp_group_count,
    ),
    _flag_setting(
        "sequence_parallel",
        "sequence parallelism of norms and residuals",
        _TENSOR_LOSSES | {StepLoss.MEMORY_BOUND},
        _has_tensor_parallelism,
    ),
    _flag_setting(
        "async_tensor_model_parallel_allreduce",
        "backward's tensor-parallel communication behind the weight gradient",
        _TENSOR_LOSSES,
        _has_tensor_parallelism,
    ),
    setting(
        "encoder_replicas",
        "images shared by replicas of the encoder, in place of its tensor parallelism",
        ChangeSubject.LAYOUT,
        _TENSOR_LOSSES | {StepLoss.MATMULS, StepLoss.MEMORY_BOUND, StepLoss.LAUNCH},
        ("layout.encoder_tp=1",),
        _splits_encoder,
    ),
    _flag_setting(
        "overlap_p2p_comm",
        "stages compute while they send",
        StepLoss.exposed(PIPELINE) | {StepLoss.BUBBLE},
        lambda scenario: scenario.layout.is_pipelined,
    ),
)

SHARDING_REMEDIES: Final = (
    _data_remedy(
        "larger_buckets",
        "gradient buckets of Megatron-LM's size",
        _data_option("bucket=megatron"),
        lambda strategy, _: isinstance(strategy, BucketedStrategy) and strategy.bucket is not None,
    ),
    _data_remedy(
        "sharded_optimizer",
        "optimizer states sharded over replicas (ZeRO-1)",
        lambda _: iter((Alternative(("layout.data=zero1",)),)),
        lambda strategy, _: isinstance(strategy, DdpStrategy),
        _DATA_LOSSES | {StepLoss.OPTIMIZER},
        needs="zero1",
    ),
    _data_remedy(
        "hybrid_sharding",
        "weights sharded over the fewest ranks that fit, replicated over the rest",
        _hybrid_sharding,
        lambda strategy, _: strategy.shards_parameters and strategy.shard_size is None,
        needs="hsdp",
    ),
    _data_remedy(
        "keep_gathered",
        "gathered weights kept until backward",
        _data_option("reshard_after_forward=false"),
        lambda strategy, is_pipelined: strategy.reshards_parameters(is_pipelined=is_pipelined),
    ),
    _data_remedy(
        "more_prefetch",
        "weights prefetched further ahead",
        _more_prefetch,
        lambda strategy, _: strategy.prefetch_depth > 0,
    ),
)

EXPERT_REMEDIES: Final = (
    _moe_remedy(
        "other_dispatcher",
        "another token dispatcher",
        _other_dispatcher,
        lambda scenario: scenario.layout.has_expert_mesh,
    ),
    _moe_remedy(
        "experts_inside",
        "experts spread inside NVLink domains",
        _experts_across_domains(within=True),
        lambda scenario: not ep_fits_domains(scenario, scenario.layout.ep),
    ),
    _moe_remedy(
        "experts_across",
        "experts spread across NVLink domains",
        _experts_across_domains(within=False),
        lambda scenario: ep_fits_domains(scenario, scenario.layout.ep) and scenario.supports_axis(EXPERT.name),
    ),
    _moe_remedy(
        "overlapped_experts",
        "expert communication overlapped with another microbatch",
        _overlapped_experts,
        lambda scenario: scenario.layout.ep > 1 and not scenario.layout.overlap_moe_expert_parallel_comm,
    ),
    _flag_setting(
        "moe_shared_expert_overlap",
        "shared experts computed during the dispatch of tokens",
        _EXPERT_LOSSES,
        _can_overlap_shared_experts,
    ),
    _moe_remedy(
        "whole_experts",
        "whole experts on each rank",
        _whole_experts,
        lambda scenario: scenario.layout.effective_etp > 1,
        _EXPERT_LOSSES | {StepLoss.MATMULS, StepLoss.MEMORY_BOUND, StepLoss.LAUNCH},
    ),
    setting(
        "fused_routing",
        "router and permutation of tokens fused",
        ChangeSubject.FRAMEWORK,
        frozenset({StepLoss.MEMORY_BOUND, StepLoss.LAUNCH, StepLoss.RECOMPUTE}),
        ("training.overheads.router_unfused=false", "training.overheads.permute_unfused=false"),
        _can_fuse_routing,
    ),
)
