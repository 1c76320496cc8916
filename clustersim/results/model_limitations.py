"""Which effects does a simulation leave out? Sentences for the reader of its result."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Final

from clustersim.hardware.degradation import Degradations
from clustersim.results.selected_algorithms import SelectedAlgorithm
from clustersim.scenario import Contention, Scenario

NETWORK_LIMITATIONS: Final[Mapping[Contention, str]] = {
    Contention.UNCONTENDED: "contention between collectives of different kinds (each kind shares links among its own "
    "groups)",
    Contention.SHARED: "queues and congestion control of the network: links are shared fairly, as fluids",
}
HEALTHY_CLUSTER_NOTE: Final = "stragglers and jitter: all GPUs and links are healthy (`degradations` says otherwise)"
MODEL_LIMITATIONS: Final = (
    "slowdown of collectives by concurrent kernels, and of kernels by messages between stages",
    "clock throttling, failures",
    "data loaders, logging, checkpoints, Python overhead beyond kernel launches",
    "small reductions of gradients of key and value heads held by several ranks",
)
BALANCED_EXPERTS_NOTE: Final = "uneven loads of experts: each gets as many tokens as any other"
SCAN_NOTE: Final = (
    "rates of the kernels of linear attention and state spaces by GPU and length: their shares of the roofline are "
    "those of an H200 with 8,192 tokens and more, of Mamba 2 on AMD those of published steps"
)
IMAGES_NOTE: Final = (
    "what a pipeline loses between microbatches with unequal images; reading, decoding and copying them to the GPU"
)
SPARSE_ATTENTION_NOTE: Final = (
    "rates of the kernels of sparse attention by GPU and shape: their shares of the roofline are those of H800, H200 "
    "and B200, of the indexer's scores and loss assumed"
)
CUDA_GRAPHS_LIMITATION: Final = "memory of CUDA graphs' private pools: they need more than is counted"
HOST_LIMITATIONS: Final = (
    "contention of copies to and from the host with what NICs send over the same PCIe, and with kernels",
    "rounding up of pinned memory, host memory of the system itself, adding up gradients on the host",
)
CO_LOCATED_JOBS_LIMITATION: Final = (
    "hosts that jobs share: each launches kernels, and copies to its host, as if it had the host to itself"
)


def find_limitations(
    scenario: Scenario, algorithms: Iterable[SelectedAlgorithm], *, uses_host_memory: bool
) -> tuple[str, ...]:
    """Effects that the simulation of a scenario leaves out. algorithms: those selected for its collectives."""
    return (
        NETWORK_LIMITATIONS[scenario.cost.network],
        *((CO_LOCATED_JOBS_LIMITATION,) if scenario.co_scheduled_jobs else ()),
        *_custom_algorithm_notes(scenario, tuple(algorithms)),
        *_accelerator_notes(scenario),
        *(() if _models_stragglers(scenario) else (HEALTHY_CLUSTER_NOTE,)),
        *((BALANCED_EXPERTS_NOTE,) if scenario.model.distinct_moes and scenario.training.expert_load is None else ()),
        *((SCAN_NOTE,) if _has_scans(scenario) else ()),
        *((IMAGES_NOTE,) if _reads_images(scenario) else ()),
        *((SPARSE_ATTENTION_NOTE,) if _has_sparse_attention(scenario) else ()),
        *((CUDA_GRAPHS_LIMITATION,) if scenario.framework.uses_cuda_graphs else ()),
        *MODEL_LIMITATIONS,
        *(HOST_LIMITATIONS if uses_host_memory else ()),
    )


def _reads_images(scenario: Scenario) -> bool:
    """Whether the model, or an encoder in front of it, reads images."""
    return scenario.model.patches is not None or scenario.model.encoder is not None


def _has_scans(scenario: Scenario) -> bool:
    """Whether some layer has another mixer than attention, within its sequence or across."""
    return any(not mixer.is_attention for mixer in scenario.model.distinct_mixers)


def _has_sparse_attention(scenario: Scenario) -> bool:
    """Whether some layer attends to selected keys."""
    return any(mixer.has_indexer for mixer in scenario.model.distinct_mixers)


def _accelerator_notes(scenario: Scenario) -> Iterator[str]:
    """Notes on accelerators that are described as being like another, or do not exist yet."""
    for accelerator in scenario.cluster.accelerator_kinds()[0]:
        if accelerator.like is not None:
            yield (
                f"what {accelerator.name} reaches: not measured; fractions of peak rates, overheads and rates within a "
                f"step are those of {accelerator.like}"
            )
        if accelerator.is_projection:
            yield f"whether {accelerator.name} will be as announced: its rates are a projection"


def _models_stragglers(scenario: Scenario) -> bool:
    has_degradations = scenario.degradations != Degradations() or bool(scenario.cluster.accelerator_overrides)
    return scenario.jitter is not None or has_degradations or scenario.has_background_load


def _custom_algorithm_notes(scenario: Scenario, algorithms: tuple[SelectedAlgorithm, ...]) -> Iterator[str]:
    """Notes on user-defined algorithms in use, whose latency steps are costed with the library's constants."""
    for name in scenario.cost.nccl_overrides.custom_algorithms:
        uses = [selected for selected in algorithms if selected.algorithm.rpartition(" ")[0] == name]
        used_for = ", ".join(dict.fromkeys(f"{use.collective} of {use.group}" for use in uses)) or "nothing"
        yield f"what rounds and protocols of {name} cost (taken for {used_for}): constants are the library's own"
