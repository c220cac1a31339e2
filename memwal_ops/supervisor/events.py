"""Listen to the events of a store, and have the tables polled that their objects belong to.

An event is a hint, and nothing else: a table is polled by its timer, too. So none must be kept, and all that may go
wrong with a queue costs is time. Messages are notifications of a bucket of S3, also by SNS, and events of EventBridge.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from fnmatch import fnmatchcase
from typing import Any
from urllib.parse import unquote, unquote_plus

from memwal_ops.core.protocols import AnnouncesCommits
from memwal_ops.core.registry import formats, short_name
from memwal_ops.errors import MemwalOpsError
from memwal_ops.log import get_logger
from memwal_ops.storage import locations, queues
from memwal_ops.storage.options import redact
from memwal_ops.supervisor.config.effective import TableSettings
from memwal_ops.supervisor.config.model import EventsConfig
from memwal_ops.supervisor.observe.status_document import EventsStatus
from memwal_ops.supervisor.scheduling.discovery import FoundTable, is_wanted

_CREATED = "ObjectCreated:"
_EVENT_BRIDGE_CREATED = "Object Created"
# SNS may send to a queue what EventBridge sent to it.
_MAX_DEPTH = 3


@dataclass(frozen=True, slots=True)
class Created:
    """An object that was written, or copied, to a bucket. ``keys``: its key, as it may have been encoded."""

    bucket: str
    keys: tuple[str, ...]


class UnreadableError(Exception):
    """The message is not one that S3 sends."""


def objects_created(body: str) -> list[Created]:
    """Return the objects of which a message says that they were created; none: it says something else.

    Raises ``UnreadableError``: the message is not one that S3 sends.
    """
    try:
        return [*_created(body, _MAX_DEPTH)]
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise UnreadableError(f"{type(error).__name__}: {error}") from error


def _created(body: Any, depth: int) -> Iterator[Created]:
    document: Any = json.loads(body) if isinstance(body, str) else body
    if depth and document.get("Type") == "Notification":  # SNS, without raw message delivery
        yield from _created(document["Message"], depth - 1)
    elif "Records" in document:
        for record in document["Records"]:
            yield from _of_record(record)
    elif document.get("source") == "aws.s3":
        if document["detail-type"] == _EVENT_BRIDGE_CREATED:
            detail = document["detail"]
            # Not encoded, other than in a notification; both are tried, as not all that send such events agree.
            key = _text(detail["object"]["key"])
            yield Created(_text(detail["bucket"]["name"]), tuple(dict.fromkeys((key, unquote_plus(key)))))
    elif document.get("Event") != "s3:TestEvent":
        raise ValueError("it is no event of S3")


def _of_record(record: Mapping[str, Any]) -> Iterator[Created]:
    of = record["s3"]
    bucket, key = _text(of["bucket"]["name"]), _text(of["object"]["key"])
    if str(record["eventName"]).removeprefix("s3:").startswith(_CREATED):
        yield Created(bucket, (unquote_plus(key),))


def _text(value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise ValueError("a name is empty, or is not text")
    return value


_WILD = frozenset("*?[")
# What jobs write beside a table: leases, holds, records of runs.
_OURS = "_mem_wal_ops/"


class TableRoutes:
    """The tables of a service that are in S3, by bucket and prefix.

    ``entries``: those of the configuration; a pattern may match tables that are not known yet.
    """

    def __init__(self, tables: Iterable[FoundTable] = (), entries: Iterable[TableSettings] = ()) -> None:
        self._tables: dict[tuple[str, str], list[FoundTable]] = {}
        for table in tables:
            if (place := _place(table.uri)) is not None:
                self._tables.setdefault(place, []).append(table)
        globs = ((entry, _place(entry.pattern)) for entry in entries if entry.pattern is not None)
        self._globs = [(entry, place) for entry, place in globs if place is not None]

    def tables_of(self, bucket: str, key: str) -> tuple[list[FoundTable], str]:
        """Return the tables that an object belongs to, and its path below them; no tables: it belongs to none."""
        parts = key.split("/")
        for end in range(len(parts) - 1, -1, -1):
            if table := self._tables.get((bucket, "/".join(parts[:end]))):
                return table, "/".join(parts[end:])
        return [], ""

    def new_table(self, bucket: str, key: str) -> str | None:
        """Return the folder that an object of no known table is in, if a pattern matches it as a table."""
        for entry, (in_bucket, glob) in self._globs:
            wanted, parts = glob.split("/"), key.split("/")
            folder = "/".join(parts[: len(wanted)])
            if in_bucket != bucket or len(parts) <= len(wanted) or not _matches(parts, wanted, entry):
                continue
            fixed = next((number for number, part in enumerate(wanted) if _WILD & {*part}), len(wanted) - 1)
            name = short_name("/".join(parts[fixed : len(wanted)]))
            if is_wanted(entry, name, f"s3://{bucket}/{folder}"):
                return folder
        return None


def announces_commit(table: FoundTable, path: str) -> bool:
    """Return whether an object at that path below a table may come with a commit, or another change of its backlog."""
    if path.startswith(_OURS):
        return False
    kind: object = formats().get(table.settings.format or "")
    return not isinstance(kind, AnnouncesCommits) or kind.announces_commit(path)


def _place(uri: str) -> tuple[str, str] | None:
    if locations.scheme_of(uri) not in locations.S3:
        return None
    bucket, _, prefix = locations.split_query(uri)[0].split("://", 1)[1].partition("/")
    return bucket, unquote(prefix.rstrip("/"))


def _matches(parts: list[str], wanted: list[str], entry: TableSettings) -> bool:
    if entry.database:
        return parts[: len(wanted) - 1] == wanted[:-1] and locations.is_database_table(parts[len(wanted) - 1])
    return all(map(fnmatchcase, parts, wanted))


OUTCOMES = ("unreadable", "elsewhere", "new", "polled", "unknown", "ignored")
"""What becomes of a message: it is not one that S3 sends; it is for another member; its table is not known yet; a table
is polled; it is of no table; the object announces nothing. Of one about several objects, the first of these."""
_FIRST_WAIT, _LONGEST_WAIT = 1.0, 60.0
# A message for another member is given back: at once until each member of a large fleet has probably had it, then
# after some seconds, and at last it is dropped.
_HOPS, _LATER_SECONDS, _MAX_HOPS = 30, 3, 60
# A table that is not known: its message is received again until it is, or so many listings have not found it.
_DISCOVERY_SECONDS, _MAX_RECEIVES, _ASK_AGAIN_SECONDS, _MAX_ASKED, _FORGET_SECONDS = 5, 12, 10.0, 3, 3600.0
_MAX_FOLDERS = 10_000
# What is not S3's may be another program's: it stays in the queue, and out of the way.
_UNREADABLE_SECONDS = 3600
# After a failure to delete or to give back messages, they come again within this time, and show whether it still fails.
_UNPROVEN_SECONDS = 30.0


class EventListener:
    """Receives messages on a thread of its own.

    Args:
        shared: the members of a fleet have one queue.
        ready: whether the tables of this process are known.
        elsewhere: returns which other member of the fleet has the table of a URI; empty: none.
        on_event: called with the names of tables to be polled.
        on_new: called with the folder of a table that a pattern matches, and that is not known.
        on_alive: called when it is known to work, and when it no longer does.
        count: takes the outcome of a message.
        queue: makes the queue; called again after a failure, so that new credentials are found.
    """

    def __init__(
        self,
        config: EventsConfig,
        *,
        shared: bool,
        ready: Callable[[], bool],
        elsewhere: Callable[[str], str],
        on_event: Callable[[Sequence[str]], None],
        on_new: Callable[[str], None],
        on_alive: Callable[[bool], None],
        count: Callable[[str], None],
        queue: Callable[[], queues.Queue] | None = None,
    ) -> None:
        self.routes = TableRoutes()
        self._config, self._shared = config, shared
        self._make = queue or self._open
        self._ready, self._elsewhere = ready, elsewhere
        self._on_event, self._on_new, self._on_alive, self._count = on_event, on_new, on_alive, count
        self._lock = threading.Lock()
        self._alive = False
        # When messages were received that were neither deleted nor given back.
        self._left = float("-inf")
        self._error: str | None = None
        self._last_message: float | None = None
        self._last_event: float | None = None
        self._lag: float | None = None
        self._unreadable: tuple[float, int, str] | None = None
        self._asked: dict[str, tuple[float, float, int]] = {}
        self._stopping = threading.Event()
        # A daemon thread: a request that waits for messages must not keep the process from exiting.
        self._thread = threading.Thread(target=self._work, name="events", daemon=True)
        self._log = get_logger(__name__)

    def start(self) -> None:
        """Begin to receive."""
        self._thread.start()

    def stop(self) -> None:
        """Receive no more; what comes meanwhile is left to another process, or to this one after a restart."""
        self._stopping.set()

    def status(self, covered: int, missed: Sequence[str]) -> EventsStatus:
        """Return whether events come.

        ``covered``: how many tables they come for. ``missed``: the tables to which something was committed without an
        event.
        """
        with self._lock:
            unreadable = self._unreadable
            if unreadable is not None and time.time() - unreadable[0] > _UNREADABLE_SECONDS:
                unreadable = None
            return {
                "queue": redact(self._config.queue),
                "state": "unreachable" if self._error else "listening" if self._alive else "starting",
                "error": self._error,
                "last_message": _iso(self._last_message),
                "last_event": _iso(self._last_event),
                "lag_seconds": self._lag,
                "tables": covered,
                "missed": list(missed),
                "unreadable": 0 if unreadable is None else unreadable[1],
                "unreadable_error": None if unreadable is None else unreadable[2],
            }

    # -- its own thread

    def _work(self) -> None:
        queue: queues.Queue | None = None
        wait = _FIRST_WAIT
        while not self._stopping.wait(0.0 if self._ready() else _FIRST_WAIT):
            if not self._ready():
                continue
            try:
                queue = queue or self._make()
                if not self._alive:
                    self._take(queue, queue.receive(0))  # answers at once: it is known to work
                    if time.monotonic() - self._left > _UNPROVEN_SECONDS:
                        self._set_alive(None)
                self._take(queue, queue.receive())
                wait = _FIRST_WAIT
                continue
            except MemwalOpsError as error:
                why = str(error)
            except Exception as error:  # noqa: BLE001 - tables are polled without events
                why = f"Unexpected {type(error).__name__}: {error}"
            queue = None
            self._set_alive(redact(why))
            self._stopping.wait(wait)
            wait = min(2 * wait, _LONGEST_WAIT)

    def _open(self) -> queues.Queue:
        config = self._config
        return queues.Queue(queues.address_of(config.queue, config.endpoint), config.storage_options, config.region)

    def _set_alive(self, error: str | None) -> None:
        with self._lock:
            changed = (self._alive, self._error is None) != (error is None, error is None)
            self._alive, self._error = error is None, error
        if changed:
            self._on_alive(error is None)
            if error is None:
                self._log.info("events_listening", queue=redact(self._config.queue))
            else:
                self._log.warning("events_unreachable", queue=redact(self._config.queue), error=error)

    def _take(self, queue: queues.Queue, messages: Sequence[queues.QueueMessage]) -> None:
        """Have tables polled, then delete the messages: a process that dies in between polls all as it starts."""
        if self._stopping.is_set():
            # Others may have its tables by now, and poll them at an event alone.
            queue.hide((message, 0) for message in messages)
            return
        polled: dict[str, None] = {}
        done: list[queues.QueueMessage] = []
        hidden: list[tuple[queues.QueueMessage, int]] = []
        for message in messages:
            outcome, names = self._outcome(message)
            self._count(outcome)
            polled |= dict.fromkeys(names)
            again = self._again_after(outcome, message.receives)
            if again is None:
                done.append(message)
            else:
                hidden.append((message, again))
        self._note(messages, heard=bool(polled))
        if polled:
            self._on_event([*polled])
        self._left = time.monotonic() if messages else self._left
        queue.delete(done)
        queue.hide(hidden)
        self._left = float("-inf") if messages else self._left

    def _outcome(self, message: queues.QueueMessage) -> tuple[str, list[str]]:
        try:
            created = objects_created(message.body)
        except UnreadableError as error:
            self._note_unreadable(message, redact(str(error)))
            return "unreadable", []
        names: list[str] = []
        outcomes = {"ignored"}
        for named in created:
            routes = [self.routes.tables_of(named.bucket, key) for key in named.keys]
            tables, path = max(routes, key=lambda match: len(match[0]))
            if not tables:
                folder = next(filter(None, (self.routes.new_table(named.bucket, key) for key in named.keys)), None)
                outcomes.add("new" if folder is not None and self._ask(f"s3://{named.bucket}/{folder}") else "unknown")
            for table in tables:
                if announces_commit(table, path):
                    elsewhere = self._elsewhere(table.uri)
                    outcomes.add("elsewhere" if elsewhere else "polled")
                    names += [] if elsewhere else [table.name]
        return next(outcome for outcome in OUTCOMES if outcome in outcomes), names

    def _again_after(self, outcome: str, receives: int) -> int | None:
        if outcome == "unreadable":
            return _UNREADABLE_SECONDS
        if outcome == "new" and receives <= _MAX_RECEIVES:
            return _DISCOVERY_SECONDS
        if outcome == "elsewhere" and self._shared and receives <= _MAX_HOPS:
            return 0 if receives <= _HOPS else _LATER_SECONDS
        return None

    def _ask(self, folder: str) -> bool:
        now = time.monotonic()
        first, last, count = self._asked.get(folder, (now, float("-inf"), 0))
        if now - first > _FORGET_SECONDS:
            first, count = now, 0
        if now - last < _ASK_AGAIN_SECONDS:
            return True
        if count >= _MAX_ASKED:
            return False
        if len(self._asked) >= _MAX_FOLDERS:
            self._asked.clear()
        self._asked[folder] = (first, now, count + 1)
        self._on_new(folder)
        return True

    def _note(self, messages: Sequence[queues.QueueMessage], *, heard: bool) -> None:
        now = time.time()
        sent = [message.sent for message in messages if message.sent is not None and message.receives == 1]
        with self._lock:
            self._last_message = now if messages else self._last_message
            self._last_event = now if heard else self._last_event
            if sent or not messages:
                self._lag = round(max(0.0, now - min(sent, default=now)), 3)

    def _note_unreadable(self, message: queues.QueueMessage, why: str) -> None:
        with self._lock:
            count = 0 if self._unreadable is None else self._unreadable[1]
            self._unreadable = (time.time(), count + 1, why)
        if not count:
            self._log.warning("event_unreadable", queue=redact(self._config.queue), message=message.id, why=why)


def _iso(seconds: float | None) -> str | None:
    return None if seconds is None else datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds")
