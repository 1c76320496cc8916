"""The variants that a library may select under NCCL overrides."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from clustersim.collectives.library import ALGORITHMS, P2pChannelConstants
from clustersim.collectives.library_files import load_library
from clustersim.collectives.nccl_overrides import P2P_COLLECTIVES, TUNED_COLLECTIVES, ChannelLimits, NcclOverrides
from clustersim.collectives.tuner import Tuner, select_variants
from clustersim.common.errors import InputError
from clustersim.hardware.cluster import load_cluster
from clustersim.program.task import CollectiveType
from tests.conftest import examples

NCCL = load_library("nccl")
FABRIC = load_cluster("dgx-h100", 32).fabric
PAYLOADS = (1e3, 1e6, 1e9)
NAMES = st.frozensets(st.sampled_from(sorted(ALGORITHMS)))
PROTOCOLS = st.frozensets(st.sampled_from(["LL", "LL128", "Simple"]))


def selected_seconds(overrides: NcclOverrides, kind: CollectiveType, payload: float) -> float:
    variant_costs = Tuner(FABRIC, overrides.apply_to(NCCL)).evaluate_variants(kind, np.arange(32)[None])
    return float(select_variants(variant_costs, payload).seconds[0])


def test_empty_overrides_leave_the_library_unchanged() -> None:
    assert NcclOverrides().apply_to(NCCL) is NCCL
    assert NcclOverrides(algorithms={}, protocols={}, description="nothing").apply_to(NCCL) is NCCL


@given(
    st.dictionaries(st.sampled_from(TUNED_COLLECTIVES), NAMES),
    st.dictionaries(st.sampled_from(TUNED_COLLECTIVES), PROTOCOLS),
)
@examples(100)
def test_remaining_variants_are_allowed_by_both_lists(
    algorithms: dict[CollectiveType, frozenset[str]], protocols: dict[CollectiveType, frozenset[str]]
) -> None:
    restricted = NcclOverrides(algorithms=algorithms, protocols=protocols).apply_to(NCCL)
    for kind in CollectiveType:
        allowed = [
            variant.name
            for variant in NCCL.variants_for(kind)
            if variant.algorithm in algorithms.get(kind, {variant.algorithm})
            and variant.protocol in protocols.get(kind, {variant.protocol})
        ]
        assert [variant.name for variant in restricted.variants_for(kind)] == allowed


@pytest.mark.parametrize("kind", TUNED_COLLECTIVES)
@pytest.mark.parametrize("payload", PAYLOADS)
def test_the_selection_is_the_fastest_variant(kind: CollectiveType, payload: float) -> None:
    """With all variants allowed, the time is the minimum over the variants allowed one at a time."""
    single_variant_seconds = []
    for variant in NCCL.variants_for(kind):
        single_variant = NcclOverrides({kind: frozenset({variant.algorithm})}, {kind: frozenset({variant.protocol})})
        try:
            single_variant_seconds.append(selected_seconds(single_variant, kind, payload))
        except InputError:  # such as PAT, which needs one GPU a node
            continue
    assert len(single_variant_seconds) > 1
    assert selected_seconds(NcclOverrides(), kind, payload) == pytest.approx(min(single_variant_seconds), rel=1e-12)


def test_an_algorithm_that_is_never_selected_by_default_may_be_forced() -> None:
    forced = NcclOverrides(forced={CollectiveType.ALL_REDUCE: "hierarchical"}).apply_to(NCCL)
    assert {variant.algorithm for variant in forced.variants_for(CollectiveType.ALL_REDUCE)} == {"hierarchical"}
    default_names = [variant.name for variant in NCCL.variants_for(CollectiveType.ALL_GATHER)]
    assert [variant.name for variant in forced.variants_for(CollectiveType.ALL_GATHER)] == default_names
    restricted = NcclOverrides(algorithms={CollectiveType.ALL_REDUCE: frozenset({"hierarchical"})}).apply_to(NCCL)
    assert not restricted.variants_for(CollectiveType.ALL_REDUCE), "a list only restricts what NCCL would choose from"


def test_errors_name_the_users_setting() -> None:
    restricted = NcclOverrides({CollectiveType.ALL_REDUCE: frozenset()}, description="NCCL_ALGO").apply_to(NCCL)
    with pytest.raises(InputError, match=r"NCCL_ALGO.*all_reduce.*groups of 32"):
        Tuner(FABRIC, restricted).evaluate_variants(CollectiveType.ALL_REDUCE, np.arange(32)[None])


@pytest.mark.parametrize(
    ("limits", "channels"),
    [
        (ChannelLimits(), 32),
        (ChannelLimits(max_channels=8), 8),
        (ChannelLimits(max_channels=6), 8),  # rounded up to a power of two
        (ChannelLimits(max_channels=1), 1),
        (ChannelLimits(min_channels=40), 64),
        (ChannelLimits(max_p2p_channels=4), 4),
        (ChannelLimits(max_p2p_channels=48), 32),
        (ChannelLimits(max_channels=4, min_p2p_channels=16), 16),
        (ChannelLimits(max_channels=4, max_p2p_channels=16), 4),
    ],
)
def test_p2p_channels_follow_their_limits(limits: ChannelLimits, channels: int) -> None:
    """NCCL's p2pnChannels: min(nChannels, p2p maximum), at least the p2p minimum, rounded up to a power of two."""
    assert limits.clamp_channels(P2pChannelConstants(32, 65536.0, 2.0**24)).max_channels == channels


def test_fewer_channels_slow_only_messages_within_a_domain() -> None:
    """Among 8 B200 a message of 256 MiB is on 16 channels, or on the only two."""
    fabric = load_cluster("hgx-b200", 8).fabric
    limited = NcclOverrides(channel_limits=ChannelLimits(max_channels=2)).apply_to(NCCL)
    ring = np.stack([np.arange(8), np.roll(np.arange(8), -1)], axis=1)

    def seconds(library: object, kind: CollectiveType, members: np.ndarray) -> float:
        return float(select_variants(Tuner(fabric, library).evaluate_variants(kind, members), 2.0**28).seconds[0])  # type: ignore[arg-type]

    assert seconds(limited, CollectiveType.SEND_RECV, ring) > 6 * seconds(NCCL, CollectiveType.SEND_RECV, ring)
    for kind in TUNED_COLLECTIVES:
        assert seconds(limited, kind, np.arange(8)[None]) == seconds(NCCL, kind, np.arange(8)[None])
    assert NcclOverrides(channel_limits=ChannelLimits(max_channels=2)).constrained_collectives == P2P_COLLECTIVES
