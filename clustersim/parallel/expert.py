"""How do tokens travel to the ranks of their experts, and back?

Experts are spread over the ranks of the role `ep`, each of them cut over those of `etp`. A rank's tokens are its part
of the residual stream: of the sequence, where that is cut over tensor-parallel ranks. Forward sends the rows before the
first operator on the experts' ranks and gets them back behind the last; backward sends the gradients of the results
there and gets those of the inputs back, so each direction does both once.

All-to-all (Megatron-LM's `MoEAlltoAllTokenDispatcher`): a row for each expert of a token goes to its rank; where
experts are cut, all ranks that have a part of one gather the rows that came for it, and the sums of the parts' results
are scattered.
"""

from dataclasses import dataclass

from clustersim.dtypes import DType
from clustersim.parallel.layout import Layout
from clustersim.parallel.mesh import EXPERT_ROLE, EXPERT_TENSOR_ROLE
from clustersim.program.task import Collective, Exchange, Routing
from clustersim.units import Bytes
from clustersim.workload.stack import RoutedMlp


@dataclass(frozen=True, slots=True)
class Dispatch:
    """The exchanges of a mixture. size: bytes of the residual stream on one rank; format: of activations."""

    layout: Layout
    routed: RoutedMlp
    size: Bytes
    format: DType

    @property
    def routing(self) -> Routing:
        """Where rows go."""
        router = self.routed.router
        return Routing(self.layout.dispatcher, self.routed.experts, self.routed.top_k, router.groups, router.limit)

    @property
    def rows(self) -> Bytes:
        """Bytes of a row for each token and expert."""
        return self.routed.top_k * self.size

    def there(self) -> tuple[Exchange, ...]:
        """Rows go to the ranks of their experts."""
        gathered = Exchange("gather rows", Collective.ALL_GATHER, EXPERT_TENSOR_ROLE.name, self._parts * self.rows)
        return (*self._to_all("dispatch tokens"), *((gathered,) if self._cut else ()))

    def back(self) -> tuple[Exchange, ...]:
        """What experts made of them comes back."""
        size = self._parts * self.rows
        kind, role = Collective.REDUCE_SCATTER, EXPERT_TENSOR_ROLE.name
        summed = Exchange("sum parts of experts", kind, role, size, format=self.format)
        return (*((summed,) if self._cut else ()), *self._to_all("combine tokens"))

    @property
    def _parts(self) -> int:
        return self.layout.expert_tensor

    @property
    def _cut(self) -> bool:
        return self._parts > 1

    def _to_all(self, name: str) -> tuple[Exchange, ...]:
        if self.layout.ep == 1:
            return ()
        return (Exchange(name, Collective.ALL_TO_ALL, EXPERT_ROLE.name, self.rows, routing=self.routing),)
