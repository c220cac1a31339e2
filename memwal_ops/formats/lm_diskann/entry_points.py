"""Choose how many entry points a graph has."""

from __future__ import annotations

from math import isqrt


def entry_points(live: int) -> int:
    """The number of entry points of a graph with that many live rows: eight times its square root, at least 4.

    A search compares all of them with the query, and begins at the nearest: if the rows form clusters, there may be no
    links between them, so there must be an entry point in each.
    """
    return min(live, max(4, 8 * isqrt(live)))
