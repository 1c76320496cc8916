"""Co-scheduled jobs (`degradations.jobs`): placement, round trip, results and error messages."""

import pickle
from pathlib import Path
from typing import Any

import pytest
import yaml

from clustersim import Scenario, simulate
from clustersim.common.errors import InputError
from clustersim.report.labels import describe_degradations
from clustersim.report.terminal.run import describe_co_scheduled_job
from clustersim.scenario.settings import Symmetry
from tests.small_pipeline import render_terminal

BASE_MAPPING: dict[str, Any] = {
    "model": "llama-tiny",
    "cluster": {"name": "dgx-h100", "gpus": 16},
    "layout": {"tp": 8, "dp": 2},
    "training": {"sequence": 512, "global_batch": 2},
}
OTHER_JOB: dict[str, Any] = {
    "model": {"preset": "llama-tiny", "layers": 2},
    "cluster": "dgx-h100",
    "layout": {"tp": 2, "dp": 4},
    "training": {"sequence": 512, "global_batch": 4},
}

SLOW_GPU = {"gpu": 17, "speed": 0.5}
DEADLOCKED_ORDERS = {"name": "x", "placement": [0, 1], "rows": ["0F0,0B0,0F1,0B1", "1F1,1B1,1F0,1B0"]}


def with_sections(mapping: dict[str, Any], **sections: Any) -> dict[str, Any]:
    return {**mapping, **sections}


def load_scenario(*jobs: Any, **sections: Any) -> Scenario:
    return Scenario.from_mapping({**BASE_MAPPING, "degradations": {"jobs": [*jobs]}, **sections}, default_name="mine")


def load_degraded_scenario(*jobs: Any, **degradations: Any) -> Scenario:
    return load_scenario(degradations={"jobs": [*jobs], **degradations})


def gpus_of_jobs(scenario: Scenario) -> list[list[int]]:
    """GPU indices of this job and of the co-scheduled ones."""
    return [
        indices.tolist()
        for indices in (
            scenario.cluster.machine_gpu_ids,
            *(job.resolved.cluster.machine_gpu_ids for job in scenario.co_scheduled_jobs),
        )
    ]


@pytest.fixture
def other_file(tmp_path: Path) -> Path:
    path = tmp_path / "neighbour.yaml"
    path.write_text(yaml.safe_dump(OTHER_JOB), encoding="utf-8")
    return path


def test_job_file_is_placed_on_the_first_free_gpus(other_file: Path) -> None:
    scenario = load_scenario(str(other_file))
    assert gpus_of_jobs(scenario) == [[*range(16)], [*range(16, 24)]]
    assert scenario.cluster.machine.gpu_count == 24
    (job,) = scenario.co_scheduled_jobs
    assert (job.resolved.name, job.start_offset, job.path) == ("neighbour", 0.0, other_file)
    assert other_file in scenario.files


def test_round_trip_does_not_need_the_job_file(other_file: Path) -> None:
    scenario = load_scenario(
        {"scenario": str(other_file), "start": "-5 ms"}, {"scenario": OTHER_JOB, "placement": {"order": "40-47"}}
    )
    written = scenario.to_mapping()
    other_file.unlink()
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
def test_jobs_use_their_placement_or_free_gpus(
    placement: dict[str, Any] | None, jobs: list[dict[str, Any]], expected: list[list[int] | None]
) -> None:
    cluster = {**BASE_MAPPING["cluster"], **({} if placement is None else {"placement": placement})}
    if None in expected:  # jobs are placed in file order, also before later ones with explicit placement
        with pytest.raises(InputError, match=r"jobs.1.placement: GPUs 16-23 are degradations.jobs.0's already"):
            load_scenario(*({"scenario": OTHER_JOB, **job} for job in jobs), cluster=cluster)
        return
    assert gpus_of_jobs(load_scenario(*({"scenario": OTHER_JOB, **job} for job in jobs), cluster=cluster)) == expected


def test_job_file_placement_and_override(tmp_path: Path) -> None:
    (tmp_path / "gpus.txt").write_text("24-31\n", encoding="utf-8")
    path = tmp_path / "placed.yaml"
    placed_job = with_sections(OTHER_JOB, cluster={"name": "dgx-h100", "placement": {"order": "gpus.txt"}})
    path.write_text(yaml.safe_dump(placed_job), encoding="utf-8")
    assert gpus_of_jobs(load_scenario(str(path)))[1] == [*range(24, 32)]
    assert gpus_of_jobs(load_scenario({"scenario": str(path), "placement": {"nodes": 2}}))[1] == [*range(16, 24)]
    assert tmp_path / "gpus.txt" in load_scenario(str(path)).files


@pytest.mark.parametrize(
    ("job", "sentence"),
    [
        ("nowhere.yaml", r"jobs\.0\.scenario: nowhere\.yaml:.*No such file or directory"),
        (7, r"jobs\.0: 7.*scenario: other\.yaml"),
        ({}, "jobs.0.scenario: is missing; write scenario: other.yaml"),
        ({"scenario": OTHER_JOB, "begins": "1 s"}, "jobs.0.begins: unknown key"),
        ({"scenario": OTHER_JOB, "start": 3}, "jobs.0.start: 3 has no unit"),
        ({"scenario": OTHER_JOB, "placement": {"nodes": 1}}, "GPUs 8-15 are this job's already; free are GPUs 16-23"),
        ({"scenario": OTHER_JOB, "placement": {"order": "15-22"}}, "jobs.0.placement: GPU 15 is this job's already"),
        ({"scenario": OTHER_JOB, "placement": {"order": "16-17"}}, "names 2 GPUs, but the job has 8 ranks"),
        ({"scenario": with_sections(OTHER_JOB, cluster="dgx-a100")}, "job: cluster:.*dgx-a100.*dgx-h100"),
        (
            {"scenario": with_sections(OTHER_JOB, cluster={"name": "dgx-h100", "accelerator": "h200-sxm-141gb"})},
            r"job: cluster\.accelerator: differs.*leave it out",
        ),
        (
            {"scenario": with_sections(OTHER_JOB, degradations={"jobs": [{"scenario": OTHER_JOB}]})},
            "job: degradations.jobs: is of the whole machine",
        ),
        (
            {"scenario": with_sections(OTHER_JOB, degradations={"slow": {"gpu": 3, "speed": 0.5}})},
            "job: degradations.slow: is of the whole machine",
        ),
        (
            {"scenario": with_sections(OTHER_JOB, cost={"network": "uncontended"})},
            "job: cost.network: uncontended, but jobs on one machine",
        ),
        ({"scenario": with_sections(OTHER_JOB, model="llama-tinny")}, "job: model: .*did you mean llama-tiny"),
        (
            {"scenario": with_sections(OTHER_JOB, training={"sequence": 512, "global_batch": 5})},
            "job: training.global_batch: 5 .*",
        ),
        (
            {"scenario": with_sections(OTHER_JOB, layout={"pp": 2, "dp": 2}, schedule={"orders": DEADLOCKED_ORDERS})},
            "job: schedule: x deadlocks: x, row 1, cell 2",
        ),
        (
            {"scenario": with_sections(OTHER_JOB, cluster={"name": "dgx-h100", "gpus": 2**20})},
            "jobs.0.scenario: .*not fit with the other jobs",
        ),
    ],
)
def test_invalid_jobs_have_one_line_errors(job: Any, sentence: str) -> None:
    with pytest.raises(InputError, match=sentence) as refused:
        load_scenario(job)
    assert str(refused.value).startswith("mine: degradations.jobs.0")
    assert "\n" not in str(refused.value)


def test_jobs_need_a_shared_network() -> None:
    with pytest.raises(InputError, match=r"degradations\.jobs:.*cost\.network uncontended"):
        load_scenario({"scenario": OTHER_JOB}, cost={"network": "uncontended"})


def test_full_cluster_rejects_another_job() -> None:
    cluster = {"name": "llama3-roce", "gpus": 16, "fabric": {"leaf": {"nodes": 2}, "spine": None, "core": None}}
    with pytest.raises(InputError, match=r"jobs\.0\.scenario: 8 GPUs.*none of 16"):
        load_scenario({"scenario": with_sections(OTHER_JOB, cluster="llama3-roce")}, cluster=cluster)


def test_all_errors_of_a_job_file_are_listed(tmp_path: Path) -> None:
    path = tmp_path / "wrong.yaml"
    path.write_text(yaml.safe_dump(with_sections(OTHER_JOB, layout={"tp": 3, "dp": 2})), encoding="utf-8")
    with pytest.raises(InputError, match="3 problems") as caught:
        load_scenario(str(path))
    assert str(caught.value).count("jobs.0.scenario: " + str(path) + ": layout.tp: 3 does not divide") == 3


def test_excessive_steps_of_another_job_are_rejected() -> None:
    with pytest.raises(InputError, match=r"degradations.jobs.0: [\d,]+ of its steps pass while this job runs; 10,000"):
        simulate(load_scenario({"scenario": OTHER_JOB, "start": "-3600 s"}))


def test_other_jobs_inherit_cost_settings_and_have_no_jobs() -> None:
    scenario = load_scenario({"scenario": OTHER_JOB}, cost={"symmetry": "off", "coalesce": False})
    (other_job,) = scenario.co_scheduled_scenarios
    assert (other_job.cost.symmetry, other_job.cost.coalesce, other_job.co_scheduled_jobs) == (Symmetry.OFF, False, ())
    assert other_job.degradations == scenario.degradations


def test_result_describes_other_jobs() -> None:
    scenario = load_scenario({"scenario": with_sections(OTHER_JOB, name="neighbour", degradations={"jitter": "1 %"})})
    result = simulate(scenario)
    (job,) = result.co_scheduled_jobs
    result_json = result.to_json()
    assert result_json["step_time_isolated_s"] == result.isolated_step_time == pytest.approx(result.step_time)
    assert [(job_json["name"], job_json["ranks"], job_json["start_s"]) for job_json in result_json["jobs"]] == [
        ("neighbour", 8, 0.0)
    ]
    assert (
        len(result_json["jobs"][0]["step_times_s"])
        == len(result_json["jobs"][0]["step_times_isolated_s"])
        == max(job.ended_steps, 1)
    )
    assert describe_degradations(scenario) == "co-scheduled with neighbour"
    assert f"co-scheduled: {describe_co_scheduled_job(job)}" in " ".join(render_terminal(result, width=200).split())
    assert "+0.0 % with co-scheduled jobs" in render_terminal(result)
    assert any("hosts that jobs share" in limitation for limitation in result.model_limitations)
    assert not any("all GPUs and links are healthy" in limitation for limitation in result.model_limitations)
    assert pickle.loads(pickle.dumps(result)).to_json()["jobs"] == result_json["jobs"]


def test_result_without_other_jobs() -> None:
    result = simulate(Scenario.from_mapping(BASE_MAPPING))
    assert (result.isolated_step_time, result.co_scheduled_jobs, result.to_json()["jobs"]) == (None, (), [])
    assert "co-scheduled" not in render_terminal(result)


def test_degradations_affect_all_jobs() -> None:
    healthy, slow = (
        simulate(load_scenario({"scenario": OTHER_JOB})),
        simulate(load_degraded_scenario({"scenario": OTHER_JOB}, slow=SLOW_GPU)),
    )
    assert slow.step_time == healthy.step_time
    assert slow.co_scheduled_jobs[0].isolated_step_times[0] > 1.1 * healthy.co_scheduled_jobs[0].isolated_step_times[0]


def test_disconnected_job_is_rejected() -> None:
    two_node_job = with_sections(OTHER_JOB, layout={"tp": 8, "dp": 2})
    with pytest.raises(InputError, match=r"degradations\.nics\.0:.*NICs of GPUs 16-23, GPUs 16-23 cannot"):
        load_degraded_scenario({"scenario": two_node_job}, nics={"node": 2, "dead": True})
