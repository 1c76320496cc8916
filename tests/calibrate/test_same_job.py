"""Runs of one job: how far their errors are apart, and intervals that follow from a published run of the job."""

from collections.abc import Sequence
from statistics import fmean

import pytest

from calibrate.fit.out_of_sample import out_of_sample_path, read_out_of_sample
from calibrate.fit.prediction_interval import same_job_errors
from calibrate.fit.same_job import JobPair, fit_same_job, same_job_pairs, same_job_quantile
from calibrate.fit.student_t import student_t_ratio
from clustersim.uncertainty.model_file import DENSE_STEPS, MOE_STEPS, load_uncertainty_model
from clustersim.uncertainty.reference_runs import ReferenceRun, group_by_job, read_reference_runs

KINDS = (DENSE_STEPS, MOE_STEPS)


@pytest.fixture(scope="module")
def published() -> Sequence[ReferenceRun]:
    return read_reference_runs()


def known_runs(kind: str, published: Sequence[ReferenceRun]) -> list[ReferenceRun]:
    """Runs of a class whose errors are out of sample."""
    case_ids = {step.case_id for step in read_out_of_sample(out_of_sample_path(kind))}
    return [run for run in published if run.case_id in case_ids]


def test_sources_have_equal_weight_whatever_their_number_of_pairs() -> None:
    """Nine sources whose errors agree within 1 %, one within 50 %: 90 % of sources are below the larger."""
    pairs = [JobPair(f"source {index}", 0.01) for index in range(9)]
    many = [*pairs, *[JobPair("far", 0.5)] * 100]
    assert same_job_quantile(many) == pytest.approx(0.01 * student_t_ratio(9))
    assert same_job_quantile([*pairs[1:], *[JobPair("far", 0.5)] * 100]) == pytest.approx(0.5 * student_t_ratio(8))


def test_pairs_of_few_sources_say_nothing() -> None:
    assert fit_same_job([JobPair(f"source {index % 4}", 0.01) for index in range(40)]) is None


def test_runs_whose_settings_are_unknown_form_no_pairs(published: Sequence[ReferenceRun]) -> None:
    unknown = [run for run in published if run.quality == "C"]
    assert unknown
    assert not same_job_pairs(unknown)


@pytest.mark.parametrize("kind", KINDS)
def test_packaged_models_are_fitted_to_the_packaged_runs(kind: str) -> None:
    assert load_uncertainty_model(kind).same_job == same_job_errors(read_out_of_sample(out_of_sample_path(kind)))


def test_intervals_from_a_run_of_the_same_job_cover_those_of_sources_that_they_have_not_seen(
    published: Sequence[ReferenceRun],
) -> None:
    """Leave-one-source-out: the run's own source is in no pair of the quantile, the run itself is no reference.

    All published runs that have another one of their job, whatever their class.
    """
    covered: dict[str, list[bool]] = {}
    for kind in KINDS:
        runs = known_runs(kind, published)
        pairs = same_job_pairs(runs)
        for job_runs in group_by_job(runs).values():
            for run in job_runs if len(job_runs) > 1 else ():
                others = [other for other in job_runs if other is not run]
                reference = max(abs(other.log_error) for other in others)
                quantile = same_job_quantile([pair for pair in pairs if run.source not in pair.source.split(" + ")])
                covered.setdefault(f"{run.source}, {kind}", []).append(abs(run.log_error) <= reference + quantile)
    assert len(covered) >= 20
    assert fmean(map(fmean, covered.values())) >= 0.9
