"""Which lowering does a data-parallel strategy have?"""

from clustersim.lowering.bucketed import Bucketed
from clustersim.lowering.deepspeed_zero3 import OneByOne
from clustersim.lowering.fsdp import Sharded
from clustersim.lowering.program_builder import DataLowering, Plain
from clustersim.parallel.data_parallel_strategy import DdpStrategy, DeepspeedZero3Strategy, FullyShard, Zero1
from clustersim.parallel.plan import Plan


def data_lowering(plan: Plan) -> DataLowering:
    """How passes become tasks under the plan's data parallelism."""
    if all(group.dp_size == 1 for group in plan.parameter_groups):
        return Plain()
    match plan.layout.data:
        case DeepspeedZero3Strategy() as strategy:
            return OneByOne(strategy)
        case FullyShard() as strategy:
            return Sharded(strategy)
        case DdpStrategy() | Zero1() as strategy:
            return Bucketed(strategy)
    return Plain()
