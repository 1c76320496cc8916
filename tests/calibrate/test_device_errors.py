"""Errors of a real machine, raised by a stand-in for `torch.cuda`: which are rows, and which end a session, and how.

Sentences are those of PyTorch 2.8 to 2.13 on CUDA (c10/cuda/CUDAException.cpp, aten/src/ATen/cuda/CUDABlas.cpp), of
Triton (runtime/build.py) and of cudaGetErrorString.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from clustersim.common.dtypes import DType
from clustersim.common.errors import InputError
from clustersim.cost.calibration_record import (
    CalibrationRecord,
    DeviceInfo,
    KernelSample,
    MeasurementConditions,
    MeasurementOutcome,
)
from clustersim.cost.record_file import read_record
from clustersim.model.kernels import Kernel, MatmulShape
from clustersim.model.linear import matmul_kernel

torch = pytest.importorskip("torch")
fakes = pytest.importorskip("tests.calibrate.fake_cuda")
from calibrate.devices import cuda_errors  # noqa: E402 - after torch is known to be there
from calibrate.devices.cuda import CudaDevice  # noqa: E402
from calibrate.devices.device import DeviceLostError  # noqa: E402
from calibrate.kernels import compiler, copy_benchmark, selection, session  # noqa: E402
from calibrate.kernels.copy_interference import typical_kernel  # noqa: E402
from calibrate.kernels.formulas import UnsupportedKernel  # noqa: E402
from calibrate.kernels.measure import KernelFailedError, measure_kernel  # noqa: E402
from calibrate.kernels.timing import MeasurementMethod  # noqa: E402
from calibrate.kernels.training_errors import explain_training_error  # noqa: E402
from tests.calibrate import fake_tensors  # noqa: E402

FAST = MeasurementMethod(max_seconds=0.002, min_samples=2, max_samples=2, min_sample_seconds=0.0)
NOT_SUPPORTED = (
    "CUDA error: CUBLAS_STATUS_NOT_SUPPORTED when calling `cublasLtMatmulAlgoGetHeuristic( ltHandle, "
    "computeDesc.descriptor(), Adesc.descriptor(), Bdesc.descriptor(), Cdesc.descriptor(), Ddesc.descriptor(), "
    "preference.descriptor(), 1, &heuristicResult, &returnedResult)`"
)
HELP = (
    "\nSearch for `{}' in https://docs.nvidia.com/cuda/cuda-runtime-api/group__CUDART__TYPES.html for more information."
    "\nCUDA kernel errors might be asynchronously reported at some other API call, so the stacktrace below might be "
    "incorrect.\nFor debugging consider passing CUDA_LAUNCH_BLOCKING=1\nCompile with `TORCH_USE_CUDA_DSA` to enable "
    "device-side assertions.\n"
)


def accelerator_error(code: int, sentence: str, name: str = "cudaError") -> Exception:
    """As torch/csrc/Exceptions.cpp makes it."""
    error = torch.AcceleratorError(f"CUDA error: {sentence}{HELP.format(name)}")
    error.error_code = code
    return error  # type: ignore[no-any-return]


def _wrapped(inner: Exception) -> Exception:
    from torch._inductor.exc import InductorError

    return InductorError(inner, None)


ILLEGAL = (700, "an illegal memory access was encountered")
MEMORY = (2, "out of memory")


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """An H100 that is not there."""
    with fake_tensors.on(fakes.FakeCuda().install(monkeypatch)) as made:
        yield made


def _matmul(size: int) -> Kernel:
    return matmul_kernel(f"matmul.{size}", DType.BF16, MatmulShape(size, size, size), result_bytes=2)


@pytest.mark.parametrize(
    ("error", "outcome", "reason"),
    [
        (RuntimeError(NOT_SUPPORTED), MeasurementOutcome.UNSUPPORTED, NOT_SUPPORTED),
        (accelerator_error(*MEMORY), MeasurementOutcome.OUT_OF_MEMORY, "memory ran out while it ran"),
        (RuntimeError("CUDA error: out of memory"), MeasurementOutcome.OUT_OF_MEMORY, "memory ran out while it ran"),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."), MeasurementOutcome.OUT_OF_MEMORY, "memory"),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
         MeasurementOutcome.OUT_OF_MEMORY, "memory ran out"),
        (RuntimeError("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`"),
         MeasurementOutcome.OUT_OF_MEMORY, "memory ran out"),
        (accelerator_error(9, "invalid configuration argument"), MeasurementOutcome.UNSUPPORTED, "CUDA error: invalid conf"),
        (accelerator_error(701, "too many resources requested for launch"), MeasurementOutcome.UNSUPPORTED, "CUDA error: too"),
        (accelerator_error(209, "no kernel image is available for execution on the device"), MeasurementOutcome.UNSUPPORTED,
         "CUDA error: no kernel image"),
        (RuntimeError("cuDNN error: CUDNN_STATUS_NOT_SUPPORTED"), MeasurementOutcome.UNSUPPORTED, "cuDNN error: CUDNN_STATUS_NOT"),
    ],
)  # fmt: skip
def test_an_error_of_one_kernel_is_its_row_and_the_others_are_measured(
    cuda: Any, error: Exception, outcome: MeasurementOutcome, reason: str
) -> None:
    cuda.fail("aten.mm", error)
    failed, other = session.measure_within_budget(
        [_matmul(512), _matmul(256)], CudaDevice(0), session.TimeBudget(None, lambda kernel: kernel.flops), FAST
    )
    assert (failed.outcome, failed.time) == (outcome, None)
    assert failed.source.startswith(reason) and "\n" not in failed.source
    assert other.outcome is MeasurementOutcome.MEASURED


@pytest.mark.parametrize(("code", "sentence"), cuda_errors._CONTEXT_LOST_ERRORS.items())
def test_an_error_after_which_the_context_is_lost_ends_measuring(cuda: Any, code: int, sentence: str) -> None:
    """By its number, where PyTorch gives it; by cudaGetErrorString's sentence, where Triton or NCCL has it."""
    cuda.fail("aten.mm", accelerator_error(code, sentence.removeprefix("error: ")))
    with pytest.raises(KernelFailedError, match=r"^matmul[.]64 left NVIDIA H100 80GB HBM3 unusable"):
        measure_kernel(_matmul(64), CudaDevice(0), FAST)
    assert cuda_errors.is_context_lost(RuntimeError(f"Triton Error [CUDA]: {sentence}"))
    assert not cuda_errors.is_context_lost(accelerator_error(701, sentence))


def test_a_lost_context_is_found_out_by_asking_whatever_the_error_says(cuda: Any) -> None:
    """A kernel before it was at fault: cuBLAS only says that it could not."""
    error = RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasGemmEx(...)`")
    assert CudaDevice(0).is_usable_after(error)
    cuda.fail("synchronize", accelerator_error(*ILLEGAL), sticky=True)
    assert not CudaDevice(0).is_usable_after(error)


def test_what_lost_the_device_is_written_and_the_same_command_goes_on_without_it(cuda: Any, tmp_path: Path) -> None:
    kernels = [_matmul(64), _matmul(512), _matmul(256)]
    device, record = DeviceInfo("h100-sxm-80gb", "NVIDIA H100"), tmp_path / "r.json"
    first = session.KernelSession(record, device, MeasurementConditions("2026-11-22", "", ""))
    parts = session.TimeBudget(None, lambda kernel: kernel.flops)
    cuda.fail("aten.mm", accelerator_error(*ILLEGAL), call=50, sticky=True)
    with pytest.raises(KernelFailedError) as ended:
        for made in session.measure_within_budget(first.missing_kernels(kernels), CudaDevice(0), parts, FAST):
            first.add(made)
    lost = ended.value.sample
    found = {kernel_sample.name: kernel_sample for kernel_sample in read_record(record).kernels}
    assert found[lost.name].outcome is MeasurementOutcome.FAILED
    assert "an illegal memory access" in found[lost.name].source
    again = session.KernelSession(record, device, MeasurementConditions("2026-11-22", "", ""))
    assert {missing_kernel.name for missing_kernel in again.missing_kernels(kernels)} == {
        item.name for item in kernels
    } - found.keys()


def _row(outcome: MeasurementOutcome) -> KernelSample:
    kernel = _matmul(64)
    assert kernel.shape is not None
    return KernelSample(kernel.name, kernel.kind, kernel.dtype, kernel.shape, 1.0, 1.0, 1, None, outcome, "why")


def test_a_kernel_that_had_no_memory_and_then_loses_the_device_is_not_met_again(tmp_path: Path) -> None:
    made = session.KernelSession(
        tmp_path / "r.json", DeviceInfo("h100-sxm-80gb", "H100"), MeasurementConditions("2026-11-22", "", "")
    )
    made.add(_row(MeasurementOutcome.OUT_OF_MEMORY))
    assert made.missing_kernels([_matmul(64)])
    made.add(_row(MeasurementOutcome.FAILED))
    assert not made.missing_kernels([_matmul(64)])


@pytest.mark.usefixtures("cuda")
def test_a_usual_kernel_that_has_lost_the_device_is_not_met_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither where the machine's pace is told by it, nor beside a copy."""
    typical = typical_kernel(CudaDevice(0))
    assert typical.shape is not None
    made = KernelSample(
        "x", typical.kind, typical.dtype, typical.shape, 1.0, 1.0, 1, None, MeasurementOutcome.FAILED, "lost"
    )
    record = CalibrationRecord(
        DeviceInfo("h100-sxm-80gb", "H100"), MeasurementConditions("2026-11-22", "", ""), (made,)
    )
    asked: list[str] = []
    monkeypatch.setattr(selection, "measure_kernel", lambda kernel, *_: asked.append(kernel.name) or made)
    selection.measure_rough_rates(CudaDevice(0), typical.dtype, selection.failed_signatures(record))
    assert asked == ["pace.sum"]


def _no_triton() -> Exception:
    from torch._inductor.exc import TritonMissing

    return TritonMissing(None)


def _no_cpp() -> Exception:
    from torch._inductor.exc import InvalidCxxCompiler

    return _wrapped(InvalidCxxCompiler())


def _elsewhere() -> Exception:
    from torch._inductor.compile_worker.subproc_pool import SubprocException

    text = (
        'Traceback (most recent call last):\n  File "build.py"\nRuntimeError: Failed to find C compiler. Please specify'
    )
    return _wrapped(SubprocException(text, "triton_poi_fused_0"))


def _cannot_build() -> Exception:
    import subprocess

    return _wrapped(subprocess.CalledProcessError(1, ["/usr/bin/gcc", "/tmp/main.c", "-I/usr/include/python3.11"]))


@pytest.mark.parametrize(
    ("made", "reason"),
    [
        (_no_triton, "kernels cannot be compiled: Triton is not installed"),
        (lambda: _wrapped(RuntimeError("Failed to find C compiler. Please specify via CC")), "there is no C compiler"),
        (_elsewhere, "there is no C compiler"),
        (_cannot_build, "the C compiler cannot build what Triton needs"),
        (_no_cpp, "there is no C++ compiler"),
    ],
)
def test_a_kernel_that_cannot_be_compiled_says_which_tool_is_missing(cuda: Any, made: Any, reason: str) -> None:
    cuda.fail("aten.mm", made())
    found = measure_kernel(_matmul(64), CudaDevice(0), FAST)
    assert found.outcome is MeasurementOutcome.NO_COMPILER
    assert reason in found.source and "\n" not in found.source


@pytest.mark.parametrize(
    ("error", "kind", "said"),
    [
        (accelerator_error(*MEMORY), InputError, "too large"),
        (
            _wrapped(RuntimeError("Failed to find C compiler.")),
            InputError,
            "training.fused: kernels cannot be compiled",
        ),
        (
            UnsupportedKernel("swiglu: there is none"),
            InputError,
            "training.fused: swiglu: there is none; set it to false",
        ),
        (accelerator_error(*ILLEGAL), DeviceLostError, "training left NVIDIA H100 80GB HBM3 unusable for this process"),
    ],
)
@pytest.mark.usefixtures("cuda")
def test_what_training_meets_is_a_sentence(error: Exception, kind: type[Exception], said: str) -> None:
    found = explain_training_error(error, CudaDevice(0), "too large")
    assert isinstance(found, kind) and str(found).startswith(said)


@pytest.mark.usefixtures("cuda")
def test_errors_of_our_own_are_not_explained_away() -> None:
    assert explain_training_error(KeyError("x"), CudaDevice(0), "too large") is None
    assert explain_training_error(InputError("no such layer"), CudaDevice(0), "too large") is None


def test_what_the_compiler_itself_refuses_is_no_missing_tool() -> None:
    import subprocess

    assert compiler.missing_tool(_wrapped(RuntimeError("out of resource: shared memory, Required: 262144"))) is None
    assert compiler.missing_tool(_wrapped(subprocess.CalledProcessError(255, ["/opt/triton/bin/ptxas", "-v"]))) is None
    assert compiler.summary_line(_wrapped(ValueError("first\nsecond"))) == "first"


def test_kernels_that_lacked_a_compiler_are_missing_once_there_is_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = session.KernelSession(
        tmp_path / "r.json", DeviceInfo("h100-sxm-80gb", "H100"), MeasurementConditions("2026-11-22", "", "")
    )
    made.add(_row(MeasurementOutcome.NO_COMPILER))
    there = {"gcc": None, "clang": None, "/opt/bin/cc": None}
    monkeypatch.setattr(compiler, "find_spec", lambda _: object())
    monkeypatch.setattr(compiler.shutil, "which", there.get)
    monkeypatch.delenv("CC", raising=False)
    assert not made.missing_kernels([_matmul(64)])
    there["gcc"] = "/usr/bin/gcc"
    assert made.missing_kernels([_matmul(64)])
    monkeypatch.setenv("CC", "/opt/bin/cc")
    assert not made.missing_kernels([_matmul(64)])
    monkeypatch.delenv("CC")
    monkeypatch.setattr(compiler, "find_spec", lambda _: None)
    assert not made.missing_kernels([_matmul(64)])


def test_copies_without_pinned_memory_are_left_out_with_a_sentence(
    cuda: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """The third that a copy to the device asks for; copies from it and within it are measured."""
    cuda.fail("pinned", accelerator_error(*MEMORY), call=3)
    found = [
        (measure_copy.route, measure_copy.bytes) for measure_copy in copy_benchmark.measure_copies(CudaDevice(0), FAST)
    ]
    sizes = [float(size) for size in copy_benchmark._SIZES]
    assert found == [
        *(("device", size) for size in sizes),
        *(("host_to_device", size) for size in sizes[:2]),
        *(("device_to_host", size) for size in sizes),
    ]
    assert capsys.readouterr().err == (
        "copies host_to_device: no memory, or pinned memory of the host, for 16 MiB and more; they are left out\n"
    )


def test_a_copy_that_loses_the_device_is_no_lack_of_memory(cuda: Any) -> None:
    cuda.fail("pinned", accelerator_error(*ILLEGAL), sticky=True)
    with pytest.raises(torch.AcceleratorError, match="illegal memory access"):
        list(copy_benchmark.measure_copies(CudaDevice(0), FAST))
