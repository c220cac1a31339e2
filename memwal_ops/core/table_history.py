"""The history that a table itself records: its revisions and their writers, its log, its indexes and its storage.

For pages and reports; a format that can read it implements :class:`HasRecentHistory`. It reaches back as far as the
table's retention does.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Any, Protocol, runtime_checkable

from memwal_ops.core.protocols import Table


@dataclass(frozen=True, slots=True)
class RevisionRecord:
    """One retained revision.

    Attributes:
        by: the program that made it, for example ``memwal-ops merge`` or ``lance 14.0.2``.
        operation: what kind of change it was, in the format's own word; empty if that is not known.
        rows: its live rows; None if they are not recorded.
        bytes: the size of its data files; None if it is not recorded.
        merged: how many parts of the log it merged.
        merged_rows: their rows; None if one of them has none recorded.
        merged_bytes: their size, likewise.
    """

    revision: int
    committed: datetime | None
    by: str
    operation: str
    rows: int | None
    bytes: int | None
    merged: int = 0
    merged_rows: int | None = 0
    merged_bytes: int | None = 0


@dataclass(frozen=True, slots=True)
class LogRecord:
    """The life of one part of the log, such as a generation.

    Attributes:
        flushed: when it was added to the log; None if that was before what is retained.
        merged: when it was merged; None if it was not, or before what is retained.
        merged_in: the revision that merged it, if that is retained.
        removed: when its entry was removed from the log; its files are deleted later.
    """

    name: str
    rows: int | None
    bytes: int | None
    flushed: datetime | None
    merged: datetime | None
    merged_in: int | None
    removed: datetime | None
    state: str


@dataclass(frozen=True, slots=True)
class IndexRecord:
    """How much of the table an index covers. ``covered`` and ``total`` count parts of the table."""

    name: str
    kind: str
    covered: int
    total: int
    uncovered_rows: int


@dataclass(frozen=True, slots=True)
class StorageRecord:
    """Storage used by objects of one kind. ``held_by`` is why they are kept, or the command that frees them."""

    what: str
    objects: int
    bytes: int
    held_by: str


@dataclass(frozen=True, slots=True)
class TableHistory:
    """The history of one table; lists are ordered newest first.

    ``truncated``: what is included, if something was left out, to be read after "Only"; else empty.
    """

    revisions: tuple[RevisionRecord, ...]
    log: tuple[LogRecord, ...] = ()
    indexes: tuple[IndexRecord, ...] = ()
    storage: tuple[StorageRecord, ...] = ()
    truncated: str = ""

    def to_json(self) -> dict[str, Any]:
        """The history as a JSON document; times are ISO 8601, UTC."""
        document: dict[str, Any] = asdict(self, dict_factory=_jsonable)
        return document


@runtime_checkable
class HasRecentHistory(Protocol):
    """A format that reports the history of its tables; optional."""

    def recent_history(self, table: Any, limit: int) -> TableHistory:
        """The newest ``limit`` revisions of a table, and the generations that they mention. Reads metadata only."""


def history_document(table: Table, limit: int) -> Mapping[str, Any] | None:
    """The history of a table as a JSON document; None if its format does not report one."""
    known = table.format
    return known.recent_history(table, limit).to_json() if isinstance(known, HasRecentHistory) else None


def storage_of_gc(report: Mapping[str, Any]) -> list[StorageRecord]:
    """Sum up the candidates in a document of ``gc --json`` by kind and reason, the largest first."""
    records: dict[tuple[str, str], StorageRecord] = {}
    for verdict in ("delete", "held", "unknown"):
        entries = report.get(verdict)
        for entry in entries if isinstance(entries, list) else ():
            if not isinstance(entry, dict):
                continue
            why = _DELETABLE if verdict == "delete" else str(entry.get("because") or "not recognized")
            kind = str(entry.get("kind", "")).replace("_", " ")
            before = records.get((kind, why), StorageRecord(kind, 0, 0, why))
            objects, size = before.objects + _number(entry, "objects"), before.bytes + _number(entry, "bytes")
            records[kind, why] = StorageRecord(kind, objects, size, why)
    return sorted(records.values(), key=lambda record: -record.bytes)


def _number(one: Mapping[str, Any], name: str) -> int:
    """A number of an entry; 0 for anything else, as the report may be that of another package."""
    value = one.get(name)
    return value if isinstance(value, int) else 0


_DELETABLE = "nothing (memwal-ops gc --apply deletes it)"


def _jsonable(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    return {name: value.isoformat() if isinstance(value, datetime) else value for name, value in pairs}
