"""Selects the lowering of a data-parallel strategy; those of the rarer ones are imported where a plan has them."""

from clustersim.lowering.fsdp import FsdpLowering
from clustersim.lowering.program_builder import DataParallelLowering, NoDataParallelLowering
from clustersim.parallel.data_parallel_strategy import DdpStrategy, DeepspeedZero3Strategy, FullyShard, Zero1
from clustersim.parallel.plan import Plan


def select_data_lowering(plan: Plan) -> DataParallelLowering:
    """How passes become tasks under the plan's data-parallel strategy."""
    if all(group.dp_size == 1 for group in plan.parameter_groups):
        return NoDataParallelLowering()
    match plan.layout.data:
        case DeepspeedZero3Strategy() as strategy:
            from clustersim.lowering.deepspeed_zero3 import DeepspeedZero3

            return DeepspeedZero3(strategy)
        case FullyShard() as strategy:
            return FsdpLowering(strategy)
        case DdpStrategy() | Zero1() as strategy:
            from clustersim.lowering.bucketed import BucketedLowering

            return BucketedLowering(strategy)
    return NoDataParallelLowering()
