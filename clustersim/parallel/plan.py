"""Who computes what? The parts of a scenario that decide it, and the numbers that follow from them."""

from dataclasses import dataclass
from functools import cached_property

from clustersim.parallel.layout import Layout
from clustersim.parallel.pipeline import Stage, split_layers, stages
from clustersim.parallel.tensor import Sharding
from clustersim.units import Bytes
from clustersim.workload.layers import Shard
from clustersim.workload.training import Training
from clustersim.workload.transformer import Model


@dataclass(frozen=True)
class Plan:
    """A model, how it is trained, and how it is spread. chunks: virtual stages on each pipeline rank."""

    model: Model
    training: Training
    layout: Layout
    chunks: int = 1

    @property
    def microbatches(self) -> int:
        """Microbatches that each replica runs in one step."""
        return self.training.global_batch // (self.layout.dp * self.training.microbatch)

    @cached_property
    def stages(self) -> tuple[Stage, ...]:
        """Virtual stages in model order."""
        count = self.layout.pp * self.chunks
        return stages(self.layout.layers_per_stage or split_layers(self.model.layers, count))

    @property
    def replicas(self) -> int:
        """Ranks that hold the same weights, over which gradients are reduced."""
        return self.layout.dp * self.layout.cp

    @property
    def shard(self) -> Shard:
        """What one rank holds of a microbatch and a layer."""
        return Shard(
            batch=self.training.microbatch,
            sequence=self.training.sequence // self.layout.cp,
            keys=self.training.sequence,
            tp=self.layout.tp,
            sequence_parallel=self.layout.sequence_parallel,
        )

    @property
    def activation(self) -> Bytes:
        """Bytes of the activation between layers, whole over tensor-parallel ranks: [batch, sequence / cp, hidden]."""
        shard = self.shard
        return float(shard.batch * shard.sequence * self.model.hidden * self.training.precision.compute.bytes)

    @cached_property
    def sharding(self) -> Sharding:
        """What a layer's collectives need to know."""
        kv_heads = max(1, self.model.kv_heads // self.layout.tp)
        keys = self.shard.batch * self.shard.keys * kv_heads * self.model.head_dim
        return Sharding(self.layout, self.activation, 2.0 * keys * self.training.precision.compute.bytes)

    def stages_of(self, pipeline_rank: int) -> tuple[Stage, ...]:
        """Virtual stages on one pipeline rank."""
        return self.stages[pipeline_rank :: self.layout.pp]
