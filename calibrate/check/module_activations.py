"""What do the modules that are trained here keep, beyond what backward reads?

The ledger counts what backward reads. PyTorch frees whole storages, so two things here hold more:

- Queries, keys and values are views of the result of one product. Rotary positions write turned queries and keys
  anew, but values stay a view, and with them all of the product's result (norms of queries and keys read it anyway).
- DTensor's loss over a split vocabulary (`loss_parallel`, torch/distributed/tensor/parallel/loss.py,
  `_nll_loss_and_log_softmax_backward`) has three FP32 tensors of logits beside the log-softmax at a time: the gradient
  of the chosen ones, the softmax, and their sum; PyTorch's own kernels have two.
"""

from dataclasses import dataclass

from clustersim.common.dtypes import DType
from clustersim.common.units import Bytes
from clustersim.memory.activations import ActivationKind, Activations
from clustersim.model.layer_stack import LayerSpec
from clustersim.model.transformer import PositionEncoding

_LAYER_KINDS = (ActivationKind.LAYER_SAVED, ActivationKind.LAYER_FULL)


@dataclass(frozen=True)
class ModuleActivations(Activations):
    """Bytes of activations of one rank of a plan, as the modules here keep them."""

    def bytes_of(self, kind: ActivationKind, spec: LayerSpec | None = None) -> Bytes:
        """Bytes of a part; spec: of which kind of layer, if it is a layer's."""
        rotated_bytes = 0.0 if spec is None or kind not in _LAYER_KINDS else self._rotated_bytes(spec)
        return super().bytes_of(kind, spec) + rotated_bytes

    @property
    def loss_gradient_bytes(self) -> Bytes:
        """Bytes of the logits' gradients beside what the loss keeps, per logit."""
        return 3.0 * DType.FP32.bytes if self.plan.layout.tp > 1 else super().loss_gradient_bytes

    def _rotated_bytes(self, spec: LayerSpec) -> Bytes:
        """Queries and keys as the product made them."""
        attention = spec.attention
        if attention is None or attention.qk_norm or self.plan.model.positions is not PositionEncoding.ROTARY:
            return 0.0
        heads = (attention.heads + attention.kv_heads) // self.plan.layout.tp
        return self.plan.layer_shard.tokens * heads * attention.head_dim * self.element_bytes
