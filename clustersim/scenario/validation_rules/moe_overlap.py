"""Can MoE communication overlap with the computation of another microbatch?

The exclusions are Megatron-LM's own (megatron/core/transformer/transformer_config.py@00caa53a, under
`overlap_moe_expert_parallel_comm`; its newest versions allow recomputation of full stages, and nothing else
with it): ep above 1, an alltoall, DeepEP or Hybrid-EP dispatcher, no recomputation of full layers or of the
MoE layer, which would dispatch again inside a backward, several chunks in a pipeline; and
`delay_wgrad_compute` with it only. Shared experts overlap with dispatch and combine
(`moe_shared_expert_overlap`) with alltoall and, since pull request 2207, DeepEP and Hybrid-EP, not recomputed, and
not together with it.
"""

from collections.abc import Iterator

from clustersim.model.recompute_modules import RecomputeModule
from clustersim.model.training import FullRecompute, SelectiveRecompute
from clustersim.program.task import TokenDispatcher
from clustersim.scenario.resolved import ResolvedScenario
from clustersim.scenario.validation_rules.remedies import Problem, Remedy

_KEY = "layout.overlap_moe_expert_parallel_comm: true"
_PAIRING = Remedy("schedule", (("interleaved",), ("dualpipev",)))  # schedules that pair forwards with backwards


def check_moe_overlap(scenario: ResolvedScenario) -> Iterator[str]:
    """Check the conditions of overlapped MoE communication and of delayed weight gradients."""
    layout = scenario.layout
    if layout.overlap_moe_expert_parallel_comm:
        yield from (*_check_dispatch(scenario), *_check_recompute(scenario), *_check_schedule(scenario))
    elif layout.delay_wgrad_compute:
        yield (
            "layout.delay_wgrad_compute: true delays weight gradients behind overlapped MoE communication; "
            f"write {_KEY}, too"
        )
    if layout.delay_wgrad_compute and layout.data.shards_parameters:
        yield (
            "layout.delay_wgrad_compute: true is not modelled where each backward gathers weights; use zero1, "
            "or write false"
        )


def check_shared_expert_overlap(scenario: ResolvedScenario) -> Iterator[str]:
    """Check the conditions of shared experts overlapping dispatch and combine."""
    layout, recompute = scenario.layout, scenario.training.recompute
    if not layout.moe_shared_expert_overlap:
        return
    key = "layout.moe_shared_expert_overlap: true"
    if layout.ep == 1 or not any(distinct_moe.shared for distinct_moe in scenario.model.distinct_moes):
        yield f"{key} needs shared experts and tokens that travel (ep above 1); write false"
    if layout.dispatcher is TokenDispatcher.ALL_GATHER:
        yield _refuse_all_gather(key)
    if layout.overlap_moe_expert_parallel_comm:
        yield f"{key} and {_KEY} exclude each other; write one of them"
    if RecomputeModule.SHARED_EXPERTS in recompute.modules:
        yield f"{key} excludes training.recompute modules: [{RecomputeModule.SHARED_EXPERTS.value}]; leave that out"


def _check_dispatch(scenario: ResolvedScenario) -> Iterator[str]:
    layout = scenario.layout
    if layout.ep == 1 or not scenario.model.distinct_moes:
        yield f"{_KEY} overlaps MoE communication with computation, but layout.ep is 1; write false"
    elif layout.dispatcher is TokenDispatcher.ALL_GATHER:
        yield _refuse_all_gather(_KEY)


def _refuse_all_gather(key: str) -> Problem:
    others = (dispatcher for dispatcher in TokenDispatcher if dispatcher is not TokenDispatcher.ALL_GATHER)
    remedy = Remedy("layout.dispatcher", tuple((dispatcher.value,) for dispatcher in others))
    return Problem(f"{key} is not for dispatcher {TokenDispatcher.ALL_GATHER.value}", remedy)


def _check_recompute(scenario: ResolvedScenario) -> Iterator[str]:
    match scenario.training.recompute:
        case FullRecompute():
            setting = "full"
        case SelectiveRecompute(modules) if RecomputeModule.MOE in modules:
            setting = f"modules: [{RecomputeModule.MOE.value}]"
        case _:
            return
    allowed = [module.value for module in RecomputeModule if module is not RecomputeModule.MOE]
    yield Problem(
        f"{_KEY} excludes training.recompute {setting}, which sends tokens again in backward; modules may be any of "
        f"{', '.join(allowed)}",
        Remedy("training.recompute", (("none",),)),
    )


def _check_schedule(scenario: ResolvedScenario) -> Iterator[str]:
    """Check that the schedule pairs forwards with backwards."""
    schedule = scenario.effective_schedule
    if not schedule.may_pair_passes:
        yield Problem(f"{_KEY} overlaps forwards with backwards, which schedule {schedule.name} has not", _PAIRING)
    elif schedule.needs_chunks_to_pair and scenario.layout.pp > 1 and scenario.placement.max_chunks == 1:
        yield Problem(f"{_KEY} needs several chunks in a pipeline, and schedule {schedule.name} has one", _PAIRING)
