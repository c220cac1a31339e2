"""Which cases of a test run in ``make test``: a sample that changes with the seed; the others are long.

The whole of them is what ``make test`` and ``make campaigns`` run together, for any seed.
"""

from __future__ import annotations

import sys
import zlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable

    import pytest


def left_out(items: Iterable[pytest.Item], seed: int) -> set[pytest.Item]:
    """Cases of tests that are not in the sample; none of a test that is marked otherwise."""
    tests: dict[str, list[Any]] = {}
    for item in items:
        if hasattr(item, "callspec") and not any(map(item.get_closest_marker, ("campaign", "long", "spark"))):
            tests.setdefault(item.nodeid.partition("[")[0], []).append(item)
    others: set[pytest.Item] = set()
    for name, cases in tests.items():
        choose = sample if cases[0].get_closest_marker("sampled") else on_one_layout
        others |= set(cases) - choose(cases, seed + zlib.crc32(name.encode()))
    return others


def sample(cases: list[Any], seed: int) -> set[Any]:
    """As many of a test's cases as ``sampled`` says, and among them as many values of its parameters as can be.

    Without a number: enough that each value of each parameter is in one of them.
    """
    most = next(iter(cases[0].get_closest_marker("sampled").args), None)
    start = seed % len(cases)
    values = {case: set(_values(case).items()) for case in cases[start:] + cases[:start]}
    sample: set[Any] = set()
    while values and len(sample) != most:
        case = max(values, key=lambda case: len(values[case]))
        if not (covered := values.pop(case)) and most is None:
            break
        sample.add(case)
        values = {other: left - covered for other, left in values.items()}
    return sample


def on_one_layout(cases: list[Any], seed: int) -> set[Any]:
    """Of cases that differ by the layout of the table alone, one; all where no parameter is a layout."""
    layouts = {id(layout) for layout in getattr(sys.modules.get("tests.support.tables.layouts"), "LAYOUTS", [])}
    alike: dict[tuple[object, ...], list[Any]] = {}
    for case in cases:
        named = [name for name, value in case.callspec.params.items() if id(value) in layouts]
        others = tuple(value for name, value in sorted(_values(case).items()) if name not in named)
        alike.setdefault((*others, None if named else case), []).append(case)
    return {same[(seed + number) % len(same)] for number, same in enumerate(alike.values())}


def _values(case: Any) -> dict[str, int]:
    """Which value each parameter has: ``indices`` of pytest 9 number the cases where several marks parametrize."""
    return {name: id(value) for name, value in case.callspec.params.items()}
