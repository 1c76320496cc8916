"""What a library has left once its user has told it what to take."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from clustersim.collectives.library import ALGORITHMS, P2pChannelConstants, load_library
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


def seconds(switches: NcclOverrides, kind: CollectiveType, payload: float) -> float:
    survey = Tuner(FABRIC, switches.apply_to(NCCL)).evaluate_variants(kind, np.arange(32)[None])
    return float(select_variants(survey, payload).seconds[0])


def test_a_library_that_is_told_nothing_is_itself() -> None:
    assert NcclOverrides().apply_to(NCCL) is NCCL
    assert NcclOverrides(algorithms={}, protocols={}, description="nothing").apply_to(NCCL) is NCCL


@given(
    st.dictionaries(st.sampled_from(TUNED_COLLECTIVES), NAMES),
    st.dictionaries(st.sampled_from(TUNED_COLLECTIVES), PROTOCOLS),
)
@examples(100)
def test_what_is_left_is_what_both_lists_allow(
    algorithms: dict[CollectiveType, frozenset[str]], protocols: dict[CollectiveType, frozenset[str]]
) -> None:
    left = NcclOverrides(algorithms=algorithms, protocols=protocols).apply_to(NCCL)
    for kind in CollectiveType:
        allowed = [
            offer.name
            for offer in NCCL.variants_for(kind)
            if offer.algorithm in algorithms.get(kind, {offer.algorithm})
            and offer.protocol in protocols.get(kind, {offer.protocol})
        ]
        assert [offer.name for offer in left.variants_for(kind)] == allowed


@pytest.mark.parametrize("kind", TUNED_COLLECTIVES)
@pytest.mark.parametrize("payload", PAYLOADS)
def test_the_choice_is_the_fastest_of_what_each_offer_would_take(kind: CollectiveType, payload: float) -> None:
    """A library that may take one offer takes what that takes; one that may take all takes the least of these."""
    alone = []
    for offer in NCCL.variants_for(kind):
        only = NcclOverrides({kind: frozenset({offer.algorithm})}, {kind: frozenset({offer.protocol})})
        try:
            alone.append(seconds(only, kind, payload))
        except InputError:  # such as PAT, which needs one GPU a node
            continue
    assert len(alone) > 1
    assert seconds(NcclOverrides(), kind, payload) == pytest.approx(min(alone), rel=1e-12)


def test_an_algorithm_that_the_library_never_takes_by_itself_may_be_forced() -> None:
    forced = NcclOverrides(forced={CollectiveType.ALL_REDUCE: "hierarchical"}).apply_to(NCCL)
    assert {offer.algorithm for offer in forced.variants_for(CollectiveType.ALL_REDUCE)} == {"hierarchical"}
    own = [offer.name for offer in NCCL.variants_for(CollectiveType.ALL_GATHER)]
    assert [offer.name for offer in forced.variants_for(CollectiveType.ALL_GATHER)] == own
    listed = NcclOverrides(algorithms={CollectiveType.ALL_REDUCE: frozenset({"hierarchical"})}).apply_to(NCCL)
    assert not listed.variants_for(CollectiveType.ALL_REDUCE), "a list only restricts what NCCL would choose from"


def test_errors_name_what_the_user_said() -> None:
    only = NcclOverrides({CollectiveType.ALL_REDUCE: frozenset()}, description="NCCL_ALGO").apply_to(NCCL)
    with pytest.raises(InputError, match="nccl with NCCL_ALGO cannot do all_reduce by anything in groups of 32"):
        Tuner(FABRIC, only).evaluate_variants(CollectiveType.ALL_REDUCE, np.arange(32)[None])


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
def test_messages_have_as_many_channels_as_their_bounds_leave(limits: ChannelLimits, channels: int) -> None:
    """NCCL's p2pnChannels: min(nChannels, most of messages), at least their least, up to a power of two."""
    assert limits.clamp_channels(P2pChannelConstants(32, 65536.0, 2.0**24)).max_channels == channels


def test_fewer_channels_make_messages_inside_a_domain_slower_and_nothing_else() -> None:
    """Among 8 B200 a message of 256 MiB is on 16 channels, or on the only two."""
    fabric = load_cluster("hgx-b200", 8).fabric
    few = NcclOverrides(channel_limits=ChannelLimits(max_channels=2)).apply_to(NCCL)
    ring = np.stack([np.arange(8), np.roll(np.arange(8), -1)], axis=1)

    def taken(library: object, kind: CollectiveType, members: np.ndarray) -> float:
        return float(select_variants(Tuner(fabric, library).evaluate_variants(kind, members), 2.0**28).seconds[0])  # type: ignore[arg-type]

    assert taken(few, CollectiveType.SEND_RECV, ring) > 6 * taken(NCCL, CollectiveType.SEND_RECV, ring)
    for kind in TUNED_COLLECTIVES:
        assert taken(few, kind, np.arange(8)[None]) == taken(NCCL, kind, np.arange(8)[None])
    assert NcclOverrides(channel_limits=ChannelLimits(max_channels=2)).constrained_collectives == P2P_COLLECTIVES
