"""Tokens over AWS's fabric: what all-to-alls of routed tokens and dispatch kernels take beyond the ports' rate."""

import numpy as np
import pytest

from clustersim.collectives.library_files import load_dispatcher, load_library
from clustersim.collectives.phase_cost import effective_bandwidth
from clustersim.cost.collective_cost import CollectiveCost
from clustersim.hardware.cluster import load_cluster
from clustersim.hardware.link_technology import LinkTechnology
from clustersim.hardware.topology import LINK_KINDS, LinkKind
from clustersim.program.program import ProcessGroups
from clustersim.program.task import CollectiveType, CommOp, TokenDispatcher, TokenRouting

GB = 1e9
RANKS = 32


def seconds(
    cluster: str,
    collective: CollectiveType,
    payload: float,
    dispatcher: TokenDispatcher | None = None,
    token_bytes: float = 14336.0,
) -> float:
    """Of one operation among 32 ranks; without a dispatcher messages are no routed tokens."""
    routing = None if dispatcher is None else TokenRouting(dispatcher, 256, 8, token_bytes=token_bytes)
    groups = {"ep": ProcessGroups("ep", np.arange(RANKS)[None])}
    cost = CollectiveCost(load_cluster(cluster, RANKS).fabric, load_library("nccl"), groups)
    return float(cost.time_comm_op(CommOp("tokens", collective, "ep", payload, routing=routing)).seconds[0])


def test_routed_tokens_move_at_the_rate_of_incast() -> None:
    """With large messages the times differ as the shares of a port, whatever the latency."""
    payload, constants = 640 * GB, load_library("nccl").network_constants(LinkTechnology.EFA2)
    plain = seconds("aws-p5", CollectiveType.ALL_TO_ALL, payload)
    routed = seconds("aws-p5", CollectiveType.ALL_TO_ALL, payload, TokenDispatcher.ALL_TO_ALL)
    assert constants.routed_efficiency is not None
    assert routed / plain == pytest.approx(constants.efficiency / constants.routed_efficiency, rel=1e-3)


def test_over_infiniband_routed_tokens_are_like_any_message() -> None:
    """No table of incast over it is known."""
    plain, routed = (
        seconds("hgx-b300", CollectiveType.ALL_TO_ALL, GB, dispatcher)
        for dispatcher in (None, TokenDispatcher.ALL_TO_ALL)
    )
    assert plain == routed


@pytest.mark.parametrize("dispatcher", [TokenDispatcher.DEEPEP, TokenDispatcher.DEEPEP_UCCL])
@pytest.mark.parametrize("collective", [CollectiveType.DISPATCH, CollectiveType.COMBINE])
def test_a_call_over_efa_has_a_cost_of_its_own(dispatcher: TokenDispatcher, collective: CollectiveType) -> None:
    """Of few bytes: at least the proxies' latency more than over InfiniBand."""
    latency = load_dispatcher(dispatcher).network_constants(LinkTechnology.EFA).message_latency
    over_efa, over_infiniband = (
        seconds(cluster, collective, 1e3, dispatcher) for cluster in ("aws-p6-b300", "hgx-b300")
    )
    assert over_efa - over_infiniband >= latency > 5e-5


@pytest.mark.parametrize("technology", [LinkTechnology.EFA, LinkTechnology.EFA2])
@pytest.mark.parametrize(("ranks", "nodes"), [(16, 2), (32, 4)])
@pytest.mark.parametrize("dispatcher", [TokenDispatcher.DEEPEP, TokenDispatcher.DEEPEP_UCCL])
def test_ports_of_proxies_send_one_message_at_a_time(
    dispatcher: TokenDispatcher, ranks: int, nodes: int, technology: LinkTechnology
) -> None:
    """Large tokens reach the port's share of the nominal rate, small ones what one thread posts, or each peer's."""
    cluster = {LinkTechnology.EFA: "aws-p6-b300", LinkTechnology.EFA2: "aws-p5"}[technology]
    table, library = load_cluster(cluster, ranks).fabric.links, load_dispatcher(dispatcher)
    constants, ports = library.network_constants(technology), table.kind == LINK_KINDS.index(LinkKind.NIC)

    def rate(token_bytes: float, message_tokens: int) -> float:
        with_tokens = library.with_token_bytes(token_bytes, ranks, message_tokens)
        (port_rate,) = np.unique(effective_bandwidth(table, with_tokens, with_tokens.variants[0], nodes)[ports])
        return float(port_rate)

    peers = nodes - 1 if dispatcher is TokenDispatcher.DEEPEP_UCCL else 1
    message_seconds = constants.message_seconds or constants.peer_message_seconds
    assert rate(512.0, 4) == pytest.approx(peers * 4 * 512.0 / message_seconds)
    assert rate(1e9, 1) == pytest.approx(float(table.bandwidth[ports].max()) * constants.efficiency)


@pytest.mark.parametrize(("ranks", "tokens"), [(8, 20), (16, 20), (32, 8), (64, 8), (160, 12), (320, 12)])
def test_messages_have_the_default_size_of_their_group(ranks: int, tokens: int) -> None:
    """As DeepEP's configurations have it for dispatch; larger groups have that of the largest."""
    (dispatch,) = (
        load_dispatcher(TokenDispatcher.DEEPEP).with_token_bytes(100.0, ranks).variants_for(CollectiveType.DISPATCH)
    )
    assert dispatch.message_bytes == 100.0 * tokens


def test_smaller_tokens_take_as_long_where_proxies_limit() -> None:
    """The same number of tokens, half as wide: proxies post as many."""
    wide, narrow = (
        seconds("aws-p5", CollectiveType.DISPATCH, 65536 * 8 * size, TokenDispatcher.DEEPEP, size)
        for size in (4096.0, 2048.0)
    )
    assert narrow == pytest.approx(wide, rel=1e-3)
