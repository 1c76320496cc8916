"""What does the training framework cost in addition to the kernels of a step: launches, memory, overheads?

The host (the CPU process that drives one GPU) launches kernels one after the other, ahead of the GPU
where it can: `launch_seconds` is its time per forward kernel, including the Python around it,
`backward_launch_seconds` per backward kernel, including autograd and parameter hooks. Kernels are those
that the simulator counts; some are several in reality. `collective_seconds` is its time per collective:
the library's own launch, the events and waits that order streams, and the work object the caller may wait
for. `moe_launch_seconds` is its time per kernel of a MoE model, in any pass: the kernels of such a model
are short and its host gets ahead less often, so launch time is exposed. With CUDA graphs the kernels and
collectives of a pass are captured once and launched as one graph, in `graph_launch_seconds`: all of a
pass (Megatron-Core's `full_iteration`, or one graph per layer, whose launches are few compared with its
contents), or all that does not run on expert ranks (its scopes `attn`, `moe_router` and
`moe_preprocess`), since the number of received tokens is not known in advance. Assumed: the GPU runs
graph nodes as it runs kernels launched ahead. `cost.host_launch` says when launches are exposed.
`p2p_seconds` is what hosts add to each message between pipeline stages (`cost.p2p_overhead`). Caching
allocator, communicators and matmul workspaces take device memory in addition to tensors; private memory
pools of graphs are not counted.

Host measurements of a measurement record replace these constants where the framework launches in the same
way (`measured_host_use`; `cost.measured_host`). `compiled` says that layers are compiled
(`torch.compile`): its kernels are launched by generated code, in `compiled_launch_seconds` each, its graph's
call and guards included, or in what such a record says.

Constants belong to a software generation, in `topologies/frameworks`, each with its source.
"""

from dataclasses import dataclass, replace
from enum import Enum
from typing import Final

from clustersim.common.dtypes import DType
from clustersim.common.errors import InputError
from clustersim.common.units import Bytes, Seconds
from clustersim.model.layout_defaults import ALL_OVERLAPPED, LayoutDefaults
from clustersim.model.overheads import NO_OVERHEADS, Overheads
from clustersim.model.training import (
    ALL_FUSED,
    COMPILER_FUSED,
    AttentionBackend,
    DotsSaveableRecompute,
    FullRecompute,
    FusedKernel,
    LossImplementation,
    Recompute,
    SelectiveOpRecompute,
)

KERNEL_KEYS: Final = ("fused", "loss", "attention")
"""Keys of `training` whose defaults are those of `KernelDefaults`."""


class GraphCapture(Enum):
    """Which kernels of a pass are in CUDA graphs."""

    NOTHING = "nothing"
    OUTSIDE_EXPERTS = "outside_experts"  # everything except expert computation and token dispatch
    ALL = "all"


class MeasuredHostUse(Enum):
    """Which host measurements (`cost.calibration_record.LaunchMode`) replace a framework's launch constants."""

    NOTHING = "nothing"  # none: its Python and autograd differ
    EAGER = "eager"  # eager modules on current autograd, and CUDA graphs; it has its own sharding and model parallelism
    TORCH = "torch"  # also `fully_shard`, DTensor and `torch.compile`


@dataclass(frozen=True, slots=True)
class SupportedLayouts:
    """What a framework supports, by scenario keywords: strategies, schedules, dispatchers, axes besides dp.

    Searches and suggestions stay within all of them; a scenario with another dispatcher is refused, since dispatchers
    are a framework's own code, while the others may be ported. context_parallel: kinds, its default first.
    """

    data: tuple[str, ...] = ("ddp", "zero1", "zero2", "fsdp", "hsdp")
    data_with_pipeline: tuple[str, ...] = ("ddp", "zero1", "fsdp")
    schedules: tuple[str, ...] = ("1f1b", "interleaved")
    dispatchers: tuple[str, ...] = (
        "allgather",
        "alltoall",
        "deepep",
        "deepep_v2",
        "deepep_uccl",
        "hybridep",
        "mori",
    )
    context_parallel: tuple[str, ...] = ("ring", "all_gather", "ulysses")
    axes: tuple[str, ...] = ("tp", "cp", "pp", "ep")

    def strategies(self, *, is_pipelined: bool) -> tuple[str, ...]:
        """Data-parallel strategies, with a pipeline or without."""
        return self.data_with_pipeline if is_pipelined else self.data


@dataclass(frozen=True, slots=True)
class KernelDefaults:
    """The kernels that a framework runs where a scenario does not say.

    fused: what runs as one kernel each; loss: cross-entropy; compiled_loss: the same behind `torch_compile` (None:
    it is not compiled); compiled_padding: whether `torch_compile` has all matmuls, the output matrix included, and
    pads their sizes; attention: its library; gradients: the format in which 16-bit runs accumulate and reduce them.
    """

    fused: frozenset[FusedKernel] = ALL_FUSED
    loss: LossImplementation = LossImplementation.VOCAB_PARALLEL
    compiled_loss: LossImplementation | None = None
    compiled_padding: bool = False
    attention: AttentionBackend = AttentionBackend.FLASH
    gradients: DType = DType.FP32

    def compiled(self) -> "KernelDefaults":
        """The same with layers compiled (`torch.compile`): pointwise operations are fused, the optimizer is not."""
        return replace(self, fused=self.fused | COMPILER_FUSED, loss=self.compiled_loss or self.loss)


@dataclass(frozen=True, slots=True)
class Framework:
    """Host launch times, memory and overheads of a training framework.

    fragmentation: reserved over allocated bytes at the peak; selective_fragmentation, full_fragmentation: the same
    where single operations or some layers are recomputed, or all (None: the same); communicator_bytes: buffers of one
    process group; workspace_bytes: permanent allocations of libraries; grouped_workspace_bytes: the same for grouped
    matmuls, if any; zero3_bucket_bytes: permanent buffer in which ZeRO-3 gathers gradients for their reduction, if
    any; zero3_live_bytes: gathered parameters that ZeRO-3 keeps for their next use; deallocate_pipeline_outputs:
    whether pipeline stages free sent outputs, where a scenario does not say; torch_fsdp: FSDP is PyTorch's, whose
    shards are the master weights, and gradients exist from backward until the optimizer has run (`Footprint`);
    launch_seconds, backward_launch_seconds: host seconds per forward (and optimizer) and backward kernel;
    compiled_launch_seconds: per kernel of a compiled layer, in either pass, None: as of an eager one;
    collective_seconds: per collective, None: as per kernel; eager_call_seconds: per tensor operation without autograd
    and modules; graph_launch_seconds: per CUDA graph, None: not supported; p2p_seconds: of hosts, per message between
    pipeline stages; moe_launch_seconds: per kernel of a MoE model, None: as for dense models; graph_capture: what
    CUDA graphs contain; compiled: whether layers are compiled; numa_bound: whether ranks are bound to the NUMA node
    of their GPU; measured_host_use: which host measurements of a record replace these constants; early_stop:
    activation checkpoints stop recomputing once all that backward needs is available; kernels: the kernels that it
    runs where a scenario does not say; layout_defaults: the same of communication; version: of the software, "": the
    newest that the file describes; recipe: one of the software's, "": the file as it is; overheads: extra work per
    step; supported_layouts: which layouts it has, for the layout search.
    """

    fragmentation: float
    communicator_bytes: Bytes
    workspace_bytes: Bytes = 0.0
    grouped_workspace_bytes: Bytes = 0.0
    zero3_bucket_bytes: Bytes = 0.0
    zero3_live_bytes: Bytes = 0.0
    deallocate_pipeline_outputs: bool = True
    torch_fsdp: bool = False
    launch_seconds: Seconds = 0.0
    backward_launch_seconds: Seconds = 0.0
    compiled_launch_seconds: Seconds | None = None
    p2p_seconds: Seconds = 0.0
    collective_seconds: Seconds | None = None
    eager_call_seconds: Seconds = 0.0
    graph_launch_seconds: Seconds | None = None
    moe_launch_seconds: Seconds | None = None
    graph_capture: GraphCapture = GraphCapture.NOTHING
    compiled: bool = False
    numa_bound: bool = False
    measured_host_use: MeasuredHostUse = MeasuredHostUse.NOTHING
    early_stop: bool = False
    name: str = "framework"
    version: str = ""
    recipe: str = ""
    kernels: KernelDefaults = KernelDefaults()
    overheads: Overheads = NO_OVERHEADS
    supported_layouts: SupportedLayouts = SupportedLayouts()
    layout_defaults: LayoutDefaults = ALL_OVERLAPPED
    selective_fragmentation: float | None = None
    full_fragmentation: float | None = None

    def fragmentation_with(self, recompute: Recompute) -> float:
        """Reserved over allocated bytes at the peak with this recomputation; single modules of layers count as none."""
        match recompute:
            case FullRecompute(None):
                return self.full_fragmentation or self.fragmentation
            case FullRecompute() | SelectiveOpRecompute() | DotsSaveableRecompute():
                return self.selective_fragmentation or self.fragmentation
        return self.fragmentation

    @property
    def is_eager(self) -> bool:
        """Whether it runs layers operation by operation, though it could compile them."""
        return self.measured_host_use is MeasuredHostUse.TORCH and not self.compiled

    @property
    def uses_cuda_graphs(self) -> bool:
        """Whether anything is captured in CUDA graphs."""
        return self.graph_capture is not GraphCapture.NOTHING

    def with_moe_launches(self, host_slowdown: float = 1.0) -> "Framework":
        """The framework as it launches a MoE model; host_slowdown: of this host relative to an x86 server.

        Eager PyTorch launches it at its own pace; that of compiled layers was measured on Grace.
        """
        if self.moe_launch_seconds is None:
            return self._with_slower_host(host_slowdown) if self.is_eager else self
        launch_seconds = host_slowdown * self.moe_launch_seconds
        return replace(
            self, launch_seconds=launch_seconds, backward_launch_seconds=launch_seconds, moe_launch_seconds=None
        )

    def _with_slower_host(self, host_slowdown: float) -> "Framework":
        """The framework where each launch takes longer by a factor."""
        return replace(
            self,
            launch_seconds=host_slowdown * self.launch_seconds,
            backward_launch_seconds=host_slowdown * self.backward_launch_seconds,
        )

    def with_cuda_graphs(self, graph_capture: GraphCapture = GraphCapture.ALL) -> "Framework":
        """The framework with passes captured in CUDA graphs; raise InputError where it does not support them."""
        if self.graph_launch_seconds is None:
            raise InputError(f"cuda_graphs: {self.name} captures none; leave it out, or name a framework that does")
        return replace(self, graph_capture=graph_capture)

    def with_compiled(self) -> "Framework":
        """The framework with compiled layers; raise InputError where it does not compile layers.

        A compiler drops what backward does not read, so that recomputation stops early.
        """
        if self.measured_host_use is not MeasuredHostUse.TORCH:
            raise InputError(
                f"torch_compile: {self.name} compiles no layers; leave it out, or name a framework that does: pytorch"
            )
        overheads = replace(self.overheads, shape_padding=self.kernels.compiled_padding)
        compiled = replace(self, compiled=True, kernels=self.kernels.compiled(), overheads=overheads, early_stop=True)
        seconds = self.compiled_launch_seconds
        return (
            compiled if seconds is None else replace(compiled, launch_seconds=seconds, backward_launch_seconds=seconds)
        )

    def with_launch_seconds(self, forward_seconds: Seconds | None, backward_seconds: Seconds | None) -> "Framework":
        """The framework with user-given launch times, which no measurement record overrides; None: not given.

        Backward launches take as long as forward ones unless given.
        """
        if forward_seconds is None and backward_seconds is None:
            return self
        launch_seconds = self.launch_seconds if forward_seconds is None else forward_seconds
        backward_launch_seconds = launch_seconds if backward_seconds is None else backward_seconds
        changed = replace(
            self,
            launch_seconds=launch_seconds,
            backward_launch_seconds=backward_launch_seconds,
            measured_host_use=MeasuredHostUse.NOTHING,
        )
        return replace(changed, moe_launch_seconds=None)
