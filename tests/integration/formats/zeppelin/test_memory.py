"""The memory of a compaction: that of its rows, not that of decoded fragments."""

from __future__ import annotations

import tracemalloc
from typing import TYPE_CHECKING, Any

import numpy as np

from memwal_ops import open_table
from memwal_ops.core.context import RunContext
from memwal_ops.formats import zeppelin
from memwal_ops.formats.zeppelin.compaction import read_inputs

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

_WIDTH, _ROWS = 64, 100


def peak(run: Callable[[], object]) -> int:
    tracemalloc.start()
    try:
        run()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_fragments_are_decoded_one_at_a_time_and_held_once(tmp_path: Path) -> None:
    """A decoded fragment takes many times its vectors, until they are in an array; no array is held twice."""
    uri, random = str(tmp_path / "ns"), np.random.default_rng(1)
    zeppelin.create(uri, dimensions=_WIDTH, dialect="native")
    writer = zeppelin.open_writer(uri)
    for number in range(32):
        vectors = random.normal(size=(_ROWS, _WIDTH)).tolist()
        writer.append([{"id": f"{number}-{at}", "values": one} for at, one in enumerate(vectors)])
    table: Any = open_table(uri)
    refs = table.manifest.fragments
    one = peak(lambda: read_inputs(table, refs[:1], RunContext()))
    rest = peak(lambda: read_inputs(table, refs, RunContext())) - one
    assert rest < 2.5 * 4 * _WIDTH * _ROWS * len(refs), "vectors, ids and attributes"
