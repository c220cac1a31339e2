"""Execute the tasks of a compaction: here, or where another engine runs them; and write dictionaries anew.

pylance keeps a dictionary as it is, also values that no row has any more. An erasure has what was rewritten written
again, with the values in use alone.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Protocol

import pyarrow as pa
from lance.fragment import write_fragments

from memwal_ops.errors import InvariantViolatedError
from memwal_ops.formats.lance.files.datasets import lance_options
from memwal_ops.formats.lance.files.lance_errors import lance_errors
from memwal_ops.formats.lance.files.referenced_files import DATA_FOLDER

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    import lance
    from lance.optimize import CompactionTask, RewriteResult

    from memwal_ops.formats.lance.table import Table


class TaskExecutor(Protocol):
    """Rewrites groups of fragments. A task only adds files that no version names; the job commits its results."""

    @property
    def name(self) -> str:
        """The value of ``--engine`` that selects it."""

    @property
    def rows_per_commit(self) -> int:
        """A commit holds the old and the new address of every row, to remap the indexes: some 90 bytes per row."""

    def execute(
        self, table: Table, dataset: lance.LanceDataset, tasks: Sequence[CompactionTask]
    ) -> Iterator[RewriteResult]:
        """The results of tasks that were planned on ``dataset``, which is ``table``'s version."""


class LocalExecutor:
    """One task after the other, in this process."""

    name = "local"
    rows_per_commit = 8 << 20

    def execute(
        self, table: Table, dataset: lance.LanceDataset, tasks: Sequence[CompactionTask]
    ) -> Iterator[RewriteResult]:
        """See :class:`TaskExecutor`."""
        for task in tasks:
            with lance_errors("write compacted fragments of", table.location.uri):
                result = task.execute(dataset)
            yield result


def dictionary_columns(schema: pa.Schema) -> list[str]:
    """The columns with a dictionary anywhere in them."""
    return [field.name for field in schema if _has_dictionary(field.type)]


def _has_dictionary(kind: pa.DataType) -> bool:
    return bool(pa.types.is_dictionary(kind)) or any(
        _has_dictionary(kind.field(at).type) for at in range(kind.num_fields if pa.types.is_nested(kind) else 0)
    )


def dictionaries_of(array: pa.Array, name: str) -> Iterator[tuple[str, pa.DictionaryArray]]:
    """The arrays with a dictionary in a column, each with the path to it."""
    kind = array.type
    if pa.types.is_dictionary(kind):
        yield name, array
    elif pa.types.is_struct(kind):
        for child in kind:
            yield from dictionaries_of(array.field(child.name), f"{name}.{child.name}")
    elif _has_dictionary(kind):
        for at, child in enumerate([array.keys, array.items] if pa.types.is_map(kind) else [array.values]):
            yield from dictionaries_of(child, f"{name}.{at}")


def with_values_in_use(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """The same rows, with dictionaries of the values that they have."""
    for batch in batches:
        columns = [_in_use(column) if _has_dictionary(column.type) else column for column in batch.columns]
        yield pa.RecordBatch.from_arrays(columns, schema=batch.schema)


def _in_use(array: pa.Array) -> pa.Array:
    array = array.take(pa.array(range(len(array)), pa.int64()))  # without an offset, and without what is not in use
    kind, is_null = array.type, array.is_null()
    if pa.types.is_dictionary(kind):
        encoded = array.dictionary_decode().dictionary_encode()
        return pa.DictionaryArray.from_arrays(
            encoded.indices.cast(kind.index_type), encoded.dictionary, ordered=kind.ordered
        )
    if pa.types.is_struct(kind):
        children = [_in_use(array.field(at)) for at in range(kind.num_fields)]
        return pa.StructArray.from_arrays(children, fields=[*kind], mask=is_null)
    if pa.types.is_map(kind):
        return pa.MapArray.from_arrays(array.offsets, _in_use(array.keys), _in_use(array.items), kind, mask=is_null)
    if pa.types.is_fixed_size_list(kind):
        return pa.FixedSizeListArray.from_arrays(_in_use(array.values), type=kind, mask=is_null)
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return type(array).from_arrays(array.offsets, _in_use(array.values), type=kind, mask=is_null)
    return array


def with_new_dictionaries(
    table: Table, dataset: lance.LanceDataset, results: Iterable[RewriteResult]
) -> Iterator[RewriteResult]:
    """Write what tasks rewrote again, with the values in use alone; the files of before are deleted.

    Args:
        table: the version that the tasks were planned on.
        dataset: opened.
        results: those of the tasks.
    """
    result: Any  # the stub lacks its methods
    for result in results:
        document = json.loads(result.json())
        old = [f"{DATA_FOLDER}/{file['path']}" for one in document["new_fragments"] for file in one["files"]]
        rows = _Rows(dataset, [int(one["id"]) for one in document["original_fragments"]])
        for fragment in document["new_fragments"]:
            with lance_errors("write the dictionaries of", table.location.uri):
                fragment["files"] = rows.write(int(fragment["physical_rows"]), table)
        table.guard.register(old)
        table.discard(old)
        yield type(result).from_json(json.dumps(document))


class _Rows:
    """The rows of fragments that are not deleted, in their order, as a task rewrites them."""

    def __init__(self, dataset: lance.LanceDataset, fragments: list[int]) -> None:
        parts = [part for number in fragments if (part := dataset.get_fragment(number)) is not None]
        self._dataset = dataset
        self._batches = dataset.scanner(fragments=parts, blob_handling="all_binary").to_batches()
        self._rest: pa.RecordBatch | None = None

    def write(self, count: int, table: Table) -> list[dict[str, Any]]:
        """Write so many of the next rows as a fragment of a table; return its files."""
        schema = self._dataset.schema
        made = write_fragments(
            pa.RecordBatchReader.from_batches(schema, with_values_in_use(self._next(count))),
            self._dataset,
            mode="append",
            max_rows_per_file=count,
            data_storage_version=self._dataset.data_storage_version,
            storage_options=lance_options(table.location),
        )
        if not isinstance(made, list) or len(made) != 1 or made[0].physical_rows != count:
            raise InvariantViolatedError(f"Not exactly {count} rows were written again; nothing was published.")
        files: list[dict[str, Any]] = made[0].to_json()["files"]
        return files

    def _next(self, count: int) -> Iterator[pa.RecordBatch]:
        while count and (batch := self._rest or next(self._batches, None)) is not None:
            yield batch.slice(0, count)
            self._rest = batch.slice(count) if batch.num_rows > count else None
            count -= min(count, batch.num_rows)
