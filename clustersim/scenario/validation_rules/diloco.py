"""Can the replicas of a scenario train by themselves?"""

from collections.abc import Iterator

import numpy as np

from clustersim.common.errors import suggest_nearest
from clustersim.scenario.diloco import MAX_REPLICAS
from clustersim.scenario.resolved import ResolvedScenario


def check_diloco(scenario: ResolvedScenario) -> Iterator[str]:
    """Check that there are several replicas, and that whole copies of the model and whole batches fit each of them."""
    if scenario.diloco is None:
        return
    problems = list(_replica_problems(scenario))
    yield from problems or _batch_problems(scenario)
    yield from _exchange_problems(scenario)


def _replica_problems(scenario: ResolvedScenario) -> Iterator[str]:
    """Problems of how the job's GPUs are divided between replicas."""
    counts, settings = site_gpu_counts(scenario), scenario.diloco
    replicas = None if settings is None else settings.replicas
    if replicas is None:
        if len(counts) < 2:
            yield (
                f"diloco: {scenario.cluster.name} is a single site; name a cluster file that lists several sites, or "
                "write into how many replicas it is divided (diloco.replicas: 4)"
            )
        return
    total, model_ranks = sum(counts), scenario.layout.world_size // scenario.layout.dp
    if total % replicas:
        legal = [
            str(number)
            for number in range(2, min(total, MAX_REPLICAS) + 1)
            if total % number == 0 and total // number % model_ranks == 0
        ]
        yield (
            f"diloco.replicas: {total:,} GPUs are not {replicas} equal parts; "
            + (
                f"such as {', '.join(legal[:3])} are"
                if legal
                else "nor whole copies of the model in any number of them"
            )
        )


def _batch_problems(scenario: ResolvedScenario) -> Iterator[str]:
    """Replicas that do not hold whole copies of the model, or get no whole microbatches."""
    layout, training = scenario.layout, scenario.training
    model_ranks = layout.world_size // layout.dp
    settings = scenario.diloco
    counts = {f"site {index}": count for index, count in enumerate(site_gpu_counts(scenario), start=1)}
    if settings is not None and settings.replicas is not None:
        counts = {"each replica": sum(counts.values()) // settings.replicas}
    for label, count in counts.items():
        if count % model_ranks:
            yield (
                f"diloco: {label} of {count:,} GPUs does not hold whole copies of the model, of {model_ranks:,} GPUs "
                "each (tp x cp x pp)"
            )
        elif training.global_batch * count % scenario.cluster.gpu_count or (
            training.global_batch * count // scenario.cluster.gpu_count
        ) % (count // model_ranks * training.microbatch):
            yield (
                f"training.global_batch: {training.global_batch:,} sequences over {scenario.cluster.gpu_count:,} GPUs "
                f"are no whole microbatches for the {count:,} GPUs of {label}"
            )


def _exchange_problems(scenario: ResolvedScenario) -> Iterator[str]:
    """Fragments, a quorum or absences that the job does not have the layers, replicas or sites for."""
    settings = scenario.diloco
    if settings is None:
        return
    if settings.fragments > scenario.model.layer_count:
        yield (
            f"diloco.fragments: {settings.fragments} are more than the {scenario.model.layer_count} layers of "
            f"{scenario.model.name}"
        )
    replicas = settings.replicas or len(site_gpu_counts(scenario))
    if settings.quorum is not None and settings.quorum > replicas:
        yield f"diloco.quorum: an exchange cannot wait for {settings.quorum} of {replicas} replicas"
    names = site_names(scenario)
    for absence in settings.away:
        if absence.site not in names:
            yield f"diloco.away: there is no site {absence.site}; {suggest_nearest(absence.site, names)}"


def site_gpu_counts(scenario: ResolvedScenario) -> list[int]:
    """GPUs of the job in each of its sites, in rank order; one number on a single site."""
    site_ids = scenario.cluster.site_ids
    if site_ids is None:
        return [scenario.cluster.gpu_count]
    return [int(members) for members in np.bincount(site_ids) if members]


def site_names(scenario: ResolvedScenario) -> list[str]:
    """Names of the job's sites, in rank order; the cluster's on a single site."""
    machine, site_ids = scenario.cluster.sites, scenario.cluster.site_ids
    if machine is None or site_ids is None:
        return [scenario.cluster.name]
    return [machine.sites[site].name for site in dict.fromkeys(site_ids.tolist())]
