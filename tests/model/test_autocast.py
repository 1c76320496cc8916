"""Casts by operation (torch.autocast): what runs in FP32, what is cast, and what is saved for it."""

from dataclasses import replace
from typing import Any

import pytest

from clustersim import Scenario, simulate
from clustersim.common.errors import InputError
from clustersim.model.kernels import KernelKind
from clustersim.model.layers import LayerOperators, transformer_layer
from clustersim.model.operators import LayerShard
from clustersim.model.overheads import Overheads
from clustersim.model.presets import load_preset
from clustersim.model.training import ALL_FUSED, AttentionBackend, FusedKernel, Training

TOKENS = 512
EAGER = ALL_FUSED - {FusedKernel.RESIDUAL}  # kernels of a library, without a compiler


def _layer(*, autocast: bool, attention: AttentionBackend, fused: frozenset[FusedKernel] = EAGER) -> LayerOperators:
    model = load_preset("llama-tiny")
    training = Training(TOKENS, 1, attention=attention, overheads=Overheads(autocast=autocast), fused=fused)
    return transformer_layer(model, model.stack[0].spec, training, LayerShard(1, TOKENS, TOKENS))


def _bytes(layer: LayerOperators, kind: KernelKind) -> float:
    return sum(kernel.bytes for one in layer.operators for kernel in one.forward if kernel.kind is kind)


def test_norms_and_sums_move_twice_the_bytes_and_matmuls_the_same() -> None:
    plain, cast = (_layer(autocast=autocast, attention=AttentionBackend.FLASH) for autocast in (False, True))
    for kind in (KernelKind.NORM, KernelKind.RESIDUAL):
        assert _bytes(cast, kind) == 2 * _bytes(plain, kind)
    assert _bytes(cast, KernelKind.MATMUL) == _bytes(plain, KernelKind.MATMUL)
    assert cast.parameter_count == plain.parameter_count


def test_weights_and_what_norms_hand_on_are_cast() -> None:
    """Read in FP32 and written in 16 bits: every matrix in forward, and the inputs of both branches."""
    plain, cast = (_layer(autocast=autocast, attention=AttentionBackend.FLASH) for autocast in (False, True))
    model = load_preset("llama-tiny")
    weights = sum(operator.linear.parameter_count for operator in cast.operators if operator.linear is not None)
    copied = _bytes(cast, KernelKind.COPY) - _bytes(plain, KernelKind.COPY)
    assert copied == (weights + 2 * TOKENS * model.hidden) * (4 + 2)


def test_a_compiler_casts_inside_the_norms() -> None:
    """No copies but the weights', and each norm writes 16 bits."""
    eager, compiled = (
        _layer(autocast=True, attention=AttentionBackend.FLASH, fused=fused) for fused in (EAGER, ALL_FUSED)
    )
    handed_on = 2 * TOKENS * load_preset("llama-tiny").hidden
    assert _bytes(eager, KernelKind.COPY) - _bytes(compiled, KernelKind.COPY) == handed_on * (4 + 2)
    assert _bytes(eager, KernelKind.NORM) - _bytes(compiled, KernelKind.NORM) == handed_on * (4 - 2)
    assert eager.parameter_count == compiled.parameter_count


def test_inputs_of_norms_are_saved_in_fp32_and_softmaxes_in_both_formats() -> None:
    model, saved = load_preset("llama-tiny"), {}
    for attention in AttentionBackend.FLASH, AttentionBackend.STANDARD:
        plain, cast = (_layer(autocast=autocast, attention=attention).saved_bytes for autocast in (False, True))
        saved[attention] = cast - plain
    assert saved[AttentionBackend.FLASH] == 2 * TOKENS * model.hidden * 2
    heads = model.distinct_attentions[0].heads
    assert saved[AttentionBackend.STANDARD] - saved[AttentionBackend.FLASH] == TOKENS * TOKENS * heads * 4


def _scenario(**layout: Any) -> Scenario:
    mapping = {
        "model": "llama-tiny",
        "cluster": {"name": "dgx-h100", "gpus": 8},
        "layout": layout,
        "training": {"sequence": 512, "global_batch": 8, "overheads": {"autocast": True}},
    }
    return Scenario.from_mapping(mapping)


def test_a_step_takes_longer_and_more_memory() -> None:
    cast = _scenario()
    plain = cast.with_overrides("training.overheads.autocast=false")
    assert not plain.training.overheads.autocast
    assert replace(cast.training.overheads, autocast=False) == plain.training.overheads
    results = [simulate(scenario) for scenario in (plain, cast)]
    assert results[1].step_time > results[0].step_time
    assert results[1].peak_memory > results[0].peak_memory


@pytest.mark.parametrize("axis", ["tp", "cp", "pp"])
def test_ranks_that_exchange_activations_are_refused(axis: str) -> None:
    with pytest.raises(InputError, match=f"layout.{axis}: 2 with training.overheads.autocast is not modelled"):
        _scenario(**{axis: 2})
