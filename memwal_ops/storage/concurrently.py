"""Make several requests to a store at once, for an iterator that may be dropped at any element."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

_T = TypeVar("_T")
_R = TypeVar("_R")


def concurrently(
    function: Callable[[_T], _R], items: Iterable[_T], *, threads: int, chunk: int | None = None
) -> Iterator[tuple[_T, _R]]:
    """Each item with the function's result, in order; ``chunk`` items (by default ``threads``) are taken at a time.

    No thread outlives an element: an iterator that is dropped halfway is closed by whichever thread collects the
    garbage, and one of its own could not wait for itself.
    """
    remaining = iter(items)
    while taken := list(islice(remaining, chunk or threads)):
        with ThreadPoolExecutor(threads) as pool:
            results = list(pool.map(function, taken))
        yield from zip(taken, results, strict=True)
