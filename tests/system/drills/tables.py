"""The table of most drills."""

from __future__ import annotations

from tests.support.tables.workload import Workload


def with_generations(uri: str, options: dict[str, str] | None = None) -> Workload:
    """Two generations, nothing merged."""
    made = Workload(4, regions=1, base_rows=30).create(uri, options)
    for _ in range(2):
        made.put([1, 2, 50])
        made.flush()
    return made
