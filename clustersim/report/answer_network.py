"""What does the page need to know of the network and the cluster? It is counted from a result when a page is made."""

from clustersim.analysis.network import network_use
from clustersim.analysis.network_axes import axis_spans
from clustersim.answer import Answer
from clustersim.report.network import Network
from clustersim.report.topology import Picture
from clustersim.report.topology_view import picture
from clustersim.scenario import Contention


def network_of(result: Answer) -> Network | None:
    """How the links were used; None where the ranks exchange nothing."""
    scenario = result.scenario
    cluster, cost = scenario.cluster, scenario.cost
    use = network_use(result.rows, cluster.fabric, result.volumes)
    if use is None:
        return None
    healthy = not scenario.disturbances.network  # else no collective is looked up in the record
    recorded = healthy and cost.record is not None and bool(cost.record.collectives)
    return Network(use, shared=cost.network is Contention.SHARED, recorded=recorded, hosts=result.host is not None)


def topology_of(result: Answer) -> Picture:
    """The cluster, and the axes of the layout on it."""
    scenario = result.scenario
    spans = axis_spans(scenario.layout, scenario.cluster.fabric, scenario.placement)
    return picture(scenario.cluster, spans)
