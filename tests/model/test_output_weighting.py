"""Experts whose results are weighted and sorted as PyTorch's operations do it, as in torchtitan."""

from itertools import chain

import pytest

from clustersim.model.framework_files import load_framework
from clustersim.model.kernels import Kernel
from clustersim.model.layer_stack import LayerSpec, MlpType, MoeMlp
from clustersim.model.layers import transformer_layer
from clustersim.model.operators import LayerShard, Operator, ParallelRegion
from clustersim.model.overheads import ExpertSort, ExpertWeighting, Overheads
from clustersim.model.presets import load_preset
from clustersim.model.training import ALL_FUSED, NONE_FUSED, Training

MODEL = load_preset("llama-tiny")
T, H, TOP_K, FFN = 256, 512, 2, 384
ROWS = TOP_K * T


def moe_operators(overheads: Overheads, *, fused: bool, ep: int = 4, deepep: bool = False) -> tuple[Operator, ...]:
    training = Training(T, 1, overheads=overheads, fused=ALL_FUSED if fused else NONE_FUSED)
    spec = LayerSpec(None, MoeMlp(8, TOP_K, FFN, MlpType.SWIGLU))
    shard = LayerShard(1, T, T, ep=ep, permute_after_dispatch=deepep)
    return transformer_layer(MODEL, spec, training, shard).operators


def weighting_kernels(operators: tuple[Operator, ...]) -> list[Kernel]:
    kernels = chain.from_iterable((*operator.forward, *operator.input_gradient) for operator in operators)
    return [kernel for kernel in kernels if "weighting" in kernel.name]


def element_bytes(kernels: list[Kernel], width: int) -> list[float]:
    return [kernel.bytes / (ROWS * width) for kernel in kernels]


@pytest.mark.parametrize(
    ("weighting", "fused", "forward", "backward"),
    [
        (ExpertWeighting.OUTPUT, True, 2 + 2, 2 + 2 + 2),  # one kernel each way
        (ExpertWeighting.OUTPUT, False, (2 + 4) + (4 + 4) + (4 + 2), 6 + 8 + (12 + 4) + 6),
        (ExpertWeighting.EAGER_OUTPUT, True, (2 + 4) + (4 + 4) + (4 + 2), 6 + 8 + (12 + 4) + 6),
        (ExpertWeighting.BATCHED_OUTPUT, True, (2 + 4) + 4, 4 + 4 + 6),
    ],
)
def test_results_of_experts_are_weighted_in_fp32(
    weighting: ExpertWeighting, fused: bool, forward: float, backward: float
) -> None:
    """As wide as the model: read and written by each operation in its format, unless one kernel does it all."""
    operators = moe_operators(Overheads(weighting=weighting), fused=fused)
    assert element_bytes(weighting_kernels(operators), H) == [forward, backward]
    (operator,) = (operator for operator in operators if operator.name == "experts.output_weighting")
    assert operator.region is ParallelRegion.REPLICATED  # where the tokens come from
    assert operator.saved_bytes == ROWS * H * (2 if forward == 2 + 2 else 4)  # compiled: what was received


def test_activations_are_weighted_where_nothing_else_is_said() -> None:
    """As wide as an expert, in bf16, and by a kernel of their own only where activations are unfused."""
    assert not weighting_kernels(moe_operators(Overheads(), fused=True))
    assert element_bytes(weighting_kernels(moe_operators(Overheads(), fused=False)), FFN) == [2 * 2, 6 * 2]


def test_results_are_weighted_in_bf16_where_tokens_are_permuted_behind_the_dispatch() -> None:
    operators = moe_operators(Overheads(weighting=ExpertWeighting.EAGER_OUTPUT), fused=False, deepep=True)
    assert element_bytes(weighting_kernels(operators), H) == [2 * 2, 6 * 2]
    (operator,) = (operator for operator in operators if operator.name == "experts.output_weighting")
    assert operator.region is ParallelRegion.EXPERT


@pytest.mark.parametrize(
    ("sort", "sort_passes", "unsort_passes"),
    [
        (ExpertSort.CHUNKS, [2, 2], [2, 2]),
        (ExpertSort.INDICES, [2, 1 + 3], [2, 2]),  # backward: zeros, and rows read and added to them
        (ExpertSort.PADDED_INDICES, [2 + 2, 1 + 3], [2, 2 + 1 + 2]),  # a copy with a row more; without it, and zeros
    ],
)
def test_sorting_by_index_adds_gradients_to_zeros(
    sort: ExpertSort, sort_passes: list[int], unsort_passes: list[int]
) -> None:
    operators = {operator.name: operator for operator in moe_operators(Overheads(expert_sort=sort), fused=True)}
    for name, passes in (("experts.sort", sort_passes), ("experts.unsort", unsort_passes)):
        kernels = (*operators[name].forward, *operators[name].input_gradient)
        assert [kernel.bytes / (ROWS * H * 2) for kernel in kernels] == passes


def test_a_padded_copy_is_made_without_expert_parallelism_too() -> None:
    for sort, is_sorted in ((ExpertSort.PADDED_INDICES, True), (ExpertSort.INDICES, False)):
        operators = moe_operators(Overheads(expert_sort=sort), fused=True, ep=1)
        assert ("experts.sort" in {operator.name for operator in operators}) is is_sorted


def test_torchtitans_moe_changed_with_its_versions() -> None:
    """Padding went on 2026-04-02, the batched matmul on 2026-04-06, and layers are compiled whole since 2026-04-14."""
    versions = {
        "2025-08-22": (ExpertWeighting.EAGER_OUTPUT, ExpertSort.PADDED_INDICES),
        "2025-12-17": (ExpertWeighting.BATCHED_OUTPUT, ExpertSort.PADDED_INDICES),
        "2026-04-03": (ExpertWeighting.BATCHED_OUTPUT, ExpertSort.INDICES),
        "2026-04-10": (ExpertWeighting.EAGER_OUTPUT, ExpertSort.INDICES),
        "2026-06-16": (ExpertWeighting.OUTPUT, ExpertSort.INDICES),
        "": (ExpertWeighting.OUTPUT, ExpertSort.INDICES),
    }
    overheads = {version: load_framework("torchtitan", version).overheads for version in versions}
    assert {version: (found.weighting, found.expert_sort) for version, found in overheads.items()} == versions
    assert load_framework("megatron").overheads.weighting is ExpertWeighting.ACTIVATION
