"""Can the sites of a scenario train replicas of their own?"""

from collections.abc import Iterator

import numpy as np

from clustersim.hardware.topology import HasSites
from clustersim.scenario.resolved import ResolvedScenario


def check_diloco(scenario: ResolvedScenario) -> Iterator[str]:
    """Check that there are several sites, and that whole replicas and whole batches fit each of them."""
    if scenario.diloco is None:
        return
    counts = site_gpu_counts(scenario)
    layout, training = scenario.layout, scenario.training
    if len(counts) < 2:
        yield f"diloco: {scenario.cluster.name} is a single site; name a cluster file that lists several sites"
        return
    model_ranks = layout.world_size // layout.dp
    for site, count in enumerate(counts):
        if count % model_ranks:
            yield (
                f"diloco: a site of {count:,} GPUs does not hold whole copies of the model, of {model_ranks:,} GPUs "
                "each (tp x cp x pp)"
            )
        elif training.global_batch * count % scenario.cluster.gpu_count or (
            training.global_batch * count // scenario.cluster.gpu_count
        ) % (count // model_ranks * training.microbatch):
            yield (
                f"training.global_batch: {training.global_batch:,} sequences over {scenario.cluster.gpu_count:,} GPUs "
                f"are no whole microbatches for the {count:,} GPUs of site {site + 1}"
            )
    if scenario.diloco.fragments > scenario.model.layer_count:
        yield (
            f"diloco.fragments: {scenario.diloco.fragments} are more than the {scenario.model.layer_count} layers of "
            f"{scenario.model.name}"
        )


def site_gpu_counts(scenario: ResolvedScenario) -> list[int]:
    """GPUs of the job in each of its sites, in rank order; one number on a single site."""
    fabric, count = scenario.cluster.fabric, scenario.cluster.gpu_count
    site_ids = fabric.site_ids(np.arange(count)) if isinstance(fabric, HasSites) else None
    if site_ids is None:
        return [count]
    return [int(members) for members in np.bincount(site_ids) if members]
