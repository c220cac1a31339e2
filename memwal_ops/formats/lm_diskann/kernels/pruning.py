"""LM-Prune: keep the nearest candidate, drop those much nearer to it than to the node, repeat until R are kept.

Candidates equal to the node are also kept, up to half of the list: by the rule alone, one of them would exclude all
others, and duplicate vectors would form chains that break when one of them is deleted.
"""

from __future__ import annotations

import numba
import numpy as np

from memwal_ops.formats.lm_diskann.kernels.distances import squared


@numba.njit(cache=True, nogil=True)
def with_room(links):
    """The number of links to which a full list is pruned: the next few need no pruning."""
    return links - max(1, links // 8)


@numba.njit(cache=True, nogil=True)
def of_new(links):
    """The number of links that an insert gives a node, at most: each is a backlink in another block to be written.

    Links from later nodes fill the list. Recall is that of full lists, unless lists are short.
    """
    return max(links // 2, min(links, 32))


@numba.njit(cache=True, nogil=True)
def of_built(links):
    """The number of links that a build leaves: the first links to a node do not prune its list; as in ``of_new``."""
    return max(with_room(links), min(links, 48))


@numba.njit(cache=True, nogil=True)
def prune(vectors, distances, count, alpha, most, chosen):
    """Select neighbours.

    Args:
        vectors: float32 [count or more, d], of the candidates.
        distances: float32, their squared distances to the node.
        count: number of candidates.
        alpha: squared: a candidate is dropped if ``alpha * d(kept, it) < d(node, it)``.
        most: the maximum number to select.
        chosen: receives their indices, nearest first.

    Returns:
        The number selected.
    """
    order = np.argsort(distances[:count])
    gone = np.zeros(count, np.uint8)
    kept = 0
    equal = max(1, most // 2)
    for at in range(count):
        one = order[at]
        if gone[one]:
            continue
        if distances[one] == 0:
            if equal == 0:
                continue
            equal -= 1
        chosen[kept] = one
        kept += 1
        if kept == most:
            break
        for later in range(at + 1, count):
            other = order[later]
            if not gone[other] and alpha * squared(vectors[one], vectors[other]) < distances[other]:
                gone[other] = 1
    return kept


@numba.njit(cache=True, nogil=True)
def extend(vectors, distances, count, held, alpha, most, chosen):
    """Like :func:`prune`, for a list whose ``held`` first candidates stay: compares others only until it is full.

    So a node that is rewired keeps its links, and not all candidates are compared with each other.

    Returns:
        The number selected, without those that stay.
    """
    order = np.argsort(distances[:count])
    equal = max(1, most // 2)
    for one in range(held):
        chosen[one] = one
        equal -= distances[one] == 0
    kept = held
    for at in range(count):
        if kept == most:
            break
        new = order[at]
        if new < held:
            continue
        if distances[new] == 0:
            if equal <= 0:
                continue
            equal -= 1
        excluded = False
        for other in range(kept):
            near = chosen[other]
            if distances[near] <= distances[new] and alpha * squared(vectors[near], vectors[new]) < distances[new]:
                excluded = True
                break
        if not excluded:
            chosen[kept] = new
            kept += 1
    for one in range(held, kept):
        chosen[one - held] = chosen[one]
    return kept - held
