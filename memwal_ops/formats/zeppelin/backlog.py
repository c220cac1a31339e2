"""Compute the backlog of a namespace, and read its WAL fragments."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from memwal_ops.errors import (
    FragmentCorruptError,
    FragmentMissingError,
    InvalidFormatError,
    MemwalOpsError,
    ObjectNotFoundError,
)
from memwal_ops.formats.zeppelin.ulid import ulid_time
from memwal_ops.formats.zeppelin.wire.fragment import UnstorableError, decode_fragment
from memwal_ops.storage.concurrently import concurrently

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from memwal_ops.formats.zeppelin.namespace import Namespace
    from memwal_ops.formats.zeppelin.wire.fragment import Fragment
    from memwal_ops.formats.zeppelin.wire.manifest import FragmentRef

_CONCURRENT_READS = 8
_CORRECT = (
    "The object is intact, so a backup has the same. Fix its writer, and list a corrected copy of all its rows and "
    "deletes in its place: memwal_ops.formats.zeppelin.replace_fragment."
)


@dataclass(frozen=True)
class BlockedFragment:
    """The first fragment that cannot be compacted. Those before it can; later ones wait, since order matters."""

    fragment: str
    error: MemwalOpsError

    def to_json(self) -> dict[str, Any]:
        """The ``blocked`` entry of a report."""
        error = self.error
        return {"fragment": self.fragment, "reason": error.reason, "detail": str(error), "remedy": error.remedy}


def figures(table: Namespace) -> Mapping[str, float]:
    """Backlog metrics: one listing of the log."""
    listed = {meta.path: meta for meta in table.store.list("wal")} if table.manifest.fragments else {}
    refs = table.manifest.fragments
    found = [listed[one.key] for one in refs if one.key in listed]
    now = datetime.now(UTC)
    written = [written_at(one) or (listed[one.key].last_modified if one.key in listed else now) for one in refs]
    return {
        "fragments": len(refs),
        "rows": sum(one.vectors for one in refs),
        "bytes": sum(meta.size for meta in found),
        "oldest_age": max((max(0.0, (now - one).total_seconds()) for one in written), default=0.0),
        "blocked_fragments": len(refs) - len(found) and len(table.missing_fragments()),
    }


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
        raise FragmentCorruptError(f"The fragment {ref.key} cannot be used: {error}", remedy=_CORRECT) from error
    except InvalidFormatError as error:
        raise FragmentCorruptError(f"The fragment {ref.key} cannot be read: {error}") from error
    wrong = None
    if found.id != ref.id:
        wrong = f"its id is {found.id}"
    elif found.namespace not in {None, table.manifest.namespace}:
        wrong = f"it belongs to the namespace {found.namespace}"
    elif (len(found.ids), len(found.deletes)) != (ref.vectors, ref.deletes):
        listed = f"{ref.vectors} and {ref.deletes}"
        wrong = f"it has {len(found.ids)} vectors and {len(found.deletes)} deletes; the manifest has {listed}"
    elif dimensions is not None and found.dimensions not in {None, dimensions}:
        wrong = f"its vectors have {found.dimensions} dimensions; the namespace's have {dimensions}"
    if wrong is not None:
        raise FragmentCorruptError(f"The fragment {ref.key} cannot be used: {wrong}.")
    return found


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
