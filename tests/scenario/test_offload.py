"""`training.offload`: values, round trip, changes and error messages."""

import json
from typing import Any

import pytest

from clustersim import Scenario, simulate
from clustersim.common.errors import InputError
from clustersim.model.offload import NO_OFFLOAD, ActivationOffload, Offload, OptimizerOffload, ShardOffload
from clustersim.scenario.changes.diff import changed_keys
from tests.sentences import parts

HOST_MEMORY = (
    "{capacity: 1 TB, bandwidth: 90 GB/s, device_to_host: 50 GB/s, host_to_device: 40 GB/s, latency: 1 us, "
    "optimizer_fraction: 0.5}"
)


def offload_mapping(offload: object, cluster: object = "dgx-h100", **layout: Any) -> dict[str, Any]:
    """Llama 3 8B on one node."""
    return {
        "name": "small",
        "model": {"preset": "llama3-8b", "layers": 4},
        "cluster": {"gpus": 8, **({"name": cluster} if isinstance(cluster, str) else dict(cluster))},  # type: ignore[call-overload]
        "layout": {"dp": 8, "data": "fsdp"} | layout,
        "training": {"sequence": 1024, "global_batch": 16, "offload": offload},
    }


def load_offload(offload: object, **layout: Any) -> Offload:
    return Scenario.from_mapping(offload_mapping(offload, **layout)).training.offload


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("none", NO_OFFLOAD),
        ({}, NO_OFFLOAD),
        ({"activations": "none", "optimizer": False}, NO_OFFLOAD),
        ({"activations": "all"}, Offload(ActivationOffload())),
        ({"activations": True}, Offload(ActivationOffload())),
        ({"activations": 3}, Offload(ActivationOffload(layers=3))),
        ({"activations": "50 %"}, Offload(ActivationOffload(share=0.5))),
        ({"activations": 0.5}, Offload(ActivationOffload(share=0.5))),
        ({"activations": {"prefetch": 2}}, Offload(ActivationOffload(prefetch=2))),
        ({"activations": {"layers": 2, "prefetch": 2}}, Offload(ActivationOffload(layers=2, prefetch=2))),
        ({"optimizer": True}, Offload(states=OptimizerOffload())),
        ({"optimizer": "25 %"}, Offload(states=OptimizerOffload(0.25))),
        ({"optimizer": True, "gradients": True}, Offload(states=OptimizerOffload(gradients=True))),
        ({"parameters": True}, Offload(states=ShardOffload())),
        ({"parameters": True, "optimizer": True}, Offload(states=ShardOffload())),
        ({"activations": 1, "parameters": True}, Offload(ActivationOffload(layers=1), ShardOffload())),
    ],
)
def test_offload_shorthands(written: object, meant: Offload) -> None:
    assert load_offload(written) == meant


@pytest.mark.parametrize(("share", "layers"), [(1.0, 7), (0.5, 4), (0.01, 1)])
def test_layer_fraction_rounds_up(share: float, layers: int) -> None:
    assert ActivationOffload(share=share).offloaded_layers(7) == layers


def test_offload_round_trip_and_changes() -> None:
    scenario = Scenario.from_mapping(
        offload_mapping({"activations": {"layers": 2, "prefetch": 2}, "optimizer": "50 %"})
    )
    written = json.loads(json.dumps(simulate(scenario).to_json()))["scenario"]
    assert Scenario.from_mapping(written) == scenario
    assert scenario.with_overrides("training.offload.activations.layers=all").training.offload == Offload(
        ActivationOffload(prefetch=2), OptimizerOffload(0.5)
    )
    assert scenario.with_overrides("training.offload=none").training.offload == NO_OFFLOAD
    assert scenario.with_overrides("training.microbatch=2").training.offload == scenario.training.offload
    (change,) = changed_keys(scenario, scenario.with_overrides("training.offload.optimizer=true"))
    assert (change.key, change.first, change.second) == ("training.offload.optimizer", "50 %", True)


@pytest.mark.parametrize(
    ("offload", "layout", "sentence"),
    [
        ({"activations": "some"}, {}, "training.offload.activations: 'some' ... all ... number"),
        ({"activations": 0}, {}, "activations: 0 is not a number of layers from 1 to 10,000"),
        ({"activations": "150 %"}, {}, "'150 %' is not between 0 % and 100 %"),
        ({"activations": 5}, {}, "training.offload.activations: 5 layers ... 4; write 4 at most, or all"),
        ({"activations": {"layers": 1, "ahead": 1}}, {}, "training.offload.activations.ahead: unknown key"),
        ({"optimizer": 2}, {}, "training.offload.optimizer: 2 ... write 2 %"),
        ({"optimizer": "-5 %"}, {}, "'-5 %' is not between 0 % and 100 %"),
        ({"optimiser": True}, {}, "training.offload.optimiser: ... optimizer?"),
        ({"parameters": True, "optimizer": "50 %"}, {}, "take the whole optimizer along; leave optimizer out"),
        ({"gradients": True}, {}, "gradients ... host ... optimizer: true"),
        (
            {"optimizer": True, "gradients": True},
            {"data": "zero1"},
            "training.offload.gradients: ... last microbatch only",
        ),
        ({"parameters": True}, {"data": "zero1"}, "layout.data is not fsdp or zero3; optimizer: true fits"),
        ({"parameters": True}, {"tp": 8, "dp": 1}, "dp x cp = 1 leaves nothing to shard; optimizer: true fits"),
        (
            {"parameters": True},
            {"data": {"hsdp": {"shard": 1}}},
            "shard 1 leaves nothing to shard; optimizer: true fits",
        ),
        ({"optimizer": True}, {"data": "data_parallel"}, "torch.nn.DataParallel has no offload; use ddp"),
    ],
)
def test_invalid_offload_is_rejected(offload: object, layout: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InputError) as refused:
        Scenario.from_mapping(offload_mapping(offload, **layout))
    assert parts(sentence).search(str(refused.value))


def test_offload_without_host_memory_names_the_missing_key() -> None:
    with pytest.raises(InputError, match=r"training.offload: offload without host memory: pcie-node .*host_memory: \{"):
        Scenario.from_mapping(offload_mapping({"optimizer": True}, "pcie-node"))
    scenario = Scenario.from_mapping(
        offload_mapping({"optimizer": True}, "pcie-node"), [f"cluster.node.host_memory={HOST_MEMORY}"]
    )
    assert scenario.cluster.host_memory is not None
    assert scenario.cluster.host_memory.capacity == 1e12


def test_incomplete_host_memory_is_rejected() -> None:
    with pytest.raises(InputError, match=r"node\.host_memory\.optimizer_fraction: 2\.0.*share of a peak"):
        Scenario.from_mapping(offload_mapping({}, "dgx-h100"), ["cluster.node.host_memory.optimizer_fraction=2"])
    with pytest.raises(InputError, match=r"node.host_memory.bandwidth: is missing"):
        Scenario.from_mapping(offload_mapping({}, "pcie-node"), ["cluster.node.host_memory={capacity: 1 TB}"])
