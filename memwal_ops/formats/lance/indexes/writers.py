"""Read which releases of Lance write a table, from its newest versions."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain, islice
from typing import TYPE_CHECKING

from google.protobuf.unknown_fields import UnknownFieldSet

from memwal_ops.errors import InvalidFormatError, ObjectNotFoundError
from memwal_ops.formats.lance.files.versions import read_version_manifest
from memwal_ops.formats.lance.wire.names import JOB_PROPERTY
from memwal_ops.formats.lance.wire.version_manifest import FEATURES, SHOWN_FEATURES, lance_major
from memwal_ops.storage.concurrently import concurrently

if TYPE_CHECKING:
    from collections.abc import Iterator

    from memwal_ops.formats.lance.table import Table
    from memwal_ops.formats.lance.wire._pb import table_pb2
    from memwal_ops.formats.lance.wire.version_manifest import VersionManifest

# How many of the newest versions show which releases write the table.
_LAST_WRITERS = 32
_CONCURRENT_READS = 8
# Versions are immutable: by table, path, time and tag. A reader that follows a table reads each one once.
_KNOWN: dict[tuple[object, ...], Written] = {}
_MAX_KNOWN = 4096
# Fields of a transaction: create index, rewrite, reserve fragments.
_MAINTENANCE = frozenset({103, 104, 107})
# The releases of LanceDB that are built on a major release of Lance (docs/compatibility.md).
_LANCEDB = {8: "0.34", 9: "0.36", 10: "0.37", 11: "0.38", 12: "0.39", 13: "0.40"}


@dataclass(frozen=True, slots=True)
class Written:
    """Who wrote a version. ``writes``: whether rows may have changed; ``indexes``: names and versions."""

    version: int
    major: int | None
    release: str
    ours: bool
    writes: bool
    indexes: frozenset[tuple[str, int]]

    @classmethod
    def of(cls, manifest: VersionManifest) -> Written:
        """From a version's manifest."""
        writer, transaction = manifest.manifest.writer_version, manifest.transaction
        return cls(
            int(manifest.manifest.version),
            lance_major(manifest.manifest),
            f"{writer.library} {writer.version}".strip() or "an unknown release",
            transaction is not None and JOB_PROPERTY in transaction.transaction_properties,
            transaction is None or not _maintains(transaction),
            frozenset((entry.name, int(entry.index_version)) for entry in manifest.index_entries),
        )


def _maintains(transaction: table_pb2.Transaction) -> bool:
    """Whether a commit only built an index or compacted: ours of plain tables have no properties that tell them."""
    numbers = {field.number for field, _ in transaction.ListFields()}
    numbers |= {field.field_number for field in UnknownFieldSet(transaction)}  # type: ignore[attr-defined]  # iterable, missing in the stub
    return not numbers.isdisjoint(_MAINTENANCE)


def last_written(table: Table, *, concurrent: int = _CONCURRENT_READS) -> Iterator[Written]:
    """The newest versions, at most 32, from the newest on; a version that was read before is not read again.

    Requests: one for each version but the newest, as far as they are taken; up to ``concurrent`` are read ahead.
    """
    listed = table.listed.versions

    def known(version: int, manifest: VersionManifest | None = None) -> Written | None:
        file = listed.get(version)
        key = None if file is None else (table.location.uri, file.path, file.last_modified, file.e_tag)
        if manifest is None and key in _KNOWN:
            return _KNOWN[key]
        try:
            written = Written.of(manifest or read_version_manifest(table.store, version, table.naming))
        except (ObjectNotFoundError, InvalidFormatError):
            return None  # expired, or damaged: verify reports that
        if len(_KNOWN) >= _MAX_KNOWN:
            _KNOWN.clear()
        if key is not None:
            _KNOWN[key] = written
        return written

    earlier = sorted((version for version in listed if version < table.version), reverse=True)[: _LAST_WRITERS - 1]
    newest = known(table.version, table.manifest)
    older = (written for _, written in concurrently(known, earlier, threads=concurrent))
    yield from (written for written in chain([newest], older) if written is not None)


def last_client(table: Table, *, within: int = _LAST_WRITERS) -> Written | None:
    """The newest version that the table's own writers wrote; None: none of the newest ``within`` is theirs.

    Requests: one for each newer version of ours.
    """
    newest = islice(last_written(table, concurrent=1), within)
    return next((one for one in newest if one.writes and not one.ours), None)


def last_writer(table: Table) -> str | None:
    """The release of the table's own writers, for people: ``lance 13.0.0 (lancedb 0.40), stable row ids``.

    None: none of the newest versions is theirs. Requests: as :func:`last_client`, at most 31.
    """
    found = last_client(table)
    if found is None:
        return None
    lancedb = _LANCEDB.get(found.major or 0)
    flags = table.manifest.manifest.reader_feature_flags
    features = [one.name for one in FEATURES if one.flag & flags & SHOWN_FEATURES]
    return ", ".join([found.release + (f" (lancedb {lancedb})" if lancedb else ""), *features])
