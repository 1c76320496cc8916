"""Result of a layout search: Pareto front, recommendation, rank changes, varying keys."""

from dataclasses import replace

from clustersim.results.search_result import BoundedLayout, LayoutResult, SearchResult, SensitivityCase

PLAIN = LayoutResult(
    ("layout.tp=1",), 0, 8, "dgx-h100", 1.0, 1.0, (0.9, 1.1), 1.0, 0.5, 0.5, 40.0, 80.0, {"compute": 1.0}, 0.9, 0.1
)  # fmt: skip
FAST = replace(PLAIN, overrides=("layout.tp=2",), score=0.99, step_time=0.99, peak_memory=60.0)
SMALL = replace(PLAIN, overrides=("layout.tp=4",), score=1.5, step_time=1.5, peak_memory=10.0)
FEWER_GPUS = replace(SMALL, overrides=("layout.tp=8",), gpus=4, score=2.0, step_time=2.0, peak_memory=70.0)
DOMINATED = replace(PLAIN, overrides=("layout.pp=2",), score=3.0, step_time=3.0, peak_memory=75.0)


def search_result(*changes: SensitivityCase) -> SearchResult:
    layouts = (FAST, PLAIN, SMALL, FEWER_GPUS, DOMINATED)
    return SearchResult("step-time", 9, {}, (), layouts, 3, 1, None, 1.0, sensitivity=changes, repeatability=0.02)


def test_the_pareto_front_is_undominated_in_time_gpus_and_memory() -> None:
    """The plain layout is slower than the fast one with more free memory; the last is dominated in all three."""
    assert search_result().pareto_front == (FAST, PLAIN, SMALL, FEWER_GPUS)


def test_the_recommended_layout_is_the_first_of_the_tied_ones() -> None:
    assert search_result().recommended == PLAIN
    assert search_result().rivals == (PLAIN, FAST, SMALL)
    assert search_result().runner_up == FAST


def test_the_recommended_layout_is_among_the_best_for_any_top() -> None:
    """The index of the recommended layout in JSON refers to `best`, and the table marks it."""
    result = replace(search_result(), top=1)
    assert result.best == (FAST, PLAIN)
    report = result.to_json()
    assert report["best"][report["preferred"]]["overrides"] == list(PLAIN.overrides)
    assert result.rivals == (PLAIN, FAST)


def test_rank_changes_need_a_difference_above_the_repeatability() -> None:
    near, far = SensitivityCase("near", (1.0, 0.99, None)), SensitivityCase("far", (1.1, 1.0, 1.6))
    single, none = SensitivityCase("alone", (1.0, None, None)), SensitivityCase("none", (None, 1.0, 1.0))
    assert search_result(near, far, single, none).rank_changes == ("far",)


SEQUENCE = "layout.sequence_parallel"
BATCH = "training.global_batch"


def with_overrides(layout: LayoutResult, *overrides: str) -> LayoutResult:
    return replace(layout, overrides=(*layout.overrides, *overrides))


def test_derived_keys_are_listed_where_layouts_differ_only_in_them() -> None:
    """One with and one without sequence parallelism at tp 2; at tp 4 it is derived."""
    split, unsplit = with_overrides(FAST, f"{SEQUENCE}=true"), with_overrides(FAST, f"{SEQUENCE}=false")
    assert replace(
        search_result(), simulated=(split, unsplit, with_overrides(SMALL, f"{SEQUENCE}=true"))
    ).varying_derived_keys == {SEQUENCE}
    assert (
        replace(
            search_result(), simulated=(split, PLAIN, with_overrides(SMALL, f"{SEQUENCE}=false"))
        ).varying_derived_keys
        == set()
    )


def test_batch_sizes_are_listed_if_a_job_has_several_even_if_only_bounded() -> None:
    one, two = with_overrides(PLAIN, f"{BATCH}=64"), BoundedLayout(("layout.tp=1", f"{BATCH}=128"), 0, 2.0)
    assert replace(search_result(), simulated=(one,), bounded=(two,)).varying_derived_keys == {BATCH}
    assert replace(search_result(), simulated=(one,), bounded=(replace(two, job=1),)).varying_derived_keys == set()
