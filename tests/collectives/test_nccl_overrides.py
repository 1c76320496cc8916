"""What a library has left once its user has told it what to take."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from clustersim.collectives.library import ALGORITHMS, Channels, load_library
from clustersim.collectives.nccl_overrides import CHOSEN, MESSAGES, Limits, Switches
from clustersim.collectives.tuner import Surveyor, choose
from clustersim.common.errors import InputError
from clustersim.hardware.cluster import load_cluster
from clustersim.program.task import CollectiveType
from tests.conftest import examples

NCCL = load_library("nccl")
FABRIC = load_cluster("dgx-h100", 32).fabric
PAYLOADS = (1e3, 1e6, 1e9)
NAMES = st.frozensets(st.sampled_from(sorted(ALGORITHMS)))
PROTOCOLS = st.frozensets(st.sampled_from(["LL", "LL128", "Simple"]))


def seconds(switches: Switches, kind: CollectiveType, payload: float) -> float:
    survey = Surveyor(FABRIC, switches.narrowed(NCCL)).survey(kind, np.arange(32)[None])
    return float(choose(survey, payload).seconds[0])


def test_a_library_that_is_told_nothing_is_itself() -> None:
    assert Switches().narrowed(NCCL) is NCCL
    assert Switches(algorithms={}, protocols={}, words="nothing").narrowed(NCCL) is NCCL


@given(st.dictionaries(st.sampled_from(CHOSEN), NAMES), st.dictionaries(st.sampled_from(CHOSEN), PROTOCOLS))
@examples(100)
def test_what_is_left_is_what_both_lists_allow(
    algorithms: dict[CollectiveType, frozenset[str]], protocols: dict[CollectiveType, frozenset[str]]
) -> None:
    left = Switches(algorithms=algorithms, protocols=protocols).narrowed(NCCL)
    for kind in CollectiveType:
        allowed = [
            offer.name
            for offer in NCCL.offers_for(kind)
            if offer.algorithm in algorithms.get(kind, {offer.algorithm})
            and offer.protocol in protocols.get(kind, {offer.protocol})
        ]
        assert [offer.name for offer in left.offers_for(kind)] == allowed


@pytest.mark.parametrize("kind", CHOSEN)
@pytest.mark.parametrize("payload", PAYLOADS)
def test_the_choice_is_the_fastest_of_what_each_offer_would_take(kind: CollectiveType, payload: float) -> None:
    """A library that may take one offer takes what that takes; one that may take all takes the least of these."""
    alone = []
    for offer in NCCL.offers_for(kind):
        only = Switches({kind: frozenset({offer.algorithm})}, {kind: frozenset({offer.protocol})})
        try:
            alone.append(seconds(only, kind, payload))
        except InputError:  # such as PAT, which needs one GPU a node
            continue
    assert len(alone) > 1
    assert seconds(Switches(), kind, payload) == pytest.approx(min(alone), rel=1e-12)


def test_an_algorithm_that_the_library_never_takes_by_itself_may_be_forced() -> None:
    forced = Switches(forced={CollectiveType.ALL_REDUCE: "hierarchical"}).narrowed(NCCL)
    assert {offer.algorithm for offer in forced.offers_for(CollectiveType.ALL_REDUCE)} == {"hierarchical"}
    own = [offer.name for offer in NCCL.offers_for(CollectiveType.ALL_GATHER)]
    assert [offer.name for offer in forced.offers_for(CollectiveType.ALL_GATHER)] == own
    listed = Switches(algorithms={CollectiveType.ALL_REDUCE: frozenset({"hierarchical"})}).narrowed(NCCL)
    assert not listed.offers_for(CollectiveType.ALL_REDUCE), "a list only restricts what NCCL would choose from"


def test_errors_name_what_the_user_said() -> None:
    only = Switches({CollectiveType.ALL_REDUCE: frozenset()}, words="NCCL_ALGO").narrowed(NCCL)
    with pytest.raises(InputError, match="nccl with NCCL_ALGO cannot do all_reduce by anything in groups of 32"):
        Surveyor(FABRIC, only).survey(CollectiveType.ALL_REDUCE, np.arange(32)[None])


@pytest.mark.parametrize(
    ("limits", "channels"),
    [
        (Limits(), 32),
        (Limits(most=8), 8),
        (Limits(most=6), 8),  # rounded up to a power of two
        (Limits(most=1), 1),
        (Limits(least=40), 64),
        (Limits(messages_most=4), 4),
        (Limits(messages_most=48), 32),
        (Limits(most=4, messages_least=16), 16),
        (Limits(most=4, messages_most=16), 4),
    ],
)
def test_messages_have_as_many_channels_as_their_bounds_leave(limits: Limits, channels: int) -> None:
    """NCCL's p2pnChannels: min(nChannels, most of messages), at least their least, up to a power of two."""
    assert limits.of(Channels(32, 65536.0, 2.0**24)).all == channels


def test_fewer_channels_make_messages_inside_a_domain_slower_and_nothing_else() -> None:
    """Among 8 B200 a message of 256 MiB is on 16 channels, or on the only two."""
    fabric = load_cluster("hgx-b200", 8).fabric
    few = Switches(limits=Limits(most=2)).narrowed(NCCL)
    ring = np.stack([np.arange(8), np.roll(np.arange(8), -1)], axis=1)

    def taken(library: object, kind: CollectiveType, members: np.ndarray) -> float:
        return float(choose(Surveyor(fabric, library).survey(kind, members), 2.0**28).seconds[0])  # type: ignore[arg-type]

    assert taken(few, CollectiveType.SEND_RECV, ring) > 6 * taken(NCCL, CollectiveType.SEND_RECV, ring)
    for kind in CHOSEN:
        assert taken(few, kind, np.arange(8)[None]) == taken(NCCL, kind, np.arange(8)[None])
    assert Switches(limits=Limits(most=2)).bound == MESSAGES
