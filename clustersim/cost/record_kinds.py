"""Which kinds of records, measurements and launches does a calibration record know?"""

from enum import Enum


class RecordOrigin(Enum):
    """Where the samples come from."""

    MEASURED = "measured"  # on the machine that the record names
    PUBLISHED = "published"  # by others, each sample with its source
    DERIVED = "derived"  # from the record of another accelerator, as `derivation` says


class MeasurementOutcome(Enum):
    """Outcome of an attempted measurement."""

    MEASURED = "measured"
    OUT_OF_MEMORY = "out_of_memory"
    UNSUPPORTED = "unsupported"  # the device or the library has no such kernel
    NO_COMPILER = "no_compiler"  # needs Triton and a C compiler
    FAILED = "failed"  # left the device unusable, which ended the session
    ABSENT = "absent"  # a profiled step ran no such kernel: its work is part of others, or not done


class LaunchMode(Enum):
    """Mode in which the host launches a step."""

    EAGER = "eager"  # Python and autograd, operator by operator
    FSDP = "fsdp"  # the same with the hooks of `fully_shard`
    DTENSOR = "dtensor"  # the same with distributed tensors
    COMPILED = "compiled"  # `torch.compile`
    GRAPH = "cuda_graph"  # captured once, launched as one graph
