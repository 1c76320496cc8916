"""Native sparse attention: closed forms of keys, parameters, FLOP and saved bytes; published times of its kernels."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clustersim import Scenario, simulate
from clustersim.common.errors import InputError
from clustersim.cost.roofline import Roofline
from clustersim.model.attention_spec import FullAttention
from clustersim.model.kernels import KernelKind, SparseAttentionShape, SparseRoutine
from clustersim.model.layer_stack import LayerSpec
from clustersim.model.layers import transformer_layer
from clustersim.model.mixer import AttentionFlopConvention
from clustersim.model.mixers.native_sparse_attention import NativeSparseAttention, native_sparse_attention_operators
from clustersim.model.operators import LayerShard
from clustersim.model.presets import load_preset
from clustersim.model.sharded_layer import RankContext
from clustersim.model.training import Training
from tests.conftest import examples
from tests.sentences import parts

MIXER = NativeSparseAttention(FullAttention(64, 4, 128), 32, 16, 64, 16, 512)  # arXiv:2502.11089, section 4.1
PUBLISHED = {  # milliseconds: XunhaoLai/native-sparse-attention-triton, README.md
    ("dgx-h100", SparseRoutine.NSA_SELECTED, False): {
        8192: 3.396880,
        16384: 6.704192,
        32768: 12.417440,
        65536: 24.511856,
    },
    ("dgx-h100", SparseRoutine.NSA_SELECTED, True): {
        8192: 3.947456,
        16384: 7.538912,
        32768: 15.154192,
        65536: 33.818878,
    },
    ("dgx-h100", SparseRoutine.NSA_COMPRESSED, False): {16384: 1.440288, 32768: 4.584736, 65536: 16.134224},
    ("dgx-h100", SparseRoutine.NSA_COMPRESSED, True): {16384: 3.743440, 32768: 12.640032, 65536: 46.054817},
    ("dgx-a100", SparseRoutine.NSA_SELECTED, False): {
        8192: 3.723168,
        16384: 7.359168,
        32768: 14.142848,
        65536: 30.99136,
    },
    ("dgx-a100", SparseRoutine.NSA_SELECTED, True): {
        8192: 9.066112,
        16384: 17.113279,
        32768: 34.715614,
        65536: 76.309441,
    },
}


@given(st.integers(1, 600), st.integers(1, 8), st.integers(1, 4), st.integers(1, 5))
@examples(60)
def test_keys_of_the_branches_are_those_that_queries_have(sequence: int, stride: int, kernel: int, topk: int) -> None:
    """Counted query by query: compressed keys that end before it, and keys of its own block and the blocks before."""
    mixer = NativeSparseAttention(FullAttention(2, 1, 8), kernel * stride, stride, 2 * stride, topk, 4)
    queries, block = range(sequence), 2 * stride
    compressed = [max(0, (query + 1 - kernel * stride) // stride + 1) for query in queries]
    selected = [query % block + 1 + block * min(topk - 1, query // block) for query in queries]
    assert mixer.mean_compressed(sequence) == pytest.approx(sum(compressed) / sequence)
    assert mixer.mean_selected(sequence) == pytest.approx(sum(selected) / sequence)


def test_parameters_are_those_of_the_modules() -> None:
    """Queries, keys, values, output; matrices that compress keys and values of a head; positions; gates."""
    hidden = 2560
    projections = hidden * 128 * (64 + 4 + 4 + 64)
    compression = 2 * 4 * (32 * 128) * 128 + 4 * 32 * 128
    assert MIXER.parameter_count(hidden, linear_bias=False) == projections + compression + 3 * hidden


def test_operators_hold_the_parameters_and_run_the_flop_of_the_convention() -> None:
    """Six per weight of the matrices, and of compressed tokens; attention of the branches as its masks leave it."""
    tokens, model = 4096, load_preset("llama-tiny")
    layer = transformer_layer(model, LayerSpec(MIXER, None), Training(tokens, 1), LayerShard(1, tokens, tokens))
    assert layer.parameter_count == MIXER.parameter_count(model.hidden, linear_bias=False) + model.hidden
    kernels = [
        kernel
        for operator in layer.operators
        for kernel in (*operator.forward, *operator.input_gradient, *operator.weight_gradient)
    ]
    matmuls = sum(kernel.flops for kernel in kernels if kernel.kind is KernelKind.MATMUL)
    compressed = (tokens - 32) // 16 + 1
    expected = 6.0 * tokens * MIXER.matrix_elements(model.hidden) + 6.0 * 2 * 4 * 32 * 128 * 128 * compressed
    assert matmuls == expected
    mixing = (
        tokens * MIXER.mixing_flops(tokens, AttentionFlopConvention.CAUSAL) - 6.0 * 2 * 4 * 32 * 128 * 128 * compressed
    )
    keys = mixing / (12.0 * tokens * 64 * 128)
    window = (512 * tokens - 512 * 511 / 2) / tokens
    assert keys == pytest.approx(MIXER.mean_compressed(tokens) + MIXER.mean_selected(tokens) + window)
    sparse = [
        k
        for k in kernels
        if isinstance(k.shape, SparseAttentionShape) and k.shape.routine is SparseRoutine.NSA_SELECTED
    ]
    forward, backward = (kernel.flops for kernel in sparse)
    assert forward == 4.0 * tokens * 64 * 128 * MIXER.mean_selected(tokens)
    assert backward == 2.5 * forward


def test_saved_are_the_outputs_of_three_branches() -> None:
    """Next to what attention to all keys saves: two more outputs, statistics, compressed keys and values, indices."""
    tokens, model = 4096, load_preset("llama-tiny")
    saved = [
        transformer_layer(model, LayerSpec(mixer, None), Training(tokens, 1), LayerShard(1, tokens, tokens)).saved_bytes
        for mixer in (MIXER.attention, MIXER)
    ]
    outputs, statistics = 3 * tokens * 64 * 128 * 2, 2 * tokens * 64 * 4
    compressed, indices = 2 * 255 * 4 * 128 * 2, tokens * 4 * 16 * 4
    assert saved[1] - saved[0] == outputs + statistics + compressed + indices


@pytest.mark.parametrize(("cluster", "routine", "backward"), list(PUBLISHED))
def test_kernels_take_what_is_published(cluster: str, routine: SparseRoutine, backward: bool) -> None:
    """Within the spread of the shares over lengths, which one share stands for."""
    mapping = {
        "model": "llama3-8b",
        "cluster": {"name": cluster, "gpus": 8},
        "training": {"sequence": 512, "global_batch": 8},
    }
    roofline = Roofline(Scenario.from_mapping(mapping).cluster.accelerator)
    for tokens, milliseconds in PUBLISHED[cluster, routine, backward].items():
        rank = RankContext(load_preset("llama-tiny"), Training(tokens, 1), LayerShard(1, tokens, tokens))
        operators = native_sparse_attention_operators(rank, MIXER, after_norm=False)
        (operator,) = (one for one in operators if one.name == f"attention.{routine.value}")
        (kernel,) = operator.input_gradient if backward else operator.forward
        assert roofline.time_kernel(kernel).seconds * 1e3 == pytest.approx(milliseconds, rel=0.36)


def _scenario(**model: Any) -> Scenario:
    sizes = {"layers": 2, "hidden": 1024, "heads": 16, "kv_heads": 1, "ffn": 2048, "vocab": 1024}
    mapping = {
        "model": {**sizes, "mixer": "nsa", **model},
        "cluster": {"name": "dgx-h100", "gpus": 8},
        "training": {"sequence": 8192, "global_batch": 8},
    }
    return Scenario.from_mapping(mapping)


def test_long_sequences_are_faster_than_with_attention_to_all_keys() -> None:
    sparse, full = (
        simulate(_scenario(**model).with_overrides("training.sequence=131072"))
        for model in ({"nsa": {}}, {"mixer": "attention"})
    )
    assert sparse.step_time < full.step_time
    assert sparse.model_flops.model < full.model_flops.model


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ({}, "nsa: is missing; write such as {kernel_size: 32"),
        ({"nsa": {"kernel_stride": 24}}, "nsa.kernel_stride: 24 does not divide kernel_size 32 and block_size 64"),
        ({"nsa": {}, "window": 128}, "mixer: nsa is causal attention without a window"),
        ({"nsa": {}, "attention_sinks": True}, "mixer: nsa has no attention_sinks"),
    ],
)
def test_what_does_not_fit_is_refused(model: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        _scenario(**model)


def test_context_parallelism_has_no_rule() -> None:
    with pytest.raises(InputError, match=parts("native sparse attention ... is not known ... cp 1 fits")):
        _scenario(nsa={}).with_overrides("layout.cp=2")
