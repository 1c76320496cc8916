"""Which scenario is a published run?

One function turns a row of `steps.csv` into what a scenario file of the run would hold. What the row does not state is
filled in by the habits of its software (`framework_defaults`), the same for all of its runs.
"""

import re
from typing import Any, Final

from clustersim.parallel.mesh import DENSE_AXIS_NAMES
from clustersim.schedules import registry
from clustersim.uncertainty.model_file import uncertainty_model_name
from clustersim.validation.cases import CannotPredictError, Case
from clustersim.validation.cluster_lookup import cluster_section
from clustersim.validation.framework_defaults import Software, has_experts, software_of
from clustersim.validation.moe_settings import (
    dense_width,
    experts_formats,
    experts_layout,
    experts_overheads,
    experts_section,
    public_model,
    require_mixture,
)
from clustersim.validation.recipe_defaults import completed
from clustersim.validation.training_precision import is_wide

_OFFLOADED: Final[dict[str, dict[str, Any]]] = {  # as a row's notes say it
    "activation offloading on": {"activations": "all"},
    "optimizer offloading on": {"optimizer": True},
}
RECOMPUTES: Final = {
    "": "none",
    "none": "none",
    "selective": "selective",
    "selective-op": "selective_op",
    "full": "full",
}
_LISTED: Final = re.compile(r"selective:\[([a-z_ ]+)\]")  # Megatron-LM's --recompute-modules
_DRAWN: Final = re.compile(r"\blayout (E[tmL|()*\d]+)")  # Megatron-LM's pipeline_model_parallel_layout
_FURTHER: Final = re.compile(r"\bMTP (\d+)|\bmtp-num-layers (\d+)")  # layers that predict further tokens
_MODULES: Final = "modules:"  # of which names follow, joined by +
SIMULATED: Final = "simulated"
"""How `step_time_origin` begins where nobody measured the time."""
SCHEDULES: Final = ("", *registry.SCHEDULE_NAMES)


def scenario_mapping(case: Case) -> dict[str, Any]:
    """What a scenario file of the run holds; raise CannotPredictError where scenarios cannot say it."""
    _require(case)
    case = completed(case)
    software = software_of(case)
    return {
        "name": case.text("case_id"),
        "model": _model(case, software),
        "cluster": cluster_section(case),
        "layout": _layout(case, software),
        "schedule": _schedule(case),
        "training": _training(case, software),
        "framework": software.host(case),
        "steps": _steps(case),
    }


def _steps(case: Case) -> int:
    """Zero-bubble schedules start a step before the last one has ended everywhere: the third is a steady one."""
    return 3 if case.text("schedule").startswith("zb") else 1


def is_dense(case: Case) -> bool:
    """Whether a dense model was run in bf16 or fp16, and all that a step depends on is known (quality A or B)."""
    return is_known(case) and is_wide(case) and not has_experts(case)


def is_mixture(case: Case) -> bool:
    """Whether a mixture of experts was run in bf16 or fp16, and all that a step depends on is known."""
    return is_known(case) and is_wide(case) and has_experts(case)


def experience_of(case: Case) -> str | None:
    """The kind of experience that a case adds to.

    None where not all that its step depends on is known, or where nobody measured it.
    """
    if not (is_known(case) and is_measured(case)):
        return None
    return uncertainty_model_name(moe=has_experts(case), low_precision=not is_wide(case))


def is_measured(case: Case) -> bool:
    """Whether a GPU took the time of the row, and not somebody's simulator, whatever the source says."""
    return not case.text("step_time_origin").startswith(SIMULATED)


def is_known(case: Case) -> bool:
    """Whether all that a step depends on is known, in whatever format it was run."""
    return case.text("quality") in ("A", "B")


def _require(case: Case) -> None:
    """Refuse what is not modelled; a row that leaves out what a step depends on is not owed a prediction either."""
    if case.whole("ep", 1) > 1 and not has_experts(case):
        raise CannotPredictError("expert parallelism of a model without experts", owed=False)
    if case.text("schedule") not in SCHEDULES:
        raise CannotPredictError(f"schedule {case.text('schedule')} is not modelled")


def _model(case: Case, software: Software) -> dict[str, Any]:
    preset = public_model(case) if has_experts(case) else None
    if has_experts(case):
        require_mixture(case, preset)
    experts = {"experts": experts_section(case, preset)} if has_experts(case) else {}
    named = {"name": case.text("model") or case.text("case_id"), **experts, **_further(case)}
    if preset is not None:
        cut = {column: case.whole(column) for column in ("layers", "vocab")}
        return named | cut | {"preset": preset, "max_positions": case.whole("seq")}
    dimensions = _dimensions(case, software)
    if experts and not experts["experts"].get("dense_layers"):
        del dimensions["ffn"]  # of a dense MLP, which no layer has
    return named | dimensions


def _further(case: Case) -> dict[str, int]:
    """How many layers predict further tokens, where notes say that there are some."""
    stated = _FURTHER.search(case.text("notes"))
    return {"mtp_layers": int(stated[1] or stated[2])} if stated else {}


def _dimensions(case: Case, software: Software) -> dict[str, Any]:
    widths, heads = ("layers", "hidden", "heads", "vocab"), case.whole("heads")
    return {
        **{column: case.whole(column) for column in widths},
        "kv_heads": case.whole("kv_heads", heads),
        "head_dim": case.whole("head_dim", max(1, case.whole("hidden") // heads)),
        "ffn": dense_width(case) if has_experts(case) else case.whole("ffn_hidden"),
        "max_positions": case.whole("seq"),
        "mlp": case.text("mlp") or "swiglu",
        "tied_embeddings": case.is_yes("tied_embeddings"),
        **software.model(case),
    }


def _splits_sequence(case: Case) -> bool:
    """Whether sequences are split where there is tensor parallelism; without, no software trains experts beside it."""
    return case.is_yes("sequence_parallel") or (has_experts(case) and not case.text("sequence_parallel"))


def _layout(case: Case, software: Software) -> dict[str, Any]:
    degrees = {axis: case.whole(axis, 1) for axis in DENSE_AXIS_NAMES}
    section: dict[str, Any] = {
        **degrees,
        "sequence_parallel": _splits_sequence(case) and degrees["tp"] > 1,
        "tensor_overlap": software.overlaps_tensors(case),
        "backward_overlap": software.overlaps_backward(case),
        "pipeline_overlap": software.overlaps_pipeline(case),
        **software.releases(),
        "data": software.data(case),
        **(experts_layout(case, software) if has_experts(case) else {}),
    }
    return section | _stages(case, software)


def _stages(case: Case, software: Software) -> dict[str, Any]:
    """How layers are split over the stages, where that is not evenly."""
    stages, layers = case.whole("pp", 1) * case.whole("vpp", 1), case.whole("layers")
    stated = case.text("layers_per_stage").split()
    if stated:
        return {"layers_per_stage": [int(item) if item.isdecimal() else item for item in stated]}
    drawn = _DRAWN.search(case.text("notes"))
    if drawn:
        return {"layers_per_stage": drawn[1]}
    ends = "take a layer slot" in case.text("notes") or (software.ends_count and layers % stages != 0)
    if stages > 1 and ends and (layers + 2) % stages == 0:  # embedding and head count as a layer each
        slots = (layers + 2) // stages
        return {"layers_per_stage": [slots - 1, *[slots] * (stages - 2), slots - 1]}
    return {}


def _schedule(case: Case) -> Any:
    name = case.text("schedule")
    if case.whole("pp", 1) == 1 or not name:
        return "1f1b"
    # without a stated number of chunks, the finest interleaving: one layer each
    finest = -(-case.whole("layers") // case.whole("pp"))
    return {name: {"chunks": case.whole("vpp", finest)}} if name in registry.CHUNKED_SCHEDULES else name


def _training(case: Case, software: Software) -> dict[str, Any]:
    return {
        "sequence": case.whole("seq"),
        "global_batch": case.whole("global_batch"),
        "microbatch": case.whole("micro_batch", 1),
        "precision": _formats(case, software),
        "recompute": _recompute(case, software),
        "attention": software.core(case),
        "loss": software.loss,
        "fused": software.fused(case),
        **_lora(case),
        **_offload(case),
        **(experts_overheads(case, software) if has_experts(case) else {}),
    }


def _formats(case: Case, software: Software) -> dict[str, str]:
    """Of products and of what is kept, where it is not the usual."""
    return software.formats(case) | (experts_formats(case, software) if has_experts(case) else {})


def _offload(case: Case) -> dict[str, Any]:
    """What the notes say to be on the host."""
    said = [what for words, what in _OFFLOADED.items() if words in case.text("notes")]
    return {"offload": {key: value for what in said for key, value in what.items()}} if said else {}


def _lora(case: Case) -> dict[str, Any]:
    """Adapters, where a row has their rank."""
    if not case.text("lora_rank"):
        return {}
    targets, base = case.text("lora_targets").split() or ["all"], case.text("lora_base") or "none"
    return {"lora": {"rank": case.whole("lora_rank"), "targets": targets, "base": base}}


def _recompute(case: Case, software: Software) -> Any:
    kind, early_stop = case.text("recompute"), {"early_stop": software.stops_early(case)}
    if kind == "alternate-layers":
        return {"layers": case.whole("layers") // 2, **early_stop}
    listed = _LISTED.fullmatch(kind)
    if listed:
        return {"modules": listed[1].split()}
    if kind.startswith(_MODULES):
        return {"modules": kind.removeprefix(_MODULES).split("+")}
    if kind not in RECOMPUTES:
        raise CannotPredictError(f"recompute {kind} is not modelled")
    return {"mode": RECOMPUTES[kind], **early_stop}
