"""Activation memory of the trained PyTorch modules, which is larger than the ledger's.

The ledger counts what backward reads. PyTorch frees entire storages, so two things here take more:

- Queries, keys and values are views of one matmul's output. Rotary positions write rotated queries and keys
  to new tensors, but values stay a view, which keeps all of the matmul's output (norms of queries and keys
  read it anyway).
- DTensor's loss over a split vocabulary (`loss_parallel`, torch/distributed/tensor/parallel/loss.py,
  `_nll_loss_and_log_softmax_backward`) has three FP32 tensors of logits at a time besides the log-softmax:
  the gradient of the selected ones, the softmax, and their sum; PyTorch's own kernels have two.
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
    """Bytes of activations on one rank of a plan, as the modules here keep them."""

    def bytes_of(self, kind: ActivationKind, spec: LayerSpec | None = None) -> Bytes:
        """Bytes of one kind of activation; spec: of the layer, if it belongs to one."""
        rotated_bytes = 0.0 if spec is None or kind not in _LAYER_KINDS else self._rotated_bytes(spec)
        return super().bytes_of(kind, spec) + rotated_bytes

    @property
    def loss_gradient_bytes(self) -> Bytes:
        """Bytes of logit gradients per logit, besides what the loss saves."""
        return 3.0 * DType.FP32.bytes if self.plan.layout.tp > 1 else super().loss_gradient_bytes

    def _rotated_bytes(self, spec: LayerSpec) -> Bytes:
        """Bytes of queries and keys as the matmul wrote them."""
        attention = spec.attention
        if attention is None or attention.qk_norm or self.plan.model.positions is not PositionEncoding.ROTARY:
            return 0.0
        heads = (attention.heads + attention.kv_heads) // self.plan.layout.tp
        return self.plan.layer_shard.tokens * heads * attention.head_dim * self.element_bytes
