"""The kernel model obeys tiles, waves and rooflines, on any accelerator."""

import math
import statistics
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clustersim.common import data_files
from clustersim.common.dtypes import DType
from clustersim.common.errors import InputError
from clustersim.cost.matmul_tiles import alignment_rate
from clustersim.cost.roofline import Roofline
from clustersim.cost.timing import Bottleneck, Provenance
from clustersim.hardware.accelerator import Accelerator, load_accelerator
from clustersim.hardware.alignment import KernelAlignment
from clustersim.hardware.efficiency import AttentionEfficiency, KernelEfficiency, MatmulEfficiency
from clustersim.model.kernels import AttentionShape, Kernel, KernelKind, MatmulLayout, MatmulShape
from clustersim.model.layer_stack import MlpType
from clustersim.model.layers import LayerShard
from clustersim.model.linear import matmul_kernel
from clustersim.model.training import Training
from clustersim.model.transformer import Norm, PositionEncoding, uniform_model
from clustersim.validation.kernels import measured_seconds, read_kernels, timed_matmul
from tests.uniform_models import uniform_layer

H100 = load_accelerator("h100-sxm-80gb")
TILE, UNITS = 128, 10
# One tile shape, nothing but waves: 10 units, 1 TFLOP/s, 1 TB/s.
PLAIN = replace(
    H100,
    name="plain",
    peak={DType.BF16: 1e12, DType.FP32: 1e11},
    memory_bandwidth=1e12,
    compute_units=UNITS,
    efficiency=KernelEfficiency(
        published=False,
        matmul=MatmulEfficiency(
            peak_fraction=0.5, prologue=0.0, edge=0.0, tiles=((TILE, TILE),), peak_fraction_by_format={DType.FP8: 0.5}
        ),
        attention_forward=AttentionEfficiency(0.5, 1.0, 0.0, 0.0, TILE),
        attention_backward=AttentionEfficiency(0.5, 1.0, 0.0, 0.0, TILE),
        memory_bandwidth_fraction=0.5,
        kernel_latency=0.0,
        launch_interval=0.0,
    ),
)


def shaped_matmul(m: int, n: int, k: int, batch: int = 1, dtype: DType = DType.BF16) -> Kernel:
    moved_bytes = dtype.bytes * batch * (m * k + k * n + m * n)
    return Kernel(
        "matmul", KernelKind.MATMUL, dtype, 2.0 * batch * m * n * k, float(moved_bytes), MatmulShape(m, n, k, batch)
    )


def attention_kernel(
    batch: int, length: int, heads: int, causal: bool, backward: bool = False, head_dim: int = 128
) -> Kernel:
    shape = AttentionShape(batch, length, length, heads, heads, head_dim, causal)
    scores = batch * heads * length**2 * (0.5 if causal else 1.0)
    kind = KernelKind.ATTENTION_BACKWARD if backward else KernelKind.ATTENTION_FORWARD
    flops = (10.0 if backward else 4.0) * scores * head_dim
    moved_bytes = 8.0 * batch * heads * length * head_dim
    return Kernel("attention", kind, DType.BF16, flops, moved_bytes, shape)


def memory_bound_kernel(size: float, launches: int = 1) -> Kernel:
    return Kernel("norm", KernelKind.NORM, DType.BF16, flops=0.0, bytes=size, launches=launches)


def roofline_seconds(kernel: Kernel, accelerator: Accelerator = PLAIN) -> float:
    return Roofline(accelerator).time_kernel(kernel).seconds


def test_one_more_tile_than_a_full_wave_costs_a_second_wave() -> None:
    """10 tiles fill 10 units once, 11 run in two waves; split-k does not pay, as partial sums are too expensive.

    A wave is one tile per unit: 2 * 128 * 128 * k FLOP at 0.5 * 1e12 / 10 FLOP/s.
    """
    k = 1 << 14
    wave = 2.0 * TILE * TILE * k / (0.5 * 1e12 / UNITS)
    slow_memory = replace(PLAIN, memory_bandwidth=1e6)
    kernels = [replace(shaped_matmul(TILE * tiles, TILE, k), bytes=0.0) for tiles in (1, UNITS, UNITS + 1)]
    assert [roofline_seconds(kernel, slow_memory) for kernel in kernels] == pytest.approx([wave, wave, 2 * wave])


def test_a_partly_filled_tile_costs_a_full_one() -> None:
    assert roofline_seconds(shaped_matmul(TILE * 4 + 1, TILE, 64)) == roofline_seconds(
        shaped_matmul(TILE * 5, TILE, 64)
    )


def test_batches_multiply_tiles() -> None:
    kernel = shaped_matmul(TILE, TILE, 1024, batch=40)
    assert roofline_seconds(kernel) == pytest.approx(4 * 2.0 * TILE * TILE * 1024 / (0.5e12 / UNITS))


def test_split_k_fills_idle_units_when_partial_sums_are_cheap() -> None:
    """One tile on ten units: without a split it keeps one of them busy, with 8 splits eight of them."""
    k = 1 << 20
    unsplit = 2.0 * TILE * TILE * k / (0.5e12 / UNITS)
    assert roofline_seconds(replace(shaped_matmul(TILE, TILE, k), bytes=0.0)) == pytest.approx(unsplit / 8)


def test_attention_blocks_run_in_waves_of_one_per_unit() -> None:
    full = attention_kernel(1, TILE * UNITS, 1, causal=False)
    two_waves = attention_kernel(1, TILE * UNITS, 2, causal=False)
    assert roofline_seconds(full) == pytest.approx(full.flops / 0.5e12)
    assert roofline_seconds(two_waves) == pytest.approx(2 * roofline_seconds(full))
    more_units = replace(PLAIN, compute_units=UNITS + 5)  # 20 blocks on 15 units still need two waves
    assert roofline_seconds(two_waves, more_units) == pytest.approx(two_waves.flops / 0.5e12 * 2 * 15 / 20)


def test_causal_attention_is_at_least_as_long_as_its_longest_block() -> None:
    """10 blocks of one sequence on 10 units: the last block sees every key, 128 x 1280 scores at a unit's rate."""
    length = TILE * UNITS
    kernel = attention_kernel(1, length, 1, causal=True)
    longest = 4.0 * TILE * length * 128 / (0.5e12 / UNITS)
    assert roofline_seconds(kernel) == pytest.approx(longest)


def test_a_small_head_dimension_wastes_more_time_on_softmax() -> None:
    small, large = attention_kernel(4, 4096, 32, True, head_dim=64), attention_kernel(4, 4096, 16, True, head_dim=128)
    assert small.flops == large.flops
    assert roofline_seconds(small, H100) > roofline_seconds(large, H100)


def test_a_memory_bound_kernel_takes_bytes_over_achieved_bandwidth() -> None:
    timing = Roofline(PLAIN).time_kernel(memory_bound_kernel(1e9))
    assert timing.seconds == pytest.approx(1e9 / (1e12 * 0.5))
    assert timing.bottleneck is Bottleneck.MEMORY


def test_small_kernels_are_bound_by_launches_and_pay_one_latency_each() -> None:
    slow = replace(PLAIN, efficiency=replace(PLAIN.efficiency, kernel_latency=2e-6, launch_interval=10e-6))
    tiny = Roofline(slow).time_kernel(memory_bound_kernel(1.0, launches=3))
    assert tiny.seconds == pytest.approx(30e-6)
    assert tiny.bottleneck is Bottleneck.LAUNCH
    large = Roofline(slow).time_kernel(memory_bound_kernel(1e9, launches=3))
    assert large.seconds == pytest.approx(1e9 / 0.5e12 + 3 * 2e-6)
    assert large.bottleneck is Bottleneck.MEMORY


def test_a_large_matmul_is_bound_by_compute_and_a_thin_one_by_memory() -> None:
    roofline = Roofline(H100)
    assert roofline.time_kernel(shaped_matmul(8192, 8192, 8192)).bottleneck is Bottleneck.COMPUTE
    assert roofline.time_kernel(shaped_matmul(16, 8192, 8192)).bottleneck is Bottleneck.MEMORY


def test_provenance_is_published_only_for_calibrated_accelerators() -> None:
    kernel = shaped_matmul(4096, 4096, 4096)
    assert Roofline(H100).time_kernel(kernel).provenance is Provenance.PUBLISHED
    assert Roofline(load_accelerator("h200-sxm-141gb")).time_kernel(kernel).provenance is Provenance.ROOFLINE


def test_an_unsupported_dtype_is_rejected() -> None:
    with pytest.raises(InputError, match="has no fp8 peak; it computes in fp32, bf16"):
        roofline_seconds(shaped_matmul(128, 128, 128, dtype=DType.FP8))


def test_a_matmul_without_a_shape_still_costs_its_flops() -> None:
    assert roofline_seconds(replace(shaped_matmul(4096, 4096, 4096), shape=None)) == pytest.approx(2 * 4096**3 / 0.5e12)


sizes = st.integers(1, 5000)
kernels = st.one_of(
    st.builds(shaped_matmul, sizes, sizes, sizes, st.integers(1, 8)),
    st.builds(attention_kernel, st.integers(1, 4), sizes, st.integers(1, 40), st.booleans(), st.booleans()),
    st.builds(memory_bound_kernel, st.floats(1.0, 1e10), st.integers(1, 8)),
)
accelerators = st.sampled_from([PLAIN, H100, load_accelerator("a100-sxm-80gb"), load_accelerator("b200-sxm-180gb")])


@given(kernels, accelerators)
def test_no_kernel_beats_the_roofline(kernel: Kernel, accelerator: Accelerator) -> None:
    timing = Roofline(accelerator).time_kernel(kernel)
    assert timing.seconds * (1 + 1e-12) >= kernel.flops / accelerator.peak_flops(kernel.dtype)
    assert timing.seconds * (1 + 1e-12) >= kernel.bytes / accelerator.memory_bandwidth
    assert math.isfinite(timing.seconds)


@given(kernels, accelerators)
def test_doubled_rates_and_halved_latencies_halve_every_duration_exactly(
    kernel: Kernel, accelerator: Accelerator
) -> None:
    efficiency = accelerator.efficiency
    doubled = replace(
        accelerator,
        peak={dtype: 2 * rate for dtype, rate in accelerator.peak.items()},
        memory_bandwidth=2 * accelerator.memory_bandwidth,
        efficiency=replace(
            efficiency,
            kernel_latency=efficiency.kernel_latency / 2,
            launch_interval=efficiency.launch_interval / 2,
        ),
    )
    assert roofline_seconds(kernel, doubled) == roofline_seconds(kernel, accelerator) / 2


@given(kernels, accelerators, st.floats(1.0, 10.0))
def test_more_bytes_never_take_less_time(kernel: Kernel, accelerator: Accelerator, factor: float) -> None:
    larger = replace(kernel, bytes=kernel.bytes * factor)
    assert roofline_seconds(larger, accelerator) >= roofline_seconds(kernel, accelerator)


@given(kernels)
def test_a_timing_is_cached_and_the_same_on_a_new_roofline(kernel: Kernel) -> None:
    roofline = Roofline(H100)
    assert roofline.time_kernel(kernel) is roofline.time_kernel(kernel)
    assert roofline.time_kernel(kernel) == Roofline(H100).time_kernel(kernel)


SIZES = st.integers(64, 4096)
SHIPPED = st.sampled_from([name for name in data_files.list_names("accelerators") if not name.startswith("cpu")])


@given(SHIPPED, SIZES, SIZES, SIZES, st.sampled_from(MatmulLayout), st.sampled_from([1, 8]))
def test_a_matmul_padded_to_full_vectors_never_costs_more(
    name: str, m: int, n: int, k: int, operands: MatmulLayout, batch: int
) -> None:
    """NVIDIA's advice: sizes that are multiples of 16 bytes, 8 elements of bf16, cost no more than a few less.

    FP16 takes the place of BF16 on accelerators without it (V100).
    """
    accelerator = load_accelerator(name)
    dtype = DType.BF16 if DType.BF16 in accelerator.formats else DType.FP16
    small = matmul_kernel("small", dtype, MatmulShape(m, n, k, batch, operands), result_bytes=2.0)
    padded = [-(-size // 8) * 8 for size in (m, n, k)]
    large = matmul_kernel("large", dtype, MatmulShape(*padded, batch, operands), result_bytes=2.0)
    if alignment_rate(accelerator, dtype, small.shape) < 1.0:
        assert roofline_seconds(large, accelerator) <= roofline_seconds(small, accelerator) * (1 + 1e-12)


@pytest.mark.parametrize(
    ("operands", "slow"),
    [(MatmulLayout.NT, {"n", "k"}), (MatmulLayout.NN, {"n", "k"}), (MatmulLayout.TN, {"m", "n"})],
)
def test_only_sizes_along_rows_need_alignment(operands: MatmulLayout, slow: set[str]) -> None:
    """The answer to question 1 of thonking.ai's companion to "What Shapes Do Matrix Multiplications Like?"."""
    unaligned = set()
    for odd in ("m", "n", "k"):
        shape = replace(MatmulShape(2048, 2048, 2048, operands=operands), **{odd: 2047})
        if alignment_rate(H100, DType.BF16, shape) < 1.0:
            unaligned.add(odd)
    assert unaligned == slow


def test_h100_unaligned_rate_is_the_median_of_published_ones() -> None:
    """Rows of float8_experimental pull request 145 of 256 and more."""
    without_alignment = replace(H100, alignment=KernelAlignment())
    cases = [case for case in read_kernels() if case.text("source") == "float8_experimental"]
    large = [case for case in cases if min(case.positive_int(size) for size in "mnk") >= 256]
    kernels = [(case, timed_matmul(case)) for case in large]
    ratios = [
        roofline_seconds(kernel, without_alignment) / measured_seconds(case, [kernel]) for case, kernel in kernels
    ]
    assert len(ratios) == 4
    assert H100.alignment.unaligned_rate == pytest.approx(statistics.median(ratios), abs=0.01)


@pytest.mark.parametrize("head_dim", [72, 80, 100, 120, 125])
@pytest.mark.parametrize("backward", [False, True])
def test_an_unsupported_head_dimension_takes_the_next_ones_time(head_dim: int, backward: bool) -> None:
    padded_dim = H100.alignment.padded_head_dim(head_dim)
    small = attention_kernel(4, 4096, 32, True, backward, head_dim)
    large = attention_kernel(4, 4096, 32, True, backward, padded_dim)
    assert roofline_seconds(small, H100) == pytest.approx(roofline_seconds(large, H100))


@pytest.mark.parametrize("name", ["a100-sxm-80gb", "h100-sxm-80gb", "b200-sxm-180gb"])
@pytest.mark.parametrize("tp", [1, 2, 8])
def test_a_layer_with_head_dimension_125_is_not_faster_than_with_128(name: str, tp: int) -> None:
    """The projections are a little smaller, but padding copies and unaligned matmuls cost more than that saves."""

    def layer_seconds(head_dim: int) -> float:
        model = uniform_model(
            name="llama-7b",
            layers=1,
            hidden=4096,
            ffn=11008,
            heads=32,
            kv_heads=32,
            head_dim=head_dim,
            vocab=32000,
            max_positions=4096,
            mlp=MlpType.SWIGLU,
            norm=Norm.RMSNORM,
            positions=PositionEncoding.ROTARY,
            tied_embeddings=False,
            linear_bias=False,
            qkv_bias=False,
            dropout=False,
        )
        sharded_layer = uniform_layer(
            model, Training(4096, global_batch=1, microbatch=1), LayerShard(1, 4096, 4096, tp=tp)
        )
        source = Roofline(load_accelerator(name))
        kernel_lists = [
            (operator.forward, operator.input_gradient, operator.weight_gradient)
            for operator in sharded_layer.operators
        ]
        return sum(
            source.time_kernel(kernel).seconds
            for kernel_list in kernel_lists
            for kernels in kernel_list
            for kernel in kernels
        )

    assert layer_seconds(125) > layer_seconds(128)
    assert layer_seconds(120) < layer_seconds(125)


def test_attention_with_unequal_heads_may_run_another_kernel() -> None:
    """Heads of 192 and 128 at a fifth of the rate of equal ones take five times as long as without the constant."""
    shape = AttentionShape(1, 4096, 4096, 8, 8, 192, True, value_dim=128)
    kernel = Kernel("attention", KernelKind.ATTENTION_FORWARD, DType.BF16, 1e12, 1.0, shape)
    equal = replace(kernel, shape=replace(shape, value_dim=None))
    slow = replace(
        PLAIN,
        efficiency=replace(
            PLAIN.efficiency, attention_forward=replace(PLAIN.efficiency.attention_forward, unequal_head_ratio=0.2)
        ),
    )
    assert roofline_seconds(kernel, slow) == pytest.approx(5.0 * roofline_seconds(kernel))
    assert roofline_seconds(equal, slow) == roofline_seconds(equal)
