"""``merge --accept-drained`` and ``adopt --drained``, with every fault at each write, and others who run there."""

from __future__ import annotations

import shutil
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lance
import pytest

from memwal_ops import open_table
from memwal_ops.errors import MemwalOpsError
from memwal_ops.formats.lance.jobs import adopt, merge
from memwal_ops.formats.lance.jobs.gc import job as gc
from memwal_ops.formats.lance.options import AdoptOptions, MergeOptions
from memwal_ops.storage import probe
from tests.campaigns.faults.plan import Fault, Plan, described
from tests.campaigns.faults.points import is_indifferent
from tests.campaigns.faults.tables import scan
from tests.campaigns.faults.test_matrix import chosen
from tests.integration.contracts import small
from tests.integration.formats.lance.jobs.adopt.test_drained import EXPECTED, flushed, theirs
from tests.support.dying_store import Killed
from tests.support.gc_options import IMMEDIATE, PATIENT

if TYPE_CHECKING:
    from collections.abc import Callable

    from memwal_ops.formats.lance.table import Table
    from tests.campaigns.faults.cells import Matrix

ACCEPT = MergeOptions(accept_drained=True)
WANTED = EXPECTED | {120: [5.0], 60: [6.0]}


def _merge(table: Table) -> Any:
    return merge.apply(table, ACCEPT)


def _adopt(table: Table) -> Any:
    return adopt.apply(table, AdoptOptions(drained=True))


def _write(uri: str) -> None:
    small.flush(uri, small.rows(61, 62, 7.0))


_OTHERS: dict[str, Callable[[str], object]] = {
    "writer": _write,
    "merge": lambda uri: _merge(open_table(uri)),
    "adopt": lambda uri: _adopt(open_table(uri)),
    "gc": lambda uri: gc.apply(open_table(uri), PATIENT),
    "compaction": lambda uri: lance.dataset(uri).optimize.compact_files(),
}


def _make(folder: Path, *, missing: bool) -> str:
    """Five generations that another program dropped, the last one unmerged if ``missing``; one that waits."""
    uri = flushed(folder)
    small.flush(uri, small.rows(120, 121, 5.0))
    for number in range(1, 5):
        theirs(uri, only=number)
    theirs(uri, only=5, merged=not missing)
    small.flush(uri, small.rows(60, 61, 6.0))
    return uri


@pytest.mark.parametrize("missing", [True, False], ids=["missing", "merged"])
@pytest.mark.parametrize("job", [_merge, _adopt])
def test_every_point(matrix: Matrix, job: Callable[[Table], Any], missing: bool) -> None:
    """Whatever happens there, and whatever gc takes then, the next runs leave each row once, and of its last write."""
    folder = Path(matrix.folder, f"drained{job.__name__}{missing}")
    folder.mkdir(parents=True)
    start, uri = _make(folder, missing=missing), str(folder / "t.lance")

    def copy() -> None:
        shutil.rmtree(uri, ignore_errors=True)
        shutil.copytree(start, uri)
        probe._proven.add(uri)

    copy()
    plan = Plan(scan=lambda: scan(uri))
    plan.run(job, uri)
    cells = [
        (number, point.name, fault, other)
        for number, point in enumerate(described(plan.trail), 1)
        if point.effect  # others before the first of its reads is another order of the two
        for fault, other in [*((fault, "") for fault in point.faults), *((Fault.BESIDE, other) for other in _OTHERS)]
        if fault is not Fault.BESIDE or not (point.nested or is_indifferent(point.name))
    ]
    assert len(cells) > 20
    for number, name, fault, other in chosen(cells):
        copy()
        try:
            plan = Plan(number, fault, partial(_OTHERS[other], uri) if other else None)
            with suppress(*(() if fault is Fault.BESIDE else (Killed, MemwalOpsError))):
                plan.run(job, uri)
            assert plan.struck
            assert gc.apply(open_table(uri), IMMEDIATE).exit_code in {0, 10}
            job(open_table(uri))
            for _ in range(2):
                assert _merge(open_table(uri)).exit_code == 0
                assert gc.apply(open_table(uri), IMMEDIATE).exit_code == 0
            assert small.values(uri) == WANTED | ({61: [7.0]} if other == "writer" else {})
            (progress,) = small.progress(uri).values()
            assert progress == 6 + (other == "writer")
        except BaseException as error:
            error.add_note(f"{fault} {other} at {number}, {name}")
            raise
