"""Memory of published runs and of users' own: which quantity, of which rank, of which run."""

from pathlib import Path

import pytest

from clustersim.common.errors import InputError
from clustersim.model.overheads import Grouping
from clustersim.model.recompute_modules import RecomputeModule
from clustersim.model.training import SelectiveRecompute
from clustersim.program.task import TokenDispatcher
from clustersim.results.memory_check import check, memory_timelines
from clustersim.validation.cases import ValidationCase
from clustersim.validation.comparison import CaseComparison
from clustersim.validation.megatron_notes import stated_dimensions
from clustersim.validation.memory import compare_memory, judge_memory_fit, read_memory
from clustersim.validation.steps import build_scenario, compare_step, read_steps
from tests.sentences import parts
from tests.validation.csv_tables import write_table
from tests.validation.sample_cases import BASE_ROW, step_case

RUN_ROW = {key: text for key, text in BASE_ROW.items() if key not in ("step_time_s", "quality")} | {"model": "made up"}
MEMORY_ROW = RUN_ROW | {"quantity": "peak_allocated", "rank": "", "bytes": "1e9", "fits": "yes"}
PACKAGED_STEP = "titan-T1-fsdp"  # a step whose memory was measured too


def memory_cases(folder: Path, *changes: dict[str, str]) -> list[ValidationCase]:
    return read_memory(write_table(folder / "mine.csv", *(MEMORY_ROW | change for change in changes)))


def compare_table(folder: Path, *changes: dict[str, str]) -> list[CaseComparison]:
    return compare_memory(memory_cases(folder, *changes))


def predict_table(folder: Path, *changes: dict[str, str]) -> list[float]:
    comparisons = compare_table(folder, *changes)
    assert not [comparison.skip_reason for comparison in comparisons if comparison.predicted is None]
    return [case_comparison.predicted or 0.0 for case_comparison in comparisons]


def test_memory_quantities_are_ordered(tmp_path: Path) -> None:
    """What stays between steps, allocated at the peak, reserved with fragmentation, and all with driver and NCCL."""
    names = ("allocated_at_log", "peak_allocated", "peak_reserved", "nvidia_smi_used")
    between, allocated, reserved, used = predict_table(tmp_path, *({"quantity": name} for name in names))
    assert between < allocated < reserved < used
    scenario = build_scenario(memory_cases(tmp_path, {})[0])
    assert reserved == pytest.approx(allocated * scenario.framework.fragmentation_with(scenario.training.recompute))
    assert used == pytest.approx(check(scenario).peak_memory_bytes)


def test_model_states_of_a_stage_equal_the_zero_paper(tmp_path: Path) -> None:
    """Half of 4 layers, 12 h^2 weights each, and the embedding, over tp 2; bf16 with fp32 gradients: 18 bytes each.

    The table of positions (seq x h) is whole on every rank of the first stage; biases and norms are the rest. Beside
    states there are 96 MiB of workspaces, a gradient of each shape of a layer's weights (Transformer Engine 2.3) and a
    message each way, a half of it from each rank.
    """
    first, last = predict_table(
        tmp_path,
        {"quantity": "allocated_at_log", "rank": "first pipeline stage"},
        {"quantity": "allocated_at_log", "rank": "stage 1"},
    )
    weights = (2 * 12 * 1024**2 + 51200 * 1024) / 2
    microbatch, sequence, hidden, tp = 2, 1024, 1024, 2
    kept_bytes = 2 * 12 * hidden**2 / tp
    other_bytes = 96 * 2**20 + kept_bytes + 2 * 2 * microbatch * sequence * hidden / tp
    assert first - other_bytes == pytest.approx(18 * (weights + 1024 * 1024), rel=2e-3)
    assert last - other_bytes == pytest.approx(18 * weights, rel=2e-3)


def test_a_rank_is_one_of_its_stage(tmp_path: Path) -> None:
    """Ranks are numbered tp, dp, pp: the first four are of the first stage."""
    first, same, other, peak_rank = predict_table(
        tmp_path, {"rank": "0"}, {"rank": "3"}, {"rank": "4"}, {"rank": "max over ranks"}
    )
    stages = memory_timelines(build_scenario(memory_cases(tmp_path, {})[0]))
    assert len(stages) == 2
    assert first == same
    assert first != other
    assert peak_rank == max(first, other)


def test_a_row_inherits_missing_cells_of_a_packaged_step(tmp_path: Path) -> None:
    step = next(case for case in read_steps() if case.text("case_id") == PACKAGED_STEP)
    incomplete = dict.fromkeys(MEMORY_ROW, "") | {
        "case_id": PACKAGED_STEP,
        "quantity": "peak_allocated",
        "bytes": "8e10",
    }
    complete = {column: step.text(column) for column in step.cells} | {"case_id": "another name"}
    joined, explicit = compare_memory(read_memory(write_table(tmp_path / "t.csv", incomplete, incomplete | complete)))
    assert joined.predicted == explicit.predicted
    assert joined.predicted is not None


def test_missing_dimensions_are_those_of_the_named_preset(tmp_path: Path) -> None:
    dimensions = ("layers", "hidden", "ffn_hidden", "heads", "vocab", "mlp")
    bare = dict.fromkeys(dimensions, "") | {"model": "GPT 22B", "tp": "8", "pp": "1", "dp": "1"}
    stated = {"layers": "48", "hidden": "6144", "ffn_hidden": "24576", "heads": "64", "vocab": "51200", "mlp": "gelu"}
    by_name, by_dimensions = predict_table(tmp_path, bare, bare | stated | {"tied_embeddings": "yes"})
    assert by_name == by_dimensions
    (unknown,) = compare_table(tmp_path, bare | {"model": "of our own"})
    assert parts("dimensions of model of our own ... not stated").match(unknown.skip_reason or "")
    assert not unknown.is_expressible


def test_preset_names_are_normalized(tmp_path: Path) -> None:
    bare = {"layers": "", "hidden": "", "ffn_hidden": "", "heads": "", "vocab": "", "mlp": ""}
    ours, theirs = predict_table(tmp_path, bare | {"model": "llama3-8b"}, bare | {"model": "Llama3.1_8B"})
    assert ours == theirs


def test_a_missing_batch_fills_the_pipeline(tmp_path: Path) -> None:
    unstated, full = predict_table(tmp_path, {"global_batch": "", "dp": ""}, {"global_batch": "64"})
    assert unstated == full


def test_whether_a_run_fits_is_judged_once_for_all_its_rows(tmp_path: Path) -> None:
    huge = {"case_id": "huge", "layers": "4000", "bytes": "", "fits": "oom"}
    table = memory_cases(tmp_path, {}, {"quantity": "peak_reserved"}, huge, huge | {"fits": "yes", "case_id": "not so"})
    fits, oom, wrong = judge_memory_fit(table)
    assert [fits.is_correct, oom.is_correct, wrong.is_correct] == [True, True, False]
    assert [fits.predicted, oom.predicted, wrong.predicted] == [True, False, False]
    assert "out of memory" in (compare_memory(table)[2].skip_reason or "")


def test_a_run_that_cannot_be_predicted_is_not_right(tmp_path: Path) -> None:
    (verdict,) = judge_memory_fit(memory_cases(tmp_path, {"precision": "fp8"}))
    assert not verdict.is_correct
    assert "fp8" in (verdict.skip_reason or "")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"quantity": "analytic"}, "quantity analytic: not measured or not modelled"),
        ({"rank": "9"}, "line 2: rank 9 is none of the run's"),
        ({"rank": "\u00b2"}, "is none of the run's"),
        ({"rank": "9" * 5000}, "is none of the run's"),
        ({"dp": "\u00b2", "global_batch": ""}, "line 2: dp '\u00b2' is not a number above 0"),
        ({"bytes": "lots"}, "line 2: bytes 'lots' is not a number above 0"),
        ({"bytes": ""}, "line 2: bytes is not stated"),
        ({"precision": "fp8"}, "training.precision: a100-sxm-80gb has no fp8 peak"),
        ({"precision": "fp8-mixed"}, "precision fp8-mixed of megatron-lm: which recipe ... not stated"),
        ({"precision": ""}, "precision of megatron-lm: which recipe it is, is not stated"),
        ({"experts": "8"}, "line 2: top_k is not stated"),
        ({"gpu": "unknown", "quantity": "nvidia_smi_used"}, "gpu is not stated"),
        ({"layers": "few"}, "line 2: layers 'few' is not a number above 0"),
        ({"micro_batch": "3"}, "global_batch"),
    ],
)
def test_an_unpredictable_row_has_a_reason(tmp_path: Path, change: dict[str, str], reason: str) -> None:
    bad, good = compare_table(tmp_path, {"experts": ""} | change, {"experts": ""})
    assert parts(reason).search(bad.skip_reason or "")
    assert not bad.is_expressible
    assert good.predicted is not None


def test_a_table_without_a_required_column_is_rejected(tmp_path: Path) -> None:
    path = write_table(tmp_path / "t.csv", {key: text for key, text in MEMORY_ROW.items() if key != "quantity"})
    with pytest.raises(InputError, match="missing column quantity"):
        read_memory(path)


def test_allocated_memory_needs_no_gpu_but_a_verdict_does(tmp_path: Path) -> None:
    with_gpu, without_gpu = predict_table(tmp_path, {}, {"gpu": "unknown"})
    assert with_gpu == without_gpu
    (verdict,) = judge_memory_fit(memory_cases(tmp_path, {}, {"gpu": ""}))
    assert verdict.case_id == MEMORY_ROW["case_id"]


def test_the_fuller_of_the_first_and_the_last_stage(tmp_path: Path) -> None:
    four = {"pp": "4", "dp": "1", "layers": "4"}
    stages = [four | {"rank": f"stage {stage}"} for stage in range(4)]
    *stage_peaks, ends = predict_table(tmp_path, *stages, four | {"rank": "max of first and last stage"})
    assert ends == max(stage_peaks[0], stage_peaks[3])


def test_an_unstated_rank_is_the_one_the_framework_logs(tmp_path: Path) -> None:
    """Megatron-LM's tensorboard is written by its last rank; others' rows are of the fullest, as rows without notes."""
    small = {"vocab": "2048", "rank": ""}  # so that the first stage, which has two microbatches in flight, is fullest
    unsaid = small | {"notes": "inferred: which rank; num-layers 4"}
    other = {"framework": ""}
    logged, last, peak_rank, theirs, full = predict_table(
        tmp_path, unsaid, small | {"rank": "stage 1"}, small, unsaid | other, small | other
    )
    assert logged == last
    assert peak_rank > logged
    assert theirs == full


def test_dimensions_may_be_in_the_notes_as_megatrons_arguments(tmp_path: Path) -> None:
    """An MLP of 4 h, GPT-2's vocabulary padded to 128 for each of two ranks: 50257 -> 50432."""
    bare = dict.fromkeys(("layers", "hidden", "ffn_hidden", "heads", "vocab", "mlp", "tied_embeddings"), "")
    notes = {"notes": "golden; num-layers 4; hidden-size 1024; num-attention-heads 16; num-query-groups 4"}
    stated = {"layers": "4", "hidden": "1024", "ffn_hidden": "4096", "heads": "16", "kv_heads": "4", "vocab": "50432"}
    noted, plain = predict_table(tmp_path, bare | notes, stated | {"mlp": "gelu", "tied_embeddings": "yes"})
    assert noted == plain
    (few,) = compare_table(tmp_path, bare | {"notes": "num-layers 4; hidden-size 1024"})
    assert few.predicted is None


def test_a_step_that_was_measured_but_would_not_fit_says_so() -> None:
    """400 layers of 8,192 on eight A100 are no less predicted; a step without a scenario says nothing of memory."""
    usual, huge, refused = (
        compare_step(step_case(**cells)) for cells in ({}, {"layers": "400", "hidden": "8192"}, {"dp": "3"})
    )
    assert (usual.fits_in_memory, huge.fits_in_memory, refused.fits_in_memory) == (True, False, None)
    assert huge.predicted is not None


EXPERTS = {"experts": "8", "top_k": "2", "moe_ffn_hidden": "512", "ep": "2", "pp": "1", "dp": "4"}


def test_megatron_moe_arguments_are_read(tmp_path: Path) -> None:
    """As the notes of its functional tests have it; experts that are not grouped run one after the other."""
    notes = "num-experts 8; expert-tensor-parallel-size 2; moe-token-dispatcher-type allgather"
    plain, grouped = (
        build_scenario(memory_case)
        for memory_case in memory_cases(
            tmp_path, EXPERTS | {"notes": notes}, EXPERTS | {"notes": f"{notes}; moe-grouped-gemm True"}
        )
    )
    assert plain.layout.effective_etp == 2
    assert plain.layout.sequence_parallel, "left open, as experts beside tensor parallelism need it"
    assert plain.layout.dispatcher is TokenDispatcher.ALL_GATHER
    assert (plain.training.grouping, grouped.training.grouping) == (Grouping.LOOP, Grouping.STREAMS)
    assert {distinct_moe.ffn for distinct_moe in plain.model.distinct_moes} == {512}
    assert not plain.model.distinct_dense_mlps


def test_widths_of_experts_are_among_the_arguments() -> None:
    """Shared experts are counted in routed ones; without a width of their own these are as wide as the MLP."""
    notes = "num-layers 12; hidden-size 512; num-attention-heads 8; num-experts 8; moe-router-topk 2"
    plain = stated_dimensions(notes, "2")
    assert (plain["experts"], plain["top_k"], plain["ffn_hidden"]) == ("8", "2", "2048")
    with_widths = stated_dimensions(f"{notes}; moe-ffn-hidden-size 1024; moe-shared-expert-intermediate-size 512", "2")
    assert (with_widths["moe_ffn_hidden"], with_widths["shared_experts"]) == ("1024", "0.5")


def test_grouped_gemms_have_their_own_workspaces(tmp_path: Path) -> None:
    """Transformer Engine's: 32 MiB on each of four streams, where experts are grouped."""
    between = EXPERTS | {"quantity": "allocated_at_log"}
    loop, grouped = predict_table(tmp_path, between | {"notes": "experts one after the other"}, between)
    assert grouped - loop == 4 * 32 * 2**20


def test_modules_are_read_as_megatron_prints_them(tmp_path: Path) -> None:
    expected = SelectiveRecompute(frozenset({RecomputeModule.MOE, RecomputeModule.LAYERNORM}))
    for text in ("selective:[moe layernorm]", "modules:moe+layernorm"):
        (row,) = memory_cases(tmp_path, {"recompute": text})
        assert build_scenario(row).training.recompute == expected


@pytest.mark.parametrize(
    ("notes", "reason"),
    [
        ("multi-latent-attention", "latent attention of a model that is not packaged"),
        ("fine-grained-activation-offloading", "single operators on the host"),
    ],
)
def test_unmodelled_moe_settings_have_a_reason(tmp_path: Path, notes: str, reason: str) -> None:
    (refused,) = compare_table(tmp_path, EXPERTS | {"notes": notes})
    assert reason in (refused.skip_reason or "")
    assert refused.is_expressible


def test_notes_of_a_packaged_step_count_for_the_memory_row_too(tmp_path: Path) -> None:
    """Only its step says that this run is compiled: dropped FP32 copies of norms and activations need less memory."""
    step = {"case_id": "titan-T1-fsdp+compile"}
    blank = {column: "" for column in MEMORY_ROW if column not in (*step, "quantity", "bytes")}
    compiled, eager = (
        predict_table(tmp_path, {**blank, **step, "notes": notes, **more})[0]
        for notes, more in (("range 20 to 21", {}), ("range 20 to 21", {"case_id": "titan-T1-fsdp"}))
    )
    assert compiled < eager
    alone = predict_table(tmp_path, {**blank, **step, "notes": ""})[0]
    assert compiled == alone
