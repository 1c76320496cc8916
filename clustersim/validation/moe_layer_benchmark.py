"""How long does a published MoE layer take, by kernel and collective?

A row is forward or backward of one MoE layer and nothing else (no norm, no residual sum), on the GPUs of
one node: NVIDIA/Megatron-LM, tests/functional_tests/test_cases/common/moe_perf. The notes state its sizes,
the dispatcher and the number of GPUs. The prediction is the sum of the layer's kernels and collectives, run
back to back as in a training step, but in isolation (without a step's power throttling). The benchmark has
fused routing and permutation, FP32 scores, BF16 gradients that are not accumulated, and no shared experts
whatever its sizes say: they are not in the configuration that it builds (`_build_transformer_config`). In
FP8 its weights are already cast. A matmul before the layer hides the host's first launches.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Any, Final

from clustersim.build import PreparedSimulation, build_simulation
from clustersim.common.units import Seconds
from clustersim.cost.roofline import Roofline
from clustersim.model.kernels import Kernel
from clustersim.parallel.tensor_parallel import backward_operations, forward_operations
from clustersim.program.task import CommOp, Operation, TokenDispatcher
from clustersim.scenario import Scenario
from clustersim.validation.cases import CannotPredictError, ValidationCase
from clustersim.validation.cluster_lookup import CLUSTER_BY_GPU

_SIZES_NOTE: Final = re.compile(r"hidden (\d+), moe ffn (\d+), (\d+) experts top-(\d+)")
_EXPERT_GROUPS_NOTE: Final = re.compile(r"group-limited (\d+) of (\d+)")
_RANKS_NOTE: Final = re.compile(r"(\d+) GPUs, EP(\d+), ETP1, TP1")
_DISPATCHER_NOTE: Final = re.compile(r"dispatcher (\w+)")
_DISPATCHER_BY_NAME: Final = {
    "a2a": TokenDispatcher.ALL_TO_ALL,
    "deepep": TokenDispatcher.DEEPEP,
    "hybridep": TokenDispatcher.HYBRIDEP,
    "allgather": TokenDispatcher.ALL_GATHER,
}
_PRECISION_BY_DTYPE: Final[Mapping[str, Mapping[str, str]]] = {
    "bf16": {},
    "fp8 blockwise": {"compute": "fp8-blockwise"},
}
_MOE_KERNEL_PREFIXES: Final = ("mlp.", "experts.")
_EXCLUDED_PREFIXES: Final = ("mlp.norm", "mlp.residual")
_ACCUMULATE_SUFFIX: Final = ".accumulate"  # gradients are not accumulated


def moe_layer_breakdown(case: ValidationCase) -> Mapping[str, Seconds]:
    """Seconds of each kernel and collective of a row, by name; raises CannotPredictError for other layers."""
    passes, direction = {"fwd": forward_operations, "bwd": backward_operations}, case.text("direction")
    if direction not in passes or case.text("dtype") not in _PRECISION_BY_DTYPE:
        raise CannotPredictError(
            f"layers {direction or 'both ways'} in {case.text('dtype')} are not modelled", is_expressible=False
        )
    scenario = Scenario.from_mapping(_scenario_mapping(case), default_name=case.text("case_id"))
    simulation = build_simulation(scenario)
    ((spec, layer),) = simulation.plan.layer_by_spec.items()
    return _operation_seconds(scenario, simulation, passes[direction](layer, simulation.plan.layer_sharding(spec)))


def _operation_seconds(
    scenario: Scenario, simulation: PreparedSimulation, operations: Iterable[Operation]
) -> Mapping[str, Seconds]:
    roofline, seconds_by_name = Roofline(scenario.cluster.accelerator), {}
    for body in (operation.body for operation in operations):
        match body:
            case CommOp(routing=routing) if routing is not None:
                seconds_by_name[body.name] = float(simulation.cost.comm_timing_by_group(body).seconds.max())
            case Kernel(name=name) if _is_timed(name):
                seconds_by_name[name] = seconds_by_name.get(name, 0.0) + roofline.time_kernel(body).seconds
    return seconds_by_name


def _is_timed(name: str) -> bool:
    return (
        name.startswith(_MOE_KERNEL_PREFIXES)
        and not name.startswith(_EXCLUDED_PREFIXES)
        and not name.endswith(_ACCUMULATE_SUFFIX)
    )


def _scenario_mapping(case: ValidationCase) -> dict[str, Any]:
    """Scenario of a model with one such layer, with one sequence per rank."""
    hidden, ffn, experts, top_k = _parse_sizes(case, _SIZES_NOTE)
    gpus, ep = _parse_sizes(case, _RANKS_NOTE)
    dispatcher = _DISPATCHER_NOTE.search(case.text("notes"))
    if dispatcher is None or dispatcher[1] not in _DISPATCHER_BY_NAME:
        raise CannotPredictError("the dispatcher is not stated", is_expressible=False)
    moe_config = {"count": experts, "top_k": top_k, "ffn": ffn, **_expert_group_config(case)}
    heads = hidden // 128
    sizes = {"layers": 1, "hidden": hidden, "heads": heads, "ffn": ffn, "vocab": 128 * gpus, "mlp": "swiglu"}
    return {
        "model": {**sizes, "experts": moe_config},
        "cluster": {"name": _cluster_name(case), "gpus": gpus},
        "layout": {"ep": ep, "dispatcher": _DISPATCHER_BY_NAME[dispatcher[1]].value},
        "training": {
            "sequence": case.positive_int("m"),
            "global_batch": gpus,
            "precision": {**_PRECISION_BY_DTYPE[case.text("dtype")], "gradients": "bf16"},
            "overheads": {"accumulation": "added", "router_unfused": False, "permute_unfused": False},
        },
        "framework": "megatron",
    }


def _expert_group_config(case: ValidationCase) -> dict[str, Any]:
    match = _EXPERT_GROUPS_NOTE.search(case.text("notes"))
    if match is None:
        return {}
    return {"group_topk": int(match[1]), "num_groups": int(match[2]), "router": "sigmoid", "router_bias": True}


def _parse_sizes(case: ValidationCase, pattern: re.Pattern[str]) -> tuple[int, ...]:
    match = pattern.search(case.text("notes"))
    if match is None:
        raise CannotPredictError("sizes of the layer or its ranks are not stated", is_expressible=False)
    return tuple(int(group) for group in match.groups())


def _cluster_name(case: ValidationCase) -> str:
    gpu = case.text("gpu")
    if gpu not in CLUSTER_BY_GPU:
        raise CannotPredictError(f"gpu {gpu or 'is not stated'}: no cluster of it is known", is_expressible=False)
    return CLUSTER_BY_GPU[gpu].cluster_name
