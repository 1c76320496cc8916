"""Chunk sizes, and correction factors of trees."""

import numpy as np
import pytest

from clustersim.collectives.chunking import ChunkSizeSteps, correction_factor
from clustersim.collectives.library import ChannelRamp, PipelineChunking
from clustersim.collectives.library_files import load_library
from clustersim.program.task import CollectiveType

KIB, MIB = 2**10, 2**20
NVLS_STEPS = ChunkSizeSteps(128.0 * KIB, ((64.0 * KIB, 64.0), (32.0 * KIB, 8.0), (16.0 * KIB, 2.0)))


@pytest.mark.parametrize(
    ("payload", "chunk"),
    [(2**40, 128), (1024 * MIB, 128), (1023 * MIB, 64), (64 * MIB, 64), (63 * MIB, 32), (8 * MIB, 32), (8, 16)],
)
def test_nvls_chunk_sizes_on_eight_h100_match_nccl(payload, chunk):
    """16 channels times 8 heads: 64 x 128 x 128 KiB is 1 GiB, then 8 x 128 x 64 KiB and 2 x 128 x 32 KiB."""
    assert NVLS_STEPS.chunk_bytes(payload, np.array([128.0])) == chunk * KIB


def test_tree_correction_factors_are_interpolated_between_powers_of_two():
    factors = (1.0, 0.5, 0.7)
    assert [correction_factor(factors, size) for size in (1.0, 64.0, 128.0, 256.0, 1e12)] == [1.0, 1.0, 0.5, 0.7, 0.7]
    assert correction_factor(factors, 64.0 * 2**0.5) == pytest.approx(0.75)
    assert correction_factor((), 1e6) == 1.0


def test_a_small_ring_uses_few_channels():
    """One channel per 4 KiB of each of 8 ranks: 64 KiB use 2 of 24 channels."""
    ramp = ChannelRamp(24, 4.0 * KIB)
    assert ramp.slowdown(64.0 * KIB, np.array([8])) == 12.0
    assert ramp.slowdown(MIB, np.array([8])) == 1.0


def test_pipeline_chunks_are_smaller_within_a_domain():
    assert PipelineChunking(0.25, 0.5, 8.0).chunk_bytes(12.0, np.array([1, 2, 3])).tolist() == [3.0, 6.0, 6.0]
    assert PipelineChunking(0.25, 0.5, 8.0).chunk_bytes(1000.0, np.array([1, 2])).tolist() == [8.0, 8.0]


def test_trees_of_the_packaged_library_have_ncc_ls_full_table():
    factor_tables = [
        variant.correction_factors
        for variant in load_library("nccl").variants_for(CollectiveType.ALL_REDUCE)
        if variant.algorithm == "tree"
    ]
    assert [len(factors) for factors in factor_tables] == [20, 22, 24]  # later factors are 1, or the last of 24
    assert all(min(factors) >= 0.4 and max(factors) <= 1.0 for factors in factor_tables)
