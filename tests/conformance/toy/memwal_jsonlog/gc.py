"""Delete log entries that are merged.

Proof: the newest base version contains them, and ``merged`` only rises. A reader that misses an entry reads the newest
version again; a writer that stalled until its number was merged and free again writes its entry again under the next
number. Files with unrecognized names are kept and reported.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from memwal_jsonlog.table import base_path, number_of
from memwal_ops.core import collector
from memwal_ops.core.anchors import Anchor, anchor_at
from memwal_ops.core.candidates import UNKNOWN, Candidate, CollectionReport, Gate, KindText, unrecognized

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from memwal_jsonlog.table import Table
    from memwal_ops.core.context import RunContext
    from memwal_ops.core.options import CollectOptions


KINDS = {"entry": KindText("log entries", ("log entry", "log entries")), UNKNOWN: KindText("unknown")}


class Report(CollectionReport[Candidate]):
    """The report of gc, as in every format."""

    kinds = KINDS


class LogEntries(collector.Collector[Candidate]):
    """The entries of the log."""

    anchors: tuple[Anchor, ...] = ()

    def __init__(self, table: Table) -> None:
        self.table, self.store = table, table.store

    def stages(self) -> Iterator[collector.Stage[Candidate]]:
        found = sorted((meta.path, meta.size) for meta in self.store.list("log"))
        yield collector.Stage(self._judged(*one) for one in found)

    def revalidate(self, batch: Sequence[Candidate]) -> list[Candidate]:
        # The anchor is read first: everything read after it, and the deletion, are then of the same table.
        self.anchors = (anchor_at(self.store, base_path(self.table.revision), f"Version {self.table.revision}"),)
        self.table = self.table.newest()
        return [self._judged(one.path, one.bytes) for one in batch]

    def _judged(self, path: str, size: int) -> Candidate:
        if not number_of(path):
            return unrecognized(path, size, "its name is not that of a log entry")
        text = f"version {self.table.revision} contains the log up to {self.table.merged}"
        return Candidate("entry", path, size, 1, (Gate(number_of(path) <= self.table.merged, text),))


def collectors(table: Table) -> list[LogEntries]:
    return [LogEntries(table)]


def plan(table: Table, options: CollectOptions, context: RunContext) -> Report:
    return collector.plan(collectors(table), Report(applied=False), options, context)


def apply(table: Table, options: CollectOptions, context: RunContext) -> Report:
    return collector.collect(collectors(table), Report(applied=True), options, context)
