"""A record reproduces its own samples, whatever else was measured, and survives writing and reading unchanged."""

from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clustersim.common.dtypes import DType
from clustersim.cost.calibration_record import (
    COPY,
    CalibrationRecord,
    CopySample,
    DeviceInfo,
    InterferenceSample,
    KernelSample,
    MeasurementConditions,
    TimeStatistics,
)
from clustersim.cost.measured_kernels import MeasuredKernels
from clustersim.cost.record_file import read_record, write_record
from clustersim.cost.record_kinds import MeasurementOutcome, RecordOrigin
from clustersim.cost.record_scaling import scale_record
from clustersim.cost.timing import Bottleneck, Provenance
from clustersim.model.kernels import (
    AttentionShape,
    Kernel,
    KernelKind,
    KernelShape,
    MatmulLayout,
    MatmulShape,
    MemoryBoundOp,
    MemoryBoundShape,
)
from clustersim.program.task import CollectiveType
from tests.cost.records import (
    CONDITIONS,
    DEVICE,
    H100,
    MODEL,
    collective_fit,
    collective_samples,
    kernel_fit_of,
    kernel_sample,
    matmul_kernel,
)

SIZES = st.integers(1, 1 << 16)
SECONDS = st.floats(1e-7, 1e3)
TEXT = st.text(max_size=12)

MATMULS = st.builds(
    MatmulShape,
    m=SIZES,
    n=SIZES,
    k=SIZES,
    batch=st.integers(1, 64),
    operands=st.sampled_from(MatmulLayout),
    accumulated=st.none() | st.sampled_from(DType),
)
ATTENTIONS = st.builds(AttentionShape, SIZES, SIZES, SIZES, SIZES, SIZES, st.integers(1, 256), st.booleans())
STREAMS = st.builds(
    MemoryBoundShape,
    st.sampled_from(MemoryBoundOp),
    SIZES,
    SIZES,
    st.booleans(),
    st.booleans(),
    st.integers(0, 1 << 17),
    st.lists(st.sampled_from(DType), max_size=3).map(tuple),
)


@st.composite
def spreads(draw: st.DrawFn) -> TimeStatistics:
    p5, seconds, p95 = sorted(draw(st.tuples(SECONDS, SECONDS, SECONDS)))
    return TimeStatistics(seconds, p5, p95, draw(st.integers(1, 1000)), draw(st.integers(0, 10)))


@st.composite
def kernel_samples(draw: st.DrawFn) -> KernelSample:
    shape: KernelShape = draw(st.one_of(MATMULS, ATTENTIONS, STREAMS))
    kind = draw(st.sampled_from(KernelKind))
    outcome = draw(st.sampled_from(MeasurementOutcome))
    time = draw(spreads()) if outcome is MeasurementOutcome.MEASURED else None
    amounts = draw(st.floats(0.0, 1e18)), draw(st.floats(0.0, 1e15)), draw(st.integers(1, 20))
    return KernelSample(draw(TEXT), kind, draw(st.sampled_from(DType)), shape, *amounts, time, outcome, draw(TEXT))


OVERLAPPED_KINDS = st.sampled_from([COPY, *(kind.value for kind in CollectiveType)])


@st.composite
def records(draw: st.DrawFn) -> CalibrationRecord:
    kernels = draw(st.lists(kernel_samples(), max_size=6, unique_by=lambda sample: sample.signature))
    timed_samples = [sample for sample in kernels if sample.time is not None]
    overlapped_samples = [
        InterferenceSample(
            sample, draw(st.sampled_from([COPY, *(kind.value for kind in CollectiveType)])), draw(spreads())
        )
        for sample in timed_samples[:1]
    ]
    payloads = draw(st.lists(st.floats(1.0, 1e12), max_size=4, unique=True))
    measured = st.dictionaries(TEXT, st.floats(-50.0, 1e4), max_size=2)
    return CalibrationRecord(
        device=draw(st.builds(DeviceInfo, TEXT, TEXT, st.floats(0.0, 1e12), st.integers(0, 200), TEXT)),
        conditions=MeasurementConditions(draw(TEXT), draw(TEXT), draw(TEXT), draw(st.integers(1, 8)), draw(measured)),
        kernels=tuple(kernels),
        collectives=collective_samples({payload: draw(SECONDS) for payload in payloads}),
        copies=(CopySample("device", 1e9, draw(spreads())),),
        interference=tuple(overlapped_samples),
        launch_interval=draw(st.none() | SECONDS),
        kernel_fit=draw(st.none() | st.just(kernel_fit_of(matmul_bf16=0.1))),
        collective_fits=(collective_fit(1e-5, 1e11, 0.1),),
        origin=draw(st.sampled_from(RecordOrigin)),
        derivation=draw(TEXT),
    )


@given(records())
def test_a_record_that_is_written_and_read_is_the_same(record: CalibrationRecord):
    with TemporaryDirectory() as folder:
        path = Path(folder) / "record.json"
        write_record(record, path)
        assert read_record(path) == record
        assert [item.name for item in Path(folder).iterdir()] == ["record.json"]


@given(
    st.lists(st.tuples(MATMULS, SECONDS), min_size=1, max_size=8, unique_by=lambda timed_shape: timed_shape[0]),
    st.data(),
)
def test_a_measured_kernel_does_not_depend_on_other_samples(measured: list[tuple[MatmulShape, float]], data):
    """Nor on the order of samples or a fit; a time shorter than the launch interval is raised to it."""
    samples = [kernel_sample(matmul_kernel(shape), seconds, 0.1) for shape, seconds in measured]
    chosen = data.draw(st.sampled_from(samples))
    expected = MeasuredKernels(CalibrationRecord(DEVICE, CONDITIONS, (chosen,)), H100).time_kernel(chosen.kernel)
    full_record = CalibrationRecord(
        DEVICE, CONDITIONS, tuple(data.draw(st.permutations(samples))), kernel_fit=kernel_fit_of()
    )
    timing = MeasuredKernels(full_record, H100).time_kernel(chosen.kernel)
    assert timing == expected
    assert timing.provenance is Provenance.MEASURED
    assert chosen.time is not None
    assert timing.seconds == max(chosen.time.seconds, H100.efficiency.launch_interval)


@given(st.lists(MATMULS, min_size=1, max_size=12, unique=True), MATMULS)
def test_samples_equal_to_the_model_reproduce_the_model(shapes: list[MatmulShape], queried: MatmulShape):
    """Wherever the kernel lies; between samples the result is exactly the model's."""
    kernels = [matmul_kernel(shape) for shape in shapes]
    record = CalibrationRecord(
        DEVICE, CONDITIONS, tuple(kernel_sample(kernel, MODEL.time_kernel(kernel).seconds) for kernel in kernels)
    )
    timing = MeasuredKernels(record, H100).time_kernel(matmul_kernel(queried))
    assert timing.seconds == MODEL.time_kernel(matmul_kernel(queried)).seconds


@given(st.lists(MATMULS, min_size=4, max_size=12, unique=True), MATMULS, st.floats(0.25, 4.0))
def test_scaling_all_samples_scales_the_interpolation(shapes, queried: MatmulShape, factor: float):
    """Samples that all take `factor` times as long scale predictions as much, except for shrinkage of the level.

    The level of n samples of equal ratio is met up to a fraction of about (1 + noise) / (n level), less than 13 %
    of it.
    """
    kernels = [matmul_kernel(shape) for shape in shapes]
    record = CalibrationRecord(
        DEVICE,
        CONDITIONS,
        tuple(kernel_sample(kernel, factor * MODEL.time_kernel(kernel).seconds) for kernel in kernels),
    )
    timing, model = (
        MeasuredKernels(record, H100).time_kernel(matmul_kernel(queried)),
        MODEL.time_kernel(matmul_kernel(queried)),
    )
    if timing.provenance is Provenance.INTERPOLATED:
        assert timing.seconds / model.seconds == pytest.approx(factor, rel=0.2)


@given(
    st.lists(st.one_of(MATMULS, STREAMS), min_size=1, max_size=6, unique=True),
    st.floats(0.25, 4.0),
    st.floats(0.25, 4.0),
)
def test_a_scaled_record_scales_each_kernels_bottleneck(shapes, compute: float, bandwidth: float):
    kernels = [_kernel(shape) for shape in shapes]
    record = CalibrationRecord(
        DEVICE, CONDITIONS, tuple(kernel_sample(kernel, MODEL.time_kernel(kernel).seconds) for kernel in kernels)
    )
    scaled_record = scale_record(record, compute=compute, bandwidth=bandwidth)
    ratios = {Bottleneck.COMPUTE: compute, Bottleneck.MEMORY: bandwidth, Bottleneck.LAUNCH: 1.0}
    for before, after in zip(record.kernels, scaled_record.kernels, strict=True):
        assert before.time is not None
        assert after.time is not None
        ratio = ratios[MODEL.time_kernel(before.kernel).bottleneck]
        assert after.time.seconds == pytest.approx(before.time.seconds / ratio, rel=1e-12)
        assert after.time.dispersion == pytest.approx(before.time.dispersion, abs=1e-12)
    assert scaled_record.origin is RecordOrigin.DERIVED


@given(st.lists(MATMULS, min_size=1, max_size=6, unique=True))
def test_scaling_by_one_changes_only_the_origin(shapes: list[MatmulShape]):
    kernels = [matmul_kernel(shape) for shape in shapes]
    record = CalibrationRecord(
        DEVICE, CONDITIONS, tuple(kernel_sample(kernel, MODEL.time_kernel(kernel).seconds) for kernel in kernels)
    )
    unscaled = scale_record(record, compute=1.0, bandwidth=1.0)
    assert replace(unscaled, origin=RecordOrigin.MEASURED, derivation="") == record


def _kernel(shape: KernelShape) -> Kernel:
    if isinstance(shape, MatmulShape):
        return matmul_kernel(shape)
    elements = getattr(shape, "elements", 1)
    return Kernel("streamed", KernelKind.NORM, DType.BF16, 0.0, 4.0 * elements, shape)
