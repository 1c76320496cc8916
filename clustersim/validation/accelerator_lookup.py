"""Which packaged accelerator does a table name?

Tables name GPUs as `b200` or `v100-32gb`; names of packaged accelerators are accepted too.
"""

from functools import cache

from clustersim.common import data_files
from clustersim.common.errors import suggest_nearest
from clustersim.hardware.accelerator import Accelerator, load_accelerator
from clustersim.hardware.cluster import load_cluster
from clustersim.validation.cases import CannotPredictError, ValidationCase
from clustersim.validation.cluster_lookup import CLUSTER_BY_GPU


def case_accelerator(case: ValidationCase) -> Accelerator:
    """The accelerator of a row; raises CannotPredictError if it is not stated or not packaged."""
    return _table_accelerator(case.text("gpu"))


@cache
def _table_accelerator(gpu: str) -> Accelerator:
    """Cached, since thousands of rows name a dozen GPUs."""
    if gpu in ("", "unknown"):
        raise CannotPredictError("gpu is not stated", is_expressible=False)
    if gpu in CLUSTER_BY_GPU:
        packaged = CLUSTER_BY_GPU[gpu]
        return (
            load_accelerator(packaged.accelerator)
            if packaged.accelerator
            else load_cluster(packaged.cluster_name).accelerator
        )
    names = data_files.list_names("accelerators")
    if gpu not in names:
        suggestion = suggest_nearest(gpu, (*CLUSTER_BY_GPU, *names))
        raise CannotPredictError(f"gpu {gpu}: there is no such accelerator; {suggestion}", is_expressible=False)
    return load_accelerator(gpu)
