"""LanceDB's own way: ``optimize()`` in each round. Run by an interpreter that has lancedb, and not memwal-ops."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from benchmarks.life.loop import Calendar, serve

if TYPE_CHECKING:
    from collections.abc import Callable


def prepare(uri: str, options: dict[str, str], calendar: Calendar) -> Callable[[], object]:
    """``optimize()``, which deletes versions older than a week by default."""
    folder, _, name = uri.removesuffix(".lance").rpartition("/")
    lancedb = importlib.import_module("lancedb")
    database = lancedb.connect(folder, storage_options=options)

    def maintain() -> object:
        database.open_table(name).optimize(cleanup_older_than=calendar.age(7))
        return ["optimize"]

    return maintain


if __name__ == "__main__":
    serve(prepare)
