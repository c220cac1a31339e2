"""Divide work by bytes into parts, and run one task of Spark for each part.

Parts are tasks of RDDs: nothing is planned, compiled or converted by Spark SQL.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from pyspark import SparkContext

_T = TypeVar("_T")


def part_numbers(sizes: Sequence[int], parts: int, most: int) -> list[int]:
    """Per item the number of its part, from 0: neighbors together, all parts about as large.

    Args:
        sizes: of the items, in bytes or another measure.
        parts: how many are wanted; fewer, if there are not as many items.
        most: how large a part of several items may be; there are more parts where that takes them.
    """
    share = max(1, min(most, -(-sum(sizes) // max(1, parts))))
    groups, seen = [], 0
    for size in sizes:
        groups.append((seen + size // 2) // share)
        seen += size
    numbers = {group: number for number, group in enumerate(sorted(set(groups)))}
    return [numbers[group] for group in groups]


def in_parts(items: Sequence[_T], numbers: Sequence[int]) -> list[list[_T]]:
    """The items that have the same number, by number."""
    found: dict[int, list[_T]] = {}
    for item, number in zip(items, numbers, strict=True):
        found.setdefault(number, []).append(item)
    return [found[number] for number in sorted(found)]


def run_parts(context: SparkContext, task: Callable[[Iterable[Any]], Iterator[Any]], parts: Sequence[Any]) -> list[Any]:
    """Run one task for each part, and return all results, in the order of parts.

    Results are those of the one successful attempt of each task.
    """
    return context.parallelize(parts, len(parts)).mapPartitions(task).collect() if parts else []
