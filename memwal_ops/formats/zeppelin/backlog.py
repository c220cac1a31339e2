"""Compute the backlog of a namespace, and read its WAL fragments."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from memwal_ops.core.polling import cached_for_poll
from memwal_ops.errors import (
    FragmentCorruptError,
    FragmentMissingError,
    InvalidFormatError,
    MemwalOpsError,
    ObjectNotFoundError,
)
from memwal_ops.formats.zeppelin import remedies
from memwal_ops.formats.zeppelin.completeness import Listed, damaged_parts
from memwal_ops.formats.zeppelin.ulid import ulid_time
from memwal_ops.formats.zeppelin.wire.fragment import UnstorableError, decode_fragment
from memwal_ops.formats.zeppelin.wire.names import MANIFEST
from memwal_ops.storage.concurrently import concurrently
from memwal_ops.text import counted

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from memwal_ops.formats.zeppelin.namespace import Namespace
    from memwal_ops.formats.zeppelin.wire.fragment import Fragment
    from memwal_ops.formats.zeppelin.wire.manifest import FragmentRef

_CONCURRENT_READS = 8
_NAMED = 3


def figures(table: Namespace) -> Mapping[str, float]:
    """Backlog metrics; for the requests, see :mod:`memwal_ops.formats.zeppelin.completeness`.

    A log of contested rows alone is no backlog: no compaction changes it, and each poll would start another one.
    """
    listed = Listed(table.store)
    blocked = cached_for_poll(table, "damaged", lambda: damaged_parts(table, listed))
    left = cached_for_poll(table, "contested", lambda: contested(table))
    refs, now = () if left.alone else table.manifest.fragments, datetime.now(UTC)
    existing = {ref.id: meta for ref in refs if (meta := listed.folder(ref.key).get(ref.key)) is not None}
    written = [written_at(ref) or (existing[ref.id].last_modified if ref.id in existing else None) for ref in refs]
    oldest = min(filter(None, written), default=None)
    if refs and oldest is None:  # its objects are gone, and say nothing: the manifest that lists them is younger
        oldest = getattr(table.store.head(MANIFEST), "last_modified", None)
    return {
        "fragments": len(refs),
        "rows": sum(ref.vectors for ref in refs),
        "bytes": sum(meta.size for meta in existing.values()),
        "oldest_age": 0.0 if oldest is None else max(0.0, (now - oldest).total_seconds()),
        "blocked_parts": len(blocked),
    }


@dataclass(frozen=True)
class Contested:
    """Ids that are both in wiki ``pending_deletes`` and in the log: it is not defined which came later (S4-014).

    Attributes:
        ids: ascending.
        alone: whether a compaction has nothing else to do.
    """

    ids: tuple[str, ...] = ()
    alone: bool = False

    def __str__(self) -> str:
        """How many there are, and the first ones."""
        some = ", ".join(map(repr, self.ids[:_NAMED])) + (", ..." if len(self.ids) > _NAMED else "")
        return f"{counted(len(self.ids), 'id is', 'ids are')} both in pending_deletes and in the log: {some}"


def contested(table: Namespace) -> Contested:
    """The contested ids of a namespace. Reads the log only if ``pending_deletes`` has ids; memory: the log's ids."""
    hidden = table.manifest.hidden.difference(table.manifest.pending_keys)
    if not hidden:
        return Contested()
    newest: dict[str, bool] = {}
    whole = not any(ref.is_empty for ref in table.manifest.fragments)
    for _, fragment in read_fragments(table, table.manifest.fragments, None):
        if isinstance(fragment, MemwalOpsError):
            whole = False  # it blocks the log, and those behind it are not compacted
            break
        newest |= dict.fromkeys(fragment.deletes, False) | dict.fromkeys(fragment.ids, True)
    ids = {name for name in hidden if newest.get(name)}
    return Contested(tuple(sorted(ids)), whole and ids == hidden and newest.keys() == ids)


def written_at(ref: FragmentRef) -> datetime | None:
    """When a fragment was written, by its writer's clock."""
    try:
        written = None if ref.created_at is None else datetime.fromisoformat(ref.created_at)
    except ValueError:
        written = None
    if written is not None:
        return written if written.tzinfo is not None else written.replace(tzinfo=UTC)
    return ulid_time(ref.id)


def read_fragment(table: Namespace, ref: FragmentRef, dimensions: int | None = None) -> Fragment:
    """Read a listed fragment, verified against its checksum and its entry in the manifest.

    Raises:
        FragmentMissingError: it does not exist.
        FragmentCorruptError: it cannot be read, or is not the fragment that is listed.
    """
    return _decoded(table, ref, dimensions, _fetched(table, ref))


def _fetched(table: Namespace, ref: FragmentRef) -> bytes:
    try:
        return table.store.get(ref.key)
    except ObjectNotFoundError as error:
        raise FragmentMissingError(f"The fragment {ref.key} is listed, but does not exist.") from error


def _decoded(table: Namespace, ref: FragmentRef, dimensions: int | None, data: bytes) -> Fragment:
    try:
        found = decode_fragment(data, table.manifest.dialect)
    except UnstorableError as error:
        raise FragmentCorruptError(
            f"The fragment {ref.key} cannot be used: {error}", remedy=remedies.CORRECT
        ) from error
    except InvalidFormatError as error:
        raise FragmentCorruptError(f"The fragment {ref.key} cannot be read: {error}") from error
    if dimensions is not None and found.dimensions not in {None, dimensions}:
        raise other_dimensions(ref, found, dimensions)
    wrong = None
    if found.id != ref.id:
        wrong = f"its id is {found.id}"
    elif found.namespace not in {None, table.manifest.namespace}:
        wrong = f"it belongs to the namespace {found.namespace}"
    elif ref.bytes is not None and len(data) != ref.bytes:
        wrong = f"it has {len(data)} bytes; the manifest has {ref.bytes}"
    elif (len(found.ids), len(found.deletes)) != (ref.vectors, ref.deletes):
        listed = f"{ref.vectors} and {ref.deletes}"
        wrong = f"it has {len(found.ids)} vectors and {len(found.deletes)} deletes; the manifest has {listed}"
    if wrong is not None:
        raise FragmentCorruptError(f"The fragment {ref.key} cannot be used: {wrong}.")
    return found


def other_dimensions(ref: FragmentRef, found: Fragment, dimensions: int) -> FragmentCorruptError:
    """The error of a fragment whose vectors are not of the dimensions of those before."""
    return FragmentCorruptError(
        f"The fragment {ref.key} cannot be used: its vectors have {found.dimensions} dimensions; those before have "
        f"{dimensions}.",
        remedy=remedies.CORRECT,
    )


def read_fragments(
    table: Namespace, refs: Sequence[FragmentRef], dimensions: int | None
) -> Iterator[tuple[FragmentRef, Fragment | MemwalOpsError]]:
    """Read listed fragments in order; an error in place of one that cannot be used.

    The bytes of a few are fetched at once. They are decoded one at a time, as that needs many times their size.
    """

    def fetched(ref: FragmentRef) -> bytes | FragmentMissingError:
        try:
            return _fetched(table, ref)
        except FragmentMissingError as error:
            return error

    for ref, data in concurrently(fetched, refs, threads=_CONCURRENT_READS):
        if isinstance(data, FragmentMissingError):
            yield ref, data
            continue
        try:
            found: Fragment | MemwalOpsError = _decoded(table, ref, dimensions, data)
        except FragmentCorruptError as error:
            found = error
        yield ref, found
        del found  # before the next one is decoded
