"""Collect the garbage of an index folder: replaced views, leftovers of killed runs, and files of ended readers.

| what | proof |
|---|---|
| file of a view | `CURRENT` names another view, and only rises; a reader with the file open keeps it, and one that does not find it reads `CURRENT` again; nothing is published meanwhile: the run has the writer lock |
| file of a reader | its kernel lock is released, which happens when its process ends |
| anything else | kept, reported as unrecognized |
"""  # noqa: E501 - a table

from __future__ import annotations

import enum
import re
from typing import TYPE_CHECKING

from memwal_ops.core import collector
from memwal_ops.core.anchors import Anchor, anchor_at
from memwal_ops.core.candidates import UNKNOWN, Candidate, Gate, unrecognized
from memwal_ops.core.gc_report import GcReport, KindText
from memwal_ops.errors import TableReplacedError
from memwal_ops.formats.lm_diskann.files import CURRENT, GRAPH, METADATA
from memwal_ops.formats.lm_diskann.library import read_parameters
from memwal_ops.formats.lm_diskann.locks import READERS, WRITER, WriterLock, dead_readers
from memwal_ops.formats.lm_diskann.publishing import stale_files
from memwal_ops.formats.lm_diskann.store import LOG, NAME
from memwal_ops.formats.lm_diskann.view import read_current

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from memwal_ops.core.context import RunContext
    from memwal_ops.formats.lm_diskann.options import GcOptions
    from memwal_ops.formats.lm_diskann.table import Table

_KNOWN = {METADATA, GRAPH, NAME, LOG, WRITER, CURRENT}
_FOREIGN = re.compile(r"(_mem_wal_ops|diskann_store\.duckdb\.tmp)/.*")
_VIEW = re.compile(r"view/[0-9]{16}\.(base|log)")


class Kind(enum.StrEnum):
    """The kinds of candidates."""

    VIEW = "view"
    READER = "reader"


class IndexGcReport(GcReport[Candidate]):
    """The report of gc, as in every format."""

    kinds = {  # noqa: RUF012 - as in the base class
        Kind.VIEW: KindText("files of replaced views", ("file", "files")),
        Kind.READER: KindText("files of ended readers", ("file", "files")),
        UNKNOWN: KindText("unknown"),
    }


class Files(collector.Collector[Candidate]):
    """The files of the folder that are not in use.

    Args:
        table: any epoch.
        anchors: see the base class.
    """

    def __init__(self, table: Table, anchors: Sequence[Anchor] = ()) -> None:
        self.table, self.store, self._anchors = table, table.store, anchors

    @property
    def anchors(self) -> Sequence[Anchor]:
        """``CURRENT``; none for a plan."""
        return self._anchors

    def stages(self) -> Iterator[collector.Stage[Candidate]]:
        """In the order of their names."""
        yield collector.Stage(self._found())

    def revalidate(self, batch: Sequence[Candidate]) -> Iterable[Candidate]:
        """Judge the batch by the view in ``CURRENT`` and the locks now."""
        wanted = {one.path for one in batch}
        return [one for one in self._found() if one.path in wanted]

    def _found(self) -> list[Candidate]:
        folder, parameters = self.table.location.uri, read_parameters(self.table.location.uri)
        if parameters.uuid != self.table.parameters.uuid:
            raise TableReplacedError(f"{folder} contains another index than before.")
        number = read_current(folder, parameters)
        stale, dead = {*stale_files(folder, parameters)}, {*dead_readers(folder)}
        found = []
        for meta in self.store.list(""):
            if meta.path in stale:
                gate = Gate(met=True, text=f"{CURRENT} names view {number}")
                found.append(Candidate(Kind.VIEW, meta.path, meta.size, 1, (gate,)))
            elif meta.path in dead:
                gate = Gate(met=True, text="its reader's lock is released: the process has ended")
                found.append(Candidate(Kind.READER, meta.path, meta.size, 1, (gate,)))
            elif not (
                meta.path in _KNOWN
                or _FOREIGN.fullmatch(meta.path)
                or _VIEW.fullmatch(meta.path)
                or meta.path.startswith(f"{READERS}/")
            ):
                found.append(unrecognized(meta.path, meta.size, "its name is not one of the format's"))
        return sorted(found, key=lambda one: one.path)


def backlog(table: Table) -> Mapping[str, float]:
    """No metrics."""
    del table
    return {}


def plan(table: Table, options: GcOptions, context: RunContext) -> IndexGcReport:
    """The candidates. Reads only."""
    return collector.plan([Files(table)], IndexGcReport(applied=False), options, context)


def apply(table: Table, options: GcOptions, context: RunContext) -> IndexGcReport:
    """Delete the candidates. Safe to kill, to run twice, and beside readers.

    Raises:
        IndexBusyError: another writer or job has the index.
    """
    lock = WriterLock(table.location.uri, options.wait.total_seconds())
    try:
        anchors = (anchor_at(table.store, CURRENT, "The current view"),)
        return collector.collect([Files(table, anchors)], IndexGcReport(applied=True), options, context)
    finally:
        lock.release()
