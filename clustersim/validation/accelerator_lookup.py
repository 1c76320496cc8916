"""Which shipped accelerator is it that a table calls so?

Tables name GPUs as `b200` or `v100-32gb`; the names of shipped accelerators are known too.
"""

from clustersim.common import data_files
from clustersim.common.errors import suggest_nearest
from clustersim.hardware.accelerator import Accelerator, load_accelerator
from clustersim.hardware.cluster import load_cluster
from clustersim.validation.cases import CannotPredictError, Case
from clustersim.validation.cluster_lookup import PLACES


def accelerator_of(case: Case) -> Accelerator:
    """The accelerator of a row; raise CannotPredictError if it is not stated, or none that is shipped."""
    gpu = case.text("gpu")
    if gpu in ("", "unknown"):
        raise CannotPredictError("gpu is not stated", owed=False)
    if gpu in PLACES:
        place = PLACES[gpu]
        return load_accelerator(place.accelerator) if place.accelerator else load_cluster(place.cluster).accelerator
    names = data_files.list_names("accelerators")
    if gpu not in names:
        known = suggest_nearest(gpu, (*PLACES, *names))
        raise CannotPredictError(f"gpu {gpu}: there is no such accelerator; {known}", owed=False)
    return load_accelerator(gpu)
