"""Reads direct GPU-to-GPU links from a cluster file.

`node.nvlink.links` is `all` (one link for each pair of a domain) or a list of pairs [i, j] of GPU indices in
a domain, one entry per link: a pair that is listed twice has two. `bandwidth` stays that of a GPU's whole
port, the sum of its links. Without `links`, a switch joins the domain.
"""

from typing import Final

import numpy as np

from clustersim.common.errors import format_value
from clustersim.common.mapping_reader import MappingReader
from clustersim.hardware.direct_links import MAX_DOMAIN_GPUS, MAX_SEARCHED_GPUS, DirectLinks

_ALL: Final = "all"


def read_direct_links(section: MappingReader, gpu_count: int) -> DirectLinks:
    """Direct links: `all` for one per pair, or a list of pairs of GPU indices in a domain, one entry per link."""
    links = section.get_value("links")
    max_gpus = MAX_SEARCHED_GPUS if isinstance(links, list) else MAX_DOMAIN_GPUS
    if gpu_count > max_gpus:
        raise section.input_error(
            "links", f"join at most {max_gpus} GPUs; leave links out where a switch joins {gpu_count}"
        )
    if links == _ALL:
        return DirectLinks.fully_connected(gpu_count)
    if not isinstance(links, list):
        raise section.input_error(
            "links", f"{format_value(links)} is neither {_ALL} nor a list of pairs [i, j] of GPUs"
        )
    for link in links:
        if not _is_pair(link, gpu_count):
            raise section.input_error(
                "links", f"{format_value(link)} is not a pair [i, j] of two GPUs from 0 to {gpu_count - 1}"
            )
    return _require_regular(section, DirectLinks.from_pairs(gpu_count, links))


def _is_pair(link: object, gpu_count: int) -> bool:
    match link:
        case [source, target] if type(source) is int and type(target) is int:
            return source != target and min(source, target) >= 0 and max(source, target) < gpu_count
    return False


def _require_regular(section: MappingReader, direct_links: DirectLinks) -> DirectLinks:
    """Require the same number of links for every GPU, and each pair to be joined directly or by one relay GPU."""
    max_links, min_links = (
        int(direct_links.link_matrix.sum(axis=1).max()),
        int(direct_links.link_matrix.sum(axis=1).min()),
    )
    if max_links != min_links:
        raise section.input_error(
            "links", f"give GPUs {min_links} to {max_links} links each; all must have equally many"
        )
    for source, target in np.argwhere(direct_links.relay < 0).tolist():
        raise section.input_error("links", f"join GPUs {source} and {target} neither directly nor over one other GPU")
    return direct_links
