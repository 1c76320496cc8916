"""Does predicted peak memory match what published runs used?

A row is one quantity of one run, of one rank or stage. `peak_allocated`: peak bytes allocated by the
framework's allocator; `peak_reserved`: peak bytes that it reserved on the device, fragmentation included;
`allocated_at_log`: bytes allocated between steps; `nvidia_smi_used`: the device's own figure, with CUDA
context and NCCL buffers.

Missing cells of the model or run come from the published run with the same `case_id`; else dimensions come
from the notes (`megatron_notes`), the preset, or published steps of a model of that name, if all agree. If
the batch is not stated, there are enough microbatches to fill the pipeline; if dp is not stated, it takes
the GPUs that the other axes leave. If the notes say that the source does not state the rank, it is the rank
that the software logs, Megatron-LM's last (megatron/training/global_vars.py, `_set_tensorboard_writer`).
Allocated bytes do not depend on the GPU, so an unknown GPU is replaced by an H100, and whether the run fits
is not judged.
"""

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Final

from clustersim.common.units import Bytes
from clustersim.memory.footprint import SHARDED_CATEGORIES, MemoryCategory
from clustersim.memory.ledger import MemoryLedger
from clustersim.model.attention_spec import FullAttention
from clustersim.model.layer_stack import BlockForm
from clustersim.model.presets import code_presets
from clustersim.model.transformer import PositionEncoding, TransformerModel, uniform_dimensions
from clustersim.parallel.mesh import BASE_AXES, DATA, PIPELINE
from clustersim.results.memory_check import memory_timelines
from clustersim.scenario import Scenario
from clustersim.validation.cases import PUBLISHED_FOLDER, CannotPredictError, ValidationCase, read_cases
from clustersim.validation.comparison import CaseComparison
from clustersim.validation.error_statistics import group_by
from clustersim.validation.framework_defaults import framework_defaults
from clustersim.validation.megatron_notes import stated_dimensions
from clustersim.validation.steps import build_scenario, error_groupings, read_steps

PUBLISHED_TABLE: Final = PUBLISHED_FOLDER / "memory.csv"
REQUIRED_COLUMNS: Final = (
    *("case_id", "source", "gpu", "n_gpus", "model", "seq", "global_batch", "micro_batch", "tp", "pp", "dp"),
    *("precision", "quantity", "rank", "bytes"),
)
QUANTITIES: Final = ("peak_allocated", "peak_reserved", "allocated_at_log", "nvidia_smi_used")
_PEAK_QUANTITIES: Final = ("peak_allocated", "peak_reserved", "nvidia_smi_used")
_MODEL_COLUMNS: Final = (
    "layers",
    "hidden",
    "ffn_hidden",
    "mlp",
    "heads",
    "kv_heads",
    "head_dim",
    "vocab",
    "tied_embeddings",
)
_PEAK_RANK_NAMES: Final = ("", "max", "max over ranks", "max over stages")
_FIRST_AND_LAST_STAGE: Final = "max of first and last stage"
_UNKNOWN_RANK: Final = re.compile(r"inferred:[^;]*which rank")  # text in the notes
_SUBSTITUTE_GPU: Final = "h100-sxm-80gb"
_ALLOCATOR_QUANTITIES: Final = ("peak_allocated", "peak_reserved", "allocated_at_log")
_UNKNOWN: Final = ("", "unknown")
_SAMPLE_COLUMNS: Final = ("quantity", "rank", "bytes", "fits", "unit_printed")
_OUTSIDE_ALLOCATOR: Final = (
    MemoryCategory.COMMUNICATION,
    MemoryCategory.CONTEXT,
)  # not allocated by the framework's allocator
_PERSISTENT_CATEGORIES: Final = (*SHARDED_CATEGORIES, MemoryCategory.MESSAGES, MemoryCategory.WORKSPACE)
_FIT_BY_TEXT: Final = {"yes": True, "oom": False, "no": False}
_MAX_RANK_DIGITS: Final = 9  # a rank has fewer digits
_MICROBATCHES_PER_STAGE: Final = 4  # if the batch is not stated: enough for the peak of any schedule


@dataclass(frozen=True, slots=True)
class MemoryFitVerdict:
    """Whether a run fits in memory: as stated by its source, and as predicted (None: skipped, with the reason)."""

    case_id: str
    source: str
    stated: bool
    predicted: bool | None = None
    skip_reason: str | None = None
    is_expressible: bool = True

    @property
    def is_correct(self) -> bool:
        """Whether there is a prediction and it agrees with the source."""
        return self.predicted is self.stated


@dataclass(frozen=True, slots=True)
class PeakError:
    """The error of a run's predicted peak. ratio: measured over predicted, the largest of the peaks that it states."""

    case_id: str
    source: str
    framework: str
    ratio: float


@dataclass(frozen=True)
class RunMemory:
    """Simulated memory of a run: the memory ledgers of its pipeline ranks."""

    scenario: Scenario
    ledgers: tuple[MemoryLedger, ...]

    def bytes_for(self, case: ValidationCase) -> Bytes:
        """Bytes of the quantity that a row measures."""
        quantity = _supported_quantity(case)
        return max(_quantity_bytes(self.ledgers[stage], quantity) for stage in self._matching_stages(case))

    @property
    def fits_in_memory(self) -> bool:
        """Whether the peak-memory rank fits in device memory."""
        return max(ledger.peak for ledger in self.ledgers) <= self.scenario.cluster.accelerator.memory_bytes

    def _matching_stages(self, case: ValidationCase) -> Iterable[int]:
        """The pipeline ranks over which a row's maximum is taken: of a global rank, of a stage by name, or all."""
        rank, stages = case.text("rank").lower(), len(self.ledgers)
        if not rank and _UNKNOWN_RANK.search(case.text("notes")) and framework_defaults(case).logs_last_rank:
            return (stages - 1,)
        if rank in _PEAK_RANK_NAMES:
            return range(stages)
        if rank.isdecimal() and len(rank) < _MAX_RANK_DIGITS and int(rank) < self.scenario.layout.world_size:
            return (int(self._stage_of_rank[int(rank)]),)
        stages_by_name = {
            "first pipeline stage": (0,),
            "last pipeline stage": (stages - 1,),
            _FIRST_AND_LAST_STAGE: (0, stages - 1),
        }
        stages_by_name |= {f"stage {stage}": (stage,) for stage in range(stages)}
        if rank not in stages_by_name:
            raise CannotPredictError(f"line {case.line_number}: rank {rank} is none of the run's", is_expressible=False)
        return stages_by_name[rank]

    @cached_property
    def _stage_of_rank(self) -> list[int]:
        stages: list[int] = self.scenario.layout.rank_coordinates(PIPELINE).tolist()
        return stages


def read_memory(path: Path = PUBLISHED_TABLE) -> list[ValidationCase]:
    """Read the cases of a table of memory."""
    return read_cases(path, REQUIRED_COLUMNS)


def compare_memory(cases: Sequence[ValidationCase]) -> list[CaseComparison]:
    """Predict every case, in bytes; cases of one run are predicted together."""
    comparisons = dict(pair for run in _group_runs(cases) for pair in _compare_run(run))
    return [comparisons[case_index] for case_index in range(len(cases))]


def judge_memory_fit(cases: Sequence[ValidationCase]) -> list[MemoryFitVerdict]:
    """For every run that states whether it fits (`yes`, `oom`), whether it is predicted to."""
    return [_judge_run(run) for run in _group_runs(cases) if any(map(_states_fit, (case for _, case in run)))]


def peak_errors(cases: Sequence[ValidationCase]) -> list[PeakError]:
    """For every run that states a peak and can be predicted, the error of its prediction."""
    return [error for run in _group_runs(cases) for error in _peak_errors_of_run([case for _, case in run])]


def _peak_errors_of_run(cases: Sequence[ValidationCase]) -> Iterator[PeakError]:
    peak_cases = [case for case in cases if case.text("quantity") in _PEAK_QUANTITIES]
    if not peak_cases:
        return
    case = peak_cases[0]
    try:
        memory = _simulate_memory(case)
        ratio = max(_measured_bytes(peak_case) / memory.bytes_for(peak_case) for peak_case in peak_cases)
    except CannotPredictError:
        return
    yield PeakError(case.text("case_id"), case.text("source"), memory.scenario.framework.name, ratio)


IndexedCases = list[tuple[int, ValidationCase]]  # cases of a run with their indices in the table


def _group_runs(cases: Sequence[ValidationCase]) -> list[IndexedCases]:
    """Cases with missing cells filled in, grouped by run."""
    catalog = _RunCatalog.from_published()
    indexed_cases = [(case_index, catalog.fill_in(case)) for case_index, case in enumerate(cases)]
    return list(group_by(indexed_cases, lambda row: _run_key(row[1])).values())


def _run_key(case: ValidationCase) -> tuple[tuple[str, str], ...]:
    return tuple(_run_cells(case).items())


def _compare_run(run: IndexedCases) -> list[tuple[int, CaseComparison]]:
    """Comparison of every case of a run, with its index."""
    try:
        memory = _simulate_memory(run[0][1])
    except CannotPredictError as error:
        return [(case_index, _skipped_comparison(case, error)) for case_index, case in run]
    return [(case_index, _compare_case(case, memory)) for case_index, case in run]


def _compare_case(case: ValidationCase, memory: RunMemory) -> CaseComparison:
    try:
        measured, predicted = _measured_bytes(case), memory.bytes_for(case)
    except CannotPredictError as error:
        return _skipped_comparison(case, error)
    identity = (case.text("case_id"), case.text("source"), measured)
    fits_in_memory = memory.fits_in_memory if _states_fit(case) else None
    return CaseComparison(*identity, predicted, groupings=_groupings(case), fits_in_memory=fits_in_memory)


def _skipped_comparison(case: ValidationCase, error: CannotPredictError) -> CaseComparison:
    try:
        measured = _measured_bytes(case)
    except CannotPredictError as measurement_error:
        measured, error = math.nan, measurement_error
    identity = (case.text("case_id"), case.text("source"), measured)
    return CaseComparison(
        *identity, skip_reason=str(error), is_expressible=error.is_expressible, groupings=_groupings(case)
    )


def _groupings(case: ValidationCase) -> dict[str, str]:
    return {"quantity": case.text("quantity") or "not stated"} | error_groupings(case)


def _measured_bytes(case: ValidationCase) -> Bytes:
    if not case.text("bytes") and _FIT_BY_TEXT.get(case.text("fits").lower()) is False:
        raise CannotPredictError("it ran out of memory, so that no bytes were measured", is_expressible=False)
    return case.positive_float("bytes")


def _states_fit(case: ValidationCase) -> bool:
    """Whether a row states that its run fits or not, on a GPU that it names."""
    return case.text("fits").lower() in _FIT_BY_TEXT and case.text("gpu") not in _UNKNOWN


def _judge_run(run: IndexedCases) -> MemoryFitVerdict:
    case = next(case for _, case in run if _states_fit(case))
    identity, stated = (case.text("case_id"), case.text("source")), _FIT_BY_TEXT[case.text("fits").lower()]
    try:
        return MemoryFitVerdict(*identity, stated, _simulate_memory(case).fits_in_memory)
    except CannotPredictError as error:
        return MemoryFitVerdict(*identity, stated, None, str(error), error.is_expressible)


def _supported_quantity(case: ValidationCase) -> str:
    """The quantity of a row; raises CannotPredictError if it is computed by a formula or not modelled."""
    quantity = case.text("quantity")
    if quantity not in QUANTITIES:
        raise CannotPredictError(
            f"quantity {quantity or 'is not stated'}: not measured or not modelled", is_expressible=False
        )
    return quantity


def _simulate_memory(case: ValidationCase) -> RunMemory:
    """Simulate the memory of a run; raises CannotPredictError if there is no scenario for it."""
    if case.text("gpu") in _UNKNOWN:
        if _supported_quantity(case) not in _ALLOCATOR_QUANTITIES:
            raise CannotPredictError("gpu is not stated", is_expressible=False)
        case = ValidationCase({**case.cells, "gpu": _SUBSTITUTE_GPU}, case.line_number)
    if not case.text("layers"):
        model = case.text("model") or "without a name"
        raise CannotPredictError(f"dimensions of model {model} are not stated, and not packaged", is_expressible=False)
    scenario = build_scenario(case)
    return RunMemory(scenario, memory_timelines(scenario))


def _quantity_bytes(ledger: MemoryLedger, quantity: str) -> Bytes:
    """Bytes of a quantity in a pipeline rank's ledger."""
    if quantity == "allocated_at_log":
        return sum(ledger.resident[category] for category in _PERSISTENT_CATEGORIES)
    bytes_by_category = ledger.peak_by_category()
    if quantity == "nvidia_smi_used":
        return sum(bytes_by_category.values())
    outside = (*_OUTSIDE_ALLOCATOR, *(() if quantity == "peak_reserved" else (MemoryCategory.FRAGMENTATION,)))
    return sum(size for category, size in bytes_by_category.items() if category not in outside)


@dataclass(frozen=True, slots=True)
class _RunCatalog:
    """Cells of published runs by `case_id`, and of models by normalized name."""

    runs_by_case_id: Mapping[str, Mapping[str, str]]
    models_by_name: Mapping[str, Mapping[str, str]]

    @classmethod
    def from_published(cls) -> "_RunCatalog":
        steps = read_steps()
        memory_runs = {case.text("case_id"): _run_cells(case) for case in read_memory()}
        all_runs = memory_runs | {case.text("case_id"): case.cells for case in steps}
        steps_by_model = group_by(steps, lambda case: _normalize_name(case.text("model")))
        preset_models = {
            _normalize_name(name): _preset_cells(model_preset.model)
            for name, model_preset in code_presets().items()
            if _is_expressible(model_preset.model)
        }
        return cls(
            all_runs,
            {name: _common_dimensions(model_cases) for name, model_cases in steps_by_model.items()} | preset_models,
        )

    def fill_in(self, case: ValidationCase) -> ValidationCase:
        """The case with missing cells filled in; its own cells have precedence, and its run's notes count too."""
        stated = {column: text for column, text in case.cells.items() if text}
        run = {column: text for column, text in self.runs_by_case_id.get(case.text("case_id"), {}).items() if text}
        merged = {**run, **stated, **_joined_notes(run, stated)}
        cells = merged if "layers" in merged else {**self._model_cells(stated), **merged}
        return ValidationCase(
            {**case.cells, **_default_degrees(ValidationCase(cells, case.line_number)), **cells}, case.line_number
        )

    def _model_cells(self, stated: Mapping[str, str]) -> Mapping[str, str]:
        dimensions = stated_dimensions(stated.get("notes", ""), stated.get("tp", ""))
        return dimensions or self.models_by_name.get(_normalize_name(stated.get("model", "")), {})


def _joined_notes(run: Mapping[str, str], stated: Mapping[str, str]) -> Mapping[str, str]:
    """The notes of a step and of a memory row of the same run; those of memory rows alone are their own."""
    both = dict.fromkeys(cells["notes"] for cells in (run, stated) if "step_time_s" in run and "notes" in cells)
    return {"notes": "; ".join(both)} if both else {}


def _run_cells(case: ValidationCase) -> Mapping[str, str]:
    """The cells of a memory row that describe its run."""
    return {column: text for column, text in case.cells.items() if column not in _SAMPLE_COLUMNS}


def _normalize_name(name: str) -> str:
    """A model's name, normalized so that `Llama3.1-8B` matches `llama3-8b` (3.1 kept the dimensions of 3)."""
    return "".join(letter for letter in name.lower().replace("3.1", "3") if letter.isalnum())


def _is_expressible(model: TransformerModel) -> bool:
    """Whether cells can express the model: uniform dense pre-norm layers with plain attention."""
    is_plain = all(spec.block is BlockForm.PRE_NORM for spec in model.distinct_specs) and not model.embedding_norm
    is_plain = is_plain and not model.distinct_moes
    has_plain_attention = all(
        attention.window is None and attention.qk_norm is None and not attention.attn_logit_softcapping
        for attention in model.distinct_attentions
    ) and all(isinstance(mixer, FullAttention) for mixer in model.distinct_mixers)
    is_uniform = len(model.stack) == 1 and not model.distinct_moes
    return is_uniform and is_plain and has_plain_attention and model.positions is not PositionEncoding.ALIBI


def _preset_cells(model: TransformerModel) -> Mapping[str, str]:
    """The cells of a preset."""
    values = uniform_dimensions(model)
    cells = {"ffn_hidden": str(values["ffn"]), "mlp": values["mlp"].value, "vocab": str(model.vocab)}
    cells |= {column: str(values[column]) for column in ("layers", "hidden", "heads", "kv_heads", "head_dim")}
    return cells | {"tied_embeddings": "yes" if model.tied_embeddings else "no"}


def _common_dimensions(cases: Sequence[ValidationCase]) -> Mapping[str, str]:
    """The dimensions of a model, if all its cases agree."""
    variants = {tuple(case.text(column) for column in _MODEL_COLUMNS) for case in cases}
    return dict(zip(_MODEL_COLUMNS, variants.pop(), strict=True)) if len(variants) == 1 else {}


def _default_degrees(case: ValidationCase) -> dict[str, str]:
    """Default dp and batch, where the other axes are known."""
    try:
        gpus, micro = case.positive_int("n_gpus"), case.positive_int("micro_batch")
        ranks_per_replica = math.prod(case.positive_int(axis.name, 1) for axis in BASE_AXES if axis is not DATA)
        dp, pp = case.positive_int(DATA.name, max(1, gpus // ranks_per_replica)), case.positive_int(PIPELINE.name, 1)
    except CannotPredictError:
        return {}
    return {DATA.name: str(dp), "global_batch": str(dp * micro * (1 if pp == 1 else _MICROBATCHES_PER_STAGE * pp))}
