"""Masks of the rows that belong to no expert: bytes by hand, and when there are none."""

from dataclasses import replace

import pytest

from clustersim.model.framework_files import load_framework
from clustersim.model.layer_stack import MlpType, MoeMlp
from clustersim.model.moe_layer import moe_operators
from clustersim.model.operators import LayerShard, Operator
from clustersim.model.overheads import ExpertRowMasks, ExpertWeighting, Overheads
from clustersim.model.presets import load_preset
from clustersim.model.sharded_layer import RankContext
from clustersim.model.training import ALL_FUSED, Training

T, H, F, E, K, BF16_BYTES = 64, 256, 128, 16, 4, 2
ROWS = T * K
MASKS = ("experts.input_mask", "experts.up_mask", "experts.down_mask")


def operators_by_name(overheads: Overheads, *, ep: int = 1, compiled: bool = False) -> dict[str, Operator]:
    training = Training(T, 1, fused=ALL_FUSED if compiled else frozenset(), overheads=overheads)
    rank = RankContext(replace(load_preset("llama3-8b"), hidden=H), training, LayerShard(1, T, T, ep=ep))
    return {operator.name: operator for operator in moe_operators(rank, MoeMlp(E, K, F, MlpType.SWIGLU))}


def test_each_mask_fills_all_rows_and_copies_those_that_are_read_again() -> None:
    """Filling reads and writes them, 2 passes, and a copy before it 2 more: forward in place, copied, copied.

    Backward copies at each, so that a mask of r x w elements moves 8 r w bytes there in two kernels (BF16).
    """
    operators = operators_by_name(Overheads(expert_row_masks=ExpertRowMasks.ALWAYS))
    for name, width, passes in zip(MASKS, (H, 2 * F, H), (2, 4, 4), strict=True):
        operator = operators[name]
        assert sum(kernel.bytes for kernel in operator.forward) == passes * ROWS * width * BF16_BYTES
        assert sum(kernel.bytes for kernel in operator.input_gradient) == 4 * ROWS * width * BF16_BYTES
        assert (len(operator.forward), len(operator.input_gradient)) == (passes / 2, 2)
        assert operator.saved_bytes == 0.0
    order = [name for name in operators if name.startswith("experts.")]
    wanted = ["experts.up", "experts.up_mask", "experts.activation", "experts.down", "experts.down_mask"]
    assert order == ["experts.input_mask", *wanted]


@pytest.mark.parametrize(
    ("masks", "ep", "compiled", "has_masks"),
    [
        (ExpertRowMasks.NEVER, 4, False, False),
        (ExpertRowMasks.EXPERT_PARALLEL, 1, False, False),
        (ExpertRowMasks.EXPERT_PARALLEL, 4, False, True),
        (ExpertRowMasks.ALWAYS, 1, False, True),
        (ExpertRowMasks.ALWAYS, 4, True, False),  # fused with what is around them
    ],
)
def test_where_rows_are_masked(masks: ExpertRowMasks, ep: int, compiled: bool, has_masks: bool) -> None:
    operators = operators_by_name(Overheads(expert_row_masks=masks), ep=ep, compiled=compiled)
    assert [name in operators for name in MASKS] == 3 * [has_masks]


def test_weighting_without_conversion_stays_in_the_format_of_activations() -> None:
    """A row and its scalar: 2 passes forward; backward two products and a sum, 6 passes of three kernels."""
    operator = operators_by_name(Overheads(weighting=ExpertWeighting.UNCONVERTED_OUTPUT))["experts.output_weighting"]
    assert operator.forward[0].bytes == 2 * ROWS * H * BF16_BYTES
    assert operator.input_gradient[0].bytes == 6 * ROWS * H * BF16_BYTES
    assert (operator.forward[0].launches, operator.input_gradient[0].launches) == (1, 3)
    assert operator.saved_bytes == ROWS * H * BF16_BYTES


def test_releases_of_transformers_that_mask_without_expert_parallelism() -> None:
    masks = [load_framework("transformers", version).overheads.expert_row_masks for version in ("4.57", "5.17", "")]
    assert masks == [ExpertRowMasks.NEVER, ExpertRowMasks.ALWAYS, ExpertRowMasks.EXPERT_PARALLEL]
