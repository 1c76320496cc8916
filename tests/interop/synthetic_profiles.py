"""Synthetic traces in the format of PyTorch's profiler: a host launch for each kernel, annotated steps."""

import json
from pathlib import Path
from typing import Any

GEMM = "nvjet_tst_192x192_64x4_2x1_v_bz_TNT"
NCCL = "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
ALL_REDUCE_ARGS = {
    "Collective name": "allreduce", "In msg nelems": 1024, "Out msg nelems": 1024, "Group size": 2,
    "dtype": "BFloat16", "Process Group Name": "7", "Process Group Description": "default_pg",
    "Process Group Ranks": "[0, 1]",
}  # fmt: skip


class SyntheticProfile:
    """One rank's trace; times are microseconds."""

    def __init__(self, rank: int = 0, world: int = 1, base: int = 0) -> None:
        self.events: list[dict[str, Any]] = []
        self.content: dict[str, Any] = {
            "schemaVersion": 1,
            "deviceProperties": [{"id": 0, "name": "NVIDIA H100 80GB HBM3"}],
            "distributedInfo": {"backend": "nccl", "rank": rank, "world_size": world},
            "baseTimeNanoseconds": base,
            "traceEvents": self.events,
        }

    def add_step(self, step_number: int, begin: float, duration: float) -> "SyntheticProfile":
        mark = {"ph": "X", "name": f"ProfilerStep#{step_number}", "pid": 7, "tid": 7, "ts": begin, "dur": duration}
        self.events.append({**mark, "cat": "user_annotation"})
        self.events.append({**mark, "cat": "gpu_user_annotation", "ts": begin + 1000.0})  # the GPU is late
        return self

    def add_kernel(
        self, name: str, launch: float, start: float, duration: float, stream: int = 7, cat: str = "kernel", **args: Any
    ) -> "SyntheticProfile":
        """args: `operator_dims` of the operator, and further args of the kernel event, `_` for a space."""
        event_id = len(self.events)
        dims = args.pop("dims", None)
        if dims is not None:
            operator = {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "pid": 7, "tid": 7, "ts": launch, "dur": 1.0}
            self.events.append({**operator, "args": {"External id": event_id, "Input Dims": dims}})
        event_args = {"stream": stream, "correlation": event_id, "External id": event_id, **args}
        self.events.append(
            {"ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "pid": 7, "tid": 7, "ts": launch,
             "dur": 1.0, "args": {"correlation": event_id}}
        )  # fmt: skip
        self.events.append(
            {
                "ph": "X",
                "cat": cat,
                "name": name,
                "pid": 0,
                "tid": stream,
                "ts": start,
                "dur": duration,
                "args": event_args,
            }
        )
        return self

    def write(self, path: Path) -> Path:
        path.write_text(json.dumps(self.content))
        return path


def three_steps(rank: int = 0, world: int = 1, base: int = 0) -> SyntheticProfile:
    """Steps of 100, 140 and 120 us on the GPU, which runs 50 us behind the host; the fourth one is truncated.

    Each has a matmul of 60 us, which hides the first 20 of 40 us of an all-reduce, and a copy to the host of 5
    us.
    """
    profile = SyntheticProfile(rank, world, base)
    begin = 1000.0
    for step_number, duration in enumerate((100.0, 140.0, 120.0, 70.0), start=5):
        profile.add_step(step_number, begin - 50.0, duration)
        profile.add_kernel(GEMM, begin - 49.0, begin, 60.0, dims=[[64, 32], [32, 16]])
        profile.add_kernel(NCCL, begin - 45.0, begin + 40.0, 40.0, stream=20, **ALL_REDUCE_ARGS)
        profile.add_kernel("Memcpy DtoH (Device -> Pinned)", begin - 40.0, begin + 85.0, 5.0, cat="gpu_memcpy")
        begin += duration
    return profile
