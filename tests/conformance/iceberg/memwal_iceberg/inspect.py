"""Show a table and its snapshots. Reads metadata files only."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from memwal_iceberg.files import Contents, Missing, contents_of
from memwal_ops.text import counted, grid, size_text

if TYPE_CHECKING:
    from memwal_iceberg.specs import InspectOptions
    from memwal_iceberg.table import Table
    from memwal_ops.core.context import RunContext


@dataclass(frozen=True)
class Inspection:
    """A table with what its current snapshot contains; ``missing``: why that is not known."""

    table: Table
    contents: Contents
    missing: str | None
    limit: int

    decision = "inspected"
    exit_code = 0

    def to_json(self) -> dict[str, Any]:
        metadata = self.table.iceberg.metadata
        current = metadata.current_snapshot_id
        return {
            "decision": self.decision,
            "uri": self.table.location.uri,
            "catalog": self.table.location.catalog,
            "format": self.table.format.name,
            "version": self.table.revision,
            "format_version": metadata.format_version,
            "current_snapshot": current,
            "files": self.contents.files,
            "delete_files": self.contents.delete_files,
            "rows": self.contents.rows,
            "bytes": self.contents.bytes,
            "missing": self.missing,
            "snapshots": self._snapshots()[: self.limit],
            "truncated": len(metadata.snapshots) > self.limit,
            "backlog": {},
        }

    def describe(self) -> str:
        table, metadata = self.table, self.table.iceberg.metadata
        deletes = counted(self.contents.delete_files, "delete file")
        what = f"{counted(self.contents.files, 'file')}, {deletes}, {counted(self.contents.rows, 'row')}"
        rows = [
            ("table", f"{table.location.catalog}, at {table.location.uri}"),
            ("revision", f"{table.revision}, format version {metadata.format_version}"),
            ("contents", f"{what}, {size_text(self.contents.bytes)}" if self.missing is None else self.missing),
            ("snapshots", f"{len(metadata.snapshots)}"),
        ]
        lines = [f"{name:<10} {text}" for name, text in rows]
        cells = [(str(one["id"]), one["time"], str(one["operation"])) for one in self._snapshots()[: self.limit]]
        if cells:
            lines += ["", grid(("snapshot", "time", "operation"), cells, words=("time", "operation"))]
        return "\n".join(lines)

    def _snapshots(self) -> list[dict[str, Any]]:
        """The retained snapshots, the newest first."""
        metadata = self.table.iceberg.metadata
        names: dict[int, list[str]] = {}
        for name, ref in metadata.refs.items():
            names.setdefault(ref.snapshot_id, []).append(name)
        return [
            {
                "id": one.snapshot_id,
                "time": datetime.fromtimestamp(one.timestamp_ms / 1000, UTC).isoformat(timespec="seconds"),
                "operation": None if one.summary is None else one.summary.operation.value,
                "refs": sorted(names.get(one.snapshot_id, [])),
            }
            for one in sorted(metadata.snapshots, key=lambda one: one.timestamp_ms, reverse=True)
        ]


def plan(table: Table, options: InspectOptions, context: RunContext) -> Inspection:
    current = table.iceberg.current_snapshot()
    try:
        contents = Contents() if current is None else contents_of(table, current)
    except Missing as error:
        return Inspection(table, Contents(), str(error), options.limit)
    return Inspection(table, contents, None, options.limit)


apply = plan
