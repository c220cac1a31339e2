"""Read and write Zeppelin namespaces: a small writer and a reader, for programs without a Zeppelin server.

They are used in tests and in the demo; production queries are served by a Zeppelin server. Formats, jobs and commands
are in the modules below; importing this package imports none of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping, Sequence

    from memwal_ops.formats.zeppelin.namespace import Namespace
    from memwal_ops.formats.zeppelin.writer import Writer

__all__ = ["create", "open_writer", "query", "replace_fragment"]


def create(
    uri: str | os.PathLike[str],
    *,
    dimensions: int = 8,
    metric: str = "cosine",
    dialect: str = "wiki",
    storage_options: Mapping[str, str] | None = None,
) -> Namespace:
    """Create an empty namespace.

    Args:
        uri: its prefix; the last part is its name (1 to 255 letters, digits, ``-``, ``_`` and ``.``).
        dimensions: of all its vectors.
        metric: ``cosine``, ``euclidean`` or ``dot_product``.
        dialect: ``wiki`` (the published document) or ``native`` (what releases of Zeppelin write).
        storage_options: as ``open_table`` takes them.

    Raises:
        InvalidUsageError: an invalid name, metric or dialect; or there is a namespace already.
        ConditionalWriteUnsupportedError: the store has no compare-and-swap.
    """
    from memwal_ops.formats.zeppelin.writer import create_namespace  # noqa: PLC0415 - see the module

    return create_namespace(uri, dimensions, metric, dialect, storage_options)


def open_writer(uri: str | os.PathLike[str], storage_options: Mapping[str, str] | None = None) -> Writer:
    """A writer of the namespace at a URI.

    Raises: as ``open_table``; UnsupportedFeatureError if only a server may write it.
    """
    from memwal_ops.formats.zeppelin.writer import open_namespace_writer  # noqa: PLC0415 - see the module

    return open_namespace_writer(uri, storage_options)


def replace_fragment(
    uri: str | os.PathLike[str],
    fragment: str,
    *,
    vectors: Sequence[Mapping[str, Any]] = (),
    deletes: Sequence[str] = (),
    storage_options: Mapping[str, str] | None = None,
) -> str:
    """List a corrected copy of a fragment that cannot be compacted in its place; returns the copy's id.

    Args:
        uri: the namespace.
        fragment: the id of the listed fragment.
        vectors: all rows that it must have: ``{"id", "values", "attributes"}`` each.
        deletes: all ids that it must delete.
        storage_options: as ``open_table`` takes them.

    Raises:
        InvalidUsageError: the manifest does not list the fragment, or a value cannot be stored; nothing was changed.
        CommitConflictError: other writers replaced the manifest too often; nothing was changed.
    """
    return open_writer(uri, storage_options).replace(fragment, vectors, deletes)


def query(
    uri: str | os.PathLike[str],
    *,
    vector: Sequence[float] | None = None,
    text: str | None = None,
    field: str | None = None,
    k: int = 10,
    nprobe: int = 8,
    filter: Mapping[str, Any] | None = None,  # noqa: A002 - the word of the contract
    metric: str | None = None,
    consistency: str = "strong",
    storage_options: Mapping[str, str] | None = None,
) -> list[dict[str, Any]]:
    """The ``k`` rows that are nearest to a vector, or match a text best.

    Args:
        uri: the namespace.
        vector: the query vector.
        text: the query words; needs ``field``. Give one of ``vector`` and ``text``.
        field: the attribute with the text.
        k: number of rows.
        nprobe: how many clusters of a segment are searched, the nearest first; not for a text.
        filter: attributes that must be equal, or one of ``{"op": "eq" | "not_eq" | "in" | "not_in" | "range" |
            "contains" | "and" | "or" | "not", ...}``.
        metric: of a namespace without settings; cosine by default.
        consistency: ``strong`` scans every uncompacted fragment; ``eventual`` reads segments alone.
        storage_options: as ``open_table`` takes them.

    Returns:
        ``{"id", "distance", "attributes"}``, the nearest first. A distance is 1 - cosine, the square of the Euclidean
        one, the dot product times -1, or the BM25 score times -1.

    Raises:
        InvalidUsageError: neither a vector nor a text, a vector of another length, or an invalid filter.
        FragmentMissingError, FragmentCorruptError, SegmentCorruptError: an object in the manifest cannot be read.
    """
    from memwal_ops.formats.zeppelin.reader import Query, run_query  # noqa: PLC0415 - see the module

    query_ = Query(vector, text, field, k, nprobe, filter, metric, consistency)
    return run_query(uri, query_, storage_options)
