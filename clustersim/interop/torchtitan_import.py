"""What does a torchtitan job file train, and how?

TOML files of v0.2.2 (February 2026) and what came before it under the same names; later versions configure jobs in
Python. What torchtitan does and no key says stands in the scenario: sequences are split over tensor-parallel ranks,
PyTorch's loss, pipeline outputs that are held, eager kernels unless layers are compiled. What makes another step than
can be said is refused. Which cluster it runs on no key says, and how many GPUs only where no degree is -1.

Reference: pytorch/torchtitan v0.2.2, torchtitan/train.py, config/job_config.py, distributed/{parallel_dims,
pipeline_parallel,activation_checkpoint}.py, models/{llama3,llama4}/infra/parallelize.py.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from clustersim.common.errors import InputError, suggest_nearest
from clustersim.interop.import_result import Imported
from clustersim.interop.model_equivalence import has_experts
from clustersim.interop.torchtitan_config import Job
from clustersim.interop.torchtitan_flavors import Flavor, flavor, model_of
from clustersim.interop.torchtitan_pipeline import stages_of
from clustersim.model.training import AttentionBackend

DDP_BUCKET: Final = "100 MiB"
"""`bucket_cap_mb` of apply_ddp in models/llama3/infra/parallelize.py."""
RESHARDS: Final = {"default": None, "always": True, "never": False}
RECIPES: Final = {"tensorwise": "fp8-tensorwise", "rowwise": "fp8-rowwise"}
LINEAR: Final = {
    "quantize.linear.float8": "float8",
    "float8": "float8",
    "quantize.linear.mx": "mx",
    "mx": "mx",
}
"""Converters of linear layers; the short names are those that shipped files still have."""
_GROUPED: Final = ("quantize.grouped_mm.float8", "quantize.grouped_mm.mx")
_WIDE: Final = ("output", "router.gate", "auto_filter_small_kn")
"""Modules that recipes leave wide in any case, and torchao's rule for small ones."""
_GATHERED: Final = "enable_fsdp_float8_all_gather"
_NOT_PIPELINED: Final = ("qwen3", "gpt_oss")
_WIDTHS: Final = {"bfloat16": "bf16", "float32": "fp32"}


@dataclass(frozen=True, slots=True)
class _Degrees:
    """Degrees of parallelism, whose product is the number of GPUs."""

    replicate: int
    shard: int
    cp: int
    tp: int
    pp: int

    @property
    def dp(self) -> int:
        """Replicas that read their own data."""
        return self.replicate * self.shard

    @property
    def world(self) -> int:
        """GPUs."""
        return self.dp * self.cp * self.tp * self.pp


def read_torchtitan(text: str, source: str, cluster: str = "dgx-h100", gpus: int | None = None) -> Imported:
    """A scenario of a job file.

    source: names it in errors; gpus: how many, where a degree is -1. Raises InputError for what is no job file of
    torchtitan, for degrees that do not multiply, and for what makes another step than can be said.
    """
    job = Job(text, source)
    named = flavor(job.text("model", "name"), job.text("model", "flavor"), source)
    degrees = _degrees(job, gpus)
    model = model_of(named)
    if degrees.pp > 1 and named.name in _NOT_PIPELINED:
        raise job.error(
            "parallelism", "pipeline_parallel_degree", f"torchtitan has no pipeline of {named.name}; write 1"
        )
    counts, schedule = stages_of(job, model.layer_count, degrees.pp)
    enabled, components = job.flag("compile", "enable"), job.words("compile", "components")
    compiled = enabled and "model" in components
    assumed = [*_assumed(job, named), *_assumed_layers(job, counts)]
    mapping = {
        "model": _model(named),
        "cluster": {"name": cluster, "gpus": degrees.world},
        "layout": _layout(job, named, degrees, compiled=compiled)
        | ({"layers_per_stage": list(counts)} if degrees.pp > 1 else {}),
        **schedule,
        "training": _training(job, degrees, counts, compiled=compiled)
        | ({} if named.attention is AttentionBackend.FLASH else {"attention": named.attention.value}),
        "framework": {"name": "pytorch", "compiled": True} if compiled else "pytorch",
    }
    return Imported(mapping, job.passed_over, tuple(assumed))


def _model(named: Flavor) -> Any:
    """The preset alone where it is that."""
    section = named.section
    if list(section) == ["preset"]:
        return section["preset"]
    return {"name": f"{named.name} {named.flavor}", **section}


def _assumed(job: Job, named: Flavor) -> list[str]:
    said = []
    if named.masked:
        said.append("documents fill their sequences, so masks between them change nothing")
    if has_experts(model_of(named)) and _converters(job) and not _grouped(job):
        said.append("products of experts are in the format of linear layers, too")
    return said


def _assumed_layers(job: Job, counts: Sequence[int]) -> list[str]:
    """Where every N-th layer is another number on each stage."""
    option = job.text("activation_checkpoint", "selective_ac_option")
    said = job.text("activation_checkpoint", "mode") == "selective" and option.isdecimal() and option != "0"
    many = sorted({count // int(option) for count in counts}) if said else [0]
    return [f"{many[-1]} layers of each stage are computed again, though some have {many[0]}"] if many[1:] else []


def _degrees(job: Job, gpus: int | None) -> _Degrees:
    names = ("data_parallel_replicate", "context_parallel", "tensor_parallel", "pipeline_parallel")
    replicate, cp, tp, pp = (job.whole("parallelism", f"{name}_degree") for name in names)
    shard, rest = job.whole("parallelism", "data_parallel_shard_degree"), replicate * cp * tp * pp
    said = f"replicate {replicate} x cp {cp} x tp {tp} x pp {pp} = {rest}"
    if shard == -1 and gpus is None:
        raise InputError(
            f"{job.source}: does not say how many GPUs, as data_parallel_shard_degree is -1; give --gpus, a multiple "
            f"of {said}"
        )
    if shard == -1 and gpus is not None and (gpus % rest or gpus < rest):
        near = max(1, round(gpus / rest)) * rest
        raise InputError(f"{job.source}: {gpus} GPUs are no multiple of {said}; give --gpus {near} or so")
    shard = (gpus or 0) // rest if shard == -1 else shard
    degrees = _Degrees(replicate, shard, cp, tp, pp)
    if gpus not in (None, degrees.world):
        raise InputError(
            f"{job.source}: {gpus} GPUs, but shard {shard} x {said} makes {degrees.world}; leave --gpus out, or write "
            "data_parallel_shard_degree = -1"
        )
    return degrees


def _layout(job: Job, named: Flavor, degrees: _Degrees, *, compiled: bool) -> dict[str, Any]:
    layout: dict[str, Any] = {
        "tp": degrees.tp,
        "cp": degrees.cp,
        "pp": degrees.pp,
        "sequence_parallel": degrees.tp > 1,
        "tensor_overlap": _overlaps(job, compiled=compiled) and degrees.tp > 1,
        "release_outputs": False,
        "data": _data(job, degrees),
    }
    plain = {"tp": 1, "cp": 1, "pp": 1, "sequence_parallel": False, "tensor_overlap": False, "data": None}
    if degrees.cp == 1:
        job.without_effect("parallelism", "context_parallel_load_balancer", "context_parallel_rotate_method")
    kept = {key: value for key, value in layout.items() if value != plain.get(key, "")}
    experts = _experts(job, degrees, mixture=has_experts(model_of(named)))
    return kept | ({"backward_overlap": False} if degrees.tp > 1 else {}) | experts


def _overlaps(job: Job, *, compiled: bool) -> bool:
    """Whether tensor-parallel collectives are pipelined with their matmuls."""
    asked = job.flag("parallelism", "enable_async_tensor_parallel")
    if asked and not compiled:
        raise job.error(
            "parallelism", "enable_async_tensor_parallel", 'needs [compile] enable = true with "model" in components'
        )
    return asked


def _data(job: Job, degrees: _Degrees) -> Any:
    """The strategy of data parallelism."""
    reshards = job.word("parallelism", "fsdp_reshard_after_forward", RESHARDS)
    options: dict[str, Any] = {} if reshards is None else {"reshard_after_forward": reshards}
    sharded = degrees.shard * degrees.cp
    if sharded > 1:
        hybrid = {"shard": sharded} if degrees.replicate > 1 else {}
        name = "hsdp" if hybrid else "fsdp"
        return {name: hybrid | options} if hybrid or options else name
    if degrees.replicate > 1 and degrees.tp * degrees.pp > 1:
        raise job.error(
            "parallelism",
            "data_parallel_replicate_degree",
            "torchtitan has DDP alone; write data_parallel_shard_degree = -1 beside other parallelism",
        )
    return {"ddp": {"bucket": DDP_BUCKET}} if degrees.replicate > 1 else None


def _experts(job: Job, degrees: _Degrees, *, mixture: bool) -> dict[str, Any]:
    """How experts are spread, if there are any; without expert parallelism they are cut as all else is."""
    ep, etp = (job.whole("parallelism", f"{name}_degree") for name in ("expert_parallel", "expert_tensor_parallel"))
    backend = job.word("parallelism", "expert_parallel_comm_backend", {"standard": "alltoall", "deepep": "deepep"})
    beside = job.flag("parallelism", "pipeline_parallel_expert_parallel_overlap")
    if ep == 1 or not mixture:
        return {}
    if etp not in (1, degrees.tp):
        raise job.error("parallelism", "expert_tensor_parallel_degree", f"{etp} is neither 1 nor tp {degrees.tp}")
    if backend == "deepep" and etp > 1:
        raise job.error("parallelism", "expert_parallel_comm_backend", "deepep needs expert_tensor_parallel_degree = 1")
    layout: dict[str, Any] = {"ep": ep, "etp": etp}
    layout |= {"dispatcher": backend} if backend != "alltoall" else {}
    schedule = job.text("parallelism", "pipeline_parallel_schedule")
    return layout | ({"overlap_expert_communication": False} if schedule == "DualPipeV" and not beside else {})


def _training(job: Job, degrees: _Degrees, counts: Sequence[int], *, compiled: bool) -> dict[str, Any]:
    local = job.whole("training", "local_batch_size")
    microbatch = job.whole("parallelism", "pipeline_parallel_microbatch_size") if degrees.pp > 1 else local
    if local % microbatch:
        raise job.error("training", "local_batch_size", f"{local} is no multiple of microbatches of {microbatch}")
    batch = job.whole("training", "global_batch_size")
    batch = local * degrees.dp if batch == -1 else batch
    times, left = divmod(batch, local * degrees.dp)
    if left or not times:
        raise job.error(
            "training", "global_batch_size", f"{batch} is no multiple of {local} sequences x {degrees.dp} replicas"
        )
    if times > 1 and degrees.pp > 1:
        raise job.error(
            "training",
            "global_batch_size",
            f"a pipeline that is filled and drained {times} times a step is not modelled; write local_batch_size = "
            f"{local * times}",
        )
    early = job.flag("activation_checkpoint", "early_stop") or compiled
    training: dict[str, Any] = {
        "sequence": job.whole("training", "seq_len"),
        "global_batch": batch,
        "microbatch": microbatch,
        "precision": _precision(job),
        "recompute": _recompute(job, counts, early=early),
        "loss": "torch",
        "fused": compiled,
    }
    _require_adam(job)
    offloads = job.flag("training", "enable_cpu_offload")
    return training | ({"offload": {"parameters": True}} if offloads else {})


def _require_adam(job: Job) -> None:
    job.word("optimizer", "name", dict.fromkeys(("Adam", "AdamW"), ""))
    if job.flag("optimizer", "early_step_in_backward"):
        raise job.error("optimizer", "early_step_in_backward", "an optimizer inside backward is not modelled")


def _precision(job: Job) -> dict[str, str]:
    kept = job.word("training", "dtype", _WIDTHS)
    wide = job.word("training", "mixed_precision_param", _WIDTHS)
    job.word("training", "mixed_precision_reduce", {"float32": ""})
    states = {"master": "none", "moments": "bf16"} if kept == "bf16" else {}
    linear = _converters(job)
    for item in ("float8", "mx"):
        if item != linear:
            job.without_effect(f"quantize.linear.{item}", "recipe_name", "filter_fqns", "emulate", _GATHERED)
        job.without_effect(f"quantize.grouped_mm.{item}", "recipe_name", "fqns")
    if not linear:
        return {"compute": "bf16" if kept == "bf16" else wide, **states}
    section = f"quantize.linear.{linear}"
    if not {"output"} <= set(job.words(section, "filter_fqns")) <= set(_WIDE):
        raise job.error(
            section, "filter_fqns", f'other layers than ["output"] and {" and ".join(_WIDE[1:])} cannot be left wide'
        )
    if linear == "mx":
        job.word(section, "recipe_name", dict.fromkeys(("mxfp8", "mxfp8_cublas"), ""))
        return {"compute": "mxfp8", **states}
    named = job.says(section, "recipe_name")
    recipe = job.word(section, "recipe_name", RECIPES) if named else RECIPES["tensorwise"]
    gathers = job.flag(section, _GATHERED)
    if named and gathers:
        raise job.error(section, _GATHERED, "goes without recipe_name, as the scaling of whole tensors alone has it")
    return {"compute": recipe, **({"gathered": "fp8"} if gathers else {}), **states}


def _converters(job: Job) -> str | None:
    """Whether linear layers are converted to float8 or mx."""
    asked = job.words("model", "converters")
    for item in asked:
        if item not in (*LINEAR, *_GROUPED):
            raise job.error(
                "model", "converters", f"{item!r} is not known; {suggest_nearest(item, (*LINEAR, *_GROUPED))}"
            )
    linear = {LINEAR[element] for element in asked if element in LINEAR}
    grouped = {entry.rpartition(".")[2] for entry in asked if entry in _GROUPED}
    if len(linear | grouped) > 1 or (grouped and not linear):
        raise job.error("model", "converters", "linear layers and experts are in one format; write quantize.linear's")
    return next(iter(linear), None)


def _grouped(job: Job) -> bool:
    return any(word in _GROUPED for word in job.words("model", "converters"))


def _recompute(job: Job, counts: Sequence[int], *, early: bool) -> Any:
    """Option N recomputes every N-th layer of a stage; the scenario says how many."""
    modes = {item: item for item in ("none", "full", "selective", "memory_budget")}
    mode = job.word("activation_checkpoint", "mode", modes)
    option = job.text("activation_checkpoint", "selective_ac_option")
    match mode:
        case "none":
            return "none"
        case "full":
            return {"mode": "full", "early_stop": early}
        case "memory_budget":
            raise job.error("activation_checkpoint", "mode", "what a compiler drops is not modelled; write selective")
    if option == "op":
        return {"mode": "selective_op", "early_stop": early}
    if not option.isdecimal():
        raise job.error("activation_checkpoint", "selective_ac_option", f'{option!r} is neither "op" nor such as "2"')
    every = max(1, int(option))
    if every == 1:
        return {"mode": "full", "early_stop": early}
    many = max(counts) // every
    return {"layers": many, "early_stop": early} if many else "none"
