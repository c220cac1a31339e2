"""Show a namespace and its backlog. Reads only."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from memwal_ops.core.polling import cached_for_poll, poll_cache
from memwal_ops.errors import TableCorruptError
from memwal_ops.formats.zeppelin import backlog as log
from memwal_ops.formats.zeppelin.backlog import damaged_parts, unchecked
from memwal_ops.formats.zeppelin.lease import read_lease
from memwal_ops.text import counted, grid, paragraph, size_text, time_text

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from memwal_ops.core.context import RunContext
    from memwal_ops.formats.zeppelin.backlog import BlockedPart, Contested
    from memwal_ops.formats.zeppelin.lease import LeaseRecord
    from memwal_ops.formats.zeppelin.namespace import Namespace
    from memwal_ops.formats.zeppelin.specs import InspectOptions


@dataclass(frozen=True)
class Inspection:
    """The data that ``inspect`` prints for one manifest."""

    table: Namespace
    backlog: Mapping[str, float]
    damaged: tuple[BlockedPart, ...]
    contested: Contested
    lease: LeaseRecord | None
    limit: int

    decision = "inspected"
    exit_code = 0

    def to_json(self) -> dict[str, Any]:
        """The document of ``inspect --json``."""
        table, manifest = self.table, self.table.manifest
        missing = {one.id for one in self.damaged if one.missing}
        return {
            "decision": self.decision,
            "uri": table.location.uri,
            "format": table.format.name,
            "dialect": manifest.dialect,
            "encoding": manifest.encoding,
            "namespace": manifest.namespace,
            "version": table.revision,
            "dimensions": table.meta.dimensions,
            "metric": table.meta.metric,
            "state": table.meta.state,
            "unwritable": manifest.unwritable,
            "fencing_token": manifest.token,
            "lease": self._lease(),
            "pending_deletes": len(manifest.pending),
            "segments": [
                {
                    "id": one.id,
                    "vectors": one.vectors,
                    "clusters": one.clusters,
                    "quantization": one.quantization,
                    "bitmap_fields": [*one.bitmap_fields],
                    "fts_fields": [*one.fts_fields],
                    "hierarchical": one.hierarchical,
                }
                for one in manifest.segments
            ],
            "fragments": [
                {"id": one.id, "vectors": one.vectors, "deletes": one.deletes, "missing": one.id in missing}
                for one in manifest.fragments[: self.limit]
            ],
            "truncated": len(manifest.fragments) > self.limit,
            "blocked": [one.to_json() for one in self.damaged],
            "contested": len(self.contested.ids),
            "backlog": dict(self.backlog),
        }

    def describe(self) -> str:
        """The inspection as text for people."""
        table, manifest = self.table, self.table.manifest
        lease = self._lease()
        held = "unreadable" if any(one.kind == "lease" for one in self.damaged) else "never acquired"
        if lease is not None:
            held = f"{lease['state']} ({lease['holder']}, token {lease['token']})"
        what = f"{counted(int(self.backlog['fragments']), 'fragment')}, {counted(int(self.backlog['rows']), 'vector')}"
        waiting = f"{what}, {size_text(self.backlog['bytes'])}, the oldest for {time_text(self.backlog['oldest_age'])}"
        rows = [
            ("namespace", f"{manifest.namespace}, {manifest.dialect} dialect, manifest as {manifest.encoding}"),
            ("revision", f"{table.revision}, fencing token {manifest.token}"),
            ("vectors", f"{table.meta.dimensions or 'unknown'} dimensions, metric {table.meta.metric or 'unknown'}"),
            ("waiting", waiting),
            ("pending", counted(len(manifest.pending), "pending delete")),
            ("lease", held),
        ]
        lines = [f"{name:<10} {text}" for name, text in rows]
        if manifest.unwritable is not None:
            lines.append(f"{'read-only':<10} {manifest.unwritable}")
        cells = [
            (one.id, f"{one.vectors:,}", str(one.clusters), one.quantization or "none", ", ".join(one.bitmap_fields))
            for one in manifest.segments
        ]
        if cells:
            headings = ("segment", "vectors", "clusters", "codes", "bitmaps")
            lines += ["", grid(headings, cells, words=("segment", "codes", "bitmaps"))]
        lines += ["", *self._objects()]
        return "\n".join(lines)

    def _objects(self) -> Iterator[str]:
        """What is wrong with objects, and how far they were checked."""
        for one in self.damaged:
            yield f"{'missing' if one.missing else 'damaged'}: {one.path}"
            yield paragraph(f"{one.error} {one.error.remedy}", indent="  ", hanging="  ")
        if self.contested.ids:
            yield paragraph(f"{self.contested}; no query returns them, and merge keeps both.", hanging="  ")
        skipped = unchecked(self.table.manifest)
        if skipped:
            yield f"Not looked for, as only a server can: the objects of {', '.join(skipped)}."
        elif not self.damaged:
            yield "All listed objects exist, with the sizes that are known; contents were not read: memwal-ops verify."

    def _lease(self) -> dict[str, Any] | None:
        if self.lease is None:
            return None
        state = "held" if self.lease.expires > datetime.now(UTC) else "expired"
        expires = self.lease.expires.isoformat(timespec="seconds")
        return {"holder": self.lease.holder, "token": self.lease.token, "expires": expires, "state": state}


def plan(table: Namespace, options: InspectOptions, context: RunContext | None = None) -> Inspection:
    """Inspect the namespace: its manifest, listings of its log and segment, and its lease."""
    del context
    try:
        stored = read_lease(table)
    except TableCorruptError:
        stored = None  # among what is damaged
    with poll_cache():
        figures = log.figures(table)
        damaged = cached_for_poll(table, "damaged", lambda: damaged_parts(table))
        left = cached_for_poll(table, "contested", lambda: log.contested(table))
    return Inspection(table, figures, damaged, left, stored and stored[0], options.limit)


apply = plan
