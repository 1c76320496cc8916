"""Waiting for outer gradients: closed forms, and laws of any settings."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clustersim.reliability.outer_exchange import exposed_seconds, fragment_layers
from clustersim.scenario.diloco import DilocoSettings, OuterSend
from tests.conftest import examples

AFTER, DURING = OuterSend.AFTER_OPTIMIZER, OuterSend.DURING_BACKWARD
SENDS = st.sampled_from(list(OuterSend))


@given(st.integers(1, 200), st.integers(1, 200))
@examples(50)
def test_fragments_hold_every_layer_once(layers: int, fragments: int) -> None:
    parts = fragment_layers(layers, min(fragments, layers))
    assert sorted(layer for part in parts for layer in part) == list(range(layers))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_without_overlap_all_of_it_is_waited_for() -> None:
    assert exposed_seconds(DilocoSettings(100), 1.0, 10, 7.0, 0.5) == pytest.approx(7.5)
    assert exposed_seconds(DilocoSettings(100, fragments=5), 1.0, 10, 7.0, 0.5) == pytest.approx(7.0 + 5 * 0.5)


def test_overlapped_steps_hide_as_much_of_each_fragment() -> None:
    settings = DilocoSettings(100, fragments=5, overlap=1)
    assert exposed_seconds(settings, 1.0, 10, 7.0, 0.0) == pytest.approx(5 * (7.0 / 5 - 1.0))
    assert exposed_seconds(settings, 1.4, 10, 7.0, 0.0) == pytest.approx(0.0)


def test_a_single_layer_sent_during_backward_has_no_window() -> None:
    """One layer: its backward ends the step and its forward begins the next."""
    assert exposed_seconds(DilocoSettings(1, send=DURING), 3.0, 1, 2.0, 0.25) == pytest.approx(2.25)


def test_two_layers_sent_during_backward() -> None:
    """Forward 1 s, backward of each layer 1 s: the upper one is sent at 2 s, the lower one at 3 s, needed at 3 s."""
    assert exposed_seconds(DilocoSettings(1, send=DURING), 3.0, 2, 1.0, 0.0) == pytest.approx(0.5)
    assert exposed_seconds(DilocoSettings(1, send=DURING), 3.0, 2, 6.0, 0.0) == pytest.approx(5.0)  # 2 + 6 - 3


@given(SENDS, st.integers(1, 12), st.integers(0, 5), st.floats(0.01, 50.0), st.floats(0.0, 1.0), st.floats(0.1, 1.0))
@examples(100)
def test_more_bandwidth_or_overlap_is_never_slower(
    send: OuterSend, fragments: int, overlap: int, exchange: float, latency: float, faster: float
) -> None:
    settings = DilocoSettings(20, fragments, overlap, send=send)
    waiting = exposed_seconds(settings, 1.0, 12, exchange, latency)
    assert exposed_seconds(settings, 1.0, 12, exchange * faster, latency * faster) <= waiting + 1e-9
    assert exposed_seconds(DilocoSettings(20, fragments, overlap + 1, send=send), 1.0, 12, exchange, latency) <= waiting
    assert exposed_seconds(settings, 1.0, 12, 0.0, 0.0) == pytest.approx(0.0, abs=1e-9)


@given(st.integers(1, 12), st.integers(0, 5), st.floats(0.01, 50.0))
@examples(100)
def test_sending_during_backward_is_never_slower(fragments: int, overlap: int, exchange: float) -> None:
    after, during = (DilocoSettings(20, fragments, overlap, send=send) for send in (AFTER, DURING))
    assert exposed_seconds(during, 1.0, 12, exchange, 0.0) <= exposed_seconds(after, 1.0, 12, exchange, 0.0) + 1e-9
