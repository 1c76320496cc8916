"""Detection of the compiler toolchain for fused kernels, and explanation of its errors.

`torch.compile` makes Triton kernels on a GPU. That takes Triton (a package of its own) and a C compiler:
Triton builds a module that launches them with `CC`, gcc or clang, against Python's header files
(triton/runtime/build.py). Without Triton PyTorch raises `torch._inductor.exc.TritonMissing`; without a
compiler Triton raises a RuntimeError, "Failed to find C compiler. Please specify via CC environment
variable", which PyTorch wraps (`InductorError`), or names in the text of a `SubprocException` where it
compiles in other processes; one that cannot build it raises a CalledProcessError. On a CPU PyTorch compiles
C++ (`InvalidCxxCompiler`).
"""

import os
import re
import shutil
from collections.abc import Iterator
from importlib.util import find_spec
from subprocess import CalledProcessError
from typing import Final

_ERROR_CAUSES: Final = (  # text of an error, its explanation
    ("Cannot find a working triton installation", "Triton is not installed, or too old for PyTorch"),
    ("Failed to find C compiler", "there is no C compiler, which Triton needs; install gcc, or name one in CC"),
    ("No working C++ compiler found", "there is no C++ compiler; install g++, or name one in CXX"),
    ("Python.h", "Python's header files are missing, which Triton needs; install python3-dev"),
)
_COMPILER: Final = re.compile(r"\b(gcc|cc|clang)\b")
_BUILD_FAILURE: Final = (
    "the C compiler cannot build what Triton needs; Python's header files (python3-dev) may be missing"
)


def is_available() -> bool:
    """Whether GPU kernels can probably be compiled here (without trying)."""
    configured = os.environ.get("CC")
    compilers = [configured] if configured else ["gcc", "clang"]
    return find_spec("triton") is not None and any(shutil.which(compiler) for compiler in compilers)


def missing_tool(error: BaseException) -> str | None:
    """A sentence naming the tool that a compilation error is missing; None for other errors."""
    for linked in _error_chain(error):
        if isinstance(linked, CalledProcessError) and _COMPILER.search(str(linked.cmd)):
            return f"kernels cannot be compiled: {_BUILD_FAILURE}"
        for pattern, explanation in _ERROR_CAUSES:
            if pattern in str(linked):
                return f"kernels cannot be compiled: {explanation}"
    return None


def summary_line(error: BaseException) -> str:
    """The most informative line of an error or of the error that it wraps."""
    wrapped = getattr(error, "inner_exception", error)  # of torch._dynamo.exc.BackendCompilerFailed
    lines = [line.strip() for line in str(wrapped).splitlines() if line.strip()]
    if not lines:
        return type(wrapped).__name__
    return lines[-1] if lines[0].endswith(":") else lines[0]


def _error_chain(error: BaseException | None) -> Iterator[BaseException]:
    """An error, what it wraps, and what it was raised from."""
    visited: set[int] = set()
    while error is not None and id(error) not in visited:
        visited.add(id(error))
        yield error
        error = getattr(error, "inner_exception", None) or error.__cause__ or error.__context__
