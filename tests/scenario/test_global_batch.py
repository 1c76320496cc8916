"""A global batch in tokens is the batch of its sequences, or refused with the nearest; units are named."""

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clustersim.common.errors import InputError
from clustersim.scenario import Scenario
from clustersim.scenario.config.global_batch import parse_global_batch
from clustersim.scenario.schema import scenario_schema


@pytest.mark.parametrize(
    ("stated", "sequence", "sequences"),
    [
        ("16M tokens", 8192, 2048),  # Llama 3 405B (arXiv:2407.21783, section 3.4.1)
        ("16M", 8192, 2048),
        ("4194304 tokens", 8192, 512),
        ("4,194,304 tokens", 8192, 512),
        ("4M", 4096, 1024),
        ("4Mi tokens", 4096, 1024),
        ("0.5M tokens", 2048, 256),  # GPT-3 Small (arXiv:2005.14165, table 2.1)
        ("512K tokens", 4096, 128),
        ("1M tokens", 1000, 1000),  # 2^20 is no multiple
        ("8192 tokens", 8192, 1),
        (512, 8192, 512),
    ],
)
def test_a_batch_in_tokens_is_that_of_its_sequences(stated: object, sequence: int, sequences: int) -> None:
    assert parse_global_batch(stated, sequence) == sequences


@given(st.integers(1, 10_000), st.integers(1, 100_000))
def test_exact_tokens_give_back_the_sequences(sequences: int, sequence: int) -> None:
    assert parse_global_batch(f"{sequences * sequence} tokens", sequence) == sequences


@given(st.integers(1, 10**9), st.integers(2, 100_000))
def test_a_refusal_names_two_legal_batches_around_the_tokens(tokens: int, sequence: int) -> None:
    if tokens % sequence:
        with pytest.raises(Exception, match="no multiple of the sequence") as error:
            parse_global_batch(f"{tokens} tokens", sequence)
        above = tokens // sequence + 1
        assert f"{above} ({above * sequence:,} tokens)" in str(error.value)


@pytest.mark.parametrize(
    ("stated", "parts"),
    [
        ("3.2M tokens", ["'3.2M tokens' is no multiple of the sequence, 8,192", "390 (", "391 ("]),
        ("100 tokens", ["write the sequences: 1 (8,192 tokens)"]),
        ("0 tokens", ["no multiple", "1 (8,192 tokens)"]),
        ("2K", ["'2K' may be sequences or tokens", "'2K tokens'"]),
        ("many", ["'many' is not a whole number"]),
    ],
)
def test_other_batches_are_refused(refusal: Callable[..., str], stated: str, parts: list[str]) -> None:
    message = refusal(f"training.global_batch={stated}")
    assert "training.global_batch: " in message
    assert all(part in message for part in parts)


def test_a_wrong_sequence_is_the_only_problem(refusal: Callable[..., str]) -> None:
    message = refusal("training.sequence=0", "training.global_batch=16M tokens")
    assert "training.sequence" in message
    assert "global_batch" not in message


def test_the_reading_of_a_prefix_is_said(mapping: dict[str, Any]) -> None:
    scenario = Scenario.from_mapping(mapping, ["training.global_batch=16M tokens"])
    assert scenario.training.global_batch == 2048
    (warning,) = scenario.warnings
    assert "16M tokens are taken as 16,777,216, 2,048 sequences of 8,192" in warning
    for exact in ("16Mi tokens", "16777216 tokens", "2048"):
        assert Scenario.from_mapping(mapping, [f"training.global_batch={exact}"]).warnings == ()
    assert Scenario.from_mapping(scenario.to_mapping()).training.global_batch == 2048


def test_another_sequence_divides_the_tokens_again(mapping: dict[str, Any]) -> None:
    scenario = Scenario.from_mapping(mapping, ["training.global_batch=4Mi tokens"])
    assert scenario.with_overrides("training.sequence=4096").training.global_batch == 1024


def test_tokens_without_their_unit_are_questioned(mapping: dict[str, Any]) -> None:
    (warning,) = Scenario.from_mapping(mapping, ["training.global_batch=131072"]).warnings
    assert "were 131072 tokens meant?" in warning
    with pytest.raises(InputError, match="4194304 tokens"):
        Scenario.from_mapping(mapping, ["training.global_batch=4194304"])


def test_editors_accept_tokens() -> None:
    training = scenario_schema()["$defs"]["TrainingConfig"]["properties"]["global_batch"]
    assert training["type"] == ["integer", "string"]
    assert "16Mi tokens" in training["examples"]
