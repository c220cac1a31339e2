"""What the base table's own versions say about a field id: renamed, or given to another column.

Lance reuses the id of a dropped column where no data file holds it any more (an empty base table,
a column that was null throughout). Timeline of the loss this prevents: a generation is flushed
with column ``note`` (id 3); ``note`` is dropped; ``email`` is added and gets id 3; a merge by id
alone writes every old note into ``email``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from memwal_ops.core.table import VERSIONS_FOLDER
from memwal_ops.errors import ObjectNotFoundError
from memwal_ops.format.names import version_manifest_name
from memwal_ops.format.version_manifest import decode_version_manifest

if TYPE_CHECKING:
    from memwal_ops.core.table import Table


class SchemaHistory:
    """Answers for one table; versions are read newest first, once each, and only when asked."""

    def __init__(self, table: Table) -> None:
        self._table = table
        self._names: dict[int, dict[int, str] | None] = {}

    def is_rename(self, field_id: int, old: str, new: str) -> bool | None:
        """Whether the field named ``new`` today is the one that was named ``old``.

        Returns:
            True where every version back to one in which it was ``old`` has the field; False where
            a version in between lacks it, so that the id was given away; None where the versions
            that would tell are no longer there.
        """
        del new
        for version in range(self._table.version, 0, -1):
            names = self._names_at(version)
            if names is None:
                return None
            if field_id not in names:
                return False
            if names[field_id] == old:
                return True
        return None

    def _names_at(self, version: int) -> dict[int, str] | None:
        if version not in self._names:
            path = f"{VERSIONS_FOLDER}/{version_manifest_name(version, self._table.naming)}"
            try:
                manifest = decode_version_manifest(self._table.store.get(path)).manifest
                self._names[version] = {field.id: field.name for field in manifest.fields}
            except ObjectNotFoundError:
                self._names[version] = None
        return self._names[version]
