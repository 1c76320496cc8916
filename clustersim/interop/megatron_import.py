"""What does a Megatron-LM command line train, and how? Import as a scenario.

Arguments have the names and defaults of megatron/training/arguments.py (NVIDIA/Megatron-LM, core_v0.15 and
before, and later versions where names are unchanged), those of 2021 and of deepspeedai/Megatron-DeepSpeed where
these differ. Arguments that do not affect the step are ignored silently: data, logging, checkpoints, learning
rates, seeds, evaluation. Unsupported arguments raise an error if they define another model or step, else they are
reported. The cluster is not stated by any argument. The default global batch is one microbatch per replica.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from clustersim.common.errors import InputError
from clustersim.hardware.cluster import load_cluster
from clustersim.interop.deepspeed_config import ZeroSettings, is_deepspeed_fork, zero_settings
from clustersim.interop.import_result import NO_CONTEXT, ImportContext, ImportResult
from clustersim.interop.megatron_arguments import (
    CP_KIND_BY_FLAG,
    MegatronArguments,
    group_by_flag,
    has_no_effect,
    is_irrelevant_flag,
)
from clustersim.interop.megatron_bridge import read_bridge_printout
from clustersim.interop.megatron_hybrid import contradicted_layers, hybrid_stages, with_pattern_layers
from clustersim.interop.megatron_launches import LaunchedTraining, ScriptTrainings, find_trainings, yaml_trainings
from clustersim.interop.megatron_model import import_model
from clustersim.interop.shell.interpreter import definition_hint
from clustersim.interop.shell.unknowns import HOLE, Decision, Unknowns
from clustersim.model.optimizers import MuonTensorParallel
from clustersim.model.recipe_files import load_recipe
from clustersim.parallel.context_parallel import ContextParallelKind
from clustersim.parallel.pipeline_layout_string import parse_pipeline_layout
from clustersim.scenario.config.optimizer import OptimizerConfig

RECIPE_BY_FLAG: Final = {
    "delayed": "fp8",
    "tensorwise": "fp8-current",
    "blockwise": "fp8-blockwise",
    "mxfp8": "mxfp8",
}
ROUTING_FUSION_FLAGS: Final = {
    "moe-permute-fusion": "permute_unfused",
    "moe-router-fusion": "router_unfused",
    "enable-experimental": "indices_unfused",
}
"""Flags that fuse kernels around experts, and the key of `training.overheads` that they turn off."""
STRATEGY_BY_FLAG: Final = {
    "no_shard": "ddp",
    "optim": "zero1",
    "optim_grads": "zero2",
    "optim_grads_params": "fsdp",
}
"""Data-parallel strategy by `--data-parallel-sharding-strategy`; exporters use the first flag of a strategy."""
_LOSS_BY_FLAG: Final = {"native": "fused", "te": "fused", "linear": "cut_cross_entropy"}
_CUDA_GRAPH_IMPLS: Final = {name: name for name in ("none", "local", "transformer_engine", "full_iteration")}
_STATE_FORMAT_FLAGS: Final = {
    "main-grads-dtype": "gradients",
    "megatron-fsdp-main-grads-dtype": "gradients",
    "main-params-dtype": "master",
    "megatron-fsdp-main-params-dtype": "master",
    "exp-avg-dtype": "moments",
}
"""Flags that state a format, and the key of `training.precision`; `auto` and `fp32` are the default."""
_DDP_IMPLS: Final = {"local": "local", "torch": "torch"}
_TORCH_BUCKET: Final = "25 MiB"
"""`bucket_cap_mb` of torch.nn.parallel.DistributedDataParallel."""
_OPTIMIZERS: Final = ("adam", "sgd", "lion", "muon", "dist_muon")
_SHARDED_MUON: Final = "dist_muon"  # deprecated since 2026: muon with --use-distributed-optimizer


_MAX_SHOWN_FLAGS: Final = 3


@dataclass(frozen=True, slots=True)
class _Alternative:
    """A training and what its import yields."""

    training: LaunchedTraining
    outcome: ImportResult | InputError


def import_megatron(
    text: str,
    source: str,
    cluster: str = "dgx-h100",
    gpu_count: int | None = None,
    context: ImportContext = NO_CONTEXT,
) -> ImportResult:
    """The scenario of a script that launches Megatron-LM, or of its arguments alone.

    source: names it in errors and names the scenario; gpu_count: number of GPUs, None: as the script says.
    Raises InputError for arguments that are missing, invalid or not known, or define a model or step that cannot
    be expressed, and for scripts that start other programs, or several trainings that differ.
    """
    node_gpus = load_cluster(cluster).gpus_per_node
    trainings = find_trainings(text, source, context, node_gpus, has_no_effect)
    return _import_trainings(trainings, source, cluster, gpu_count, context)


def import_yaml(
    kind: str, text: str, source: str, cluster: str, gpu_count: int | None, context: ImportContext
) -> ImportResult:
    """The scenario of a YAML file of a program on Megatron-LM. kind: of `megatron_yaml`; else as `import_megatron`."""
    return _import_trainings(yaml_trainings(text, source, context, kind), source, cluster, gpu_count, context)


def import_bridge(text: str, source: str, cluster: str, gpu_count: int | None, context: ImportContext) -> ImportResult:
    """The scenario of a configuration that Megatron-Bridge prints; else as `import_megatron`."""
    training = LaunchedTraining(read_bridge_printout(text, source), None, 1)
    trainings = ScriptTrainings((training,), Unknowns(), is_table=True)
    return _import_trainings(trainings, source, cluster, gpu_count, context)


def _import_trainings(
    trainings: ScriptTrainings, source: str, cluster: str, gpu_count: int | None, context: ImportContext
) -> ImportResult:
    if not any(training.shell_words for training in trainings.alternatives):
        raise InputError(
            f"{source}: has no arguments; they begin with --, such as --num-layers 32{_unread_files(trainings)}"
        )
    alternatives: list[_Alternative] = []
    for training in trainings.alternatives:
        try:
            shell_words = group_by_flag(training.shell_words)
            parsed = MegatronArguments(with_pattern_layers(shell_words), source, trainings.unknowns, context)
            parsed.assumptions.extend(contradicted_layers(shell_words))
            result = _import_arguments(parsed, training, trainings, cluster, gpu_count)
            alternatives.append(_Alternative(training, result))
        except InputError as error:
            alternatives.append(_Alternative(training, error))
    chosen, assumptions = _single_alternative(alternatives, source)
    if isinstance(chosen.outcome, InputError):
        raise chosen.outcome
    return replace(chosen.outcome, assumptions=(*chosen.outcome.assumptions, *assumptions))


def _single_alternative(alternatives: Sequence[_Alternative], source: str) -> tuple[_Alternative, list[str]]:
    """The one training that all alternatives are; raises InputError for what decides if they differ.

    Where conditions ask whether the environment sets something, the alternative in which it does not is taken;
    the sentences say so.
    """
    first = alternatives[0]
    differing = [one for one in alternatives[1:] if not _are_equal(first, one)]
    if not differing:
        if not first.training.is_complete and isinstance(first.outcome, ImportResult):
            decision = first.training.outcomes[0][0]
            raise InputError(
                f"{source}: its arguments depend on too many conditions that are not known, the first on line "
                f"{decision.line}: {decision.condition}{definition_hint(decision.names)}"
            )
        return first, []
    kept, assumed = _defaults(alternatives)
    other = next((one for one in kept[1:] if not _are_equal(kept[0], one)), None)
    if other is not None:
        raise InputError(f"{source}: {_difference(kept[0], other)}")
    return kept[0], [
        f"line {decision.line}: {decision.condition} {'holds' if outcome == 0 else 'does not hold'}, as nothing sets "
        f"{', '.join(decision.names)}"
        for decision, outcome in assumed
    ]


def _are_equal(first: _Alternative, second: _Alternative) -> bool:
    if isinstance(first.outcome, ImportResult) and isinstance(second.outcome, ImportResult):
        return first.outcome.mapping == second.outcome.mapping
    return str(first.outcome) == str(second.outcome)


def _defaults(alternatives: Sequence[_Alternative]) -> tuple[list[_Alternative], list[tuple[Decision, int]]]:
    """The alternatives in which conditions have their outcome in an environment that sets nothing."""
    decisions = dict.fromkeys(decision for one in alternatives for decision, _ in one.training.outcomes)
    assumed = [(decision, decision.default) for decision in decisions if decision.default is not None]
    kept = [one for one in alternatives if all(one.training.agrees(*pair) for pair in assumed)]
    return (kept, assumed) if kept else (list(alternatives), [])


def _difference(first: _Alternative, second: _Alternative) -> str:
    """What decides between two trainings, and what each would be."""
    outcomes = dict(first.training.outcomes)
    deciding = next((one for one, outcome in second.training.outcomes if outcomes.get(one, outcome) != outcome), None)
    if deciding is None:
        return (
            f"starts trainings that differ, on lines {first.training.line} and {second.training.line}: "
            f"{_shown_flags(first.training, second.training)}, then {_shown_flags(second.training, first.training)}; "
            "leave one of them"
        )
    holding, failing = (first, second) if outcomes[deciding] == 0 else (second, first)
    others = (name for decision, _ in first.training.outcomes for name in decision.names)
    hint = definition_hint([*dict.fromkeys((*deciding.names, *others))]) or "; leave one of its branches"
    return (
        f"line {deciding.line}: whether {deciding.condition} is not known: where it holds, "
        f"{_shown_flags(holding.training, failing.training)}, else {_shown_flags(failing.training, holding.training)}"
        f"{hint}"
    )


def _shown_flags(training: LaunchedTraining, other: LaunchedTraining) -> str:
    """The flags of a training that another does not have, or has with another value; `?` for what is not known."""
    ours, theirs = group_by_flag(training.shell_words), group_by_flag(other.shell_words)
    differing = [
        " ".join((f"--{name}", *values))
        for name, values in ours.items()
        if theirs.get(name) != values and not is_irrelevant_flag(name)
    ]
    shown = HOLE.sub("?", " ".join(differing[:_MAX_SHOWN_FLAGS]))
    if not shown:
        return "no such flag" if training.processes == other.processes else f"{training.processes} processes"
    return f"{shown}{' and more' if len(differing) > _MAX_SHOWN_FLAGS else ''}"


def _import_arguments(
    parsed: MegatronArguments,
    training: LaunchedTraining,
    trainings: ScriptTrainings,
    cluster: str,
    gpu_count: int | None,
) -> ImportResult:
    source = parsed.source
    if "num-layers" not in parsed.arguments and trainings.notes:
        raise InputError(f"{source}: --num-layers is missing{_unread_files(trainings)}")
    zero = zero_settings(parsed, trainings.files)
    layout = _layout_config(parsed)
    if zero is None and "layers_per_stage" not in layout:
        _require_even_stages(parsed, layout["pp"])
    ranks_per_replica = layout["tp"] * layout["cp"] * layout["pp"]
    world_size = gpu_count or _world_size(parsed, training)
    if world_size % ranks_per_replica:
        raise InputError(
            f"{source}: {world_size} GPUs are no multiple of tp x cp x pp = {ranks_per_replica}; give --gpus "
            f"{ranks_per_replica} or so"
        )
    mapping = {
        "model": {**import_model(parsed, layout["tp"]), **trainings.model_keys},
        "cluster": {"name": cluster, "gpus": world_size},
        "layout": {key: value for key, value in layout.items() if value != _LAYOUT_DEFAULTS.get(key)}
        | {"data": _data_parallel_config(parsed, layout["cp"] * (world_size // ranks_per_replica), zero)},
        **_schedule_config(parsed, layout["pp"]),
        "training": _training_config(parsed, world_size // ranks_per_replica),
        "framework": _framework_config(parsed, numa_bound=training.numa_bound),
    }
    if trainings.is_table:
        others = sum(1 for name in parsed.arguments if name not in parsed.queried and not is_irrelevant_flag(name))
        remark = f"{others} further arguments of the table have no key; they are taken as Megatron-LM's defaults"
        return ImportResult(mapping, (), (*parsed.assumptions, *([remark] if others else [])))
    parsed.require_no_misspelling()
    absent = parsed.absent_arguments
    ignored = tuple(flag for flag in parsed.ignored_flags if flag.split()[0].lstrip("-") not in trainings.defaulted)
    return ImportResult(mapping, ignored, (*parsed.assumptions, *absent, *trainings.notes))


def _unread_files(trainings: ScriptTrainings) -> str:
    """What the script sources that is not here, those first of which the name is not known."""
    notes = sorted(trainings.notes, key=lambda note: "$" not in note)[:_MAX_SHOWN_FLAGS]
    return "".join(f"; {note}" for note in notes)


def _world_size(parsed: MegatronArguments, training: LaunchedTraining) -> int:
    """The number of processes that the launcher starts; raises InputError where that is not known."""
    processes = training.processes or ""
    if processes.isdecimal() and int(processes):
        return int(processes)
    unknown = parsed.unknowns.unknowns(processes)
    names = [name for one in unknown for name in one.names]
    labels = " and ".join(one.label for one in unknown)
    why = f" ({labels} is not known{definition_hint(names)})" if unknown else ""
    raise InputError(
        f"{parsed.source}: does not say how many GPUs{why}; give --gpus, or torchrun's --nproc_per_node and --nnodes"
    )


_TOKEN_DISPATCH_KEYS: Final = ("overlap_moe_expert_parallel_comm", "delay_wgrad_compute", "moe_shared_expert_overlap")
"""Keys that have no effect without expert parallelism."""
_LAYOUT_DEFAULTS: Final = {"tp": 1, "cp": 1, "pp": 1, "ep": 1, "etp": None, "sequence_parallel": False}


def _layout_config(parsed: MegatronArguments) -> dict[str, Any]:
    tp = parsed.positive_integer("tensor-model-parallel-size")
    is_fork = is_deepspeed_fork(parsed)
    layout: dict[str, Any] = {
        "tp": tp,
        **_context_config(parsed),
        "pp": parsed.positive_integer("pipeline-model-parallel-size"),
        "ep": parsed.positive_integer("moe-expert-parallel-size" if is_fork else "expert-model-parallel-size"),
        "etp": (parsed.integer("expert-tensor-parallel-size") or (tp if tp > 1 else None))
        if parsed.has("num-experts")
        else None,
        "sequence_parallel": parsed.has("sequence-parallel") and tp != 1,
        **({"order": ["tp", "cp", "pp", "dp"]} if parsed.has("use-tp-pp-dp-mapping") else {}),
        **({"overlap_p2p_comm": False} if parsed.has("no-overlap-p2p-communication") else {}),
    }
    flags = {
        "tp-comm-overlap": "tp_comm_overlap",
        "overlap-moe-expert-parallel-comm": "overlap_moe_expert_parallel_comm",
        "delay-wgrad-compute": "delay_wgrad_compute",
        "moe-shared-expert-overlap": "moe_shared_expert_overlap",
    }
    has_ep = layout["ep"] != 1
    given = {key for name, key in flags.items() if parsed.has(name)}
    layout |= dict.fromkeys(
        (key for key in flags.values() if key in given and (has_ep or key not in _TOKEN_DISPATCH_KEYS)), True
    )
    layer_split = _layer_split(parsed)
    return layout | _dispatcher_config(parsed) | ({} if layer_split is None else {"layers_per_stage": layer_split})


def _context_config(parsed: MegatronArguments) -> dict[str, Any]:
    """Context-parallel ranks, and how they exchange what attention needs; the same in all layers.

    Megatron-DeepSpeed's sequence-parallel ranks exchange heads (Ulysses).
    """
    kinds, sizes = parsed.values("cp-comm-type"), parsed.values("hierarchical-context-parallel-sizes")
    cp, swapping = (parsed.positive_integer(key) for key in ("context-parallel-size", "ds-sequence-parallel-size"))
    if swapping > 1 and cp > 1:
        raise parsed.error("ds-sequence-parallel-size", "context-parallel-size splits sequences, too; write one")
    if parsed.has("ds-sequence-parallel-fpdt"):
        raise parsed.error("ds-sequence-parallel-fpdt", "sequences in chunks on the host are not modelled")
    if swapping > 1:
        return {"cp": swapping, "cp_kind": ContextParallelKind.ULYSSES.value}
    return {"cp": cp} | (_context_kind(parsed, kinds, sizes) if cp > 1 else {})


def _context_kind(parsed: MegatronArguments, kinds: Sequence[str], sizes: Sequence[str]) -> dict[str, Any]:
    if len(set(kinds)) > 1:
        raise parsed.error("cp-comm-type", "kinds that differ by layer are not modelled; write one")
    kind = parsed.choice("cp-comm-type", CP_KIND_BY_FLAG, "p2p")
    if kind != ContextParallelKind.TWO_DIMENSIONAL.value:
        return {} if kind == ContextParallelKind.RING.value else {"cp_kind": kind}
    if len(sizes) != 2 or not sizes[0].isdecimal():
        raise parsed.error("hierarchical-context-parallel-sizes", "a2a+p2p needs two sizes, such as 4 2")
    return {"cp_kind": kind, "cp_inner": int(sizes[0])}


def _data_parallel_config(parsed: MegatronArguments, replica_ranks: int, zero: ZeroSettings | None) -> Any:
    """The data-parallel strategy. replica_ranks: number of ranks with the same weights; zero: DeepSpeed's."""
    overlap = parsed.has("overlap-grad-reduce")
    if zero is not None:
        return zero.data
    overlaps_gathers = parsed.has("overlap-param-gather") and overlap
    if parsed.choice("DDP-impl", _DDP_IMPLS, "local") == "torch":  # of 2021
        return {"ddp": {"bucket": _TORCH_BUCKET}}
    if parsed.has("use-torch-fsdp2"):
        keeps_unsharded = parsed.has("torch-fsdp2-no-reshard-after-forward")
        return {"fsdp": {"copies": True} | ({"reshard_after_forward": False} if keeps_unsharded else {})}
    if parsed.has("use-megatron-fsdp") or parsed.has("use-custom-fsdp"):
        parsed.has("use-distributed-optimizer")
        if parsed.positive_integer("num-distributed-optimizer-instances") > 1:
            raise parsed.error("num-distributed-optimizer-instances", "with --use-megatron-fsdp it is not modelled")
        return parsed.choice("data-parallel-sharding-strategy", STRATEGY_BY_FLAG, "no_shard")
    elements = parsed.integer("ddp-bucket-size")
    bucket = {} if elements is None else {"bucket": f"{elements * _gradient_bytes(parsed)} B"}
    instances = parsed.positive_integer("num-distributed-optimizer-instances")
    if replica_ranks % instances:
        raise InputError(
            f"{parsed.source}: --num-distributed-optimizer-instances: {instances} do not divide the {replica_ranks} "
            "ranks of "
            "cp and dp"
        )
    if parsed.has("use-distributed-optimizer") or parsed.text("optimizer", "adam") == _SHARDED_MUON:
        options: dict[str, Any] = {"overlap": overlap} | ({"overlap_param_gather": overlaps_gathers} if overlap else {})
        options |= {"shard": replica_ranks // instances} if instances > 1 else {}
        options |= bucket
        return {"zero": {"stage": 1, **options}}
    return {"ddp": {"bucket": "megatron", "overlap": overlap} | bucket}


def _gradient_bytes(parsed: MegatronArguments) -> int:
    """Bytes of a gradient element."""
    return 4 if _precision_config(parsed).get("gradients", "fp32") == "fp32" else 2


def _dispatcher_config(parsed: MegatronArguments) -> dict[str, Any]:
    if not parsed.has("num-experts"):
        return {}
    if is_deepspeed_fork(parsed):
        return {"dispatcher": "alltoall"}
    dispatcher_type = parsed.text("moe-token-dispatcher-type", "allgather")
    backend = parsed.text("moe-flex-dispatcher-backend", "deepep")
    deepep = parsed.has("moe-enable-deepep")
    sm_counts = {name: parsed.integer(f"moe-{name}-num-sms") for name in ("deepep", "hybridep", "flex-dispatcher")}
    if dispatcher_type == "flex" or deepep:
        sm_count = sm_counts["flex-dispatcher"] or sm_counts.get(backend or "")
        return {"dispatcher": backend} | ({"dispatcher_num_sms": sm_count} if sm_count else {})
    return {"dispatcher": {"alltoall_seq": "alltoall"}.get(dispatcher_type or "", dispatcher_type)}


def _layer_split(parsed: MegatronArguments) -> Any:
    """The split of layers over stages; None: even."""
    layout_string = parsed.text("pipeline-model-parallel-layout")
    if layout_string is not None:
        return layout_string
    hybrid_split = hybrid_stages(parsed)
    if hybrid_split is not None:
        return hybrid_split
    end_layers = {
        "first": parsed.integer("decoder-first-pipeline-num-layers"),
        "last": parsed.integer("decoder-last-pipeline-num-layers"),
    }
    counts_as_layer = {
        "embedding": parsed.has("account-for-embedding-in-pipeline-split"),
        "head": parsed.has("account-for-loss-in-pipeline-split"),
    }
    split = {key: value for key, value in (*end_layers.items(), *counts_as_layer.items()) if value}
    return split or _deepspeed_split(parsed)


def _deepspeed_split(parsed: MegatronArguments) -> Any:
    """The split of DeepSpeed's --pp-partition-method, where it counts the embedding and the head as layers."""
    method = parsed.text("pp-partition-method")
    pp, layers = parsed.positive_integer("pipeline-model-parallel-size"), parsed.required_integer("num-layers")
    counts_ends = method is not None and "embedding" in method and pp > 1
    if counts_ends and (layers + 2) % pp:
        raise parsed.error("pp-partition-method", f"{layers} layers and two ends do not divide evenly into {pp} stages")
    return {"embedding": True, "head": True} if counts_ends else None


def _schedule_config(parsed: MegatronArguments, pp: int) -> dict[str, Any]:
    """Interleaved, if pipeline ranks have several stages."""
    stage_count = parsed.integer("num-virtual-stages-per-pipeline-rank")
    layers_per_stage = parsed.integer("num-layers-per-virtual-pipeline-stage")
    layout_string = parsed.text("pipeline-model-parallel-layout")
    if layout_string is not None:
        stage_count = len(_parse_layout_string(parsed, layout_string)) // pp
    hybrid_split = hybrid_stages(parsed)
    if hybrid_split is not None:
        stage_count = len(hybrid_split) // pp
    if layers_per_stage:
        stage_count = parsed.required_integer("num-layers") // (pp * layers_per_stage)
    group_size = parsed.positive_integer("microbatch-group-size-per-virtual-pipeline-stage", pp)
    if not stage_count or stage_count == 1:
        return {}
    rounds = {} if group_size == pp else {"microbatch_group_size": group_size}
    return {"schedule": {"interleaved": {"chunks": stage_count, **rounds}}}


def _stage_count(parsed: MegatronArguments, pp: int) -> int:
    """Stages of all pipeline ranks."""
    interleaved = _schedule_config(parsed, pp).get("schedule", {}).get("interleaved", {})
    return pp * int(interleaved.get("chunks", 1))


def _require_even_stages(parsed: MegatronArguments, pp: int) -> None:
    """Raise InputError where layers do not divide into stages, as Megatron-LM does; DeepSpeed's stages may differ."""
    stages = _stage_count(parsed, pp)
    layers = parsed.required_integer("num-layers")
    is_set = any(key.startswith(("model", "layout", "schedule")) for key in parsed.context.overridden)
    if layers % stages and not is_set:
        raise parsed.error(
            "num-layers", f"{layers} do not divide into {stages} stages, and no flag says how many each has"
        )


def _parse_layout_string(parsed: MegatronArguments, layout_string: str) -> Sequence[int]:
    """Layers of each stage of a pipeline layout string."""
    try:
        return parse_pipeline_layout(layout_string).layer_counts
    except InputError as error:
        raise InputError(f"{parsed.source}: --pipeline-model-parallel-layout: {error}") from None


def _training_config(parsed: MegatronArguments, replicas: int) -> dict[str, Any]:
    microbatch = parsed.required_integer("micro-batch-size")
    batch = parsed.integer("global-batch-size")
    accumulated = parsed.integer("gas")  # microbatches of a step, of DeepSpeed's examples of 2020
    if batch is None and accumulated:
        batch = microbatch * replicas * accumulated
    if batch is None:
        batch = microbatch * replicas
        parsed.assumptions.append(f"a step has {batch:,} sequences: a microbatch for each replica")
    _require_whole_microbatches(parsed, batch, microbatch, replicas)
    training: dict[str, Any] = {
        "sequence": parsed.required_integer("seq-length"),
        "global_batch": batch,
        "microbatch": microbatch,
        "precision": _precision_config(parsed),
        "recompute": _recompute_config(parsed),
        "attention": "standard" if parsed.text("attention-backend", "auto") in ("unfused", "local") else None,
        "loss": _loss_config(parsed),
        "optimizer": _optimizer_config(parsed),
        "gradient_clipping": None if parsed.real_number("clip-grad", 1.0) > 0.0 else False,
        "overheads": _fused_routing(parsed) or None,
    }
    return {key: value for key, value in training.items() if value is not None}


def _require_whole_microbatches(parsed: MegatronArguments, batch: int, microbatch: int, replicas: int) -> None:
    """Raise InputError where replicas do not get the same microbatches; Megatron-LM refuses that, too."""
    if batch % (microbatch * replicas) == 0 or {"training", "cluster", "layout"} & {
        key.partition(".")[0] for key in parsed.context.overridden
    }:
        return
    degrees = ("tensor-model-parallel", "pipeline-model-parallel", "context-parallel", "ds-sequence-parallel")
    ranks = math.prod(parsed.positive_integer(f"{name}-size") for name in degrees)
    fitting = next((count for count in range(replicas, 0, -1) if batch % (microbatch * count) == 0), None)
    hint = f"; give --gpus {fitting * ranks}" if fitting else ""
    raise parsed.error(
        "global-batch-size",
        f"{batch} sequences are no multiple of microbatches of {microbatch} on {replicas} data-parallel ranks{hint}",
    )


def _optimizer_config(parsed: MegatronArguments) -> str | dict[str, Any] | None:
    """The optimizer, None for Adam; of Muon what differs from Megatron-LM's and the scenario's common defaults."""
    name = parsed.text("optimizer", "adam")
    if name not in _OPTIMIZERS:
        raise parsed.error("optimizer", f"{name!r} is not modelled; {', '.join(_OPTIMIZERS)} are")
    is_8bit = parsed.has("use-bnb-optimizer") and name == "adam"  # of bigscience's fork
    if name not in ("muon", _SHARDED_MUON):
        return "adam8bit" if is_8bit else None if name == "adam" else name
    defaults = OptimizerConfig()
    keys: dict[str, Any] = {
        "steps": parsed.positive_integer("muon-num-ns-steps", defaults.steps),
        "tensor_parallel": parsed.text("muon-tp-mode", _muon_tensor_parallel(parsed).value),
        "symmetric": parsed.has("muon-use-syrk"),
        "scalar": parsed.text("muon-scalar-optimizer", defaults.scalar.value),
    }
    plain_defaults = {**defaults.model_dump(), "tensor_parallel": defaults.tensor_parallel.value}
    plain_defaults["scalar"] = defaults.scalar.value
    stated = {key: value for key, value in keys.items() if value != plain_defaults[key]}
    return {"name": "muon", **stated} if stated else "muon"


def _muon_tensor_parallel(parsed: MegatronArguments) -> MuonTensorParallel:
    """Megatron-LM's default, shards by themselves (megatron/core/optimizer/optimizer_config.py); moot with tp 1."""
    tp = parsed.positive_integer("tensor-model-parallel-size")
    return MuonTensorParallel.BLOCKWISE if tp > 1 else OptimizerConfig().tensor_parallel


def _loss_config(parsed: MegatronArguments) -> str | None:
    """The loss; Megatron-LM's own where none is fused."""
    implementation = parsed.choice("cross-entropy-fusion-impl", _LOSS_BY_FLAG, "native")
    return implementation if parsed.has("cross-entropy-loss-fusion") else None


def _fused_routing(parsed: MegatronArguments) -> dict[str, bool]:
    """Overheads that fused kernels of the router and of the permutation of tokens remove."""
    is_fused = {key: parsed.has(flag) for flag, key in ROUTING_FUSION_FLAGS.items()}
    return {key: False for key, fused in is_fused.items() if fused and parsed.integer("num-experts")}


def _precision_config(parsed: MegatronArguments) -> dict[str, Any]:
    older = [parsed.has(name) for name in ("fp8-hybrid", "fp8-e4m3")]  # flags of 2022 and 2023
    is_fp8 = bool(parsed.text("fp8-format") or parsed.text("fp8")) or any(older)
    recipe = parsed.choice("fp8-recipe", RECIPE_BY_FLAG, "delayed")
    is_fp16, is_bf16 = parsed.has("fp16"), parsed.has("bf16")
    if is_fp16 and is_bf16:
        raise parsed.error("fp16", "contradicts --bf16; leave one out")
    base_format = "fp16" if is_fp16 else "bf16" if is_bf16 else "fp32"
    compute = recipe if is_fp8 else base_format
    compute = "nvfp4" if parsed.text("fp4-format") or parsed.text("fp4") else compute
    reduces_in_fp32 = parsed.has("accumulate-allreduce-grads-in-fp32")
    gradient_formats = {"gradients": "fp16"} if base_format == "fp16" and not reduces_in_fp32 else {}
    gradient_formats = {"gradients": "bf16"} if parsed.has("grad-reduce-in-bf16") else gradient_formats
    parsed.has("use-precision-aware-optimizer")
    state_formats = {
        key: format_name
        for name, key in _STATE_FORMAT_FLAGS.items()
        if (format_name := parsed.text(name, "auto")) not in ("auto", "fp32")
    }
    parsed.text("exp-avg-sq-dtype")
    gathers_fp8 = parsed.has("fp8-param-gather")
    if compute == base_format:
        return {"compute": compute, **gradient_formats, **state_formats}
    return {
        "compute": compute,
        **gradient_formats,
        **state_formats,
        **(_stored_formats(compute) if gathers_fp8 else {}),
        **_high_precision_layers(parsed),
    }


def _stored_formats(recipe: str) -> dict[str, str]:
    """Weights in their matmuls' format; MXFP8 weights are gathered in bf16 and then cast."""
    low_precision = load_recipe(recipe).matmul_formats.low_precision
    stored = {} if low_precision is None else {"stored": low_precision.value}
    return stored | ({"gathered": "bf16"} if recipe == "mxfp8" else {})


def _high_precision_layers(parsed: MegatronArguments) -> dict[str, int | None]:
    """Numbers of first and last layers that stay in BF16."""
    names = {
        "num_layers_at_start_in_bf16": "num-layers-at-start-in-bf16",
        "num_layers_at_end_in_bf16": "num-layers-at-end-in-bf16",
    }
    layer_counts = {key: parsed.integer(name, 1) for key, name in names.items()}
    return layer_counts if parsed.has("first-last-layers-bf16") else {}


def _framework_config(parsed: MegatronArguments, *, numa_bound: bool) -> Any:
    """Megatron-LM, its CUDA graphs, and whether the script binds its ranks, which counts where there are experts."""
    binding = {"numa_binding": True} if numa_bound and parsed.has("num-experts") else {}
    config = {**_graph_config(parsed), **binding}
    return {"name": "megatron", **config} if config else "megatron"


def _graph_config(parsed: MegatronArguments) -> dict[str, Any]:
    """CUDA graphs; capturing only the attention of dense models cannot be expressed."""
    old_flags = [parsed.has(name) for name in ("enable-cuda-graph", "external-cuda-graph")]
    if parsed.choice("cuda-graph-impl", _CUDA_GRAPH_IMPLS, "none") == "none" and not any(old_flags):
        return {}
    name = "cuda-graph-modules" if "cuda-graph-modules" in parsed.arguments else "cuda-graph-scope"
    scopes = set(parsed.arguments.get(name, ("full",)))
    captures_all = bool(scopes & {"full", "full_iteration"})
    if not captures_all and not ("attn" in scopes and parsed.has("num-experts")):
        return {}
    parsed.values(name)
    return {"cuda_graphs": True if captures_all else "outside_experts"}


def _recompute_config(parsed: MegatronArguments) -> Any:
    """Recomputation, of today's flags or of those of 2021 and 2022."""
    layers, method = parsed.integer("recompute-num-layers"), parsed.text("recompute-method")
    modules = parsed.values("recompute-modules")
    moe_modules = ("moe",) if parsed.has("moe-layer-recompute") and parsed.has("num-experts") else ()
    default = "selective" if parsed.has("recompute-activations") or moe_modules else "none"
    granularity = parsed.text("recompute-granularity", default)
    old_method, old_layers = _older_recompute(parsed)
    if old_method is not None:
        granularity, method, layers = "full", old_method, old_layers
    match granularity:
        case "full" if method == "block":
            return _recomputed_block(parsed, 1 if layers is None else layers)
        case "full":
            return "full"
        case "selective":
            return {"modules": [*dict.fromkeys((*(modules or ("core_attn",)), *moe_modules))]}
    return None


def _recomputed_block(parsed: MegatronArguments, layers: int) -> Any:
    """The first layers of each stage; all of them where stages have no more."""
    pp = parsed.positive_integer("pipeline-model-parallel-size")
    stages = _stage_count(parsed, pp)
    is_even = _layer_split(parsed) is None
    if is_even and layers * stages >= parsed.required_integer("num-layers"):
        return "full"
    return {"layers": layers} if layers else "none"


def _older_recompute(parsed: MegatronArguments) -> tuple[str | None, int | None]:
    """Method and number of layers of Megatron-LM's flags before --recompute-granularity; None: none is given."""
    is_checkpointed = parsed.has("checkpoint-activations")
    for name in ("checkpoint-num-layers", "activations-checkpoint-num-layers"):
        parsed.integer(name)
    method = parsed.text("activations-checkpoint-method")
    granularity = parsed.text("activations-checkpoint-granularity")
    if method is None and (is_checkpointed or granularity == "full"):
        method = "uniform"
    return method, parsed.integer("activations-checkpoint-num-layers")
