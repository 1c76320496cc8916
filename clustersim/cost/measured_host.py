"""How long does a host need for a launch, as measured?

Host samples of a record apply to its own accelerator's host, for frameworks that launch in the same way
(`Framework.measured_host_use`), and on the machine where they were measured: published and derived records are of
other machines. The base is the launch time of eager or compiled modules. Sharded parameters add hooks,
tensor parallelism adds DTensor dispatch; each adds the excess of its own sample over the eager one.
Compiled layers have no such dispatch. Assumed: the excesses are additive.

A GPU's host runs ahead of it (`cost.host_launch`). On a CPU the host is the thread that computes, so only
what isolated kernel times do not contain is added (`HostLaunchSample.alone`).
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from clustersim.common.units import Seconds
from clustersim.cost.host_launch import AsyncHost, HostModel, SyncHost
from clustersim.cost.record_kinds import LaunchMode, RecordOrigin
from clustersim.model.framework import Framework, GraphCapture, MeasuredHostUse
from clustersim.parallel.data_parallel_strategy import FullyShard
from clustersim.parallel.layout import Layout

if TYPE_CHECKING:
    from clustersim.cost.calibration_record import CalibrationRecord, HostLaunchSample


@dataclass(frozen=True, slots=True)
class LaunchSeconds:
    """Seconds per launch of forward and of backward."""

    forward: Seconds
    backward: Seconds

    @classmethod
    def from_sample(cls, sample: "HostLaunchSample", *, exclude_kernels: bool) -> "LaunchSeconds":
        """Launch seconds of a sample; exclude_kernels: without what isolated kernel times contain."""
        in_kernels = sample.in_kernel_times if exclude_kernels else (0.0, 0.0)
        return cls(max(0.0, sample.forward - in_kernels[0]), max(0.0, sample.backward - in_kernels[1]))

    def with_extra(self, slower: "LaunchSeconds", base: "LaunchSeconds") -> "LaunchSeconds":
        """These seconds plus the excess of a slower mode over its base."""
        return LaunchSeconds(
            self.forward + max(0.0, slower.forward - base.forward),
            self.backward + max(0.0, slower.backward - base.backward),
        )


def host_samples(record: "CalibrationRecord | None") -> "Mapping[LaunchMode, HostLaunchSample]":
    """Host samples of a record measured on this machine, by state; empty without an eager one (the base)."""
    if record is None or record.origin is not RecordOrigin.MEASURED:
        return {}
    samples = {sample.mode: sample for sample in record.host_launches}
    return samples if LaunchMode.EAGER in samples else {}


def is_compute_host(record: "CalibrationRecord") -> bool:
    """Whether the host itself computes the kernels: only CPU records have a thread count."""
    return record.device.threads > 0


def host_model(record: "CalibrationRecord | None", framework: Framework, layout: Layout) -> HostModel:
    """Model of the host that launches a rank's kernels, from the framework's constants or measurements."""
    graph, excludes_experts = (
        framework.graph_launch_seconds if framework.uses_cuda_graphs else None,
        framework.graph_capture is GraphCapture.OUTSIDE_EXPERTS,
    )
    launch_seconds = (
        framework.launch_seconds,
        framework.backward_launch_seconds,
        framework.collective_seconds,
        framework.eager_call_seconds,
    )
    framework_host = AsyncHost(*launch_seconds, graph, excludes_experts=excludes_experts)
    samples = host_samples(record)
    if record is None or not samples or framework.measured_host_use is MeasuredHostUse.NOTHING:
        return framework_host
    if is_compute_host(record):
        measured = _launch_seconds(samples, framework, layout, exclude_kernels=True)
        return SyncHost(measured.forward, measured.backward)
    measured = _launch_seconds(samples, framework, layout, exclude_kernels=False)
    graph_sample = samples.get(LaunchMode.GRAPH)
    if framework.uses_cuda_graphs and graph_sample is not None:
        framework_host = replace(framework_host, graph_seconds=(graph_sample.forward + graph_sample.backward) / 2.0)
    return replace(framework_host, forward_seconds=measured.forward, backward_seconds=measured.backward)


def host_states(framework: Framework, layout: Layout) -> tuple[LaunchMode, ...]:
    """The host states whose samples a step's launch time is built from: that of its layers, and additions to it."""
    if framework.measured_host_use is MeasuredHostUse.NOTHING:
        return ()
    uses_torch_modules = framework.measured_host_use is MeasuredHostUse.TORCH
    applies = {
        LaunchMode.EAGER: True,
        LaunchMode.COMPILED: uses_torch_modules and framework.compiled,
        LaunchMode.DTENSOR: uses_torch_modules and layout.tp > 1 and not framework.compiled,
        LaunchMode.FSDP: uses_torch_modules and layout.dp * layout.cp > 1 and isinstance(layout.data, FullyShard),
        LaunchMode.GRAPH: framework.uses_cuda_graphs,
    }
    return tuple(state for state, is_needed in applies.items() if is_needed)


def _launch_seconds(
    samples: "Mapping[LaunchMode, HostLaunchSample]", framework: Framework, layout: Layout, *, exclude_kernels: bool
) -> LaunchSeconds:
    """Seconds per launch; states that were not measured add nothing."""
    measurable = replace(framework, compiled=framework.compiled and LaunchMode.COMPILED in samples)
    seconds_by_state = {
        state: LaunchSeconds.from_sample(samples[state], exclude_kernels=exclude_kernels)
        for state in host_states(measurable, layout)
        if state in samples
    }
    eager = seconds_by_state[LaunchMode.EAGER]
    total = seconds_by_state.get(LaunchMode.COMPILED, eager)
    for state in (LaunchMode.DTENSOR, LaunchMode.FSDP):
        total = total.with_extra(seconds_by_state.get(state, eager), eager)
    return total
