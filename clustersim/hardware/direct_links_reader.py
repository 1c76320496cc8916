"""How are links of pairs of GPUs written in a cluster file?

`node.nvlink.links` is `all` (one link for each pair of a domain) or a list of pairs of places, [i, j], one entry for
each link: a pair that stands twice has two. `bandwidth` stays that of a GPU's whole port, the sum of its links. Where
there are no `links`, a switch joins the domain.
"""

from typing import Final

import numpy as np

from clustersim.common.errors import shown
from clustersim.common.mapping_reader import Section
from clustersim.hardware.direct_links import MOST_PLACES, MOST_SEARCHED, PairLinks

_ALL: Final = "all"


def read_pairs(section: Section, gpus: int) -> PairLinks:
    """Links of pairs: `all` for one each, or a list of pairs of places in a domain, one entry for each link."""
    links = section.value("links")
    most = MOST_SEARCHED if isinstance(links, list) else MOST_PLACES
    if gpus > most:
        raise section.refuse("links", f"join at most {most} GPUs; leave links out where a switch joins {gpus}")
    if links == _ALL:
        return PairLinks.full(gpus)
    if not isinstance(links, list):
        raise section.refuse("links", f"{shown(links)} is neither {_ALL} nor a list of pairs [i, j] of GPUs")
    for link in links:
        if not _is_pair(link, gpus):
            raise section.refuse("links", f"{shown(link)} is not a pair [i, j] of two GPUs from 0 to {gpus - 1}")
    return _even(section, PairLinks.listed(gpus, links))


def _is_pair(link: object, gpus: int) -> bool:
    match link:
        case [here, there] if type(here) is int and type(there) is int:
            return here != there and min(here, there) >= 0 and max(here, there) < gpus
    return False


def _even(section: Section, pairs: PairLinks) -> PairLinks:
    """Links of which every GPU has equally many, and that lead from each to every other over one GPU at most."""
    most, least = int(pairs.count.sum(axis=1).max()), int(pairs.count.sum(axis=1).min())
    if most != least:
        raise section.refuse("links", f"give GPUs {least} to {most} links each; all must have equally many")
    for here, there in np.argwhere(pairs.over < 0).tolist():
        raise section.refuse("links", f"join GPUs {here} and {there} neither directly nor over one other GPU")
    return pairs
