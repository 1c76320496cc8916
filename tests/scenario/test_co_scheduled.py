"""What a scenario says of other jobs on its machine, and what it may not say."""

import pickle
from pathlib import Path
from typing import Any

import pytest
import yaml

from clustersim import Scenario, simulate
from clustersim.common.errors import InputError
from clustersim.report.labels import describe_degradations
from clustersim.report.terminal.run import describe_co_located_job
from clustersim.scenario.settings import Symmetry
from tests.small_pipeline import printed

GIVEN: dict[str, Any] = {
    "model": "llama-tiny",
    "cluster": {"name": "dgx-h100", "gpus": 16},
    "layout": {"tp": 8, "dp": 2},
    "training": {"sequence": 512, "global_batch": 2},
}
OTHER: dict[str, Any] = {
    "model": {"preset": "llama-tiny", "layers": 2},
    "cluster": "dgx-h100",
    "layout": {"tp": 2, "dp": 4},
    "training": {"sequence": 512, "global_batch": 4},
}

SLOW = {"gpu": 17, "speed": 0.5}
DEADLOCK = {"name": "x", "placement": [0, 1], "rows": ["0F0,0B0,0F1,0B1", "1F1,1B1,1F0,1B0"]}


def changed(mapping: dict[str, Any], **sections: Any) -> dict[str, Any]:
    return {**mapping, **sections}


def read(*jobs: Any, **sections: Any) -> Scenario:
    return Scenario.from_mapping({**GIVEN, "disturbances": {"jobs": [*jobs]}, **sections}, default_name="mine")


def disturbed(*jobs: Any, **disturbances: Any) -> Scenario:
    return read(disturbances={"jobs": [*jobs], **disturbances})


def places(scenario: Scenario) -> list[list[int]]:
    """The GPUs of this job and of the others."""
    return [
        array.tolist()
        for array in (
            scenario.cluster.machine_gpu_ids,
            *(job.resolved.cluster.machine_gpu_ids for job in scenario.co_scheduled_jobs),
        )
    ]


@pytest.fixture
def other(tmp_path: Path) -> Path:
    path = tmp_path / "neighbour.yaml"
    path.write_text(yaml.safe_dump(OTHER), encoding="utf-8")
    return path


def test_a_file_alone_is_a_job_on_the_first_free_gpus_of_a_machine_that_is_large_enough(other: Path) -> None:
    scenario = read(str(other))
    assert places(scenario) == [[*range(16)], [*range(16, 24)]]
    assert scenario.cluster.machine.gpu_count == 24
    (job,) = scenario.co_scheduled_jobs
    assert (job.resolved.name, job.start_offset, job.path) == ("neighbour", 0.0, other)
    assert other in scenario.files


def test_what_is_written_is_the_same_without_the_file(other: Path) -> None:
    scenario = read({"scenario": str(other), "start": "-5 ms"}, {"scenario": OTHER, "placement": {"order": "40-47"}})
    written = scenario.to_mapping()
    other.unlink()
    assert Scenario.from_mapping(written, default_name="mine") == scenario
    assert pickle.loads(pickle.dumps(scenario)) == scenario
    assert [job.start_offset for job in scenario.co_scheduled_jobs] == [-0.005, 0.0]
    assert scenario.with_overrides("training.global_batch=4").co_scheduled_jobs == scenario.co_scheduled_jobs


@pytest.mark.parametrize(
    ("placement", "jobs", "expected"),
    [
        ({"nodes": [3, 1]}, [{}], [[*range(24, 32), *range(8, 16)], [*range(8)]]),
        (
            {"per_node": 4},
            [{}],
            [[0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27], [4, 5, 6, 7, 12, 13, 14, 15]],
        ),
        (None, [{"placement": {"nodes": 5}}], [[*range(16)], [*range(40, 48)]]),
        (None, [{}, {"placement": {"nodes": 2}}, {}], [[*range(16)], None, [*range(16, 24)], None]),
        ({"spare": 4}, [{}, {}], [[*range(16)], [*range(16, 24)], [*range(24, 32)]]),
    ],
)
def test_jobs_are_where_they_are_placed_or_where_nobody_is(
    placement: dict[str, Any] | None, jobs: list[dict[str, Any]], expected: list[list[int] | None]
) -> None:
    cluster = {**GIVEN["cluster"], **({} if placement is None else {"placement": placement})}
    if None in expected:  # in the order of the file, whoever is placed by name
        with pytest.raises(InputError, match=r"jobs.1.placement: GPUs 16-23 are disturbances.jobs.0's already"):
            read(*({"scenario": OTHER, **job} for job in jobs), cluster=cluster)
        return
    assert places(read(*({"scenario": OTHER, **item} for item in jobs), cluster=cluster)) == expected


def test_the_other_files_own_placement_holds_and_this_one_may_say_otherwise(tmp_path: Path) -> None:
    (tmp_path / "gpus.txt").write_text("24-31\n", encoding="utf-8")
    path = tmp_path / "placed.yaml"
    own = changed(OTHER, cluster={"name": "dgx-h100", "placement": {"order": "gpus.txt"}})
    path.write_text(yaml.safe_dump(own), encoding="utf-8")
    assert places(read(str(path)))[1] == [*range(24, 32)]
    assert places(read({"scenario": str(path), "placement": {"nodes": 2}}))[1] == [*range(16, 24)]
    assert tmp_path / "gpus.txt" in read(str(path)).files


@pytest.mark.parametrize(
    ("job", "sentence"),
    [
        ("nowhere.yaml", r"jobs.0.scenario: nowhere.yaml: cannot be read \(No such file or directory\)"),
        (7, "jobs.0: 7 is neither a scenario file nor what one would hold; write scenario: other.yaml"),
        ({}, "jobs.0.scenario: is missing; write scenario: other.yaml"),
        ({"scenario": OTHER, "begins": "1 s"}, "jobs.0.begins: unknown key"),
        ({"scenario": OTHER, "start": 3}, "jobs.0.start: 3 has no unit"),
        ({"scenario": OTHER, "placement": {"nodes": 1}}, "GPUs 8-15 are this job's already; free are GPUs 16-23"),
        ({"scenario": OTHER, "placement": {"order": "15-22"}}, "jobs.0.placement: GPU 15 is this job's already"),
        ({"scenario": OTHER, "placement": {"order": "16-17"}}, "names 2 GPUs, but the job has 8 ranks"),
        (
            {"scenario": changed(OTHER, cluster="dgx-a100")},
            "job: cluster: is dgx-a100, but the job beside which it runs is on dgx-h100",
        ),
        (
            {"scenario": changed(OTHER, cluster={"name": "dgx-h100", "accelerator": "h200-sxm-141gb"})},
            "job: cluster.accelerator: differs from the machine's, which is the cluster's own; leave it out",
        ),
        (
            {"scenario": changed(OTHER, disturbances={"jobs": [{"scenario": OTHER}]})},
            "job: disturbances.jobs: is of the whole machine",
        ),
        (
            {"scenario": changed(OTHER, disturbances={"slow": {"gpu": 3, "speed": 0.5}})},
            "job: disturbances.slow: is of the whole machine",
        ),
        (
            {"scenario": changed(OTHER, cost={"network": "uncontended"})},
            "job: cost.network: uncontended, but jobs on one machine",
        ),
        ({"scenario": changed(OTHER, model="llama-tinny")}, "job: model: .*did you mean llama-tiny"),
        (
            {"scenario": changed(OTHER, training={"sequence": 512, "global_batch": 5})},
            "job: training.global_batch: 5 .*",
        ),
        (
            {"scenario": changed(OTHER, layout={"pp": 2, "dp": 2}, schedule={"orders": DEADLOCK})},
            "job: schedule: x deadlocks: x, row 1, cell 2",
        ),
        (
            {"scenario": changed(OTHER, cluster={"name": "dgx-h100", "gpus": 2**20})},
            "jobs.0.scenario: .*not fit beside the others",
        ),
    ],
)
def test_what_cannot_be_is_said_in_one_line(job: Any, sentence: str) -> None:
    with pytest.raises(InputError, match=sentence) as refused:
        read(job)
    assert str(refused.value).startswith("mine: disturbances.jobs.0")
    assert "\n" not in str(refused.value)


def test_links_must_be_shared_for_other_jobs_to_be_on_them() -> None:
    with pytest.raises(InputError, match=r"disturbances.jobs: links are not shared with cost.network uncontended"):
        read({"scenario": OTHER}, cost={"network": "uncontended"})


def test_a_machine_that_cannot_be_larger_has_no_room_for_another_job() -> None:
    cluster = {"name": "llama3-roce", "gpus": 16, "fabric": {"leaf": {"nodes": 2}, "spine": None, "core": None}}
    with pytest.raises(InputError, match=r"jobs.0.scenario: 8 GPUs do not fit beside the others; free is none of 16"):
        read({"scenario": changed(OTHER, cluster="llama3-roce")}, cluster=cluster)


def test_a_file_with_several_mistakes_lists_them_all(tmp_path: Path) -> None:
    path = tmp_path / "wrong.yaml"
    path.write_text(yaml.safe_dump(changed(OTHER, layout={"tp": 3, "dp": 2})), encoding="utf-8")
    with pytest.raises(
        InputError, match=r"jobs.0.scenario: .*wrong.yaml: 3 problems\n  - layout.tp: 3 does not divide"
    ):
        read(str(path))


def test_more_steps_than_can_be_are_refused() -> None:
    with pytest.raises(InputError, match=r"disturbances.jobs.0: [\d,]+ of its steps pass while this job runs; 10,000"):
        simulate(read({"scenario": OTHER, "start": "-3600 s"}))


def test_others_are_simulated_as_this_job_is_and_know_no_further_jobs() -> None:
    scenario = read({"scenario": OTHER}, cost={"symmetry": "off", "coalesce": False})
    (other,) = scenario.co_scheduled_scenarios
    assert (other.cost.symmetry, other.cost.coalesce, other.co_scheduled_jobs) == (Symmetry.OFF, False, ())
    assert other.degradations == scenario.degradations


def test_an_answer_tells_of_other_jobs() -> None:
    scenario = read({"scenario": changed(OTHER, name="neighbour", disturbances={"jitter": "1 %"})})
    found = simulate(scenario)
    (job,) = found.co_located_jobs
    said = found.to_json()
    assert said["step_time_alone_s"] == found.isolated_step_time == pytest.approx(found.step_time)
    assert [(item["name"], item["ranks"], item["start_s"]) for item in said["jobs"]] == [("neighbour", 8, 0.0)]
    assert len(said["jobs"][0]["step_times_s"]) == len(said["jobs"][0]["step_times_alone_s"]) == max(job.ended_steps, 1)
    assert describe_degradations(scenario) == "beside neighbour"
    assert f"beside {describe_co_located_job(job)}" in " ".join(printed(found, width=200).split())
    assert "+0.0 % beside other jobs" in printed(found)
    assert any("hosts that jobs share" in model_limitation for model_limitation in found.model_limitations)
    assert not any("all GPUs and links are healthy" in element for element in found.model_limitations)
    assert pickle.loads(pickle.dumps(found)).to_json()["jobs"] == said["jobs"]


def test_an_answer_without_other_jobs_says_nothing_of_any() -> None:
    found = simulate(Scenario.from_mapping(GIVEN))
    assert (found.isolated_step_time, found.co_located_jobs, found.to_json()["jobs"]) == (None, (), [])
    assert "beside" not in printed(found).split("trust")[0]


def test_what_is_wrong_with_the_machine_is_wrong_for_every_job_that_is_there() -> None:
    healthy, slow = simulate(read({"scenario": OTHER})), simulate(disturbed({"scenario": OTHER}, slow=SLOW))
    assert slow.step_time == healthy.step_time
    assert slow.co_located_jobs[0].isolated_step_times[0] > 1.2 * healthy.co_located_jobs[0].isolated_step_times[0]


def test_a_job_whose_gpus_are_cut_off_from_each_other_is_refused() -> None:
    wide = changed(OTHER, layout={"tp": 8, "dp": 2})
    with pytest.raises(InputError, match=r"disturbances.nics.0: without the NICs of GPUs 16-23, GPUs 16-23 cannot"):
        disturbed({"scenario": wide}, nics={"node": 2, "dead": True})
