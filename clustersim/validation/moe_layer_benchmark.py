"""How long does a published layer with experts take, part by part?

A row is forward or backward of one layer with a mixture of experts and nothing else (no norm, no residual sum), on the
GPUs of one node: NVIDIA/Megatron-LM, tests/functional_tests/test_cases/common/moe_perf. `notes` say its sizes, who
dispatches, and over how many GPUs. Predicted are the layer's own kernels and exchanges, one behind the other, as a step
of such a model would run them, by themselves (no step's power limit). That benchmark has fused routing and permutation,
FP32 scores, gradients in BF16 that are not added to others, and no shared experts whatever its sizes say: they are no
part of the configuration that it builds (`_build_transformer_config`). In FP8 its weights are taken as cast before. A
product before it hides the host's first launches.
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
from clustersim.validation.cases import CannotPredictError, Case
from clustersim.validation.cluster_lookup import PLACES

_SIZES: Final = re.compile(r"hidden (\d+), moe ffn (\d+), (\d+) experts top-(\d+)")
_GROUPS: Final = re.compile(r"group-limited (\d+) of (\d+)")
_RANKS: Final = re.compile(r"(\d+) GPUs, EP(\d+), ETP1, TP1")
_BY: Final = re.compile(r"dispatcher (\w+)")
_DISPATCHERS: Final = {
    "a2a": TokenDispatcher.ALL_TO_ALL,
    "deepep": TokenDispatcher.DEEPEP,
    "hybridep": TokenDispatcher.HYBRIDEP,
    "allgather": TokenDispatcher.ALL_GATHER,
}
_PRECISIONS: Final[Mapping[str, Mapping[str, str]]] = {"bf16": {}, "fp8 blockwise": {"compute": "fp8-blockwise"}}
_OF_THE_MIXTURE: Final = ("mlp.", "experts.")
_BESIDE: Final = ("mlp.norm", "mlp.residual")
_SUMS: Final = ".accumulate"  # of gradients: there is nothing to add to


def layer_parts(case: Case) -> Mapping[str, Seconds]:
    """Seconds of each kernel and exchange of a row, by name; raise CannotPredictError for other layers."""
    ways, way = {"fwd": forward_operations, "bwd": backward_operations}, case.text("direction")
    if way not in ways or case.text("dtype") not in _PRECISIONS:
        raise CannotPredictError(f"layers {way or 'both ways'} in {case.text('dtype')} are not modelled", owed=False)
    scenario = Scenario.from_mapping(_mapping(case), default_name=case.text("case_id"))
    assembly = build_simulation(scenario)
    ((spec, layer),) = assembly.plan.layer_by_spec.items()
    return _timed(scenario, assembly, ways[way](layer, assembly.plan.layer_sharding(spec)))


def _timed(scenario: Scenario, assembly: PreparedSimulation, operations: Iterable[Operation]) -> Mapping[str, Seconds]:
    source, parts = Roofline(scenario.cluster.accelerator), {}
    for does in (operation.body for operation in operations):
        match does:
            case CommOp(routing=routing) if routing is not None:
                parts[does.name] = float(assembly.cost.comm_timing_by_group(does).seconds.max())
            case Kernel(name=name) if _counts(name):
                parts[name] = parts.get(name, 0.0) + source.time_kernel(does).seconds
    return parts


def _counts(name: str) -> bool:
    return name.startswith(_OF_THE_MIXTURE) and not name.startswith(_BESIDE) and not name.endswith(_SUMS)


def _mapping(case: Case) -> dict[str, Any]:
    """A step of a model of one such layer, of one sequence on each rank."""
    hidden, ffn, experts, top_k = _numbers(case, _SIZES)
    gpus, ep = _numbers(case, _RANKS)
    by = _BY.search(case.text("notes"))
    if by is None or by[1] not in _DISPATCHERS:
        raise CannotPredictError("the dispatcher is not stated", owed=False)
    mixture = {"count": experts, "top_k": top_k, "ffn": ffn, **_groups(case)}
    heads = hidden // 128
    sizes = {"layers": 1, "hidden": hidden, "heads": heads, "ffn": ffn, "vocab": 128 * gpus, "mlp": "swiglu"}
    return {
        "model": {**sizes, "experts": mixture},
        "cluster": {"name": _cluster(case), "gpus": gpus},
        "layout": {"ep": ep, "dispatcher": _DISPATCHERS[by[1]].value},
        "training": {
            "sequence": case.whole("m"),
            "global_batch": gpus,
            "precision": {**_PRECISIONS[case.text("dtype")], "gradients": "bf16"},
            "overheads": {"accumulation": "added", "router_unfused": False, "permute_unfused": False},
        },
        "framework": "megatron",
    }


def _groups(case: Case) -> dict[str, Any]:
    found = _GROUPS.search(case.text("notes"))
    if found is None:
        return {}
    return {"limit": int(found[1]), "groups": int(found[2]), "router": "sigmoid", "router_bias": True}


def _numbers(case: Case, words: re.Pattern[str]) -> tuple[int, ...]:
    found = words.search(case.text("notes"))
    if found is None:
        raise CannotPredictError("sizes of the layer or its ranks are not stated", owed=False)
    return tuple(int(group) for group in found.groups())


def _cluster(case: Case) -> str:
    gpu = case.text("gpu")
    if gpu not in PLACES:
        raise CannotPredictError(f"gpu {gpu or 'is not stated'}: no cluster of it is known", owed=False)
    return PLACES[gpu].cluster
