"""Check the key files of a generation against its rows (``--deep``): the bloom filter and the key index."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from memwal_ops.core.verification import Finding, Severity, finding_of
from memwal_ops.errors import GenerationCorruptError, InvalidFormatError, ObjectNotFoundError, runbook
from memwal_ops.formats.lance.files.datasets import ROW_ADDRESS
from memwal_ops.formats.lance.files.encoded_rows import lance_rows
from memwal_ops.formats.lance.regions.key_files import (
    BLOOM_FILTER,
    KEY_INDEX_PAGES,
    GenerationKeys,
    read_bloom_filter,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from memwal_ops.formats.lance.generations.generation import Generation
    from memwal_ops.storage.api import Store

_PAGE = runbook(GenerationCorruptError.exit_code) or ""
_MISSED = "A look-up of such a key by it misses the row, and returns an older one; merges do not use it."
_REMEDY = "memwal-ops merge URI: the base table then has the rows, and gc removes the generation with its files."


def check_key_files(store: Store, generation: Generation, keys: pa.Table) -> Iterator[Finding]:
    """Every live row is in the bloom filter, and in the key index by its address; a file that is not there is none.

    Args:
        keys: its live rows: key columns, and ``_rowaddr``.
    """
    found = GenerationKeys.of([keys], keys.column_names[: keys.column_names.index(ROW_ADDRESS)])
    if not keys.num_rows or any(column.null_count for column in found.columns):
        return
    path = f"{generation.ref.folder}/{BLOOM_FILTER}"
    try:
        bloom = read_bloom_filter(store, generation.ref.folder, [column.type for column in found.columns])
        missed = 0 if bloom is None else int(np.count_nonzero(~bloom.may_have(found.columns)))
        if missed:
            yield _lacks("key_filter", path, missed)
    except InvalidFormatError as error:
        yield finding_of(error, "key_filter", path, f"Look-ups of keys fail. {_REMEDY}")
    values = found.index_values
    path = f"{generation.ref.folder}/{KEY_INDEX_PAGES}"
    if values is None:
        return
    try:
        missed = _not_indexed(lance_rows(store.get(path), "the key index"), values, keys[ROW_ADDRESS])
        if missed:
            yield _lacks("key_index", path, missed)
    except ObjectNotFoundError:
        pass
    except InvalidFormatError as error:
        yield finding_of(error, "key_index", path, f"Look-ups of keys fail. {_REMEDY}")


def _lacks(check: str, path: str, missed: int) -> Finding:
    what = f"It lacks the keys of {missed:,} rows of the generation."
    return Finding(Severity.ERROR, check, path, what, _MISSED, _REMEDY, _PAGE)


def _not_indexed(pages: pa.Table, values: pa.Array, addresses: pa.ChunkedArray) -> int:
    """The number of rows that the key index does not have under their key and address.

    Raises:
        InvalidFormatError: the index has other columns, or values of another type.
    """
    try:
        stored = pages["values"].combine_chunks().cast(values.type)
        at = pc.index_in(addresses, value_set=pages["ids"].combine_chunks())
        same = pc.equal(_bits(stored.take(at.combine_chunks())), _bits(values))
    except (KeyError, pa.ArrowException) as error:
        raise InvalidFormatError(f"The key index does not have the columns of one: {error}") from error
    return len(values) - int(pc.sum(same).as_py() or 0)


def _bits(values: pa.Array) -> pa.Array:
    """Floats as numbers of their bits: NaN is equal to itself."""
    return values.view(f"int{values.type.bit_width}") if pa.types.is_floating(values.type) else values
