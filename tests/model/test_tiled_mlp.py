"""MLPs on tiles: FLOP and saved bytes by closed forms; memory is never more, gradients are those of one tile."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clustersim.common.errors import InputError
from clustersim.memory.layer_gradients import activation_gradient_bytes
from clustersim.model.kernels import Kernel, KernelKind
from clustersim.model.layers import LayerOperators, LayerShard, transformer_layer
from clustersim.model.operators import Operator
from clustersim.model.overheads import Overheads
from clustersim.model.presets import load_preset
from clustersim.model.training import TiledMlp, Training
from clustersim.scenario import Scenario
from tests.conftest import examples

MODEL = load_preset("llama3-8b")
HIDDEN, FFN, BYTES = 4096, 14336, 2


def layer(tokens: int, tiling: TiledMlp | None, overheads: Overheads | None = None) -> LayerOperators:
    training = Training(tokens, 1, tiled_mlp=tiling, overheads=overheads or Overheads())
    (spec,) = MODEL.distinct_specs
    return transformer_layer(MODEL, spec, training, LayerShard(1, tokens, tokens))


def mlp(tokens: int, tiling: TiledMlp | None) -> list[Operator]:
    return [operator for operator in layer(tokens, tiling).operators if operator.name in MLP_NAMES]


MLP_NAMES = "mlp.up", "mlp.activation", "mlp.down"


def matmul_flops(kernels: tuple[Kernel, ...]) -> float:
    return sum(kernel.flops for kernel in kernels if kernel.kind is KernelKind.MATMUL)


@pytest.mark.parametrize(("recomputes", "backward"), [(True, 3), (False, 2)])
@pytest.mark.parametrize("tokens", [4096, 32768])
def test_backward_has_the_forward_once_more(tokens: int, recomputes: bool, backward: int) -> None:
    """6 T h f forward, twice that backward, and once more where tiles run again."""
    operators = mlp(tokens, TiledMlp(2048, recomputes))
    forward = 6 * tokens * HIDDEN * FFN
    assert sum(matmul_flops(operator.forward) for operator in operators) == pytest.approx(forward)
    gradients = [operator.input_gradient + operator.weight_gradient for operator in operators]
    assert sum(map(matmul_flops, gradients)) == pytest.approx(backward * forward)


def test_an_mlp_saves_its_input_or_what_it_would_save_without_tiles() -> None:
    whole, again, loop = (mlp(32768, tiling) for tiling in (None, TiledMlp(), TiledMlp(recomputes=False)))
    saved = [sum(operator.saved_bytes for operator in operators) for operators in (whole, again, loop)]
    assert saved[1] == 32768 * HIDDEN * BYTES
    assert saved[0] == saved[2] == saved[1] + 32768 * 3 * FFN * BYTES


@given(tokens=st.integers(1, 64).map(lambda count: 1024 * count), tile=st.sampled_from((512, 1024, 4096, 16384)))
@examples(20)
def test_a_backward_on_tiles_never_needs_more(tokens: int, tile: int) -> None:
    """Of saved activations and gradients together, up to the input's gradient that tiles are collected in."""
    needs = []
    for tiling in (TiledMlp(tile), TiledMlp(tile, recomputes=False), None):
        tiled = layer(tokens, tiling)
        needs.append(tiled.saved_bytes + activation_gradient_bytes(tiled, BYTES))
    assert needs[0] <= needs[1] + 3 * min(tile, tokens) * FFN * BYTES
    assert needs[1] <= needs[2] + tokens * HIDDEN * BYTES


def test_liger_s_activation_writes_gradients_over_its_operands() -> None:
    """Both gradients of SwiGLU, 2 f elements a token, less what else is the peak then: f and h in the last matrix."""
    tokens = 8192
    usual, in_place = (
        activation_gradient_bytes(layer(tokens, None, Overheads(activation_in_place=is_in_place)), BYTES)
        for is_in_place in (False, True)
    )
    assert usual - in_place == tokens * (FFN - HIDDEN) * BYTES


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ("layout={tp: 2, dp: 4}", r"training\.tiled_mlp with layout\.tp: 2"),
        ("training.tiled_mlp={tokens: 65536}", r"tiled_mlp\.tokens: 65536, but a rank has 32768"),
        ("model=mixtral-8x7b", "mixtral-8x7b has no dense MLP"),
        ("training.lora={rank: 8}", r"training\.lora"),
        ("training.tiled_mlp=always", r"'always' is neither true nor false; write true or"),
    ],
)
def test_what_tiles_do_not_fit_is_said(change: str, sentence: str) -> None:
    mapping = {
        "model": "llama3-8b",
        "cluster": {"name": "dgx-h100", "gpus": 8},
        "layout": {"data": "fsdp"},
        "training": {"sequence": 32768, "global_batch": 8, "tiled_mlp": True},
    }
    with pytest.raises(InputError, match=sentence):
        Scenario.from_mapping(mapping, [change])
