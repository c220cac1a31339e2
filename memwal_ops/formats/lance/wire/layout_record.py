"""Encode and decode the layout that a migration recorded in a table version, and the one that it had before.

Without a migration the files of the regions determine the layout. After one, files of both layouts lie side by side,
and the record determines the layout of new regions. It is stored in the table configuration (manifest field 16),
which every commit of pylance preserves.
"""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass
from typing import TYPE_CHECKING

from memwal_ops.formats.lance.wire.version_manifest import TABLE_CONFIG

if TYPE_CHECKING:
    from memwal_ops.formats.lance.wire._pb import table_pb2

_LAYOUT = "memwal-ops.layout"
_BEFORE = "memwal-ops.layout-before"


@dataclass(frozen=True, slots=True)
class LayoutRecord:
    """The record of a migration between the current layouts.

    Attributes:
        layout: name of the table's layout.
        before: the one that a rollback restores; None: the last migration was rolled back.
    """

    layout: str
    before: str | None


def layout_record(manifest: table_pb2.Manifest) -> LayoutRecord | None:
    """The record of a version; None: the table was not migrated between the current layouts."""
    if _LAYOUT not in manifest.config:
        return None
    return LayoutRecord(manifest.config[_LAYOUT], dict(manifest.config).get(_BEFORE))


def with_layout_record(manifest: table_pb2.Manifest, record: LayoutRecord | None) -> table_pb2.Manifest:
    """A copy of the manifest with that record; None: with none."""
    changed = deepcopy(manifest)
    changed.config.pop(_LAYOUT, None)
    changed.config.pop(_BEFORE, None)
    if record is None:
        return changed
    changed.config[_LAYOUT] = record.layout
    if record.before is not None:
        changed.config[_BEFORE] = record.before
    changed.writer_feature_flags |= TABLE_CONFIG  # releases that would drop it must not write
    return changed
