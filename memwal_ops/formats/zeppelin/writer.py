"""Append to a namespace: write a fragment, then the manifest that lists it (S4-001, S4-007, S4-021)."""

from __future__ import annotations

import json
import re
import time
from dataclasses import replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import numpy as np

from memwal_ops.errors import InvalidFormatError, InvalidUsageError
from memwal_ops.formats.zeppelin.compaction import dimensions_of
from memwal_ops.formats.zeppelin.namespace import Namespace, load, probe, retried, swappable
from memwal_ops.formats.zeppelin.segments import METRICS, create_object
from memwal_ops.formats.zeppelin.wire import MANIFEST, META, fragment as wire, new_ulid
from memwal_ops.formats.zeppelin.wire.fragment import NATIVE, WIKI, Fragment
from memwal_ops.formats.zeppelin.wire.manifest import FragmentRef, Manifest, encode_manifest, new_manifest, timestamp
from memwal_ops.formats.zeppelin.wire.segment import MAX_DIMENSIONS
from memwal_ops.storage.catalogs import resolve
from memwal_ops.storage.objects import is_empty, open_store
from memwal_ops.storage.probe import probe_conditional_writes

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping, Sequence

    from memwal_ops.storage.api import Store

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,254}")
# gc deletes a fragment that no manifest lists after days, and replaces the manifest before: if a fragment is not listed
# at the first attempt, nor within this time, it is written again under a new name, which no ledger has.
_STALE_SECONDS = 3600.0


class Writer:
    """Append to a namespace. Any number of writers may append, without a lease: compare-and-swap orders them."""

    def __init__(self, table: Namespace) -> None:
        self._table = table
        self._dimensions = dimensions_of(table)
        self._last = ""

    def append(self, vectors: Sequence[Mapping[str, Any]] = (), deletes: Sequence[str] = ()) -> str:
        """Write one fragment, and return its id; it is durable and visible then.

        Args:
            vectors: ``{"id", "values", "attributes"}`` each; ``attributes`` is optional.
            deletes: ids; applied before the vectors of the same call.

        Raises:
            InvalidUsageError: nothing to write, an id in both lists, values that are not finite numbers or of another
                length than the namespace's, a lone surrogate in a text, or an attribute that the format cannot store.
            CommitConflictError: other writers replaced the manifest too often; the fragment is not visible.
        """
        return self._publish(self._checked(vectors, deletes))

    def replace(self, fragment: str, vectors: Sequence[Mapping[str, Any]] = (), deletes: Sequence[str] = ()) -> str:
        """See :func:`replace_fragment`; the order of the fragment in the log stays."""
        return self._publish(self._checked(vectors, deletes), fragment)

    def _publish(self, fragment: Fragment, replaced: str | None = None) -> str:
        begun, shown = _clocks(), {*fragment.ids}
        written: list[FragmentRef] = []

        def change(table: Namespace) -> Manifest:
            nonlocal begun
            listed = {*table.manifest.fragment_ids}
            if not written or max(now - then for now, then in zip(_clocks(), begun, strict=True)) > _STALE_SECONDS:
                begun = _clocks()
                # Above all that are listed, and all that this writer put: ids rise even if clocks differ.
                written[:] = [put_fragment(table, fragment, max(listed, default=self._last))]
                self._last = max(self._last, written[0].id)
            (ref,) = written
            if replaced is not None:
                old = next((ref for ref in table.manifest.fragments if ref.id == replaced), None)
                if old is None:
                    raise InvalidUsageError(f"The manifest of {table.location.uri} does not list {replaced!r}.")
                placed = replace(ref, order=old.order)
                return table.manifest.changed(
                    fragments=[placed if ref is old else ref for ref in table.manifest.fragments]
                )
            last = max((ref.order for ref in table.manifest.fragments), default=-1)
            order = max(last + 1, table.manifest.document.get("next_sequence") or 0)
            placed = replace(ref, order=order)
            # An id that is written again is not excluded any more (S4-014). All others are for a compaction.
            rest = [key for key in table.manifest.pending if key not in shown]
            pending = rest if table.manifest.dialect == WIKI and len(rest) < len(table.manifest.pending) else None
            return table.manifest.changed(fragments=[*table.manifest.fragments, placed], pending=pending)

        self._table = retried(self._table.newest(), change, compaction=replaced is not None)
        self._dimensions = self._dimensions or fragment.dimensions
        return written[0].id

    def _checked(self, vectors: Sequence[Mapping[str, Any]], deletes: Sequence[str]) -> Fragment:
        if not vectors and not deletes:
            raise InvalidUsageError("There is neither a vector nor a delete to write.")
        try:
            ids = [wire.check_id(vector["id"], "The vector's") for vector in vectors]
            gone = [wire.check_id(name, "The deleted") for name in deletes]
            values = wire.matrix([_listed(vector["values"]) for vector in vectors])
            dialect = self._table.manifest.dialect
            attributes = [wire.check_attributes(vector.get("attributes"), dialect) for vector in vectors]
        except (InvalidFormatError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise InvalidUsageError(
                f"The vectors cannot be written: {error}", remedy='Each is {"id", "values", "attributes"}.'
            ) from error
        both = set(ids) & set(gone)
        if both:
            raise InvalidUsageError(f"{min(both)!r} is both written and deleted; append them one after the other.")
        fragment = Fragment("", ids, values, attributes, gone)
        if self._dimensions is not None and fragment.dimensions not in {None, self._dimensions}:
            raise InvalidUsageError(
                f"The vectors have {fragment.dimensions} dimensions; those of the namespace have {self._dimensions}."
            )
        return fragment


def put_fragment(table: Namespace, fragment: Fragment, above: str = "") -> FragmentRef:
    """Put a fragment, with an id above another one; no manifest lists it yet."""
    native = table.manifest.dialect == NATIVE
    now = None if native else timestamp(datetime.now(UTC))
    namespace = None if native else table.manifest.namespace
    named = replace(fragment, id=new_ulid(above), namespace=namespace, created_at=now)
    data = wire.encode_fragment(named, table.manifest.dialect)
    key = f"wal/{named.id}.{'wal' if native else 'fragment.json'}"
    create_object(table.store, key, data)
    return FragmentRef(named.id, key, len(named.ids), len(named.deletes), 0, now, len(data))


def create(
    uri: str | os.PathLike[str],
    *,
    dimensions: int = 8,
    metric: str = "cosine",
    dialect: str = "wiki",
    storage_options: Mapping[str, str] | None = None,
) -> Namespace:
    """Create an empty namespace, with vectors of so many dimensions.

    Args:
        uri: its prefix; the last part is its name (1 to 255 letters, digits, ``-``, ``_`` and ``.``).
        metric: ``cosine``, ``euclidean`` or ``dot_product``.
        dialect: ``wiki`` (the published document) or ``native`` (what releases of Zeppelin write).
        storage_options: as ``open_table`` takes them.

    Raises:
        InvalidUsageError: an invalid name, metric or dialect; or there is a namespace already.
        ConditionalWriteUnsupportedError: the store has no compare-and-swap.
    """
    location = resolve(uri, storage_options)
    name = location.uri.rstrip("/").rpartition("/")[2]
    if _NAME.fullmatch(name) is None:
        raise InvalidUsageError(
            f"{name!r} is not a valid namespace name: letters, digits, '-', '_' and '.', the first a letter or digit."
        )
    if metric not in METRICS or dialect not in {WIKI, NATIVE} or not 1 <= dimensions <= MAX_DIMENSIONS:
        raise InvalidUsageError(
            f"A namespace cannot have {dimensions} dimensions, metric {metric!r} and dialect {dialect!r}.",
            remedy=f"The metric is one of {', '.join(METRICS)}; the dialect is wiki or native.",
        )
    store = swappable(open_store(location))
    if not is_empty(store):
        raise InvalidUsageError(f"The prefix {location.uri} is not empty.", remedy="Give an empty prefix.")
    probe_conditional_writes(store)
    now = timestamp(datetime.now(UTC))
    settings = {
        "name": name,
        "dimensions": dimensions,
        "distance_metric": metric,
        "index_type": "ivf_flat",
        "vector_count": 0,
        "created_at": now,
        "updated_at": now,
        "state": "active",
        "full_text_search": {},
    }
    # The settings first: without them, vectors of any length would be accepted.
    _settled(store, META, json.dumps(settings, indent=2).encode(), location.uri)
    _settled(store, MANIFEST, encode_manifest(new_manifest(name, dialect)), location.uri)
    table = load(location, store)
    probe(table)
    return table


def open_writer(uri: str | os.PathLike[str], storage_options: Mapping[str, str] | None = None) -> Writer:
    """A writer of the namespace at a URI.

    Raises: as ``open_table``; UnsupportedFeatureError if only a server may write it.
    """
    location = resolve(uri, storage_options)
    table = load(location, swappable(open_store(location)))
    table.check_writable()
    probe(table)
    return Writer(table)


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


def _settled(store: Store, path: str, data: bytes, uri: str) -> None:
    if not store.put_if_absent(path, data) and store.get(path) != data:
        raise InvalidUsageError(f"Another process is creating a namespace at {uri}.")


def _clocks() -> tuple[float, float]:
    """One clock that is never set back, and one that also counts while the machine is suspended; in seconds."""
    return time.monotonic(), time.time()


def _listed(values: Any) -> list[float]:
    numbers = values.tolist() if isinstance(values, np.ndarray) else list(values)
    if any(isinstance(part, bool) for part in numbers):
        raise InvalidFormatError("A vector has a boolean value.")
    return numbers
