"""Open Lance datasets below a table's location, on a branch or main, with caches that fit into a job's memory budget.

pylance's errors are untyped: ``OSError``, ``ValueError`` and ``RuntimeError`` with text, and a Rust panic as a
``BaseException``. The texts are classified by :mod:`memwal_ops.storage.errors`, since the object stores have the same
ones. Values for pylance's filters are written as SQL literals.

A branch is the folder ``tree/NAME`` of its table (a name may contain slashes), with versions, data files and regions
of its own. What keeps its versions is elsewhere: tags and branches are in ``_refs/`` of the root, child branches
are folders beside it. So a job that opened a branch by its path reads both below the root.
"""

from __future__ import annotations

import json
import math
import re
import threading
from collections import deque
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import cache
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, unquote

import lance
import pyarrow as pa
import pyarrow.compute as pc
from packaging.version import InvalidVersion, Version

from memwal_ops import errors
from memwal_ops.core.protocols import TableBranch
from memwal_ops.formats.lance.wire._pb import table_pb2
from memwal_ops.formats.lance.wire.names import log_folder
from memwal_ops.log import LastOpened
from memwal_ops.storage.errors import translate
from memwal_ops.storage.export_file import NotExportedError
from memwal_ops.storage.locations import (
    BRANCHES_FOLDER,
    LOCAL as LOCAL_SCHEMES,
    Location,
    below,
    has_scheme,
    split_query,
)
from memwal_ops.storage.metering import LOCAL, REMOTE, Traffic
from memwal_ops.storage.objects import open_store
from memwal_ops.version import OLDEST_PYLANCE

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from memwal_ops.formats.lance.wire.version_manifest import VersionManifest
    from memwal_ops.storage.api import Store


REFS_FOLDER = "_refs"


@dataclass(frozen=True, slots=True)
class Branch:
    """A branch of a table, or main (``name`` is None).

    ``root``: of its table, to be read only; of main, the table's own store.
    """

    name: str | None
    root: Store

    @property
    def folder(self) -> str:
        """Its folder below the root; empty: the root itself."""
        return branch_folder(self.name)


def branch_folder(name: str | None) -> str:
    """The folder of a branch below the root; empty for main."""
    return "" if name is None else f"{BRANCHES_FOLDER}/{name}"


def list_branches(root: Store) -> tuple[TableBranch, ...]:
    """The branches of a table, ascending by name. A listing, and one request for each.

    Raises ``TableCorruptError``: the record of one does not decode.
    """
    branches = []
    for meta in root.list(f"{REFS_FOLDER}/branches"):
        name = unquote(meta.path.rpartition("/")[2].removesuffix(".json"))
        try:
            record = json.loads(root.get(meta.path))
            created = datetime.fromtimestamp(int(record["createAt"]), UTC)
            branches.append(TableBranch(name, record["parentBranch"], int(record["parentVersion"]), created))
        except errors.ObjectNotFoundError:
            continue  # deleted since it was listed
        except (ValueError, KeyError, TypeError, OverflowError, OSError) as error:
            raise errors.TableCorruptError(
                f"{meta.path}, the record of a branch, cannot be read: {error!r}."
            ) from error
    return tuple(sorted(branches, key=lambda branch: branch.name))


def list_tags(root: Store) -> Mapping[str, tuple[str | None, int]]:
    """By the name of each tag of a table its branch and version. A listing, and one request for each.

    Raises ``TableCorruptError``: the record of one does not decode; ``StorageError``.
    """
    tags: dict[str, tuple[str | None, int]] = {}
    for meta in root.list(f"{REFS_FOLDER}/tags"):
        try:
            record = json.loads(root.get(meta.path))
            tags[unquote(meta.path.rpartition("/")[2].removesuffix(".json"))] = (
                record["branch"],
                int(record["version"]),
            )
        except errors.ObjectNotFoundError:
            continue  # deleted since it was listed
        except (ValueError, KeyError, TypeError) as error:
            raise errors.TableCorruptError(f"{meta.path}, the record of a tag, cannot be read: {error!r}.") from error
    return tags


def branch_location(location: Location, own: str | None, name: str | None) -> Location:
    """The location of another branch of a table; ``own``: the branch that is opened, None: main.

    Raises ``InvalidUsageError``: the root of the table is not known.
    """
    root = location if own is None else _root(location, own)
    if name is None:
        return root
    uri, query = split_query(root.uri)
    return replace(root, uri=f"{uri}/{branch_folder(name)}{query}", catalog=None)


def resolve_branch(location: Location, store: Store, name: str | None) -> Branch:
    """The branch at a location, by the name that its newest version records. No request is made.

    Raises:
        InvalidUsageError: its path does not end with ``tree/NAME``, so that the root is unknown.
        NotExportedError: it is read from an export, which has no more than the branch's folder.
    """
    if name is None:
        return Branch(None, store)
    if location.files is not None:
        raise NotExportedError(f"The tags and branches of {location.uri} are in its table's root, not in the export.")
    return Branch(name, open_store(_root(location, name)))


def _root(location: Location, name: str) -> Location:
    ending, (uri, query) = f"/{branch_folder(name)}", split_query(location.uri)
    if location.scheme not in LOCAL_SCHEMES and not uri.endswith(ending) and unquote(uri).endswith(ending):
        scheme, _, path = unquote(uri).partition("://")
        uri = f"{scheme}://{quote(path)}"
    if not uri.endswith(ending):
        raise errors.InvalidUsageError(
            f"{location.uri} is branch {name} of a table, and its tags and child branches are in the table's root, "
            f"which this path does not show: it does not end with {ending}.",
            remedy=f"Open the branch by its own path, TABLE{ending}. To keep a copy, clone it deeply: the files and "
            "tags of a copied folder stay in the table that it was copied from.",
        )
    return replace(location, uri=f"{uri.removesuffix(ending)}{query}", catalog=None)


def is_panic(error: BaseException) -> bool:
    """Whether it is a Rust panic, which is not an ``Exception`` and must not end the process."""
    return type(error).__name__ == "PanicException"


_CONFLICT = re.compile(
    r"commit conflict|preempted by concurrent|too many concurrent writers|incompatible with concurrent", re.IGNORECASE
)


def is_commit_conflict(error: BaseException) -> bool:
    """Whether it is a commit conflict of pylance: nothing of its transaction is visible."""
    return _CONFLICT.search(str(error)) is not None


@contextmanager
def lance_errors(action: str, path: str) -> Iterator[None]:
    """Translate every error of pylance in the block to a ``MemwalOpsError``, with the original as its cause."""
    LastOpened.note(f"{action} {path}")
    try:
        yield
    except errors.MemwalOpsError:
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and not is_panic(error):
            raise
        raise translate(error, path=path, action=action) from error


STORE_ERRORS = (errors.StorageCredentialsError, errors.ReadOnlyStoreError, errors.StoreUnavailableError)
"""Errors of the store itself: the rows that could not be read may be intact."""
_BATCH_BYTES, _BATCH_ROWS, _READ_AHEAD = 1 << 20, 8192, 16 << 20


def undecodable(dataset: lance.LanceDataset, fragment: lance.LanceFragment) -> Iterator[tuple[str, str]]:
    """The names of a fragment's data files of which rows do not decode, with pylance's error. Blobs are not read.

    Raises one of :data:`STORE_ERRORS`: the store failed; ``UnsupportedFeatureError``: pylance cannot read it.
    """
    files = fragment.data_files()
    width = sum(file.file_size_bytes or 0 for file in files) // max(1, fragment.physical_rows) + 1
    rows = min(_BATCH_ROWS, _BATCH_BYTES // width + 1)
    for file in files:
        columns = [field.name() for field in dataset.lance_schema.fields() if _ids(field) & {*file.fields}]
        try:
            with lance_errors(f"read the rows of fragment {fragment.fragment_id} of", dataset.uri):
                scanner = fragment.scanner(
                    columns=columns, batch_size=rows, io_buffer_size=max(_READ_AHEAD, 4 * rows * width)
                )
                deque(scanner.to_batches() if columns else (), maxlen=0)
        except errors.StorageError as error:
            if isinstance(error, (*STORE_ERRORS, errors.UnsupportedFeatureError)):
                raise
            yield file.path, str(error)


def _ids(field: Any) -> set[int]:
    return {field.id()}.union(*map(_ids, field.children()))


_INT64_MIN = -(2**63)
_NARROW = 32
_UNITS = {"s": "Second", "ms": "Millisecond", "us": "Microsecond", "ns": "Nanosecond"}


def has_sql_literals(keys: pa.ChunkedArray) -> bool:
    """Whether every key has an SQL literal."""
    if pa.types.is_integer(keys.type):
        # The smallest int64 has no literal: SQL reads it as minus a number that is too large.
        return not len(keys) or bool(pc.min(keys).as_py() > _INT64_MIN)
    return bool(pa.types.is_string(keys.type) or pa.types.is_large_string(keys.type))


def sql_literal(value: int | str) -> str:
    """A value as an SQL literal."""
    return str(value) if isinstance(value, int) else "'" + value.replace("'", "''") + "'"


def is_one_of(column: str, values: Iterable[int | str]) -> str:
    """The SQL condition that a column, whose name has no backtick, has one of these values; of none it is ``false``.

    As SQL and not as an Arrow expression: pylance passes those through Substrait, which rejects a table that has any
    column of an unsupported type (half floats, for example).
    """
    listed = ", ".join(map(sql_literal, values))
    return f"`{column}` IN ({listed})" if listed else "false"


def literal(value: Any, kind: pa.DataType) -> str | None:  # noqa: PLR0911 - one for each kind
    """The literal of a value of :func:`plain`, compared without rounding and by an index; None: there is none."""
    if pa.types.is_boolean(kind):
        return "true" if value else "false"
    if pa.types.is_integer(kind):
        return str(value) if value > _INT64_MIN else f"cast('{value}' as bigint)"
    if pa.types.is_float16(kind):
        return repr(float(value)) if math.isfinite(value) else None
    if pa.types.is_floating(kind):
        text = str(value) if math.isfinite(value) else {math.inf: "Infinity", -math.inf: "-Infinity"}.get(value, "NaN")
        return f"cast('{text}' as {'float' if pa.types.is_float32(kind) else 'double'})"
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        return "'" + value.replace("'", "''") + "'"  # type: ignore[no-any-return]  # values are Any
    if isinstance(value, bytes):
        return f"X'{value.hex()}'"
    if pa.types.is_decimal256(kind):
        return f"arrow_cast('{value}', 'Decimal256({kind.precision}, {kind.scale})')"
    if pa.types.is_decimal(kind):
        return f"cast('{value}' as decimal({kind.precision},{kind.scale}))"
    if pa.types.is_temporal(kind):
        return f"arrow_cast(arrow_cast({value}, 'Int{kind.bit_width}'), '{_name_in_sql(kind)}')"
    return literal(value, kind.value_type) if pa.types.is_dictionary(kind) else None


def _name_in_sql(kind: pa.DataType) -> str:
    """A date, time, timestamp or duration as ``arrow_cast`` names it: SQL has no literal for most of them."""
    if pa.types.is_date(kind):
        return f"Date{kind.bit_width}"
    if pa.types.is_timestamp(kind):
        zone = "None" if kind.tz is None else f'Some("{kind.tz}")'
        return f"Timestamp({_UNITS[kind.unit]}, {zone})"
    return f"{'Duration' if pa.types.is_duration(kind) else f'Time{kind.bit_width}'}({_UNITS[kind.unit]})"


def plain(values: pa.ChunkedArray) -> list[Any]:
    """Values as :func:`literal` takes them: a time or date is its number of units."""
    return values.cast(without_times(values.type)).to_pylist()  # type: ignore[no-any-return]


def readable(rows: pa.Table) -> list[dict[str, Any]]:
    """Rows of keys for a message: times and dates as text."""
    kinds = [(one.name, pa.string() if pa.types.is_temporal(one.type) else one.type) for one in rows.schema]
    return rows.cast(pa.schema(kinds)).to_pylist()  # type: ignore[no-any-return]


def without_times(kind: pa.DataType) -> pa.DataType:  # noqa: PLR0911 - one for each kind
    """The type with whole numbers for times and dates, nested ones too.

    Python has neither nanoseconds nor years beyond 9999: there ``to_pylist`` rounds, or raises.
    """
    if pa.types.is_temporal(kind):
        return pa.int32() if kind.bit_width == _NARROW else pa.int64()
    if not kind.num_fields or pa.types.is_dictionary(kind):
        return kind
    fields = [kind.field(at).with_type(without_times(kind.field(at).type)) for at in range(kind.num_fields)]
    if pa.types.is_map(kind):
        return pa.map_(without_times(kind.key_type), without_times(kind.item_type))
    if pa.types.is_fixed_size_list(kind):
        return pa.list_(*fields, kind.list_size)
    if pa.types.is_struct(kind):
        return pa.struct(fields)
    if pa.types.is_list(kind):
        return pa.list_(*fields)
    return pa.large_list(*fields) if pa.types.is_large_list(kind) else kind


ROW_ADDRESS, ROW_ID = "_rowaddr", "_rowid"
# Decoded file footers and index pages that a dataset may cache. Lance's own limits are gigabytes,
# but a job's memory must depend on its budget, not on the size of an index (docs/architecture.md, "Invariants").
_CACHE_BYTES = 32 << 20
_ON_FILES = ("file:", "memory:")


@cache
def is_supported_pylance(release: str) -> bool:
    """Whether a release of pylance is not older than the pin; one that has no number is taken for a newer one."""
    try:
        return Version(release) >= Version(OLDEST_PYLANCE)
    except InvalidVersion:
        return True


def require_pylance() -> None:
    """Raise ``UnsupportedFeatureError`` for a pylance that is older than the pin, before anything is read by it."""
    if not is_supported_pylance(lance.__version__):
        raise errors.UnsupportedFeatureError(
            f"pylance {lance.__version__} is installed, and memwal-ops needs {OLDEST_PYLANCE} or later: commits and "
            "row ids of older releases differ in ways that lose rows.",
            remedy=f"pip install 'pylance>={OLDEST_PYLANCE}', for memwal-ops alone: clients may stay older, "
            "see docs/compatibility.md.",
        )


def open_dataset(location: Location, folder: str = "", *, version: int | None = None) -> lance.LanceDataset:
    """Open the dataset at ``folder`` below the location (by default the table itself).

    A generation whose manifest names its log by another path, as the table was copied, moved or mounted elsewhere,
    reads the log of this table.

    Raises pylance's own errors, which callers translate with :func:`lance_errors`, and ``ForeignRootError``: see
    :func:`own_log`.
    """
    uri = location.files or location.uri
    uri = below(uri, folder) if folder else uri
    dataset = metered(lance.dataset(uri, version=version, **handle_options(location)))
    bases = dataset.base_paths().values() if folder else ()
    if all(base.path == own_log(location, folder, base.path) for base in bases):
        return dataset
    manifest = table_pb2.Manifest.FromString(dataset._ds.serialized_manifest())  # noqa: SLF001 - it has no other name
    for base in manifest.base_paths:
        base.path = own_log(location, folder, base.path)
    data = manifest.SerializeToString()
    return metered(lance.LanceDataset(uri, dataset.version, serialized_manifest=data, **handle_options(location)))


def own_log(location: Location, folder: str, path: str) -> str:
    """The URI of the log from which a generation is read: its region's, in this table.

    Timeline without it: a table is restored from a backup to another path, and a new table is created at the old one;
    the generations of the first, which name the old path, have the rows of the second.

    Raises ``ForeignRootError``: ``path``, by the generation's manifest, is not that of the region's log, in whichever
    table.
    """
    log = log_folder(folder)
    if not path.rstrip("/").endswith(f"/{log}"):
        raise errors.ForeignRootError(
            f"{folder} of {location.uri} names {path} as the place of its rows, which is not the log of its region.",
            remedy="Restore the generation's folder, with all its files under the same names, from a backup.",
        )
    return below(location.files or location.uri, log)


def metered(dataset: lance.LanceDataset) -> lance.LanceDataset:
    """The dataset; what pylance sends for it, and for all that is derived from it, is counted from now on.

    Its schema is converted here, where callers expect errors: of a damaged one pylance panics only then.
    """
    _ = dataset.schema
    inner: Any = dataset._ds  # noqa: SLF001 - the counts of its store; the meter must not keep the dataset itself

    def read() -> Traffic:
        counts = inner.io_stats_snapshot()
        requests = {"get": counts.read_iops, "put": counts.write_iops}
        return Traffic(requests, counts.read_bytes, counts.written_bytes)

    (REMOTE if has_scheme(dataset.uri) and not dataset.uri.startswith(_ON_FILES) else LOCAL).watch(dataset, read)
    return dataset


class PinnedDataset:
    """pylance's handle on one version. It is opened from its manifest at the first use. Safe in threads.

    pylance uses the manifest that was read, even if the object at its path was replaced since. Opening takes one
    request; a job that only compares manifests and listings opens nothing.
    """

    def __init__(self, location: Location, version: VersionManifest, opened: lance.LanceDataset | None = None) -> None:
        """``opened``: the handle, if there is one."""
        self._location, self._version, self._opened = location, version, opened
        self._lock = threading.Lock()

    def at(self, location: Location) -> PinnedDataset:
        """The same with other credentials."""
        return self if location is self._location else PinnedDataset(location, self._version)

    def get(self) -> lance.LanceDataset:
        """The handle. Raises ``StorageError``: pylance cannot open the version, by kind."""
        with self._lock:
            if self._opened is None:
                with lance_errors("open the table", self._location.uri):
                    self._opened = metered(
                        lance.LanceDataset(
                            self._location.files or self._location.uri,
                            int(self._version.manifest.version),
                            serialized_manifest=self._version.manifest.SerializeToString(),
                            **handle_options(self._location),
                        )
                    )
            return self._opened


def handle_options(location: Location) -> dict[str, Any]:
    """Storage options and limits of caches, as arguments of pylance for a handle on the table at a location."""
    return {
        "storage_options": lance_options(location),
        "index_cache_size_bytes": _CACHE_BYTES,
        "metadata_cache_size_bytes": _CACHE_BYTES,
    }


def lance_options(location: Location) -> dict[str, str] | None:
    """The location's storage options as an argument for pylance."""
    return dict(location.lance_options) or None
