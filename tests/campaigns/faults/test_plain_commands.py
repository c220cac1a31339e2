"""What works otherwise on a plain table, with every fault at every point: ``init --primary-key``, new indexes."""

from __future__ import annotations

import shutil
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

import lance
import pytest

from memwal_ops import open_table, run_job
from memwal_ops.errors import MemwalOpsError, NoPrimaryKeyError, StorageError
from memwal_ops.formats.lance.jobs.catchup import job as catchup
from memwal_ops.formats.lance.jobs.init import init
from memwal_ops.formats.lance.options import CatchupOptions, InitOptions
from memwal_ops.storage import probe
from tests.campaigns.faults.plan import Fault, Plan, described
from tests.campaigns.faults.points import is_indifferent
from tests.campaigns.faults.tables import scan
from tests.support.dying_store import Killed
from tests.support.tables.plain import PlainTable

if TYPE_CHECKING:
    from collections.abc import Callable

    from memwal_ops.formats.lance.table import Table
    from tests.campaigns.faults.cells import Matrix

KEY = ("text", "id")


def _init(table: Table) -> Any:
    options = InitOptions(primary_key=KEY, region_fields=("bucket(id, 4)",), maintained_indexes=("vector_index",))
    return init(table.location, table.store, options, dry_run=False)


def _is_initialized(made: PlainTable) -> None:
    assert _init(open_table(made.uri)).decision in {"created", "unchanged"}
    assert _init(open_table(made.uri)).decision == "unchanged"
    table = open_table(made.uri)
    assert table.primary_key == KEY
    assert not made.dataset.schema.field("text").nullable
    assert [one.spec_id for one in table.index.details.region_specs] == [1]
    assert [*table.index.maintained_indexes] == ["vector_index"]


def _retrain(table: Table) -> Any:
    return catchup.apply(table, CatchupOptions(retrain=True))


def _is_retrained(made: PlainTable) -> None:
    assert _retrain(open_table(made.uri)).decision == "caught_up"
    assert run_job(made.uri, "catchup").decision == "unchanged"


def _rebuild(table: Table) -> Any:
    return catchup.apply(table, CatchupOptions(indexes=("id_idx", "vector_index"), rebuild=True))


def _is_rebuilt(made: PlainTable) -> None:
    assert _rebuild(open_table(made.uri)).decision == "caught_up"
    assert run_job(made.uri, "catchup").decision == "unchanged"


def _make(uri: str) -> PlainTable:
    """Indexes that are behind, deleted rows, a tag."""
    made = PlainTable(uri).create(rows=40)
    made.dataset.create_scalar_index("id", "BTREE", name="id_idx")
    made.dataset.create_index("vector", "IVF_FLAT", num_partitions=2, name="vector_index")
    made.append(40)
    made.delete(3, 50)
    made.dataset.tags.create("kept", made.dataset.version)
    return made


def _check(made: PlainTable, start: PlainTable) -> None:
    """Every version has its rows, the newest has the newest; indexes find them all, each once."""
    known = {one["version"]: start.read(one["version"]) for one in start.dataset.versions()}
    for one in made.dataset.versions():
        version = one["version"]
        assert made.read(version) in ([known[version]] if version in known else [start.model, made.model])
    assert made.read("kept") == start.model
    assert made.read() == made.model
    dataset = made.dataset
    assert sorted(dataset.to_table(columns=["id"], filter="id >= 0")["id"].to_pylist()) == sorted(made.model)
    near = {"column": "vector", "q": [0.0] * 8, "k": 1000, "nprobes": 100}
    found = dataset.to_table(columns=["id", "_distance"], nearest=near)["id"].to_pylist()
    assert sorted(found) == sorted(made.model)


def _compact(made: PlainTable) -> None:
    made.dataset.optimize.compact_files()


def _index_again(made: PlainTable) -> None:
    """Another index of that name."""
    made.dataset.create_index("vector", "IVF_FLAT", num_partitions=3, name="vector_index", replace=True)


_OTHERS: dict[str, Callable[[PlainTable], object]] = {
    "append": lambda made: made.append(5),
    "delete": lambda made: made.delete(7, 60),
    "update": lambda made: made.update(8, 61, text="changed"),
    "compaction": _compact,
    "index": _index_again,
    "restore": lambda made: lance.dataset(made.uri, version="kept").restore(),
}


def _refusals(fault: Fault, other: str) -> tuple[type[BaseException], ...]:
    """A restore of a version without the mark is not for init to undo."""
    if fault is not Fault.BESIDE:
        return Killed, MemwalOpsError
    return (NoPrimaryKeyError, StorageError) if other == "restore" else ()


@pytest.mark.parametrize(
    ("command", "finish", "commits"),
    [(_init, _is_initialized, 3), (_retrain, _is_retrained, 2), (_rebuild, _is_rebuilt, 2)],
    ids=["init", "retrain", "rebuild"],
)
def test_every_point_of_a_command(
    matrix: Matrix,
    command: Callable[[Table], Any],
    finish: Callable[[PlainTable], None],
    commits: int,
) -> None:
    """Run again after a fault there, or after others ran there to their end, it has done all that it is for."""
    folder = f"{matrix.folder}/{command.__name__}"  # in memory
    start = _make(f"{folder}/start.lance")

    def copy() -> PlainTable:
        shutil.rmtree(f"{folder}/t.lance", ignore_errors=True)
        probe._proven.add(f"{folder}/t.lance")
        return start.copy(f"{folder}/t.lance")

    made = copy()
    plan = Plan(scan=lambda: scan(made.uri))
    plan.run(command, made.uri)
    assert made.dataset.version == start.dataset.version + commits
    cells = [
        (number, point.name, fault, other)
        for number, point in enumerate(described(plan.trail), 1)
        if not point.inner
        for fault, other in [*((fault, "") for fault in point.faults), *((Fault.BESIDE, other) for other in _OTHERS)]
        if fault is not Fault.BESIDE or not (point.nested or is_indifferent(point.name))
    ]
    for number, name, fault, other in cells:
        made = copy()
        try:
            plan = Plan(number, fault, partial(_OTHERS.get(other, lambda _: None), made))
            with suppress(*_refusals(fault, other)):
                plan.run(command, made.uri)
            assert plan.struck
            _check(made, start)
            finish(made)
            _check(made, start)
        except BaseException as error:
            error.add_note(f"{fault} {other} at {number}, {name}")
            raise
    assert len(cells) > 40
