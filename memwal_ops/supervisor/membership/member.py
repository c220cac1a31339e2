"""One member of a fleet: announce it, watch the others, and tell which tables it has.

It works on a thread of its own, whose requests may take as long as they want: nothing waits for them. While the store
of the fleet cannot be reached, a member keeps the tables that it had; one that never reached it has all of them.
"""

from __future__ import annotations

import threading
import time
import uuid
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from memwal_ops.errors import AlreadyRunningError, MemwalOpsError
from memwal_ops.log import get_logger
from memwal_ops.storage.locations import scheme_of
from memwal_ops.storage.objects import open_store
from memwal_ops.storage.probe import probe_conditional_writes
from memwal_ops.storage.redaction import redact
from memwal_ops.storage.resolve import resolve
from memwal_ops.storage.retries import RetryPolicy
from memwal_ops.supervisor.membership.decisions import BEATS, View, owner
from memwal_ops.supervisor.membership.records import Document, MemberRecords, name_taken
from memwal_ops.version import __version__

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from memwal_ops.core.leases import Holder
    from memwal_ops.supervisor.config.model import FleetConfig
    from memwal_ops.supervisor.observe.status_document import FleetStatus, MemberStatus
    from memwal_ops.supervisor.scheduling.discovery import FoundTable

JOINING, JOINED, UNREACHABLE = "joining", "joined", "unreachable"
_SILENT_AFTER = 2


class Member:
    """One member of a fleet (see the module).

    Args:
        config: the fleet.
        holder: this supervisor.
        alive: whether this supervisor works: if not, it lets the others take its tables.
        on_change: called on another thread when :meth:`share` may return other tables.
        on_refusal: called on another thread when it cannot be a member, with the reason.
    """

    def __init__(
        self,
        config: FleetConfig,
        holder: Holder,
        *,
        alive: Callable[[], bool],
        on_change: Callable[[], None],
        on_refusal: Callable[[MemwalOpsError], None],
    ) -> None:
        """Send no request yet."""
        self._config, self._holder = config, holder
        self._alive, self._on_change, self._on_refusal = alive, on_change, on_refusal
        self._heartbeat = config.heartbeat.total_seconds()
        self._process, self._started = uuid.uuid4().hex, datetime.now(UTC).isoformat(timespec="seconds")
        self._lock = threading.Lock()
        # None: this member has no tables yet.
        self._living: frozenset[str] | None = None
        self._view = View(self._heartbeat)
        self._documents: dict[str, tuple[int, Document | None]] = {}
        self._entries, self._tables, self._known = "", 0, 0
        self._error: str | None = None
        self._joined = False
        self._succeeded = time.monotonic()
        self._leaving = threading.Event()
        self._thread = threading.Thread(target=self._work, name="fleet", daemon=True)
        self._log = get_logger(__name__)

    def start(self) -> None:
        """Join the fleet."""
        self._thread.start()

    def leave(self) -> None:
        """Delete this member's records soon: the others take its tables at once."""
        self._leaving.set()

    def wait(self, seconds: float) -> None:
        """Wait until it has left."""
        self._leaving.set()
        if self._thread.is_alive():
            self._thread.join(seconds)

    # -- the scheduler's thread

    def share(self, tables: Sequence[FoundTable], entries: str) -> list[FoundTable]:
        """Return those of the tables that this member has now.

        Args:
            tables: all that the configuration names.
            entries: a digest of what the configuration names.
        """
        with self._lock:
            living = self._living
        names = () if living is None else (*living, self._config.name)
        mine = [table for table in tables if names and owner(table.uri, names) == self._config.name]
        with self._lock:
            self._entries, self._tables, self._known = entries, len(mine), len(tables)
        return mine

    def owner_of(self, uri: str) -> str:
        """Return the name of the other member that has a table; empty: this one has it, or is to have it."""
        found = owner(uri, (*(self._living or ()), self._config.name))
        return "" if found == self._config.name else found

    def status(self) -> FleetStatus:
        """Return the fleet as this member sees it."""
        now = time.monotonic()
        with self._lock:
            silent = now - self._succeeded
            error = self._error
            if error is None and silent > _SILENT_AFTER * self._heartbeat:
                error = f"The store has not responded for {silent:.0f} s."
            joined = JOINED if self._joined else JOINING
            documents = {name: document for name, (_, document) in self._documents.items()}
            own = _member(self._config.name, self._document(), silent, self._entries)
            others = [
                _member(name, documents.get(name), now - seen.since, self._entries, living=seen.living)
                for name, seen in self._view.seen.items()
            ]
        return {
            "uri": redact(self._config.uri),
            "name": self._config.name,
            "state": joined if error is None else UNREACHABLE,
            "error": error,
            "heartbeat_seconds": self._heartbeat,
            "members": sorted([own, *others], key=lambda one: one["name"]),
        }

    @property
    def joining(self) -> bool:
        """Whether it has no tables yet, as it is not known whether its name is free."""
        return self._living is None

    # -- its own thread

    def _work(self) -> None:
        records: MemberRecords | None = None
        while not self._leaving.is_set():
            began = time.monotonic()
            try:
                if records is None:
                    records = self._join()
                elif self._alive():
                    self._beat(records)
            except AlreadyRunningError as error:
                self._on_refusal(error)
                return
            except MemwalOpsError as error:
                self._failed(redact(f"{error} {error.remedy}"))
            except Exception as error:  # noqa: BLE001 - the tables are maintained without the fleet
                self._failed(redact(f"Unexpected {type(error).__name__}: {error}"))
            self._leaving.wait(max(0.0, began + self._heartbeat / BEATS - time.monotonic()))
        if records is not None:
            try:
                records.leave()
                self._log.info("fleet_left", member=self._config.name)
            except MemwalOpsError as error:
                self._log.warning("fleet_not_left", member=self._config.name, error=redact(str(error)))

    def _join(self) -> MemberRecords | None:
        """Return the records once the name is this member's, and it is known which of the others live.

        The name is free, its own from before a restart, or that of a member that is dead.
        """
        records, name = self._open(), self._config.name
        view = View(self._heartbeat)
        while True:
            began = time.monotonic()
            newest = records.newest()
            other = None if name not in newest else records.read(name, newest[name])
            before = view.seen.get(name)
            own = other is not None and other.instance == self._holder.instance
            if not own and before is not None and newest.get(name, before.number) != before.number:
                raise name_taken(name, other)
            view = view.after(newest, began, time.monotonic())
            view = view.without(name) if own else view
            if view.settled:
                break
            if self._leaving.wait(self._heartbeat / BEATS):
                return None
        self._view = view.without(name)
        records.begin(newest)
        self._beat(records)
        return records

    def _open(self) -> MemberRecords:
        options = dict(self._config.storage_options)
        if scheme_of(self._config.uri) != "file":
            # A store that hangs must be noticed within a heartbeat or two, whatever its client waits for.
            options.setdefault("timeout", f"{max(1, round(self._heartbeat))}s")
        retry = RetryPolicy(deadline=self._heartbeat / BEATS)
        store = open_store(resolve(self._config.uri, options), retry=retry)
        probe_conditional_writes(store)
        return MemberRecords(store, self._config.name)

    def _beat(self, records: MemberRecords) -> None:
        began = time.monotonic()
        with self._lock:
            document = self._document()
        newest = records.beat(document)
        ended = time.monotonic()
        view = self._view.after(newest, began, ended)
        for name in view.forgotten:
            records.delete(name)
        documents = {name: self._read(records, name, number) for name, number in newest.items()}
        with self._lock:
            changed = self._living != view.living
            self._view, self._living, self._documents = view, view.living, documents
            self._joined, self._error, self._succeeded = True, None, ended
        if changed:
            self._log.info("fleet_changed", member=self._config.name, others=", ".join(sorted(view.living)) or "none")
            self._on_change()

    def _read(self, records: MemberRecords, name: str, number: int) -> tuple[int, Document | None]:
        """Return what a member says of itself, with the number of the record; it is read once a heartbeat."""
        known = self._documents.get(name)
        if known is not None and known[0] <= number < known[0] + BEATS:
            return known
        return number, records.read(name, number)

    def _failed(self, why: str) -> None:
        with self._lock:
            new, alone = self._error is None, self._living is None
            self._error = why
            if alone:
                self._living = frozenset()
        if new:
            keeps = "all tables" if alone else "the tables that it has"
            self._log.warning("fleet_unreachable", member=self._config.name, keeps=keeps, error=why)
        if alone:
            self._on_change()

    def _document(self) -> Document:
        return Document(
            process=self._process,
            instance=self._holder.instance,
            holder=self._holder.name,
            version=__version__,
            started=self._started,
            tables=self._tables,
            known=self._known,
            entries=self._entries,
        )


def _member(name: str, document: Document | None, age: float, entries: str, *, living: bool = True) -> MemberStatus:
    return {
        "name": name,
        "holder": None if document is None else document.holder,
        "version": None if document is None else document.version,
        "started": None if document is None else document.started,
        "living": living,
        "tables": None if document is None else document.tables,
        "known_tables": None if document is None else document.known,
        "same_tables": document is None or not document.entries or document.entries == entries,
        "seconds_since_heartbeat": round(age, 3),
    }
