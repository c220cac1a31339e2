"""The one storage interface: what core may ask of an object store, and nothing else.

Paths are relative to the table's root, use ``/`` and never start with it. Implementations
raise only classes of :mod:`memwal_ops.errors`; a caller never sees a client library's error.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from datetime import datetime


@dataclass(frozen=True, slots=True)
class ObjectMeta:
    """What a listing or HEAD says of one object: ``size`` in bytes, ``last_modified`` aware, in UTC."""

    path: str
    size: int
    last_modified: datetime
    e_tag: str | None


@dataclass(frozen=True, slots=True)
class Listing:
    """One level of a listing: ``directories`` (relative paths without trailing ``/``) and ``objects``.

    ``empty``: folders without any object below them, which only local files can have.
    """

    directories: tuple[str, ...]
    objects: tuple[ObjectMeta, ...]
    empty: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class DeleteReport:
    """Outcome of a batch delete. An absent object counts as deleted. ``failed`` maps path to message."""

    deleted: int
    failed: Mapping[str, str]


class Store(Protocol):
    """An object store under one root."""

    @property
    def root(self) -> str:
        """The root as a URI, without credentials."""

    def get(self, path: str) -> bytes:
        """The whole object. Raises ``ObjectNotFoundError``."""

    def get_range(self, path: str, start: int, length: int) -> bytes:
        """``length`` bytes from ``start``; fewer at the object's end. Raises ``ObjectNotFoundError``."""

    def head(self, path: str) -> ObjectMeta | None:
        """Metadata of one object, or None where there is none."""

    def list(self, prefix: str = "", *, after: str | None = None) -> Iterator[ObjectMeta]:
        """All objects below the folder ``prefix``, streamed in no particular order.

        ``after``: only those whose whole path sorts after it; the others cost no request where the
        store lists in order.
        """

    def list_level(self, prefix: str = "") -> Listing:
        """The entries directly in the folder ``prefix``; an absent folder is empty."""

    def put(self, path: str, data: bytes) -> None:
        """Write without condition: for hints only, never for truth."""

    def put_if_absent(self, path: str, data: bytes) -> bool:
        """Write unless an object stands there; False where one does.

        A False after a retried request may hide our own success: callers compare contents
        where that matters.
        """

    def compare_and_swap(self, path: str, data: bytes, e_tag: str) -> bool:
        """Replace the object if it still has ``e_tag``; False where it has another.

        Raises ``ConditionalWriteUnsupportedError`` where the store cannot (local files).
        """

    def delete_many(self, paths: Iterable[str]) -> DeleteReport:
        """Delete in batches; never stops at the first failure."""
