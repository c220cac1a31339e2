"""Tables for compaction: made, merged, and compared with what they were."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from memwal_ops import open_table
from memwal_ops.formats.lance.indexes.base_indexes import base_indexes, coverage
from memwal_ops.formats.lance.jobs import merge
from memwal_ops.formats.lance.jobs.catchup import job as catchup
from tests.support.tables.model import assert_same
from tests.support.tables.reading import read_base, read_spec
from tests.support.tables.templates import copy_of
from tests.support.tables.workload import Workload

if TYPE_CHECKING:
    from pathlib import Path

    from memwal_ops.formats.lance.table import Table

from tests.support.tables.lsm_table import LsmTable


def merged(made: LsmTable, *, caught_up: bool = True) -> LsmTable:
    made.close()
    merge.apply(open_table(made.uri, made.storage_options), merge.MergeOptions())
    if caught_up:
        catchup.apply(open_table(made.uri, made.storage_options), catchup.CatchupOptions())
    return made


def make(path: Path, kind: type[LsmTable] = Workload, *, caught_up: bool = True, **options: Any) -> LsmTable:
    """A copy of old fragments of which most rows were updated, and a new one for each of three merges."""
    return copy_of(make_anew, str(path / "t.lance"), kind, caught_up, *options.items())


def make_anew(uri: str, kind: type[LsmTable], caught_up: bool, *options: tuple[str, Any]) -> LsmTable:
    """The same, which is no copy."""
    made = kind(1, regions=3, base_rows=90, **dict(options)).create(uri)
    for _ in range(3):
        merged(made.step(6), caught_up=False)
    return merged(made, caught_up=caught_up)


def fragments(table: Table) -> int:
    return len(table.manifest.manifest.fragments)


def covered(table: Table) -> dict[str, bool]:
    return {name: coverage(index.covered, table.manifest).complete for name, index in base_indexes(table).items()}


def check_kept(before: Table, after: Table, made: LsmTable) -> None:
    """The MemWAL index says what it said, and the rows are those of the model."""
    assert after.index.details == before.index.details
    assert_same(read_base(made.uri, made.storage_options), made.expected(), seed=made.seed)
    assert_same(read_spec(made.uri, made.storage_options), made.expected(), seed=made.seed)
