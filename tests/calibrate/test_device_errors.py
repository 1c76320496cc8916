"""Errors of a real device, raised by the fake `torch.cuda`: which become outcomes, and which end a session.

Messages are those of PyTorch 2.8 to 2.13 on CUDA (c10/cuda/CUDAException.cpp,
aten/src/ATen/cuda/CUDABlas.cpp), of Triton (runtime/build.py) and of cudaGetErrorString.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from clustersim.common.dtypes import DType
from clustersim.common.errors import InputError
from clustersim.cost.calibration_record import CalibrationRecord, DeviceInfo, KernelSample, MeasurementConditions
from clustersim.cost.record_file import read_record
from clustersim.cost.record_kinds import MeasurementOutcome
from clustersim.model.kernels import Kernel, MatmulShape
from clustersim.model.linear import matmul_kernel

torch = pytest.importorskip("torch")
fake_cuda_module = pytest.importorskip("tests.calibrate.fake_cuda")
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
from tests.sentences import parts  # noqa: E402

FAST_METHOD = MeasurementMethod(max_seconds=0.002, min_samples=2, max_samples=2, min_sample_seconds=0.0)
NOT_SUPPORTED = (
    "CUDA error: CUBLAS_STATUS_NOT_SUPPORTED when calling `cublasLtMatmulAlgoGetHeuristic( ltHandle, "
    "computeDesc.descriptor(), Adesc.descriptor(), Bdesc.descriptor(), Cdesc.descriptor(), Ddesc.descriptor(), "
    "preference.descriptor(), 1, &heuristicResult, &returnedResult)`"
)
CUDA_HELP_TEXT = (
    "\nSearch for `{}' in https://docs.nvidia.com/cuda/cuda-runtime-api/group__CUDART__TYPES.html for more information."
    "\nCUDA kernel errors might be asynchronously reported at some other API call, so the stacktrace below might be "
    "incorrect.\nFor debugging consider passing CUDA_LAUNCH_BLOCKING=1\nCompile with `TORCH_USE_CUDA_DSA` to enable "
    "device-side assertions.\n"
)


def accelerator_error(code: int, sentence: str, name: str = "cudaError") -> Exception:
    """The error that torch/csrc/Exceptions.cpp creates."""
    error = torch.AcceleratorError(f"CUDA error: {sentence}{CUDA_HELP_TEXT.format(name)}")
    error.error_code = code
    return error  # type: ignore[no-any-return]


def _inductor_error(inner: Exception) -> Exception:
    from torch._inductor.exc import InductorError

    return InductorError(inner, None)


ILLEGAL_ACCESS = (700, "an illegal memory access was encountered")
OUT_OF_MEMORY = (2, "out of memory")


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A fake H100."""
    with fake_tensors.fake_cuda_tensors(fake_cuda_module.FakeCuda().install(monkeypatch)) as fake:
        yield fake


def _matmul(size: int) -> Kernel:
    return matmul_kernel(f"matmul.{size}", DType.BF16, MatmulShape(size, size, size), result_bytes=2)


@pytest.mark.parametrize(
    ("error", "outcome", "reason"),
    [
        (RuntimeError(NOT_SUPPORTED), MeasurementOutcome.UNSUPPORTED, NOT_SUPPORTED),
        (accelerator_error(*OUT_OF_MEMORY), MeasurementOutcome.OUT_OF_MEMORY, "memory ran out while it ran"),
        (RuntimeError("CUDA error: out of memory"), MeasurementOutcome.OUT_OF_MEMORY, "memory ran out while it ran"),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 "
                                "GiB."), MeasurementOutcome.OUT_OF_MEMORY, "memory"),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
         MeasurementOutcome.OUT_OF_MEMORY, "memory ran out"),
        (RuntimeError("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`"),
         MeasurementOutcome.OUT_OF_MEMORY, "memory ran out"),
        (accelerator_error(9, "invalid configuration "
                              "argument"), MeasurementOutcome.UNSUPPORTED, "CUDA error: invalid conf"),
        (accelerator_error(701, "too many resources requested for "
                                "launch"), MeasurementOutcome.UNSUPPORTED, "CUDA error: too"),
        (accelerator_error(209, "no kernel image is available for execution on the "
                                "device"), MeasurementOutcome.UNSUPPORTED,
         "CUDA error: no kernel image"),
        (RuntimeError("cuDNN error: "
                      "CUDNN_STATUS_NOT_SUPPORTED"), MeasurementOutcome.UNSUPPORTED, "cuDNN error: CUDNN_STATUS_NOT"),
    ],
)  # fmt: skip
def test_kernel_error_is_its_outcome_and_others_are_measured(
    cuda: Any, error: Exception, outcome: MeasurementOutcome, reason: str
) -> None:
    cuda.fail("aten.mm", error)
    failed, other = session.measure_within_budget(
        [_matmul(512), _matmul(256)], CudaDevice(0), session.TimeBudget(None, lambda kernel: kernel.flops), FAST_METHOD
    )
    assert (failed.outcome, failed.time) == (outcome, None)
    assert failed.source.startswith(reason) and "\n" not in failed.source
    assert other.outcome is MeasurementOutcome.MEASURED


@pytest.mark.parametrize(("code", "sentence"), cuda_errors._CONTEXT_LOST_ERRORS.items())
def test_context_loss_ends_measuring(cuda: Any, code: int, sentence: str) -> None:
    """By error code where PyTorch provides it; by cudaGetErrorString's message in errors of Triton or NCCL."""
    cuda.fail("aten.mm", accelerator_error(code, sentence.removeprefix("error: ")))
    with pytest.raises(KernelFailedError, match=r"^matmul[.]64 left NVIDIA H100 80GB HBM3 unusable"):
        measure_kernel(_matmul(64), CudaDevice(0), FAST_METHOD)
    assert cuda_errors.is_context_lost(RuntimeError(f"Triton Error [CUDA]: {sentence}"))
    assert not cuda_errors.is_context_lost(accelerator_error(701, sentence))


def test_context_loss_is_detected_by_synchronizing(cuda: Any) -> None:
    """An earlier kernel was at fault: cuBLAS only reports that execution failed."""
    error = RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasGemmEx(...)`")
    assert CudaDevice(0).is_usable_after(error)
    cuda.fail("synchronize", accelerator_error(*ILLEGAL_ACCESS), sticky=True)
    assert not CudaDevice(0).is_usable_after(error)


def test_kernel_that_lost_the_device_is_recorded_and_skipped_on_resume(cuda: Any, tmp_path: Path) -> None:
    kernels = [_matmul(64), _matmul(512), _matmul(256)]
    device, record = DeviceInfo("h100-sxm-80gb", "NVIDIA H100"), tmp_path / "r.json"
    first = session.KernelSession(record, device, MeasurementConditions("2026-11-22", "", ""))
    budget = session.TimeBudget(None, lambda kernel: kernel.flops)
    cuda.fail("aten.mm", accelerator_error(*ILLEGAL_ACCESS), call=50, sticky=True)
    with pytest.raises(KernelFailedError) as error_info:
        for sample in session.measure_within_budget(first.missing_kernels(kernels), CudaDevice(0), budget, FAST_METHOD):
            first.add(sample)
    failed = error_info.value.sample
    samples = {sample.name: sample for sample in read_record(record).kernels}
    assert samples[failed.name].outcome is MeasurementOutcome.FAILED
    assert "an illegal memory access" in samples[failed.name].source
    second = session.KernelSession(record, device, MeasurementConditions("2026-11-22", "", ""))
    assert {kernel.name for kernel in second.missing_kernels(kernels)} == {
        kernel.name for kernel in kernels
    } - samples.keys()


def _failed_sample(outcome: MeasurementOutcome) -> KernelSample:
    kernel = _matmul(64)
    assert kernel.shape is not None
    return KernelSample(kernel.name, kernel.kind, kernel.dtype, kernel.shape, 1.0, 1.0, 1, None, outcome, "why")


def test_out_of_memory_is_retried_and_failed_is_not(tmp_path: Path) -> None:
    kernel_session = session.KernelSession(
        tmp_path / "r.json", DeviceInfo("h100-sxm-80gb", "H100"), MeasurementConditions("2026-11-22", "", "")
    )
    kernel_session.add(_failed_sample(MeasurementOutcome.OUT_OF_MEMORY))
    assert kernel_session.missing_kernels([_matmul(64)])
    kernel_session.add(_failed_sample(MeasurementOutcome.FAILED))
    assert not kernel_session.missing_kernels([_matmul(64)])


@pytest.mark.usefixtures("cuda")
def test_failed_probe_kernel_is_not_run_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither for the rough device rates nor for copy interference."""
    typical = typical_kernel(CudaDevice(0))
    assert typical.shape is not None
    sample = KernelSample(
        "x", typical.kind, typical.dtype, typical.shape, 1.0, 1.0, 1, None, MeasurementOutcome.FAILED, "lost"
    )
    record = CalibrationRecord(
        DeviceInfo("h100-sxm-80gb", "H100"), MeasurementConditions("2026-11-22", "", ""), (sample,)
    )
    measured: list[str] = []
    monkeypatch.setattr(selection, "measure_kernel", lambda kernel, *_: measured.append(kernel.name) or sample)
    selection.measure_rough_rates(CudaDevice(0), typical.dtype, selection.failed_signatures(record))
    assert measured == ["pace.sum"]


def _no_triton() -> Exception:
    from torch._inductor.exc import TritonMissing

    return TritonMissing(None)


def _no_cpp_compiler() -> Exception:
    from torch._inductor.exc import InvalidCxxCompiler

    return _inductor_error(InvalidCxxCompiler())


def _subprocess_error() -> Exception:
    from torch._inductor.compile_worker.subproc_pool import SubprocException

    text = (
        'Traceback (most recent call last):\n  File "build.py"\nRuntimeError: Failed to find C compiler. Please specify'
    )
    return _inductor_error(SubprocException(text, "triton_poi_fused_0"))


def _build_error() -> Exception:
    import subprocess

    return _inductor_error(
        subprocess.CalledProcessError(1, ["/usr/bin/gcc", "/tmp/main.c", "-I/usr/include/python3.11"])
    )


@pytest.mark.parametrize(
    ("compile_error", "reason"),
    [
        (_no_triton, "kernels cannot be compiled: Triton is not installed"),
        (
            lambda: _inductor_error(RuntimeError("Failed to find C compiler. Please specify via CC")),
            "there is no C compiler",
        ),
        (_subprocess_error, "there is no C compiler"),
        (_build_error, "the C compiler cannot build what Triton needs"),
        (_no_cpp_compiler, "there is no C++ compiler"),
    ],
)
def test_compile_error_names_the_missing_tool(cuda: Any, compile_error: Any, reason: str) -> None:
    cuda.fail("aten.mm", compile_error())
    sample = measure_kernel(_matmul(64), CudaDevice(0), FAST_METHOD)
    assert sample.outcome is MeasurementOutcome.NO_COMPILER
    assert reason in sample.source and "\n" not in sample.source


@pytest.mark.parametrize(
    ("error", "kind", "message"),
    [
        (accelerator_error(*OUT_OF_MEMORY), InputError, "too large"),
        (
            _inductor_error(RuntimeError("Failed to find C compiler.")),
            InputError,
            "training.fused: kernels cannot be compiled",
        ),
        (
            UnsupportedKernel("swiglu: there is none"),
            InputError,
            "training.fused: swiglu: there is none; set it to false",
        ),
        (accelerator_error(*ILLEGAL_ACCESS), DeviceLostError, "training ... NVIDIA H100 80GB HBM3 unusable"),
    ],
)
@pytest.mark.usefixtures("cuda")
def test_training_errors_are_explained_in_one_sentence(error: Exception, kind: type[Exception], message: str) -> None:
    explained = explain_training_error(error, CudaDevice(0), "too large")
    assert isinstance(explained, kind) and parts(message).match(str(explained))


@pytest.mark.usefixtures("cuda")
def test_internal_errors_are_not_explained_away() -> None:
    assert explain_training_error(KeyError("x"), CudaDevice(0), "too large") is None
    assert explain_training_error(InputError("no such layer"), CudaDevice(0), "too large") is None


def test_compiler_rejections_are_not_missing_tools() -> None:
    import subprocess

    assert (
        compiler.missing_tool(_inductor_error(RuntimeError("out of resource: shared memory, Required: 262144"))) is None
    )
    assert (
        compiler.missing_tool(_inductor_error(subprocess.CalledProcessError(255, ["/opt/triton/bin/ptxas", "-v"])))
        is None
    )
    assert compiler.summary_line(_inductor_error(ValueError("first\nsecond"))) == "first"


def test_kernels_without_a_compiler_are_retried_once_there_is_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel_session = session.KernelSession(
        tmp_path / "r.json", DeviceInfo("h100-sxm-80gb", "H100"), MeasurementConditions("2026-11-22", "", "")
    )
    kernel_session.add(_failed_sample(MeasurementOutcome.NO_COMPILER))
    executables = {"gcc": None, "clang": None, "/opt/bin/cc": None}
    monkeypatch.setattr(compiler, "find_spec", lambda _: object())
    monkeypatch.setattr(compiler.shutil, "which", executables.get)
    monkeypatch.delenv("CC", raising=False)
    assert not kernel_session.missing_kernels([_matmul(64)])
    executables["gcc"] = "/usr/bin/gcc"
    assert kernel_session.missing_kernels([_matmul(64)])
    monkeypatch.setenv("CC", "/opt/bin/cc")
    assert not kernel_session.missing_kernels([_matmul(64)])
    monkeypatch.delenv("CC")
    monkeypatch.setattr(compiler, "find_spec", lambda _: None)
    assert not kernel_session.missing_kernels([_matmul(64)])


def test_copies_without_pinned_memory_are_skipped_with_a_message(cuda: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """The third allocation for copies to the device fails; copies from and within the device are measured."""
    cuda.fail("pinned", accelerator_error(*OUT_OF_MEMORY), call=3)
    measured = [(sample.route, sample.bytes) for sample in copy_benchmark.measure_copies(CudaDevice(0), FAST_METHOD)]
    sizes = [float(size) for size in copy_benchmark._SIZES]
    assert measured == [
        *(("device", size) for size in sizes),
        *(("host_to_device", size) for size in sizes[:2]),
        *(("device_to_host", size) for size in sizes),
    ]
    message = capsys.readouterr().err
    assert parts("copies host_to_device: no memory ... 16 MiB and more ... left out\n").fullmatch(message)


def test_copy_that_loses_the_device_is_not_out_of_memory(cuda: Any) -> None:
    cuda.fail("pinned", accelerator_error(*ILLEGAL_ACCESS), sticky=True)
    with pytest.raises(torch.AcceleratorError, match="illegal memory access"):
        list(copy_benchmark.measure_copies(CudaDevice(0), FAST_METHOD))
