"""Select the objects of a Lance table for an export, and remove the table's values from them.

Rows, WAL entries, index files, filters and transaction files are listed with sizes and times, and nothing more.

Write the rows of another format to a Lance table, and create its MemWAL index.

The record of the migration is in the schema's metadata. The rows of the first run and the record are one version, so a
run that is killed before it leaves files that no version needs, and no table.
"""

from __future__ import annotations

import hmac
import json
import re
import secrets
from collections import defaultdict
from contextlib import contextmanager
from heapq import nlargest
from typing import TYPE_CHECKING, Any

import lance
import pyarrow as pa

from memwal_ops import errors
from memwal_ops.core.export import Exported
from memwal_ops.core.holds import EXPIRIES_FOLDER, HOLDS_FOLDER
from memwal_ops.core.leases import LEASES_FOLDER
from memwal_ops.formats.lance.engines.spark.load import SparkTable, bulk_load, running
from memwal_ops.formats.lance.files.datasets import REFS_FOLDER, is_one_of, lance_errors, lance_options, open_dataset
from memwal_ops.formats.lance.files.version_files import VERSION_HINT, VERSIONS_FOLDER, version_of_main
from memwal_ops.formats.lance.indexes.snapshots import decode_file, encode_file, rows_without_values, snapshot_path
from memwal_ops.formats.lance.regions.manifests import HINT
from memwal_ops.formats.lance.table import read_table
from memwal_ops.formats.lance.wire.memwal_index import decode_memwal_index, find_memwal_entry
from memwal_ops.formats.lance.wire.names import MEM_WAL_FOLDER, parse_region_manifest_name, parse_version_manifest_name
from memwal_ops.formats.lance.wire.region_manifest import decode_version_hint, encode_version_hint
from memwal_ops.formats.lance.wire.version_manifest import decode_version_manifest
from memwal_ops.formats.lance.wire.without_values import manifest_without_values, region_manifest_without_values
from memwal_ops.formats.transactions import read_transaction
from memwal_ops.storage.options import redact
from memwal_ops.text import printable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from pyspark.sql import DataFrame

    from memwal_ops.core.anchors import CommitGuard
    from memwal_ops.core.context import Progress
    from memwal_ops.storage.api import ObjectMeta, Store
    from memwal_ops.storage.locations import Location


RECORD = "memwal_ops.migration"
_KEY = {"lance-schema:unenforced-primary-key": "true"}
_KEYS_PER_DELETE = 1000
# Folders that a first run leaves if it is killed before it commits.
_UNFINISHED = {"data", "_transactions"}
_SAME_ROWS = ("CreateIndex", "Rewrite", "UpdateConfig", "ReserveFragments")


class LanceSink:
    """See :class:`memwal_ops.core.row_sink.RowSink`."""

    def __init__(self, location: Location, store: Store, guard: CommitGuard, source: str) -> None:
        """Open the table if it exists; raises as :meth:`memwal_ops.core.row_sink.ReceivesRows.open_sink`."""
        self._location, self._store, self._guard = location, store, guard
        root = store.list_level("")
        self._dataset: lance.LanceDataset | None = None
        if VERSIONS_FOLDER in root.directories:
            self._refresh()
            self._check(source)
        elif root.objects or not {*root.directories} <= _UNFINISHED:
            raise errors.InvalidUsageError(
                f"{location.uri} is not empty, and has no Lance table.",
                remedy="Give an empty prefix for the new table.",
            )

    @property
    def record(self) -> Mapping[str, Any] | None:
        """See the protocol."""
        if self._dataset is None:
            return None
        stored: Mapping[str, Any] = json.loads((self._dataset.schema.metadata or {}).get(RECORD.encode(), b"null"))
        return stored

    @property
    def schema(self) -> pa.Schema:
        """See the protocol."""
        return self._opened.schema

    @property
    def version(self) -> int:
        """See the protocol."""
        return 0 if self._dataset is None else int(self._dataset.version)

    def create(self, rows: pa.RecordBatchReader, key: str, record: Mapping[str, Any]) -> None:
        """See the protocol."""
        fields = [
            pa.field(field.name, field.type, nullable=False, metadata=_KEY) if field.name == key else field
            for field in rows.schema
        ]
        schema = pa.schema(fields, metadata={RECORD: json.dumps(record)})
        self._guard.check()
        with lance_errors("write", self._location.uri):
            self._dataset = lance.write_dataset(
                (batch.cast(schema) for batch in rows),
                self._location.uri,
                schema=schema,
                mode="create",
                storage_options=lance_options(self._location),
            )

    def add_columns(self, fields: Sequence[pa.Field]) -> None:
        """See the protocol."""
        if fields:
            self._guard.check()
            with lance_errors("add columns to", self._location.uri):
                self._opened.add_columns(pa.schema(fields))
            self._refresh()

    def upsert(self, rows: pa.RecordBatchReader, key: str) -> None:
        """See the protocol."""
        self._guard.check()
        with lance_errors("write", self._location.uri):
            changed = self._opened.merge_insert(key).when_matched_update_all().when_not_matched_insert_all()
            # An index may lack rows that it claims to cover: their keys would be inserted again.
            changed.use_index(use_index=False).execute(rows)
        self._refresh()

    def delete(self, keys: Sequence[str], key: str) -> None:
        """See the protocol."""
        for start in range(0, len(keys), _KEYS_PER_DELETE):
            self._guard.check()
            with lance_errors("delete from", self._location.uri):
                self._opened.delete(is_one_of(key, keys[start : start + _KEYS_PER_DELETE]))
            self._refresh()

    def set_record(self, record: Mapping[str, Any]) -> None:
        """Replace the record; and create the MemWAL index where there is none."""
        if not read_table(self._location, self._store).log.exists:
            self._guard.check()
            with lance_errors("create the MemWAL index of", self._location.uri):
                self._opened.initialize_mem_wal()
            self._refresh()
        if record != self.record:
            self._guard.check()
            with lance_errors("write the schema metadata of", self._location.uri):
                self._opened.update_schema_metadata({RECORD: json.dumps(record)})
            self._refresh()

    def rows(self, columns: Sequence[str] | None = None) -> Iterator[pa.RecordBatch]:
        """See the protocol."""
        with lance_errors("read", self._location.uri):
            yield from self._opened.scanner(columns=None if columns is None else [*columns]).to_batches()

    def load(self, rows: DataFrame) -> None:
        """See :class:`memwal_ops.core.row_sink.SparkRows`."""
        self._guard.check()
        bulk_load(rows, self._location.uri, storage_options=self._location.lance_options)
        self._refresh()

    @contextmanager
    def on_spark(self, master: str | None, report: Callable[[Progress], None]) -> Iterator[SparkTable]:
        """See the protocol."""
        with running(self, self._location, master, report) as rows:
            yield rows

    @property
    def _opened(self) -> lance.LanceDataset:
        if self._dataset is None:
            raise errors.TableNotFoundError(f"No table found at {self._location.uri}.")
        return self._dataset

    def _refresh(self) -> None:
        with lance_errors("open", self._location.uri):
            self._dataset = open_dataset(self._location)

    def _operation(self, version: int) -> str | None:
        """The name of the operation that created a version; None if its transaction is gone.

        pylance has no name for what precedes a compaction: it reserves the ids of fragments, and changes none.
        """
        transaction = read_transaction(self._opened, version)
        name = None if transaction is None else type(transaction.operation).__name__
        if name == "BaseOperation" and self._fragments(version - 1) == self._fragments(version):
            return "ReserveFragments"
        return name

    def _fragments(self, version: int) -> list[dict[str, Any]]:
        return [fragment.metadata.to_json() for fragment in self._opened.checkout_version(version).get_fragments()]

    def _check(self, source: str) -> None:
        """Refuse a table that this migration did not create, or that others have written since it finished."""
        record, uri = self.record, self._location.uri
        if record is None or record.get("source") != source:
            origin = "no migration created" if record is None else f"was migrated from {record.get('source')}"
            raise errors.InvalidUsageError(
                f"{uri} already has a Lance table that {origin}.", remedy="Give an empty prefix for the new table."
            )
        table = read_table(self._location, self._store)
        if table.regions.region_ids:
            raise _written_by_others(uri, "has regions of MemWAL writers")
        if record.get("finished") is None:
            return
        for version in range(int(record["finished"]) + 1, self.version + 1):
            try:
                operation = self._operation(version)
            except (OSError, ValueError):
                operation = None
            if operation is None:
                raise _written_by_others(uri, f"had a version {version} that cannot be read any more")
            if operation not in _SAME_ROWS:
                raise _written_by_others(uri, f"was changed in version {version} ({operation})")


def _written_by_others(uri: str, what: str) -> errors.InvalidUsageError:
    return errors.InvalidUsageError(
        f"{uri} {what} since the migration finished: another run would undo what others wrote.",
        remedy="The migration is finished: write to the table. To migrate again, give another target.",
    )


_OF_REGION = re.compile(rf"{MEM_WAL_FOLDER}/([0-9a-f-]{{36}})/manifest/([^/]+)")
_OF_GENERATION = re.compile(rf"{MEM_WAL_FOLDER}/[0-9a-f-]{{36}}/[^/]+/{VERSIONS_FOLDER}/([^/]+)")
# As many as verify reads without --deep.
_MANIFESTS = 20
_MARK_DIGITS = 16
_NUMBER, _STRING = int | float, str
_LEASE: Mapping[str, Any] = {
    **dict.fromkeys(("token", "ttl_seconds"), _NUMBER),
    **dict.fromkeys(("instance", "holder", "acquired", "ended", "outcome", "finished", "finished_by"), _STRING),
}
_HOLD: Mapping[str, Any] = {"versions": list, "ttl_seconds": _NUMBER, "by": _STRING}
_REF: Mapping[str, Any] = {
    **dict.fromkeys(("version", "manifestSize", "parentVersion", "createAt"), _NUMBER),
    **dict.fromkeys(("branch", "parentBranch", "createdAt", "updatedAt"), _STRING),
}


def exported(store: Store, versions: int) -> Iterator[Exported]:
    """All objects; the newest ``versions`` manifests of main, those of generations, and the newest of each region."""
    # First, so that no version has progress that the regions, which are listed later, do not show.
    main = [*store.list(VERSIONS_FOLDER)]
    redactor = _Redactor()
    numbers = [number for meta in main if (number := version_of_main(meta.path)) is not None]
    kept = frozenset(nlargest(versions, numbers))
    newest = max(kept, default=None)
    tagged = _tagged(store)
    snapshot = ""
    for meta in main:
        number = version_of_main(meta.path)
        if number is None:
            yield Exported(meta, _hint if meta.path == VERSION_HINT else None)
            continue
        if number == newest:
            snapshot = _snapshot_of(store, meta.path)
        keep = number in kept or number in tagged
        yield Exported(meta, redactor.manifest if keep else None, listed=keep, opened=number == newest)
    yield from _others(store, redactor, snapshot)


def _others(store: Store, redactor: _Redactor, snapshot: str) -> Iterator[Exported]:
    """Everything but the versions of main; a region's manifests come last, when its newest are known."""
    regions: dict[str, list[tuple[int, ObjectMeta]]] = defaultdict(list)
    for meta in store.list(""):
        path = meta.path
        if path.startswith(f"{VERSIONS_FOLDER}/"):
            continue
        of_region = _OF_REGION.fullmatch(path)
        number = None if of_region is None else parse_region_manifest_name(of_region[2])
        if of_region is not None and number is not None:
            regions[of_region[1]].append((number, meta))
            continue
        yield Exported(meta, redactor.rule(path, snapshot), opened=_is_opened(path))
    for records in regions.values():
        newest = {number for number, _ in nlargest(_MANIFESTS, records, key=lambda item: item[0])}
        for number, meta in records:
            yield Exported(meta, redactor.region if number in newest else None)


def _is_opened(path: str) -> bool:
    """Whether pylance opens the file directly: it lists tags, and opens generations."""
    return path.startswith(f"{REFS_FOLDER}/") or _is_manifest_of_generation(path)


def _is_manifest_of_generation(path: str) -> bool:
    match = _OF_GENERATION.fullmatch(path)
    return match is not None and parse_version_manifest_name(match[1]) is not None


def _tagged(store: Store) -> frozenset[int]:
    """The versions of main that tags name: ``verify`` checks that they exist."""
    versions = set()
    for meta in store.list(f"{REFS_FOLDER}/tags"):
        try:
            document = json.loads(store.get(meta.path))
        except (errors.ObjectNotFoundError, ValueError, RecursionError):
            continue
        if isinstance(document, dict) and type(document.get("version")) is int:
            versions.add(document["version"])
    return frozenset(versions)


def _snapshot_of(store: Store, path: str) -> str:
    """The path of the region snapshot of the newest version; empty if it names none.

    Raises:
        LegacyLayoutError: the table has the MemWAL index of Lance 0.31 to 1.x, in which regions are named by values.
    """
    try:
        indexes = decode_version_manifest(store.get(path)).indexes
        entry = find_memwal_entry(indexes)
        return "" if entry is None else snapshot_path(decode_memwal_index(entry).uuid)
    except (errors.InvalidFormatError, errors.TableCorruptError, errors.ObjectNotFoundError):
        return ""  # verify reports it


class _Redactor:
    """Remove values from files, by kind of file. In one export equal values get equal marks; other exports differ."""

    def __init__(self) -> None:
        self._key = secrets.token_bytes(32)

    def rule(self, path: str, snapshot: str) -> Callable[[bytes], bytes] | None:
        """The function that removes the values from the file at a path; None: its content is not exported."""
        if path == snapshot:
            return _snapshot
        if _is_manifest_of_generation(path):
            return self.manifest
        if (of_region := _OF_REGION.fullmatch(path)) is not None and of_region[2] == HINT:
            return _hint
        folders: Iterable[tuple[str, Callable[[bytes], bytes]]] = (
            (f"{REFS_FOLDER}/", lambda data: _json(data, _REF, metadata={})),
            (f"{LEASES_FOLDER}/", lambda data: _json(data, _LEASE)),
            (f"{HOLDS_FOLDER}/", lambda data: _json(data, _HOLD, note="")),
            (f"{EXPIRIES_FOLDER}/", lambda data: _json(data, _HOLD, note="")),
        )
        return next((rule for folder, rule in folders if path.startswith(folder)), None)

    def manifest(self, data: bytes) -> bytes:
        """The manifest of a version, of the table or of a generation, without values."""
        return manifest_without_values(data, _snapshot_or_nothing, redact, self._mark)

    def region(self, data: bytes) -> bytes:
        """A region manifest without values."""
        return region_manifest_without_values(data, self._mark)

    def _mark(self, value: bytes) -> bytes:
        return b"redacted:" + hmac.digest(self._key, value, "sha256").hex()[:_MARK_DIGITS].encode()


def _snapshot(data: bytes) -> bytes:
    return encode_file(rows_without_values(decode_file(data)))


def _snapshot_or_nothing(data: bytes) -> bytes:
    """A snapshot inside a manifest; if it does not decode, the manifest is exported without it."""
    try:
        return _snapshot(data)
    except errors.InvalidFormatError:
        return b""


def _hint(data: bytes) -> bytes:
    version = decode_version_hint(data)
    return b"" if version is None else encode_version_hint(version)


def _json(data: bytes, keys: Mapping[str, Any], **added: object) -> bytes:
    """A JSON document with these keys, if their values are of these types; strings without secrets and escapes.

    Raises:
        InvalidFormatError: it is not a JSON object.
    """
    try:
        document = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise errors.InvalidFormatError("It is not JSON.") from error
    if not isinstance(document, dict):
        raise errors.InvalidFormatError("It is not a JSON object.")
    kept = {
        key: printable(redact(value)) if isinstance(value, str) else value
        for key, value in document.items()
        if key in keys and (value is None or isinstance(value, keys[key]))
    }
    return json.dumps({**kept, **{key: value for key, value in added.items() if key in document}}).encode()
