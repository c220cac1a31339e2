"""What the base table's own versions say about a field: renamed, given away, or which one it was.

Lance reuses the id of a dropped column where no data file holds it any more (an empty base table,
a column that was null throughout). Timeline of the loss this prevents: a generation is flushed
with column ``note`` (id 3); ``note`` is dropped; ``email`` is added and gets id 3; a merge by id
alone writes every old note into ``email``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from memwal_ops.core.versions import read_version_manifest
from memwal_ops.errors import InvalidFormatError, ObjectNotFoundError, SchemaProjectionError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from memwal_ops.core.table import Table
    from memwal_ops.format._pb import table_pb2

# A field without its id: its name, type, and the place of its parent in the list.
_Shape = list[tuple[str, str, int]]


class SchemaHistory:
    """Answers for one table; versions are read newest first, once each, and only when asked."""

    def __init__(self, table: Table) -> None:
        self._table = table
        self._read: dict[int, table_pb2.Manifest | None] = {}

    def is_rename(self, field_id: int, old: str, new: str) -> bool | None:
        """Whether the field named ``new`` today is the one that was named ``old``.

        Returns:
            True where every version back to one in which it was ``old`` has the field; False where
            a version in between lacks it, so that the id was given away; None where the versions
            that would tell are no longer there.
        """
        del new
        for manifest in self._newest_first():
            names = {field.id: field.name for field in manifest.fields}
            if field_id not in names:
                return False
            if names[field_id] == old:
                return True
        return None

    def base_ids(self, generation: table_pb2.Manifest, *, ignore: str) -> dict[int, int] | None:
        """The base's ids for a generation whose fields were numbered without regard to the base.

        The newest version that stood when the generation was flushed and had the same fields in
        the same order tells them. Where those versions are gone, the numbers are the base's own if
        the oldest version left has the same fields and never lost one (its ids have no hole).

        Args:
            generation: its manifest.
            ignore: a top-level field of the generation that the base never had.

        Returns:
            Generation id to base id, or None where nobody can tell.
        """
        fields = [field for field in generation.fields if field.name != ignore or field.parent_id >= 0]
        wanted = _shape(fields)
        flushed = generation.timestamp.ToNanoseconds()
        oldest: table_pb2.Manifest | None = None
        for manifest in self._newest_first():
            oldest = manifest
            if manifest.timestamp.ToNanoseconds() <= flushed and _shape(manifest.fields) == wanted:
                return {mine.id: theirs.id for mine, theirs in zip(fields, manifest.fields, strict=True)}
        if oldest is None or oldest.timestamp.ToNanoseconds() <= flushed or _shape(oldest.fields) != wanted:
            return None
        ids = [field.id for field in oldest.fields]
        return {mine.id: mine.id for mine in fields} if ids == list(range(len(ids))) else None

    def _newest_first(self) -> Iterator[table_pb2.Manifest]:
        for version in range(self._table.version, 0, -1):
            manifest = self._manifest_at(version)
            if manifest is None:
                return
            yield manifest

    def _manifest_at(self, version: int) -> table_pb2.Manifest | None:
        if version not in self._read:
            try:
                found = read_version_manifest(self._table.store, version, self._table.naming).manifest
                found.ClearField("fragments")
                self._read[version] = found
            except ObjectNotFoundError:
                self._read[version] = None
            except InvalidFormatError as error:
                # The regions whose generations are older than the change wait for it; all others go on.
                raise SchemaProjectionError(
                    f"A version that would tell what the generation's columns are called today is damaged: {error}",
                    remedy="Restore that file from a backup; or give the columns their old names back, merge, and "
                    "rename them again.",
                ) from error
        return self._read[version]


def _shape(fields: Iterable[table_pb2.Field]) -> _Shape:
    listed = list(fields)
    places = {field.id: place for place, field in enumerate(listed)}
    return [(field.name, field.logical_type, places.get(field.parent_id, -1)) for field in listed]
