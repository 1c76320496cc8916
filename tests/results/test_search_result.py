"""What a search found, beyond what it simulated."""

from dataclasses import replace

from clustersim.results.search_result import BoundedLayout, LayoutResult, SearchResult, SensitivityCase

PLAIN = LayoutResult(("layout.tp=1",), 0, 8, "dgx-h100", 1.0, 1.0, (0.9, 1.1), 1.0, 0.5, 40.0, 80.0, {"compute": 1.0})
FAST = replace(PLAIN, overrides=("layout.tp=2",), score=0.99, step_time=0.99, peak_memory=60.0)
SMALL = replace(PLAIN, overrides=("layout.tp=4",), score=1.5, step_time=1.5, peak_memory=10.0)
FEW = replace(SMALL, overrides=("layout.tp=8",), gpus=4, score=2.0, step_time=2.0, peak_memory=70.0)
BAD = replace(PLAIN, overrides=("layout.pp=2",), score=3.0, step_time=3.0, peak_memory=75.0)


def found(*changes: SensitivityCase) -> SearchResult:
    layouts = (FAST, PLAIN, SMALL, FEW, BAD)
    return SearchResult("step-time", 9, {}, (), layouts, 3, 1, None, 1.0, sensitivity=changes, repeatability=0.02)


def test_nothing_on_the_front_is_beaten_in_time_gpus_and_memory_at_once() -> None:
    """The plain one is slower than the fast one with more memory left; the last is worse than others in all three."""
    assert found().pareto_front == (FAST, PLAIN, SMALL, FEW)


def test_the_one_to_take_is_the_first_of_the_rivals() -> None:
    assert found().recommended == PLAIN
    assert found().rivals == (PLAIN, FAST, SMALL)
    assert found().runner_up == FAST


def test_the_one_to_take_is_among_the_best_however_few_are_wanted() -> None:
    """As the place of the preferred one in JSON is one of `best`, and the table marks it."""
    one = replace(found(), top=1)
    assert one.best == (FAST, PLAIN)
    told = one.to_json()
    assert told["best"][told["preferred"]]["overrides"] == list(PLAIN.overrides)
    assert one.rivals == (PLAIN, FAST)


def test_another_overtakes_it_only_by_more_than_runs_of_the_same_differ() -> None:
    near, far = SensitivityCase("near", (1.0, 0.99, None)), SensitivityCase("far", (1.1, 1.0, 1.6))
    alone, none = SensitivityCase("alone", (1.0, None, None)), SensitivityCase("none", (None, 1.0, 1.0))
    assert found(near, far, alone, none).rank_changes == ("far",)


SEQUENCE = "layout.sequence_parallel"
BATCH = "training.global_batch"


def other(layout: LayoutResult, *overrides: str) -> LayoutResult:
    return replace(layout, overrides=(*layout.overrides, *overrides))


def test_what_follows_is_told_where_layouts_differ_in_nothing_else() -> None:
    """One with and one without sequence parallelism at tp 2; that of tp 4 follows."""
    only, none = other(FAST, f"{SEQUENCE}=true"), other(FAST, f"{SEQUENCE}=false")
    assert replace(found(), simulated=(only, none, other(SMALL, f"{SEQUENCE}=true"))).varying_derived_keys == {SEQUENCE}
    assert replace(found(), simulated=(only, PLAIN, other(SMALL, f"{SEQUENCE}=false"))).varying_derived_keys == set()


def test_batches_are_told_where_a_job_has_several_though_one_was_only_bounded() -> None:
    one, two = other(PLAIN, f"{BATCH}=64"), BoundedLayout(("layout.tp=1", f"{BATCH}=128"), 0, 2.0)
    assert replace(found(), simulated=(one,), bounded=(two,)).varying_derived_keys == {BATCH}
    assert replace(found(), simulated=(one,), bounded=(replace(two, job=1),)).varying_derived_keys == set()
