"""Export a table's metadata without values, and open a table from such a file (``--from FILE``)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from typing import IO, Any, Protocol, runtime_checkable

from memwal_ops import errors
from memwal_ops.core.protocols import Table
from memwal_ops.core.registry import formats, open_for
from memwal_ops.storage import api, export_file
from memwal_ops.storage.locations import Location
from memwal_ops.storage.options import redact
from memwal_ops.version import __version__

_CONCURRENT_READS = 16
_CHUNK = 4 * _CONCURRENT_READS


@dataclass(frozen=True, slots=True)
class Exported:
    """How an object of a table is exported.

    Attributes:
        without_values: returns the bytes to export: the object's bytes with all values removed. Raises
            ``InvalidFormatError`` if the object does not decode; it is then exported as empty, which does not decode
            either. None: the bytes are left out.
        listed: whether listings of the export have it.
        opened: whether a library that opens files by itself needs the contents.
    """

    meta: api.ObjectMeta
    without_values: Callable[[bytes], bytes] | None = None
    listed: bool = True
    opened: bool = False


@runtime_checkable
class ExportsMetadata(Protocol):
    """A format whose tables can be exported; optional."""

    @property
    def name(self) -> str:
        """As that of the format."""

    def exported(self, store: api.Store, versions: int) -> Iterable[Exported]:
        """All objects of the table, each listed once; what is left out of ``versions`` revisions is not listed.

        Raises ``MemwalOpsError``: a table of this kind is not exported; the store failed.
        """


def export_table(
    file: IO[bytes], table_format: ExportsMetadata, location: Location, store: api.Store, versions: int, **more: Any
) -> tuple[int, int]:
    """Write an export; returns the number of objects, and of those with contents.

    ``file``: receives the export. ``versions``: how many of the newest revisions.

    Raises:
        MemwalOpsError: see :class:`ExportsMetadata`.
    """
    about: Mapping[str, Any] = {
        "release": __version__,
        "format": table_format.name,
        "uri": redact(location.uri),
        "taken": datetime.now(UTC).isoformat(),
        **more,
    }
    return export_file.write_export(file, about, _contents(store, table_format.exported(store, versions)))


def _contents(store: api.Store, objects: Iterable[Exported]) -> Iterator[export_file.ExportedObject]:
    for _, content in api.concurrently(partial(_content, store), objects, threads=_CONCURRENT_READS, chunk=_CHUNK):
        if content is not None:
            yield content


def _content(store: api.Store, one: Exported) -> export_file.ExportedObject | None:
    """The object with its contents; None if it was deleted since it was listed."""
    contents = None
    if one.without_values is not None:
        try:
            contents = one.without_values(store.get(one.meta.path))
        except errors.ObjectNotFoundError:
            return None
        except errors.InvalidFormatError:
            contents = b""
    return export_file.ExportedObject(one.meta, contents, one.listed, one.opened)


@contextmanager
def open_export(path: str, job: str | None = None) -> Iterator[Table]:
    """Open the table of an export while the block runs. A read of left-out contents raises ``NotExportedError``.

    ``job``: as in :func:`memwal_ops.core.registry.open_table`.

    Raises:
        MemwalOpsError: see :class:`memwal_ops.storage.export_file.ExportedStore`.
        MemwalOpsError: the table cannot be opened, for the same reason as where it was exported.
    """
    with closing(export_file.ExportedStore(path)) as store:
        name = store.about.get("format")
        table_format = formats().get(str(name))
        if table_format is None:
            raise errors.UnsupportedFeatureError(
                f"{path} is an export of a table of the format {name!r:.60}, which is not installed here.",
                remedy="Install the package of that format.",
            )
        yield open_for(job, table_format, Location(store.root, "file", files=store.folder), store)


def exported_store(table: Table) -> export_file.ExportedStore | None:
    """The export that a table was opened from; None: it was not opened from an export."""
    return table.store if isinstance(table.store, export_file.ExportedStore) else None
