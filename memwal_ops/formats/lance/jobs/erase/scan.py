"""Search every byte of a Lance table for values of erased rows: what files encode, and what rows that stay have.

Nothing here is used to find what is to be erased, and nothing of that is used here: files are listed, decoded and
compared by pylance's and Arrow's own readers. See :mod:`memwal_ops.core.byte_scan`.
"""

from __future__ import annotations

import json
import re
import uuid
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import lance
import pyarrow as pa
import pyarrow.compute as pc
from lance.file import LanceFileReader

from memwal_ops.core.byte_scan import ErasedValues, NotDecoded, ScanScope
from memwal_ops.formats.lance.files.datasets import lance_options, open_dataset
from memwal_ops.formats.lance.files.version_files import VERSIONS_FOLDER
from memwal_ops.formats.lance.wire.lance_file import check_lance_file, is_first_format
from memwal_ops.formats.lance.wire.memwal_index import MEMWAL_INDEX_NAME
from memwal_ops.formats.lance.wire.names import MEM_WAL_FOLDER, parse_generation_dir, parse_version_manifest_name
from memwal_ops.storage.locations import BRANCHES_FOLDER, below

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from memwal_ops.formats.lance.table import Table
    from memwal_ops.storage.api import ObjectMeta

_BYTES, _LEAST = 8, 8
_PIECE, _MOST_ROWS = 8 << 20, 8192
_LANCE, _ARROW = b"LANC", b"ARROW1"
_BLOB = b"lance-encoding:blob"
_TERMS = "_token_fst_bytes"
_FIRST_FORMAT = "files of Lance's first format, which encodes values as they are"
_NOT_READ = "files that pylance's reader of files does not decode"
_SOME_BLOBS = "files with blobs, which are stored as they are"
_AUTOMATON = "term dictionaries of full-text indexes, which are automata"
# Words, texts and numbers of an expression, and what compares them.
_TOKEN = re.compile(r"'(?P<text>(?:[^']|'')*)'|(?P<number>\b\d+\b)|(?P<name>[\w.]+|`[^`]+`)|(?P<sign>[<>!=]+)")
_NO_COLUMN = "the expression"
_TIME = re.compile(r"\d{4}-\d\d-\d\d.*")
_NO_COLUMNS = frozenset(
    {"and", "or", "not", "in", "like", "ilike", "is", "null", "between", "cast", "as", "true", "false"}
)
_KINDS = {
    "data": ("data file", "memwal-ops compact URI --deleted-fraction 0 leaves dropped columns out, then run it again"),
    "_indices": (
        "index file",
        "build the index anew (memwal-ops catchup URI --index NAME --rebuild), then run it again",
    ),
    "_versions": ("version manifest", "a setting, a name, or a region snapshot has it: change that, then run it again"),
    "_transactions": ("transaction", "expire its version (memwal-ops expire URI), then run it again"),
    "_refs": ("reference", "delete the tag or the branch"),
    "_mem_wal_ops": ("record", "end what it records, as a hold, or delete it"),
}
_REGION = (
    "region manifest",
    "the table's region spec stores values of the column, by which rows are routed: copy the rows into a table with a "
    "bucket of it instead, and delete this one",
)


def scanned(table: Table, where: str | None) -> ScanScope:
    """What is scanned of a table. ``where``: the rows that must be gone; what others have is no trace of them."""
    rows = _RowsThatStay(table, where)
    return ScanScope(table.store, rows.forget, partial(_explain, table), partial(_decoded, table))


def prefixes(table: Table, column: str, value: Any) -> list[str]:
    """What the table's region specs make of a text."""
    memwal, names = table.memwal, {one.id: one.name for one in table.manifest.manifest.fields}
    return [
        value[: int(spec_field.parameters["width"])]
        for spec in (() if memwal is None or not isinstance(value, str) else memwal.region_specs)
        for spec_field in spec.fields
        if spec_field.transform == "truncate" and column in {names.get(source) for source in spec_field.source_ids}
    ]


def values_of(rows: pa.RecordBatch) -> Iterator[tuple[str, Any]]:
    """The values of rows with their columns: texts, bytes and whole numbers; others, and vectors, by their bytes."""
    for name, column in zip(rows.schema.names, rows.columns, strict=True):
        for array in _leaves(column, vectors=True):
            kind, present = array.type, array.drop_null()
            if pa.types.is_fixed_size_list(kind):
                width = kind.value_type.bit_width * kind.list_size // _BYTES
                data = _as_bytes(present.flatten(), kind.value_type.bit_width // _BYTES)
                yield from ((name, data[at : at + width]) for at in range(0, len(data), width))
            elif pa.types.is_temporal(kind) or pa.types.is_decimal(kind) or pa.types.is_float16(kind):
                yield from ((name, value) for value in present.view(pa.binary(kind.bit_width // _BYTES)).to_pylist())
            else:
                yield from ((name, value) for value in present.to_pylist())


def compared(where: str) -> Iterator[tuple[str, Any]]:
    """The texts and numbers that an expression says rows have, with their columns; no times, and no limits."""
    column = sign = ""
    for token in _TOKEN.finditer(where):
        if token["name"] is not None:
            name = str(token["name"]).strip("`").lower()
            column, sign = (column, name if name == "not" else sign) if name in _NO_COLUMNS else (name, "")
        elif token["sign"] is not None:
            sign = token["sign"]
        elif sign in {"", "=", "=="}:
            if token["number"] is not None:
                yield column or _NO_COLUMN, int(token["number"])
            for part in re.split(r"[%_]" if "like" in where.lower() else r"\0", token["text"] or ""):
                if part and not _TIME.fullmatch(part):
                    yield column or _NO_COLUMN, part.replace("''", "'")


def _decoded(table: Table, meta: ObjectMeta, tail: bytes) -> Iterable[bytes] | None:
    """What the bytes of an object encode; None: nothing."""
    if "/_versions/" in f"/{meta.path}":
        return None
    if meta.path.endswith(".arrow"):
        return _arrow(table, meta)
    return _lance(table, meta, tail) if tail.endswith(_LANCE) else None


def _lance(table: Table, meta: ObjectMeta, tail: bytes) -> Iterator[bytes]:
    if is_first_format(tail, meta.size):
        raise NotDecoded(_FIRST_FORMAT)
    try:
        check_lance_file(tail, meta.size)
        schema = _open(table, meta.path).metadata().schema
        names = [schema_field.name for schema_field in schema if _BLOB not in (schema_field.metadata or {})]
        reader = _open(table, meta.path, names)
        rows = max(1, min(_MOST_ROWS, _PIECE * max(1, reader.num_rows()) // max(1, meta.size)))
        for batch in reader.read_all(batch_size=rows, batch_readahead=2).to_batches() if names else ():
            for column in batch.columns:
                yield from map(_serialized, _leaves(column, unused=True))
    except Exception as error:
        raise NotDecoded(_NOT_READ) from error
    if _TERMS in schema.names:
        raise NotDecoded(_AUTOMATON)
    if len(names) < len(schema):
        raise NotDecoded(_SOME_BLOBS)


def _open(table: Table, path: str, columns: list[str] | None = None) -> LanceFileReader:
    options = lance_options(table.location)
    return LanceFileReader(below(table.location.folder, path), storage_options=options, columns=columns)


def _arrow(table: Table, meta: ObjectMeta) -> Iterator[bytes]:
    data = table.store.get(meta.path)
    try:
        reader = pa.ipc.open_file(data) if data.startswith(_ARROW) else pa.ipc.open_stream(data)
        for batch in reader.read_all().to_batches():
            for column in batch.columns:
                yield from map(_serialized, _leaves(column, unused=True))
    except (pa.ArrowException, OSError) as error:
        raise NotDecoded(_NOT_READ) from error


def _leaves(array: pa.Array, *, unused: bool = False, vectors: bool = False) -> Iterator[pa.Array]:
    """The arrays without children of a column; ``unused``: also what no row has; ``vectors`` are not divided."""
    kind, again = array.type, partial(_leaves, unused=unused, vectors=vectors)
    if isinstance(array, pa.ExtensionArray):
        yield from again(array.storage)
    elif pa.types.is_dictionary(kind):
        yield from again(array.dictionary if unused else array.dictionary_decode())
    elif pa.types.is_struct(kind):
        for child in [array.field(at) for at in range(kind.num_fields)] if unused else array.flatten():
            yield from again(child)
    elif pa.types.is_map(kind):
        yield from again(array.keys)
        yield from again(array.items)
    elif pa.types.is_fixed_size_list(kind) and vectors and pa.types.is_primitive(kind.value_type):
        yield array
    elif pa.types.is_nested(kind) and not pa.types.is_union(kind):
        yield from again(array.values if unused else array.flatten())
    else:
        yield array


def _serialized(array: pa.Array) -> bytes:
    """The bytes of the values of an array, and of no others in its buffers."""
    return bytes(pa.RecordBatch.from_arrays([array], ["x"]).serialize())


def _as_bytes(numbers: pa.Array, width: int) -> bytes:
    start = numbers.offset * width
    return bytes(numbers.buffers()[1])[start : start + len(numbers) * width]


@dataclass
class _RowsThatStay:
    """What rows have that stay, in any version or log; names and settings count, too."""

    table: Table
    where: str | None
    _read: set[str] = field(default_factory=set)

    def forget(self, values: ErasedValues) -> None:
        """Have values forget what may be anywhere."""
        for piece, short in self._pieces():
            values.forget(piece, short)
            values.forget(piece.lower())
            if not len(values):
                break

    def _pieces(self) -> Iterator[tuple[bytes, list[Any]]]:
        yield from ((words, []) for words in self._words())
        for dataset in self._datasets():
            yield bytes(dataset.schema.serialize()), []
            for part in dataset.get_fragments():
                key = json.dumps(part.metadata.to_json(), default=str)
                if key not in self._read:
                    self._read.add(key)
                    yield from self._rows(dataset, part)

    def _words(self) -> Iterator[bytes]:
        """Names and settings: of the schema, of indexes but what they have of rows, of commits and of records."""
        manifest = self.table.manifest
        for message in (*manifest.manifest.fields, manifest.manifest.writer_version):
            yield message.SerializeToString()
        for entry in manifest.index_entries:
            if entry.name != MEMWAL_INDEX_NAME:
                yield entry.SerializeToString()
        if manifest.transaction is not None:
            for words in manifest.transaction.transaction_properties.items():
                yield " ".join(words).encode()
        for meta in self.table.store.list():
            if "_indices/" in meta.path and not meta.path.endswith(".json"):
                with suppress(Exception):  # of whatever kind: then it explains nothing
                    yield bytes(_open(self.table, meta.path).metadata().schema.serialize())
            elif meta.path.startswith("_mem_wal_ops/") and meta.path.endswith(".json"):
                yield _keys(self.table.store.get(meta.path))

    def _datasets(self) -> Iterator[lance.LanceDataset]:
        """All versions of the table and its branches, then generations and log entries, opened."""
        location, paths = self.table.location, [meta.path for meta in self.table.store.list()]
        folders = {path.partition("/_versions/")[0] for path in paths if path.startswith(f"{BRANCHES_FOLDER}/")}
        for folder in sorted({"", *folders}):
            try:
                numbers = [version["version"] for version in open_dataset(location, folder).versions()]
            except Exception:  # noqa: BLE001, S112 - as above
                continue
            for number in sorted(numbers, reverse=True):
                yield from self._opened(folder, number)
        logs = {"/".join(path.split("/")[:3]) for path in paths if path.startswith(f"{MEM_WAL_FOLDER}/")}
        for folder in sorted(logs):
            if parse_generation_dir(folder.rpartition("/")[2]) is not None:
                yield from self._opened(folder, None)
        for path in paths:
            if path.startswith(f"{MEM_WAL_FOLDER}/") and "/wal/" in path:
                yield from self._entry(path)

    def _opened(self, folder: str, version: int | None) -> Iterator[lance.LanceDataset]:
        with suppress(Exception):  # as above
            yield open_dataset(self.table.location, folder, version=version)

    def _entry(self, path: str) -> Iterator[lance.LanceDataset]:
        with suppress(Exception):  # as above
            if path.endswith(".arrow"):
                rows = pa.ipc.open_stream(self.table.store.get(path)).read_all()
            else:
                rows = _open(self.table, path).read_all().to_table()
            yield lance.write_dataset(rows, f"memory://{uuid.uuid4()}")

    def _rows(self, dataset: lance.LanceDataset, part: Any) -> Iterator[tuple[bytes, list[Any]]]:
        """The rows of a fragment that are not deleted, and do not match."""
        others = None if self.where is None else f"({self.where}) IS NOT TRUE"
        with suppress(Exception):  # as above
            scanner = dataset.scanner(filter=others, fragments=[part], blob_handling="all_binary", batch_size=1024)
            for batch in scanner.to_batches():
                for column in batch.columns:
                    yield from ((_serialized(array), _short(array)) for array in _leaves(column))


def _short(array: pa.Array) -> Any:
    """The values that are looked for with a length or quotes beside them, or wider: Arrow's bytes have them bare."""
    if pa.types.is_integer(array.type):
        return array.unique().to_pylist() if array.type.bit_width // _BYTES < _LEAST else []
    try:
        return array.filter(pc.less(pc.binary_length(array), _LEAST)).unique().to_pylist()
    except pa.ArrowNotImplementedError:  # neither texts nor bytes
        return []


def _keys(data: bytes) -> bytes:
    keys: list[str] = []
    try:
        json.loads(data, object_hook=keys.extend)
    except ValueError:
        return b""
    return " ".join(keys).encode()


def _explain(table: Table, path: str) -> tuple[str, str]:
    if path.startswith(f"{BRANCHES_FOLDER}/"):
        return "branch", "erase it there, too (memwal-ops erase URI --branch NAME), or delete the branch"
    parts = path.split("/")
    if parts[0] == MEM_WAL_FOLDER:
        return _REGION if parts[2:3] == ["manifest"] else ("log", "memwal-ops gc deletes what is merged; run it again")
    name = parse_version_manifest_name(parts[-1]) if parts[0] == VERSIONS_FOLDER else None
    if name is not None and name.version != table.version:
        return "version manifest", f"memwal-ops expire URI --version {name.version} --apply deletes it; run this again"
    return _KINDS.get(parts[0], ("file", "move or delete it"))
