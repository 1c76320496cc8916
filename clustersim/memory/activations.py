"""What must a stage keep from forward to backward, and what does it need for a moment?

Kept for each microbatch in flight: what every operator's backward reads, or less under recomputation: full
recomputation keeps each layer's input, selective recomputation drops the attention core. For a moment, during
backward, a fully recomputed layer holds everything that it would have kept.
Reference: Korthikanti et al. 2022, sections 4 and 5.
"""

from dataclasses import dataclass
from functools import cached_property

from clustersim.parallel.pipeline import Stage
from clustersim.parallel.plan import Plan
from clustersim.units import Bytes
from clustersim.workload.layers import Layer, embedding, head, layer
from clustersim.workload.training import FullRecompute, SelectiveRecompute


@dataclass(frozen=True)
class Activations:
    """Bytes of activations on one rank of a plan."""

    plan: Plan

    def kept(self, stage: Stage) -> Bytes:
        """Bytes that one microbatch keeps on a stage from forward to backward."""
        again = self._recomputed_layers(stage)
        layers = again * self._layer.input_bytes + (stage.layers - again) * self._kept_layer
        ends = self._embedding.kept if stage.embedding else 0.0
        return layers + ends + (self._head.kept if stage.head else 0.0)

    def passing(self, stage: Stage) -> Bytes:
        """Bytes that the backward of one microbatch needs beside what was kept."""
        if self._recomputed_layers(stage):
            return self._layer.kept - self._layer.input_bytes
        return self._layer.kept - self._kept_layer if stage.layers else 0.0

    def _recomputed_layers(self, stage: Stage) -> int:
        match self.plan.training.recompute:
            case FullRecompute(None):
                return stage.layers
            case FullRecompute(int() as layers):
                return min(layers, stage.layers)
        return 0

    @cached_property
    def _kept_layer(self) -> Bytes:
        """Bytes of a layer whose forward is not run again as a whole."""
        if not isinstance(self.plan.training.recompute, SelectiveRecompute):
            return self._layer.kept
        return sum(operator.kept for operator in self._layer.operators if not operator.core)

    @cached_property
    def _layer(self) -> Layer:
        return layer(self.plan.model, self.plan.training, self.plan.shard)

    @cached_property
    def _embedding(self) -> Layer:
        return embedding(self.plan.model, self.plan.training, self.plan.shard)

    @cached_property
    def _head(self) -> Layer:
        return head(self.plan.model, self.plan.training, self.plan.shard)
