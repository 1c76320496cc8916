"""What data-parallel strategies say of themselves follows from their ZeRO stage."""

import pytest

from clustersim.parallel.data_parallel_strategy import (
    STRATEGY_BY_ZERO_STAGE,
    DataParallelStrategy,
    DeepspeedZero3Strategy,
    NaiveDataParallel,
    with_overlap,
)

STRATEGIES: tuple[DataParallelStrategy, ...] = (
    *(strategy() for strategy in STRATEGY_BY_ZERO_STAGE.values()),
    DeepspeedZero3Strategy(),
    NaiveDataParallel(),
)


@pytest.mark.parametrize("strategy", STRATEGIES, ids=repr)
def test_parameters_are_sharded_at_stage_3(strategy: DataParallelStrategy) -> None:
    assert strategy.shards_parameters == (strategy.zero_stage == 3)


@pytest.mark.parametrize("strategy", STRATEGIES, ids=repr)
@pytest.mark.parametrize("pipelined", [False, True])
def test_only_sharded_parameters_are_gathered(strategy: DataParallelStrategy, pipelined: bool) -> None:
    gathers = (
        strategy.reshards_parameters(is_pipelined=pipelined),
        strategy.gathers_single_parameters,
        strategy.prefetch_depth > 0,
        strategy.copies,
    )
    assert strategy.shards_parameters or not any(gathers)


@pytest.mark.parametrize("strategy", STRATEGIES, ids=repr)
def test_overlap_is_switched_off_and_on_again(strategy: DataParallelStrategy) -> None:
    off = with_overlap(strategy, overlap=False)
    assert with_overlap(off, overlap=True) == strategy
    assert (off == strategy) == strategy.is_single_process
