"""Record the events of a table's protocols, from the real code: every write, deletion and listing of its store.

The hook is below :mod:`memwal_ops.storage`: the methods of its stores. Before each event, what other programs did
since the last one (pylance's commits, tags, flushes) is found on the disk and recorded, too, as theirs.
"""

from __future__ import annotations

import functools
import os
import threading
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from memwal_ops.storage.local import LocalObjectStore
from memwal_ops.storage.object_store import ObjectStore

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

What = Literal["put", "put_if_absent", "gone", "list"]
#: Where others change what the protocols are about, in an order in which it may have happened.
_WATCHED = (
    "_mem_wal/*/wal/*",
    "_mem_wal/*/*_gen_*",
    "_mem_wal/*/*_gen_*/_versions/*.manifest",
    "_mem_wal/*/manifest/*.binpb",
    "_versions/*.manifest",
    "tree/*/_versions/*.manifest",
    "_refs/tags/*.json",
    "_mem_wal_ops/expired/*",
    "_mem_wal_ops/expiries/*",
    "_mem_wal_ops/holds/*",
    "_mem_wal_ops/leases/*/*",
)
_SHOWN = 25


@dataclass(frozen=True)
class Event:
    """One event of one table.

    ``ours``: by memwal-ops, and through its store; ``data`` is what was put. A generation is its directory.
    """

    number: int
    ours: bool
    what: What
    path: str
    data: bytes | None = None

    def __str__(self) -> str:
        return f"{self.number:5d} {'ours  ' if self.ours else 'others'} {self.what} {self.path}"


class Recorder:
    """Records the events of one local table; gives each to ``accept`` as it happens."""

    def __init__(self, uri: str, accept: Callable[[Event], None]) -> None:
        self.root = Path(uri)
        self.events: list[Event] = []
        self._accept = accept
        self._known: set[str] = set()
        self._lock = threading.RLock()

    def tail(self) -> str:
        """The last events, for a message."""
        return "\n".join(str(event) for event in self.events[-_SHOWN:])

    def look(self) -> None:
        """Record what others did."""
        with self._lock:
            there = {
                # Names of versions descend, so that the first one of a listing is the newest.
                str(path.relative_to(self.root)): path
                for pattern in _WATCHED
                for path in sorted(self.root.glob(pattern), reverse=True)
                if "#" not in path.name and ".tmp" not in path.name
            }
            for path in sorted(self._known - there.keys()):
                self._record(False, "gone", path)
            for path, whole in there.items():
                if path not in self._known:
                    self._record(False, "put", path, whole.read_bytes() if whole.is_file() else None)
            self._known = set(there)

    def called(self, what: What, path: str, data: bytes | None = None) -> None:
        """Record an event of ours."""
        with self._lock:
            self._record(True, what, path, data)
            if what == "gone":
                self._known.discard(path)
            elif what != "list" and any(Path(path).match(pattern) for pattern in _WATCHED):
                self._known.add(path)

    def _record(self, ours: bool, what: What, path: str, data: bytes | None = None) -> None:
        event = Event(len(self.events) + 1, ours, what, path, data)
        self.events.append(event)
        self._accept(event)

    def relative(self, store: ObjectStore, path: str) -> str | None:
        """A store's path from the table's root; None: it is not below it."""
        whole = os.path.normpath(os.path.join(store.root.removeprefix("file://"), path))
        relative = os.path.relpath(whole, self.root)
        return None if relative.startswith("..") else relative


@contextmanager
def recording(uri: str, accept: Callable[[Event], None]) -> Iterator[Recorder]:
    """While the block runs, the events of a local table are recorded, and accepted."""
    recorder = Recorder(uri, accept)
    recorder.look()
    with _patched(ObjectStore, "put", _put("put", recorder)), \
         _patched(ObjectStore, "put_if_absent", _put("put_if_absent", recorder)), \
         _patched(ObjectStore, "delete_many", _delete(recorder)), \
         _patched(LocalObjectStore, "list", _list(recorder)):  # fmt: skip
        try:
            yield recorder
        except AssertionError as error:
            error.add_note(recorder.tail())
            raise
        finally:
            recorder.look()


def _put(what: What, recorder: Recorder) -> Callable[..., Any]:
    def put(real: Any, self: ObjectStore, path: str, data: bytes) -> Any:
        place = recorder.relative(self, path)
        if place is None:
            return real(self, path, data)
        recorder.look()
        done = real(self, path, data)
        if done is not False:
            recorder.called(what, place, data)
        return done

    return put


def _delete(recorder: Recorder) -> Callable[..., Any]:
    def delete_many(real: Any, self: ObjectStore, paths: Any) -> Any:
        wanted = [*paths]
        places = {path: recorder.relative(self, path) for path in wanted}
        if not any(places.values()):
            return real(self, wanted)
        recorder.look()
        there = [place for place in places.values() if place is not None and (recorder.root / place).exists()]
        done = real(self, wanted)
        for place in there:
            if not (recorder.root / place).exists():
                recorder.called("gone", place)
        recorder.look()
        return done

    return delete_many


def _list(recorder: Recorder) -> Callable[..., Any]:
    def list_(real: Any, self: LocalObjectStore, prefix: str = "", *, after: str | None = None) -> Any:
        place = recorder.relative(self, prefix)
        if place is not None:
            recorder.called("list", place)
        return real(self, prefix, after=after)

    return list_


@contextmanager
def _patched(owner: type, name: str, new: Callable[..., Any]) -> Iterator[None]:
    real = vars(owner)[name]

    @functools.wraps(real)
    def call(*arguments: Any, **named: Any) -> Any:
        return new(real, *arguments, **named)

    setattr(owner, name, call)
    try:
        yield
    finally:
        setattr(owner, name, real)
