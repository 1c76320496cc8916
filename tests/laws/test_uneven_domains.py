"""A job that fills NVLink domains unevenly is not much slower than evenly filled ones of similar size."""

import numpy as np
import pytest

from clustersim import Scenario, simulate
from clustersim.collectives.library_files import load_library
from clustersim.collectives.tuner import Tuner, select_variants
from clustersim.hardware.cluster import load_cluster
from clustersim.program.task import CollectiveType

GIB = 2.0**30


def llama_step_seconds(cluster: str, gpus: int, **layout: object) -> float:
    """Step time of Llama-3 8B with the same work for each data-parallel rank."""
    ranks = gpus // int(str(layout.get("pp", 1)))
    training = {"sequence": 4096, "global_batch": 8 * ranks}
    mapping = {"model": "llama3-8b", "cluster": {"name": cluster, "gpus": gpus}, "layout": layout, "training": training}
    return simulate(Scenario.from_mapping(mapping)).step_time


@pytest.mark.parametrize("data", ["ddp", "zero1", "fsdp"])
def test_weak_scaling_over_half_nodes_equals_full_nodes(data: str) -> None:
    """Two pipeline ranks of 8, 12 and 16 replicas on nodes of 8: those of 12 take 8 + 4 and 4 + 8 GPUs."""
    eight, twelve, sixteen = (llama_step_seconds("dgx-h100", 2 * replicas, pp=2, data=data) for replicas in (8, 12, 16))
    assert twelve == pytest.approx(eight, rel=0.1)
    assert twelve == pytest.approx(sixteen, rel=0.1)


def test_partially_filled_racks_cost_as_much_as_full_ones() -> None:
    """72 GPUs are one rack, 80 two of 40, 128 two of 64, 192 three of 64."""
    times = [llama_step_seconds("gb200-nvl72", gpus, data="ddp") for gpus in (72, 80, 128, 144, 192)]
    assert max(times) <= 1.05 * min(times)


def test_all_reduce_time_is_smooth_in_even_group_sizes() -> None:
    """1 GiB among 4 to 288 GPUs, over as few racks as hold them."""
    library = load_library("nccl")
    times = []
    for gpus in range(4, 290, 2):
        fabric = load_cluster("gb200-nvl72", -(-gpus // 4) * 4).fabric
        variants = Tuner(fabric, library).evaluate_variants(CollectiveType.ALL_REDUCE, np.arange(gpus)[None])
        times.append(float(select_variants(variants, GIB).seconds[0]))
    ratios = np.array(times[1:]) / np.array(times[:-1])
    assert ratios.max() <= 1.2
    assert ratios.min() >= 1 / 1.2


def test_default_placement_fills_racks_evenly() -> None:
    """80 GPUs: 40 of the 72 of each of two racks; unused GPUs of the racks change nothing."""
    mapping = {"model": "llama3-8b", "training": {"sequence": 4096, "global_batch": 80}, "layout": {"data": "fsdp"}}
    fabric = {"spine": {"oversubscription": 3}, "leaf": {"oversubscription": 2}}
    default, explicit = (
        simulate(Scenario.from_mapping({**mapping, "cluster": {"name": "gb200-nvl72", "fabric": fabric, **cluster}}))
        for cluster in ({"gpus": 80}, {"gpus": 80, "placement": {"per_domain": 40}})
    )
    assert default.step_time == explicit.step_time
