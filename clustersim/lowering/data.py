"""Which lowering does a data-parallel strategy have?"""

from clustersim.lowering.bucketed import Bucketed
from clustersim.lowering.passes import DataLowering, Plain
from clustersim.lowering.sharded import Sharded
from clustersim.parallel.data import Replicated, Zero
from clustersim.parallel.plan import Plan
from clustersim.program.task import Collective


def data_lowering(plan: Plan) -> DataLowering:
    """How passes become tasks under the plan's data parallelism."""
    if plan.replicas == 1:
        return Plain()
    width = plan.training.precision.gradients.bytes
    last = plan.microbatches - 1
    match plan.layout.data:
        case Zero(stage=3) as strategy:
            return Sharded(strategy)
        case Zero(stage, _, overlap) as strategy:
            size = strategy.bucket_bytes(plan.replicas, width) / width
            return Bucketed(Collective.REDUCE_SCATTER, size, last, overlap, gathers=True, every_microbatch=stage == 2)
        case Replicated(bucket, overlap):
            return Bucketed(Collective.ALL_REDUCE, bucket / width, last, overlap)
    return Plain()
