"""Check before each effect that the table is still the one that was planned for, and that the run still has its lease.

A plan of deletions is tied to an anchor: an object that is never rewritten, and that is removed only with its table or
when its revision expires. Objects are deleted only while the anchor's size, modification time and entity tag are
unchanged; a revision's number and file names do not identify a table. If the anchor is gone, an expiry cannot be
distinguished from a new table, and nothing more is deleted.

Timeline of the loss that this prevents: gc lists a table; the table is removed and created again at the same URI by
the same steps, with the same file names; gc continues with its listing and deletes the new table's files. A restored
backup has the same effect: objects that were deletable are needed again.

A commit guard is checked before every effect: mutations through the store (:class:`GuardedStore`), and, by the formats
themselves, effects that do not use it (pylance's commits, transactions of an embedded database, page writes that
a reader may see). Once the lease is lost it denies everything, except that a run may still remove the exact paths that
it registered as its own unpublished files. It is no proof, as the lease may be lost between the check and the effect:
publication is decided by the format's own conditional write. Without it, a supervisor that was suspended while its job
was inside a library call would delete by proofs from before that.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, ParamSpec, Protocol, Self, TypeVar

from memwal_ops.errors import LeaseLostError, TableReplacedError
from memwal_ops.storage import api
from memwal_ops.storage.wrapper import StoreWrapper

_P = ParamSpec("_P")
_R = TypeVar("_R")
# Every other method of a store counts as a mutation, until it is listed here.
_READS = frozenset({"get", "get_with_tag", "get_range", "head", "list", "list_level"})


class CommitGuard(Protocol):
    """Checked before every publication and deletion."""

    def heartbeat(self) -> None:
        """Called at each request: a heartbeat of the run."""

    def check(self) -> None:
        """Raise ``LeaseLostError`` if the run must not have any further effect."""

    def register(self, paths: Iterable[str]) -> None:
        """Allow the removal of these paths even without a lease: unpublished files that the run itself wrote."""

    def may_remove(self, path: str) -> bool:
        """Whether a path is registered and may be removed without a lease."""


class Unguarded:
    """The guard of a run without a lease (a command, or leases switched off): allows everything."""

    def heartbeat(self) -> None:
        """Ignored."""

    def check(self) -> None:
        """Never raises."""

    def register(self, paths: Iterable[str]) -> None:
        """Ignored."""

    def may_remove(self, path: str) -> bool:
        """Always true."""
        del path
        return True


class LeaseGuard:
    """The guard of a run that holds a lease. After the first denial, it always denies.

    ``check``: raises ``LeaseLostError`` if the run does not hold the lease any more; may send requests to the store.
    ``heartbeat``: called at every request of the run.
    """

    def __init__(self, check: Callable[[], None], heartbeat: Callable[[], None] = lambda: None) -> None:
        self._check = check
        self._alive = heartbeat
        self._own: set[str] = set()
        self._lock = threading.Lock()
        self._lost: LeaseLostError | None = None

    def heartbeat(self) -> None:
        """See the interface."""
        self._alive()

    def check(self) -> None:
        """Check the lease. A lost lease stays lost: another supervisor may have acted on it.

        Raises ``LeaseLostError``: the lease is lost.
        """
        if self._lost is None:
            try:
                self._check()
            except LeaseLostError as error:
                self._lost = error
        if self._lost is not None:
            raise self._lost

    def register(self, paths: Iterable[str]) -> None:
        """See the interface. Safe from any thread."""
        with self._lock:
            self._own.update(paths)

    def may_remove(self, path: str) -> bool:
        """Whether the path was registered."""
        with self._lock:
            return path in self._own


class GuardedStore(StoreWrapper):
    """A store that checks a guard before each mutation.

    ``guard``: checked before each mutation; its ``heartbeat`` is called at each request.
    """

    def __init__(self, inner: api.Store, guard: CommitGuard) -> None:
        super().__init__(inner)
        self._guard = guard

    def list(self, prefix: str = "", *, after: str | None = None) -> Iterator[api.ObjectMeta]:
        """See the interface; a page is requested as its first object is taken."""
        for meta in self._inner.list(prefix, after=after):
            self._guard.heartbeat()
            yield meta

    def delete_many(self, paths: Iterable[str]) -> api.DeleteReport:
        """Guarded, unless every path is registered as the run's own."""
        wanted = [*paths]
        self._guard.heartbeat()
        if not all(self._guard.may_remove(path) for path in wanted):
            self._guard.check()
        return self._inner.delete_many(wanted)

    def _call(self, verb: str, method: Callable[_P, _R], /, *arguments: _P.args, **named: _P.kwargs) -> _R:
        self._guard.heartbeat()
        if verb not in _READS:
            self._guard.check()
        return method(*arguments, **named)


class GuardedTable:
    """Base of a format's table, a frozen dataclass with ``store`` and ``guard``: guarded copies, own files."""

    __dataclass_fields__: ClassVar[dict[str, Any]]
    store: api.Store
    guard: CommitGuard

    def with_guard(self, guard: CommitGuard) -> Self:
        """The same revision with a guard that is checked before each mutation of the store and each commit."""
        return replace(self, store=GuardedStore(self.store, guard), guard=guard)

    def discard(self, paths: Iterable[str]) -> api.DeleteReport:
        """Delete files that this run wrote and no revision refers to: allowed even after the run's lease is lost."""
        own = [*paths]
        self.guard.register(own)
        return self.store.delete_many(own)


@dataclass(frozen=True, slots=True)
class Anchor:
    """An object by which a plan is valid: for as long as it is unchanged.

    ``what``: a description of the object, for messages. ``meta``: the object's metadata, from a HEAD request.
    """

    what: str
    meta: api.ObjectMeta

    def check(self, store: api.Store) -> None:
        """Verify that the object is unchanged. One HEAD request.

        If it is, everything that was read since the anchor was made belongs to the same table. Raises
        ``TableReplacedError``: the object is gone or was replaced.
        """
        if _identity(anchor_at(store, self.meta.path, self.what).meta) != _identity(self.meta):
            raise TableReplacedError(
                f"{self.what} is not the same object as before: the table was recreated or restored."
            )


def anchor_at(store: api.Store, path: str, what: str) -> Anchor:
    """Return an anchor for the object at ``path``. One HEAD request.

    The caller compares the object's content with what it read before: a HEAD alone does not identify the table. Raises
    ``TableReplacedError``: the object does not exist.
    """
    meta = store.head(path)
    if meta is None:
        raise TableReplacedError(
            f"{what} does not exist any more: it was expired, or the table was recreated or restored."
        )
    return Anchor(what, meta)


def delete_proven(store: api.Store, paths: Sequence[str], anchors: Iterable[Anchor]) -> api.DeleteReport:
    """Delete one batch of objects that a plan found deletable, after checking the plan's anchors.

    Every deletion of an object that other processes may refer to is made here. (A run's own files that were never
    published have unique names and need no proof.) Raises ``TableReplacedError``: an anchor has changed; nothing was
    deleted.
    """
    for anchor in anchors:
        anchor.check(store)
    return store.delete_many(paths)


def _identity(meta: api.ObjectMeta) -> tuple[int, float, str | None]:
    # Some servers quote the entity tag in one response and not in the next.
    tag = None if meta.e_tag is None else meta.e_tag.strip('"')
    return (meta.size, meta.last_modified.timestamp(), tag)
