"""Read from an index how it was built, as arguments of pylance's call for another one like it.

What pylance describes of an index is not complete (nothing of a B-tree, zone map or bloom filter), and is empty for
indexes of older releases. So parameters are read from the files of its newest segment where they have them. A file
without a parameter is of a release that had only the default.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from google.protobuf import any_pb2, empty_pb2
from google.protobuf.message import DecodeError
from google.protobuf.unknown_fields import UnknownFieldSet
from lance.indices import IndexConfig
from lance.query import DocumentGranularity

from memwal_ops.errors import ObjectNotFoundError, StorageError, UnsupportedFeatureError
from memwal_ops.formats.lance.files import datasets, named_files, version_files
from memwal_ops.formats.lance.indexes import codebook
from memwal_ops.formats.lance.indexes.base_indexes import BaseIndex, index_folder, open_index_file
from memwal_ops.log import get_logger

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import lance
    from lance.dataset import Index

    from memwal_ops.formats.lance.table import Table
    from memwal_ops.formats.lance.wire._pb import table_pb2

_HINTS = "runtime_hints"
_BY_HAND = (
    "Create it again yourself: dataset.drop_index(NAME), then dataset.create_scalar_index(COLUMN, TYPE, name=NAME), or "
    "dataset.create_index(...) for vectors. Where there is a log, merge everything before."
)


@dataclass(frozen=True, slots=True)
class _File:
    """The file with the parameters of a type. By its key there each parameter's name, and its type."""

    name: str
    parameters: Mapping[str, tuple[str, type]] = field(default_factory=dict)


_FILES = {
    **dict.fromkeys(("BITMAP", "LABEL_LIST", "NGRAM"), _File("")),
    "BTREE": _File("page_lookup.lance", {"batch_size": ("zone_size", int)}),
    "ZONEMAP": _File("zonemap.lance", {"rows_per_zone": ("rows_per_zone", int)}),
    "BLOOMFILTER": _File(
        "bloomfilter.lance",
        {"bloomfilter_item": ("number_of_items", int), "bloomfilter_probability": ("probability", float)},
    ),
    "RTREE": _File("page_data.lance", {"page_size": ("page_size", int)}),
}
_TEXT, _JSON, _SIMILAR = "INVERTED", "JSON", "MINHASHLSH"
_TEXT_FILE = "metadata.lance"
# What pylance describes of a vector index, by the names of its call.
_OF_CODES = {"pq": ("num_sub_vectors", "num_bits"), "rq": ("num_bits",)}
_OF_GRAPH = {"max_connections": "m", "construction_ef": "ef_construction", "max_level": "max_level"}
_TYPES = {"LABELLIST": "LABEL_LIST"}
_SIMILAR_PARAMETERS = ("num_hashes", "num_bands", "shingle_size", "tokenizer")
# Field numbers of JsonIndexDetails (protos/index.proto of Lance).
_PATH, _TARGET = 1, 2


@dataclass(frozen=True, slots=True)
class IndexArguments:
    """How to create an index like another one.

    ``column``: its path, as pylance takes it. ``kind``: the type, in pylance's spelling. ``options``: the parameters,
    by the names that pylance's call gives them. ``vector``: whether it is a vector index. ``described``: what pylance
    describes of the other index; without hints.
    """

    column: str
    kind: str
    options: Mapping[str, Any] = field(repr=False)
    vector: bool
    described: Mapping[str, Any] = field(repr=False, compare=False)

    def create(self, dataset: lance.LanceDataset, name: str) -> None:
        """Let pylance create it under that name, in the place of any other."""
        options = dict(self.options)
        if self.vector:
            dataset.create_index(self.column, self.kind, name=name, replace=True, **options)
        elif self.kind == _TEXT:
            dataset.create_scalar_index(self.column, "INVERTED", name=name, replace=True, **options)
        else:
            dataset.create_scalar_index(self.column, self._config, name=name, replace=True)

    def segment(
        self, dataset: lance.LanceDataset, name: str, fragments: Sequence[int], storage: dict[str, str] | None
    ) -> Index:
        """Let pylance write a segment of some fragments for an index of that name, without publishing it.

        ``dataset``: a version that has these fragments. ``fragments``: their ids.
        """
        chosen: dict[str, Any] = {"replace": True, "fragment_ids": [*fragments], "storage_options": storage}
        if self.vector or self.kind == _TEXT:
            chosen |= {key: value for key, value in self.options.items() if key != "storage_options"}
        # Of types without parameters, pylance knows only the names.
        named = self.vector or self.kind == _TEXT or not self.options
        kind = self.kind if named else self._config
        return dataset.create_index_uncommitted(self.column, kind, name=name, **chosen)

    def whole(
        self, dataset: lance.LanceDataset, name: str, fragments: Sequence[int], storage: dict[str, str] | None
    ) -> Index:
        """A :meth:`segment` that is merged with no other; one of texts is staged until it is merged, be it alone."""
        made = self.segment(dataset, name, fragments, storage)
        return dataset.merge_existing_index_segments([made]) if self.kind == _TEXT else made

    def with_options(self, more: Mapping[str, Any]) -> IndexArguments:
        """The same with more parameters, such as those that were trained."""
        return replace(self, options={**self.options, **more})

    @property
    def _config(self) -> IndexConfig:
        return IndexConfig(self.kind.replace("_", "").lower(), dict(self.options))


def arguments_like(table: Table, index: BaseIndex, *, trained: bool = False) -> IndexArguments:
    """How to create an index like one of the table's.

    Args:
        trained: of a vector index: with its centroids and codebook, instead of ones that are trained by the rows.

    Damaged files are not read. Where no segment has those with the parameters, they are what the manifest describes,
    and pylance's defaults of what that leaves out: sizes of pages and zones, the number of partitions.

    Raises:
        UnsupportedFeatureError: its parameters cannot be read, or pylance takes no trained ones of its type.
    """
    with datasets.lance_errors("read the indexes of", table.location.uri):
        described = next(other for other in table.handle.get().describe_indices() if other.name == index.name)
    details = without_hints(described.details)
    columns = list(described.field_names)
    if len(columns) != 1 or not index.segments:
        raise UnsupportedFeatureError(f"Index {index.name} has {len(columns)} columns: pylance builds it on one.")
    kind = _kind_of(index)
    arguments = IndexArguments(_quoted(table, index, columns[0]), kind, {}, index.is_vector, details)
    # Answers do not depend on the sizes of pages and zones; of a full-text index all is described.
    options = parameters_kept(table, index)
    if options is None:
        options = _of_details(table, index, details)
    if index.is_vector:
        if trained:
            whole = whole_segments(table, index)
            if not whole:
                raise UnsupportedFeatureError("files with its codebook are missing or damaged.", remedy=_BY_HAND)
            model = codebook.read_model(table.location, index_folder(table, whole[-1]), index.name)
            options["ivf_centroids"] = model.centroids
            if model.codebook is not None:
                options["pq_codebook"] = model.codebook
        options |= {"storage_options": stored} if (stored := datasets.lance_options(table.location)) else {}
    elif kind == _TEXT:
        options.pop("lance_tokenizer", None)  # follows from the column's type, and is not accepted
        if granularity := details.get("document_granularity"):
            options["document_granularity"] = DocumentGranularity(granularity)
    elif kind == _SIMILAR:
        options = similarity_options(details)
    return replace(arguments, options=options)


def whole_segments(table: Table, index: BaseIndex) -> list[table_pb2.IndexMetadata]:
    """The segments whose files are all there and look whole, the oldest first. Two requests for each file.

    Those in another table, as of a clone, are taken to be whole.
    """
    return [entry for entry in index.segments if entry.HasField("base_id") or not _is_damaged(table, index, entry)]


def parameters_kept(table: Table, index: BaseIndex) -> dict[str, Any] | None:
    """The parameters of the newest segment with files that can be read; None: there is none."""
    for entry in reversed(whole_segments(table, index)):
        try:
            return parameters_of(table, index, entry)
        except StorageError as error:
            if type(error) not in {StorageError, ObjectNotFoundError}:
                raise  # its cause is not the file
    return None


def _is_damaged(table: Table, index: BaseIndex, entry: table_pb2.IndexMetadata) -> bool:
    folder, place = version_files.index_key(entry), named_files.FileRoot(table.store, "")
    stored = {meta.path: meta.size for meta in table.store.list(folder)}
    named = {f"{folder}/{file.path}": int(file.size_bytes) for file in entry.files}
    # Releases that list no files of an index: that with the parameters must be there.
    needed = named or {f"{folder}/{name}": 0 for name in _needed_files(index)}
    try:
        return any(
            path not in stored or place.index_file(path, named.get(path, 0)).damage(stored[path])
            for path in stored.keys() | needed.keys()
        )
    except ObjectNotFoundError:
        return True


def _needed_files(index: BaseIndex) -> Sequence[str]:
    if index.is_vector:
        return codebook.MODEL_FILES
    kind = value_kind(index)
    file = _TEXT_FILE if kind == _TEXT else _FILES[kind].name if kind in _FILES else ""
    return [file] if file else []


def _of_details(table: Table, index: BaseIndex, details: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters of an index as far as the manifest has them, where its files are lost.

    Raises ``UnsupportedFeatureError``: they are of a release that described too little.
    """
    kind = _kind_of(index)
    get_logger(__name__).warning("index_parameters_lost", table=table.location.uri, index=index.name)
    try:
        if index.is_vector:
            options: dict[str, Any] = {"metric": str(details["metric_type"]).lower()}
            code = details.get("compression", {})
            options |= {name: code[name] for name in _OF_CODES.get(str(code.get("type")), ())}
            graph = details.get("hnsw", {})
            options |= {name: graph[key] for key, name in _OF_GRAPH.items() if graph.get(key)}
            folders = [index_folder(table, entry) for entry in index.segments]
            partitions = codebook.partitions_of(table.location, folders)
            return options | ({} if partitions is None else {"num_partitions": partitions})
        if kind == _TEXT:
            if not details:
                raise KeyError(kind)
            return {**_without_none(details), **_format_version(index.segments[-1])}
        if kind == _JSON:
            path, target = _json_target(index.segments[-1])
            return {"target_index_type": target.lower(), "path": path}
    except (KeyError, ValueError, TypeError, DecodeError) as error:
        raise UnsupportedFeatureError(
            f"How index {index.name} ({index.type}) was built is unknown: its files are missing or damaged, and the "
            "manifest does not describe it.",
            remedy=_BY_HAND,
        ) from error
    return {}


def similarity_options(details: Mapping[str, Any]) -> dict[str, Any]:
    """How to create an index for similar texts like one that pylance describes by ``details``."""
    return {name: _without_none(details[name]) for name in _SIMILAR_PARAMETERS if name in details}


def parameters_of(table: Table, index: BaseIndex, entry: table_pb2.IndexMetadata) -> dict[str, Any]:
    """The parameters of one segment of an index, published or not, that its files have.

    Raises:
        UnsupportedFeatureError: its type is not known, or a file is not as this release knows it.
        StorageError: a file is missing, or the store failed.
    """
    folder, kind = index_folder(table, entry), _kind_of(index)
    if index.is_vector:
        return codebook.vector_parameters(table.location, folder, index.name)
    try:
        if kind == _JSON:
            path, target = _json_target(entry)
            inner = _of_file(table, folder, _FILES[target])
            more = {"target_index_parameters": json.dumps(inner)} if inner else {}
            return {"target_index_type": target.lower(), "path": path, **more}
        if kind == _TEXT:
            return _of_text(table, folder, entry)
        if kind == _SIMILAR:
            return {}
        return _of_file(table, folder, _FILES[kind])
    except (KeyError, ValueError, TypeError, DecodeError) as error:
        raise UnsupportedFeatureError(
            f"How index {index.name} ({index.type}) was built cannot be read: {type(error).__name__} {error}.",
            remedy=_BY_HAND,
        ) from error


def value_kind(index: BaseIndex) -> str:
    """The type of an index in capitals; of one of a JSON path that of the index of its values."""
    kind = _kind_of(index)
    if kind != _JSON or not index.segments:
        return kind
    try:
        return _json_target(index.segments[-1])[1]
    except (KeyError, ValueError, TypeError, DecodeError):
        return kind


def has_no_update(index: BaseIndex) -> str | None:
    """Why pylance adds no rows to an index, which is built anew instead; None: it does."""
    kind = value_kind(index)
    if _kind_of(index) != _JSON or kind == "BTREE":
        return None
    return f"pylance adds no rows to an index of a JSON path whose values are in a {kind}"


def without_hints(details: Mapping[str, Any] | None) -> dict[str, Any]:
    """What pylance describes of an index, without what only its build used."""
    return {name: value for name, value in (details or {}).items() if name != _HINTS}


def _kind_of(index: BaseIndex) -> str:
    kind = index.type.upper()
    return _TYPES.get(kind, kind)


def _quoted(table: Table, index: BaseIndex, described: str) -> str:
    """The path of the index's column; names with a dot are quoted, which pylance does not do."""
    known = {schema_field.id: schema_field for schema_field in table.manifest.manifest.fields}
    names, at = list[str](), known.get(index.segments[0].fields[0])
    while at is not None:
        names.insert(0, at.name)
        at = known.get(at.parent_id)
    if ".".join(names) != described:
        return described
    return ".".join(f"`{name}`" if "." in name else name for name in names)


def _metadata(table: Table, folder: str, file: str) -> Mapping[str, str]:
    path = f"{folder}/{file}"
    with datasets.lance_errors("read index", path):
        reader = open_index_file(table.location, path)
        return {key.decode(): value.decode() for key, value in (reader.metadata().schema.metadata or {}).items()}


def _of_file(table: Table, folder: str, file: _File) -> dict[str, Any]:
    metadata = _metadata(table, folder, file.name) if file.name else {}
    return {name: read(metadata[key]) for key, (name, read) in file.parameters.items() if key in metadata}


def _of_text(table: Table, folder: str, entry: table_pb2.IndexMetadata) -> dict[str, Any]:
    """The parameters of a full-text index; the version of its format only if pylance can still write it."""
    parameters: dict[str, Any] = _without_none(json.loads(_metadata(table, folder, _TEXT_FILE)["params"]))
    return parameters | _format_version(entry)


def _format_version(entry: table_pb2.IndexMetadata) -> dict[str, int]:
    version = int(entry.index_version)
    return {"format_version": version} if version in {1, 2, 3} else {}


def _json_target(entry: table_pb2.IndexMetadata) -> tuple[str, str]:
    """The path of an index of a JSON column, and the type of the index of its values."""
    fields = UnknownFieldSet(empty_pb2.Empty.FromString(entry.index_details.value))
    values = {unknown_field.field_number: unknown_field.data for unknown_field in fields}  # type: ignore[attr-defined]  # iterable, missing in the stub
    target = any_pb2.Any.FromString(values[_TARGET])
    kind = target.type_url.rpartition(".")[2].removesuffix("IndexDetails").upper()
    return values[_PATH].decode(), _TYPES.get(kind, kind)


def _without_none(value: Any) -> Any:
    return {name: inner for name, inner in value.items() if inner is not None} if isinstance(value, dict) else value
