"""In which ways is a torchtitan job stated? As TOML, in a log that prints it, or in Python.

All become the sections of v0.2.2's TOML. A log has all keys with their values, those of its version among them, so
keys that are not known there are passed over. Reference of names since 2026: pytorch/torchtitan,
torchtitan/config/configs.py, trainer.py, components/quantization, distributed/activation_checkpoint.py.
"""

import ast
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Any, Final

from clustersim.common.errors import InputError
from clustersim.common.input_files import parse_toml
from clustersim.interop.import_result import ImportContext
from clustersim.interop.torchtitan_flavors import FLAVORS
from clustersim.interop.torchtitan_older import is_older_job, modernized_job
from clustersim.interop.torchtitan_python import NotRead, PythonSection, read_python_job, unread_values

_DUMP: Final = re.compile(r"Running with (?:args|configs?):\s*")
_PREFIX: Final = re.compile(r"(?m)^(?:\[?(?:rank|default|trainer)?\d+\]?(?:/\d+)?:[ ]?)+")
_MESH: Final = re.compile(
    r"Building (?:\d-D device mesh with [(\[][^)\]]{0,200}[)\]], \[(?P<sizes>[\d, ]{1,100})\]|"
    r"device mesh with parallelism: (?P<axes>.*))"
)
"""What torchtitan prints of its ranks; until 2025 without axes of degree one, since then of all."""
_AXES: Final = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
"""Axes whose product is the number of ranks; those of experts are folded onto them."""
_MAX_DUMP: Final = 1_000_000
_CONFIG: Final = "CONFIG"
_FLOAT8, _MX = "quantize.linear.float8", "quantize.linear.mx"
_CONVERTERS: Final = {
    "Float8LinearConverter": _FLOAT8,
    "MXFP8LinearConverter": _MX,
    "MXLinearConverter": _MX,
    "Float8GroupedMMConverter": "quantize.grouped_mm.float8",
    "MXFP8GroupedMMConverter": "quantize.grouped_mm.mx",
    "Float8GroupedExpertsConverter": "quantize.grouped_mm.float8",
    "MXFP8GroupedExpertsConverter": "quantize.grouped_mm.mx",
}
_AC_MODES: Final = {
    "FullAC.Config": {"mode": "full"},
    "SelectiveAC.Config": {"mode": "selective", "selective_ac_option": "op"},
    "MemoryBudgetAC.Config": {"mode": "memory_budget"},
}
_SECTIONS: Final = ("training", "parallelism", "compile")
_TOKEN_KEYS: Final = ("max_context_length", "num_tokens_per_microbatch_per_dp_rank")
_WITHOUT_EFFECT: Final = (
    *_TOKEN_KEYS, "num_tokens_per_train_step", "disable_cuda_graphs", "spmd_backend", "enable_sequence_parallel",
    "num_pp_microbatches", "lr",
)  # fmt: skip
"""Keys since 2026 that say nothing here, or that another key says."""


class UnknownKeys(Enum):
    """What becomes of keys that v0.2.2 does not have: an error, as in torchtitan, a remark, or nothing."""

    REFUSED = "refused"
    LISTED = "listed"
    PASSED_OVER = "passed over"


@dataclass(frozen=True, slots=True)
class JobContent:
    """A job's sections, sentences about what is not read, and the ranks that a log prints; None: it prints none."""

    sections: Mapping[str, Any]
    unknown_keys: UnknownKeys = UnknownKeys.REFUSED
    remarks: tuple[str, ...] = ()
    world_size: int | None = None


def is_torchtitan_log(text: str) -> bool:
    """Whether a text is a log in which torchtitan prints its job."""
    return _DUMP.search(text) is not None


def is_torchtitan_python(text: str) -> bool:
    """Whether a text is Python that makes jobs."""
    return "Trainer.Config" in text and re.search(r"(?m)^def \w+\(", text) is not None


def read_job(text: str, source: str, context: ImportContext) -> JobContent:
    """The sections of a job, in whichever way it is stated."""
    if is_torchtitan_log(text):
        _require_no_definitions(context, source, "a log")
        return _read_log(text, source)
    if is_torchtitan_python(text):
        others = [name for name in context.definitions if name != _CONFIG]
        if others:
            raise InputError(f"{source}: --define {others[0]}: a file of jobs takes {_CONFIG}=NAME alone")
        return _read_python(text, source, context.definitions.get(_CONFIG))
    _require_no_definitions(context, source, "a job file")
    try:
        sections = parse_toml(text)
    except InputError as error:
        raise InputError(f"{source}: {error}") from None
    return _by_names_of_today(sections, source)


def _by_names_of_today(sections: Mapping[str, Any], source: str) -> JobContent:
    """A job, whose keys have their names in v0.2.2 where it is of an earlier release."""
    if not is_older_job(sections):
        return JobContent(sections)
    remark = (
        "the job is of an earlier torchtitan; its keys are read by their names in v0.2.2, with the defaults of that"
    )
    return JobContent(modernized_job(sections, source), UnknownKeys.LISTED, (remark,))


def _require_no_definitions(context: ImportContext, source: str, kind: str) -> None:
    if context.definitions:
        raise InputError(f"{source}: {kind} has no variables, so --define has nothing to define")


def _read_log(text: str, source: str) -> JobContent:
    """The last job that a log prints, as JSON or as Python's literal, each line after its rank, and its ranks."""
    start = [match.end() for match in _DUMP.finditer(text)][-1]
    dump = _PREFIX.sub("", text[start : start + _MAX_DUMP])
    content = _literal(dump)
    if not isinstance(content, dict):
        raise InputError(f"{source}: prints no mapping after 'Running with'; give the log from there on")
    if "model_spec" in content:
        job = _since_2026(_as_section(content), source, None)
    else:
        job = _by_names_of_today({name: value for name, value in content.items() if isinstance(value, dict)}, source)
    return replace(job, unknown_keys=UnknownKeys.PASSED_OVER, world_size=_printed_ranks(text[start:]))


def _printed_ranks(text: str) -> int | None:
    """The ranks of the mesh that is printed first."""
    mesh = _MESH.search(text)
    if mesh is None:
        return None
    stated = dict(re.findall(r"(\w+)=(\d{1,7})\b", mesh["axes"] or ""))
    sizes = re.findall(r"\d{1,7}", mesh["sizes"]) if mesh["sizes"] else [stated.get(axis, "1") for axis in _AXES]
    return math.prod(map(int, sizes)) or None


def _literal(dump: str) -> Any:
    try:
        return json.JSONDecoder().raw_decode(dump)[0]
    except (ValueError, RecursionError):
        pass
    line = dump.split("\n", 1)[0].strip()
    try:
        return ast.literal_eval(line)
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
        return None


def _as_section(content: Mapping[str, Any]) -> PythonSection:
    """A printed mapping as a section."""
    values = {name: _as_section(value) if isinstance(value, dict) else value for name, value in content.items()}
    return PythonSection(str(content.get("_class", "")), values)


def _read_python(text: str, source: str, wanted: str | None) -> JobContent:
    job = read_python_job(text, source, wanted)
    name = job.module.rpartition(".")[2] if job.module else Path(source).resolve().parent.name
    models = sorted({flavor.name for flavor in FLAVORS})
    if not job.module and name not in models:
        raise InputError(
            f"{source}: its models are its folder's, {name!r}, of which none is read; put it in a folder with the "
            f"model's name: {', '.join(models)}"
        )
    content = _since_2026(job.section, source, name)
    return replace(content, remarks=(*job.remarks, *content.remarks))


def _since_2026(job: PythonSection, source: str, model: str | None) -> JobContent:
    """The sections of v0.2.2 that say what a job of 2026 says."""
    sections: dict[str, dict[str, Any]] = {}
    for name in _SECTIONS:
        section = _section(job, name)
        for key, unread in unread_values(section):
            raise InputError(f"{source}: line {unread.line}: {name}.{key} is {unread.text!r}, which is no literal")
        sections[name] = {key: value for key, value in section.values.items() if key not in _WITHOUT_EFFECT}
    spec = _section(job, "model_spec")
    sections["model"], quantize = _model(job, spec, source, model)
    remarks = [*_attention_remarks(sections["model"], _backend(job, spec)), *_loss_remarks(job)]
    parallelism, compile_keys = sections["parallelism"], sections["compile"]
    if "enable_async_tensor_parallel" in compile_keys:
        parallelism["enable_async_tensor_parallel"] = compile_keys.pop("enable_async_tensor_parallel")
    tp = parallelism.get("tensor_parallel_degree", 1)
    if _section(job, "parallelism").values.get("enable_sequence_parallel", True) is False and tp != 1:
        raise InputError(f"{source}: parallelism.enable_sequence_parallel is False, which no job here has; write True")
    _put_tokens(job, sections, source)
    sections["activation_checkpoint"] = _recomputation(job, source)
    sections["optimizer"] = _optimizer(job)
    return JobContent({**sections, "quantize": quantize}, UnknownKeys.LISTED, tuple(remarks))


def _section(job: PythonSection, name: str) -> PythonSection:
    value = job.values.get(name)
    return value if isinstance(value, PythonSection) else PythonSection("")


def _model(
    job: PythonSection, spec: PythonSection, source: str, module: str | None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The model's section, and those of the formats of its layers."""
    flavor = spec.values.get("flavor", next(iter(spec.positional), None))
    name = spec.values.get("name", module)
    if not isinstance(flavor, str) or not isinstance(name, str):
        raise InputError(f"{source}: model_spec names no model; write model_registry with the flavor, such as '8B'")
    listed = spec.values.get("converters") or _section(job, "model_converters").values.get("converters") or []
    if isinstance(listed, NotRead):
        raise InputError(f"{source}: line {listed.line}: converters are {listed.text!r}, which is no literal")
    names: list[str] = []
    quantize: dict[str, dict[str, Any]] = {"linear": {}, "grouped_mm": {}}
    for converter in listed:
        label = converter.label.removesuffix(".Config") if isinstance(converter, PythonSection) else str(converter)
        key = _CONVERTERS.get(label.rpartition(".")[2])
        if key is None:
            raise InputError(f"{source}: converter {label} is not read; {', '.join(_CONVERTERS)} are")
        names.append(key)
        _, kind, form = key.split(".")
        quantize[kind][form] = _converter_keys(converter, source)
        if key == _FLOAT8 and "converters" in spec.values:  # since April 2026, when it became the default
            quantize[kind][form].setdefault("recipe_name", "rowwise")
    sections = {kind: forms for kind, forms in quantize.items() if forms}
    return {"name": name, "flavor": _flavor(name, flavor, _backend(job, spec)), "converters": names}, sections


def _backend(job: PythonSection, spec: PythonSection) -> str:
    """The attention backend; FlexAttention by default since June 2026, before that PyTorch's own."""
    is_recent = _states_tokens(job) or _section(job, "activation_checkpoint").label.endswith("AC.Config")
    default = "flex" if is_recent else "sdpa"
    return str(spec.values.get("attn_backend", default))


def _flavor(model: str, flavor: str, backend: str) -> str:
    """The flavor of v0.2.2 that has the attention of a backend, where there are two."""
    has_two = model == "llama3" and flavor == "8B" and backend in ("flex", "varlen")
    return f"{flavor}_{backend}" if has_two else flavor


def _attention_remarks(model: Mapping[str, Any], backend: str) -> list[str]:
    is_other = model["name"] == "llama3" and backend != "sdpa" and not model["flavor"].endswith(backend)
    return [f"attention is PyTorch's own, where the job has {backend}"] if is_other else []


def _states_tokens(job: PythonSection) -> bool:
    return not {"max_context_length", "num_tokens_per_microbatch_per_dp_rank"}.isdisjoint(
        _section(job, "training").values
    )


def _converter_keys(converter: Any, source: str) -> dict[str, Any]:
    values = converter.values if isinstance(converter, PythonSection) else {}
    keys = {}
    for name in ("recipe_name", "filter_fqns", "enable_fsdp_float8_all_gather", "emulate"):
        value = values.get(name)
        if isinstance(value, NotRead):
            raise InputError(f"{source}: line {value.line}: {name} is {value.text!r}, which is no literal")
        if value is not None:
            keys[name] = value
    if isinstance(keys.get("filter_fqns"), list):
        keys["filter_fqns"] = ["output" if one == "lm_head" else one for one in keys["filter_fqns"]]
    return keys


def _put_tokens(job: PythonSection, sections: dict[str, dict[str, Any]], source: str) -> None:
    """The batch and the sequence, since August 2026 stated in tokens."""
    stated, training = _section(job, "training").values, sections["training"]
    if not _states_tokens(job):
        return
    sequence = stated.get("max_context_length", 2048)
    tokens = stated.get("num_tokens_per_microbatch_per_dp_rank", 16384)
    total = stated.get("num_tokens_per_train_step", -1)
    for key, count in (("num_tokens_per_microbatch_per_dp_rank", tokens), ("num_tokens_per_train_step", total)):
        if count != -1 and (not isinstance(count, int) or not isinstance(sequence, int) or count % max(1, sequence)):
            raise InputError(f"{source}: training.{key} {count} is no multiple of max_context_length {sequence}")
    parallelism = sections["parallelism"]
    microbatch = tokens // sequence
    count = _section(job, "parallelism").values.get("num_pp_microbatches", 1)
    if parallelism.get("pipeline_parallel_degree", 1) != 1:
        parallelism["pipeline_parallel_microbatch_size"] = microbatch
        microbatch *= count
    training |= {"seq_len": sequence, "local_batch_size": microbatch}
    training["global_batch_size"] = -1 if total == -1 else total // sequence


def _recomputation(job: PythonSection, source: str) -> dict[str, Any]:
    value = job.values.get("activation_checkpoint", PythonSection("SelectiveAC.Config"))
    if value is None:
        return {"mode": "none"}
    if isinstance(value, PythonSection):
        mode = next((one for name, one in _AC_MODES.items() if value.label.endswith(name)), None)
        if mode is not None:
            return dict(mode)
        if "mode" in value.values or value.label.endswith("ActivationCheckpointConfig"):
            return {
                key: value.values[key] for key in ("mode", "selective_ac_option", "early_stop") if key in value.values
            }
    raise InputError(f"{source}: activation_checkpoint is not read; FullAC.Config() and SelectiveAC.Config() are")


def _optimizer(job: PythonSection) -> dict[str, Any]:
    values = _section(job, "optimizer").values
    return {key: values[key] for key in ("name", "implementation") if isinstance(values.get(key), str)}


def _loss_remarks(job: PythonSection) -> list[str]:
    is_chunked = _section(job, "loss").label.startswith("ChunkedLossWrapper")
    return ["the loss is computed at once, where the job computes it in chunks"] if is_chunked else []
