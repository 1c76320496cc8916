"""Do predicted peaks of memory fit what published runs held?

A row is one quantity of one run, of one rank or stage. `peak_allocated` is the most that the framework's allocator had
given out; `peak_reserved` the most that it had taken from the device, with what fragmentation loses; `allocated_at_log`
what stays between steps; `nvidia_smi_used` the device's own figure, with the driver's context and NCCL's buffers.

A row that leaves out what the model or the run is made of takes it from the shipped run of the same `case_id`; else a
model's dimensions from its notes (`arguments`), its preset, or from shipped steps of a model of that name, if all of
them agree. Where the batch is not stated, there are enough microbatches to fill the pipeline; where dp is not, it takes
the GPUs that the other axes leave. Whose memory it is, if the notes say that the source does not: that of the rank that
the software logs, Megatron-LM's last (megatron/training/global_vars.py, `_set_tensorboard_writer`). What the allocator
gives out does not depend on the GPU, so where that is not known an H100 stands in for it, and whether the run fits is
not judged.
"""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Final

from clustersim.common.units import Bytes
from clustersim.memory.footprint import SHARDED_CATEGORIES, MemoryCategory
from clustersim.memory.ledger import MemoryLedger
from clustersim.model.layer_stack import BlockForm
from clustersim.model.presets import PRESETS
from clustersim.model.transformer import PositionEncoding, TransformerModel, uniform_dimensions
from clustersim.parallel.mesh import BASE_AXES, DATA, PIPELINE
from clustersim.results.memory_check import memory_timelines
from clustersim.scenario import Scenario
from clustersim.validation.cases import PUBLISHED, CannotPredictError, Case, read_cases
from clustersim.validation.comparison import Comparison
from clustersim.validation.error_statistics import grouped
from clustersim.validation.framework_defaults import software_of
from clustersim.validation.megatron_notes import stated_dimensions
from clustersim.validation.steps import factors_of, read_steps, scenario_of

SHIPPED: Final = PUBLISHED / "memory.csv"
NEEDED: Final = (
    *("case_id", "source", "gpu", "n_gpus", "model", "seq", "global_batch", "micro_batch", "tp", "pp", "dp"),
    *("precision", "quantity", "rank", "bytes"),
)
QUANTITIES: Final = ("peak_allocated", "peak_reserved", "allocated_at_log", "nvidia_smi_used")
_MODEL: Final = ("layers", "hidden", "ffn_hidden", "mlp", "heads", "kv_heads", "head_dim", "vocab", "tied_embeddings")
_FULLEST: Final = ("", "max", "max over ranks", "max over stages")
_ENDS: Final = "max of first and last stage"
_UNKNOWN_RANK: Final = re.compile(r"inferred:[^;]*which rank")  # as a row's notes say it
_STAND_IN: Final = "h100-sxm-80gb"
_OF_THE_ALLOCATOR: Final = ("peak_allocated", "peak_reserved", "allocated_at_log")
_UNKNOWN: Final = ("", "unknown")
_OF_A_ROW: Final = ("quantity", "rank", "bytes", "fits", "unit_printed")
_OUTSIDE: Final = (MemoryCategory.COMMUNICATION, MemoryCategory.CONTEXT)  # not the framework's allocator's
_BETWEEN_STEPS: Final = (*SHARDED_CATEGORIES, MemoryCategory.MESSAGES, MemoryCategory.WORKSPACE)
_FITS: Final = {"yes": True, "oom": False, "no": False}
_DIGITS: Final = 9  # that a rank's number has fewer than
_FRESH: Final = 4  # microbatches per stage where the batch is not stated: as full as any schedule becomes


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether a run fits in memory: as its source states it, and as predicted (None: skipped, with the reason)."""

    case_id: str
    source: str
    stated: bool
    predicted: bool | None = None
    skipped: str | None = None
    expressible: bool = True

    @property
    def right(self) -> bool:
        """Whether there is a prediction and it is what is stated."""
        return self.predicted is self.stated


@dataclass(frozen=True)
class Holding:
    """What the ranks of a run hold: the ledgers of its pipeline ranks."""

    scenario: Scenario
    ledgers: tuple[MemoryLedger, ...]

    def of(self, case: Case) -> Bytes:
        """Bytes of the quantity that a row measures."""
        quantity = _quantity(case)
        return max(_bytes(self.ledgers[stage], quantity) for stage in self._stages(case))

    @property
    def fits(self) -> bool:
        """Whether the fullest device has room for all that it holds."""
        return max(ledger.peak for ledger in self.ledgers) <= self.scenario.cluster.accelerator.memory_bytes

    def _stages(self, case: Case) -> Iterable[int]:
        """The pipeline ranks of which a row's is the fullest: a rank of the run, a stage by name, or any."""
        rank, stages = case.text("rank").lower(), len(self.ledgers)
        if not rank and _UNKNOWN_RANK.search(case.text("notes")) and software_of(case).logs_last_rank:
            return (stages - 1,)
        if rank in _FULLEST:
            return range(stages)
        if rank.isdecimal() and len(rank) < _DIGITS and int(rank) < self.scenario.layout.world_size:
            return (int(self._stage_of_rank[int(rank)]),)
        named = {"first pipeline stage": (0,), "last pipeline stage": (stages - 1,), _ENDS: (0, stages - 1)}
        named |= {f"stage {stage}": (stage,) for stage in range(stages)}
        if rank not in named:
            raise CannotPredictError(f"line {case.line}: rank {rank} is none of the run's", owed=False)
        return named[rank]

    @cached_property
    def _stage_of_rank(self) -> list[int]:
        stages: list[int] = self.scenario.layout.mesh.rank_coordinates(PIPELINE).tolist()
        return stages


def read_memory(path: Path = SHIPPED) -> list[Case]:
    """The rows of a table of memory."""
    return read_cases(path, NEEDED)


def compare_memory(cases: Sequence[Case]) -> list[Comparison]:
    """Predict every row, in bytes; rows of one run are predicted together."""
    found = dict(pair for run in _runs(cases) for pair in _compared(run))
    return [found[number] for number in range(len(cases))]


def fits_right(cases: Sequence[Case]) -> list[Verdict]:
    """Whether every run that states that it fits (`yes`) or does not (`oom`) is predicted to."""
    return [_judged(run) for run in _runs(cases) if any(map(_judgeable, (case for _, case in run)))]


Run = list[tuple[int, Case]]  # a run's rows, with their numbers in the table


def _runs(cases: Sequence[Case]) -> list[Run]:
    """Rows, with all that is known of their runs, together where they are of one run."""
    known = _Known.shipped()
    rows = [(number, known.completed(case)) for number, case in enumerate(cases)]
    return list(grouped(rows, lambda row: _identity(row[1])).values())


def _identity(case: Case) -> tuple[tuple[str, str], ...]:
    return tuple(_run(case).items())


def _compared(run: Run) -> list[tuple[int, Comparison]]:
    """Every row of a run, with its number."""
    try:
        held = _holding(run[0][1])
    except CannotPredictError as refusal:
        return [(number, _skipped(case, refusal)) for number, case in run]
    return [(number, _comparison(case, held)) for number, case in run]


def _comparison(case: Case, held: Holding) -> Comparison:
    try:
        measured, predicted = _measured(case), held.of(case)
    except CannotPredictError as refusal:
        return _skipped(case, refusal)
    known = (case.text("case_id"), case.text("source"), measured)
    fits = held.fits if _judgeable(case) else None
    return Comparison(*known, predicted, factors=_factors(case), fits=fits)


def _skipped(case: Case, refusal: CannotPredictError) -> Comparison:
    try:
        measured = _measured(case)
    except CannotPredictError as unmeasured:
        measured, refusal = math.nan, unmeasured
    known = (case.text("case_id"), case.text("source"), measured)
    return Comparison(*known, skipped=str(refusal), expressible=refusal.owed, factors=_factors(case))


def _factors(case: Case) -> dict[str, str]:
    return {"quantity": case.text("quantity") or "not stated"} | factors_of(case)


def _measured(case: Case) -> Bytes:
    if not case.text("bytes") and _FITS.get(case.text("fits").lower()) is False:
        raise CannotPredictError("it ran out of memory, so that no bytes were measured", owed=False)
    return case.number("bytes")


def _judgeable(case: Case) -> bool:
    """Whether a row says whether its run fits, on a GPU that it names."""
    return case.text("fits").lower() in _FITS and case.text("gpu") not in _UNKNOWN


def _judged(run: Run) -> Verdict:
    case = next(case for _, case in run if _judgeable(case))
    of, stated = (case.text("case_id"), case.text("source")), _FITS[case.text("fits").lower()]
    try:
        return Verdict(*of, stated, _holding(case).fits)
    except CannotPredictError as refusal:
        return Verdict(*of, stated, None, str(refusal), refusal.owed)


def _quantity(case: Case) -> str:
    """What a row measures; raise CannotPredictError for what is computed by a formula or not modelled."""
    quantity = case.text("quantity")
    if quantity not in QUANTITIES:
        raise CannotPredictError(f"quantity {quantity or 'is not stated'}: not measured or not modelled", owed=False)
    return quantity


def _holding(case: Case) -> Holding:
    """The ledgers of a run; raise CannotPredictError where there is no scenario of it."""
    if case.text("gpu") in _UNKNOWN:
        if _quantity(case) not in _OF_THE_ALLOCATOR:
            raise CannotPredictError("gpu is not stated", owed=False)
        case = Case({**case.cells, "gpu": _STAND_IN}, case.line)
    if not case.text("layers"):
        model = case.text("model") or "without a name"
        raise CannotPredictError(f"dimensions of model {model} are not stated, and not shipped", owed=False)
    scenario = scenario_of(case)
    return Holding(scenario, memory_timelines(scenario))


def _bytes(rank: MemoryLedger, quantity: str) -> Bytes:
    """What a quantity counts of a pipeline rank's ledger."""
    parts = rank.peak_by_category()
    if quantity == "nvidia_smi_used":
        return sum(parts.values())
    if quantity == "allocated_at_log":
        return sum(parts[category] for category in _BETWEEN_STEPS)
    outside = (*_OUTSIDE, *(() if quantity == "peak_reserved" else (MemoryCategory.FRAGMENTATION,)))
    return sum(size for category, size in parts.items() if category not in outside)


@dataclass(frozen=True, slots=True)
class _Known:
    """What shipped steps and memory say of runs by `case_id`, and steps of models by name."""

    runs: Mapping[str, Mapping[str, str]]
    models: Mapping[str, Mapping[str, str]]

    @classmethod
    def shipped(cls) -> "_Known":
        steps = read_steps()
        held = {case.text("case_id"): _run(case) for case in read_memory()}
        runs = held | {case.text("case_id"): case.cells for case in steps}
        named = grouped(steps, lambda case: _bare(case.text("model")))
        presets = {
            _bare(name): _dimensions(model_preset.model)
            for name, model_preset in PRESETS.items()
            if _sayable(model_preset.model)
        }
        return cls(runs, {name: _agreed(same) for name, same in named.items()} | presets)

    def completed(self, case: Case) -> Case:
        """The row with what it leaves out; its own cells stay."""
        stated = {column: text for column, text in case.cells.items() if text}
        run = {column: text for column, text in self.runs.get(case.text("case_id"), {}).items() if text}
        known = {**run, **stated}
        cells = known if "layers" in known else {**self._model(stated), **known}
        return Case({**case.cells, **_defaults(Case(cells, case.line)), **cells}, case.line)

    def _model(self, stated: Mapping[str, str]) -> Mapping[str, str]:
        said = stated_dimensions(stated.get("notes", ""), stated.get("tp", ""))
        return said or self.models.get(_bare(stated.get("model", "")), {})


def _run(case: Case) -> Mapping[str, str]:
    """What a row of memory says of its run."""
    return {column: text for column, text in case.cells.items() if column not in _OF_A_ROW}


def _bare(name: str) -> str:
    """A model's name by which others find it, as `Llama3.1-8B` finds `llama3-8b` (3.1 kept the dimensions of 3)."""
    return "".join(letter for letter in name.lower().replace("3.1", "3") if letter.isalnum())


def _sayable(model: TransformerModel) -> bool:
    """Whether a row's cells say what the model is: layers that are all alike, dense, pre-norm, without windows."""
    plain = all(spec.block is BlockForm.PRE_NORM for spec in model.distinct_specs) and not model.embedding_norm
    plain = plain and not model.distinct_moes
    usual = all(
        distinct_attention.window is None and distinct_attention.qk_norm is None and not distinct_attention.softcap
        for distinct_attention in model.distinct_attentions
    )
    alike = len(model.stack) == 1 and not model.distinct_moes
    return alike and plain and usual and model.positions is not PositionEncoding.ALIBI


def _dimensions(model: TransformerModel) -> Mapping[str, str]:
    """The cells of a preset."""
    found = uniform_dimensions(model)
    said = {"ffn_hidden": str(found["ffn"]), "mlp": found["mlp"].value, "vocab": str(model.vocab)}
    said |= {column: str(found[column]) for column in ("layers", "hidden", "heads", "kv_heads", "head_dim")}
    return said | {"tied_embeddings": "yes" if model.tied_embeddings else "no"}


def _agreed(same: Sequence[Case]) -> Mapping[str, str]:
    """The dimensions of a model, if all rows have the same."""
    found = {tuple(case.text(column) for column in _MODEL) for case in same}
    return dict(zip(_MODEL, found.pop(), strict=True)) if len(found) == 1 else {}


def _defaults(case: Case) -> dict[str, str]:
    """What dp and the batch are, where the other axes are known."""
    try:
        gpus, micro = case.whole("n_gpus"), case.whole("micro_batch")
        replica = math.prod(case.whole(axis.name, 1) for axis in BASE_AXES if axis is not DATA)
        dp, pp = case.whole(DATA.name, max(1, gpus // replica)), case.whole(PIPELINE.name, 1)
    except CannotPredictError:
        return {}
    return {DATA.name: str(dp), "global_batch": str(dp * micro * (1 if pp == 1 else _FRESH * pp))}
