"""One member of a fleet: announce it, watch the others, and give the scheduler the tables that are its own.

It works on a thread of its own, whose requests may take as long as they want: nothing waits for them. While the store
of the fleet cannot be reached, a member keeps the tables that it had; one that never reached it has all of them.

With a budget, it publishes what this supervisor uses, and hands on what the others do.
"""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from hashlib import blake2b
from typing import Any

from memwal_ops.core.fleet_budget import Others
from memwal_ops.core.leases import Holder
from memwal_ops.errors import AlreadyRunningError, MemwalOpsError
from memwal_ops.log import get_logger
from memwal_ops.storage.catalogs import resolve
from memwal_ops.storage.errors import RetryPolicy
from memwal_ops.storage.locations import scheme_of
from memwal_ops.storage.objects import open_store
from memwal_ops.storage.options import redact
from memwal_ops.storage.probe import probe_conditional_writes
from memwal_ops.supervisor.config.effective import TableSettings
from memwal_ops.supervisor.config.model import FleetConfig
from memwal_ops.supervisor.membership.reading import BEATS, FleetView, Read, Reading, owner
from memwal_ops.supervisor.membership.records import MemberRecord, MemberRecords, is_same, name_taken, refused_use
from memwal_ops.supervisor.observe.status_document import FleetDocument, MemberStatus
from memwal_ops.supervisor.scheduling import discovery
from memwal_ops.supervisor.scheduling.scheduler import Scheduler
from memwal_ops.version import __version__

JOINING, JOINED, UNREACHABLE = "joining", "joined", "unreachable"
_SILENT_AFTER = 2


class Member:
    """One member of a fleet (see the module).

    Args:
        alive: whether this supervisor works: if not, it lets the others take its tables.
        on_change: called on another thread when :meth:`share` may return other tables.
        on_refusal: called on another thread when it cannot be a member, with the reason.
        budget: returns what this supervisor publishes of its budget; None: it has none.
        on_others: called on another thread with what the others use, if it has a budget.
    """

    def __init__(
        self,
        config: FleetConfig,
        holder: Holder,
        *,
        alive: Callable[[], bool],
        on_change: Callable[[], None],
        on_refusal: Callable[[MemwalOpsError], None],
        budget: Callable[[], Mapping[str, Any] | None] = lambda: None,
        on_others: Callable[[Others], None] = lambda _: None,
    ) -> None:
        self._config, self._holder = config, holder
        self._read_budget, self._on_others = budget, on_others
        self._budget: Mapping[str, Any] | None = None
        self._alive, self._on_change, self._on_refusal = alive, on_change, on_refusal
        self._heartbeat = config.heartbeat.total_seconds()
        self._process, self._started = uuid.uuid4().hex, datetime.now(UTC).isoformat(timespec="seconds")
        self._lock = threading.Lock()
        # None: this member has no tables yet.
        self._living: frozenset[str] | None = None
        self._view = FleetView(self._heartbeat)
        self._documents: Mapping[str, Read] = {}
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

    def share(self, tables: Sequence[discovery.FoundTable], entries: str) -> list[discovery.FoundTable]:
        """Return those of the tables that this member has now.

        ``tables``: all that the configuration names. ``entries``: a digest of what the configuration names.
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

    def status(self) -> FleetDocument:
        """Return the fleet as this member sees it."""
        now = time.monotonic()
        with self._lock:
            silent = now - self._succeeded
            error = self._error
            if error is None and silent > _SILENT_AFTER * self._heartbeat:
                error = f"The store has not responded for {silent:.0f} s."
            joined = JOINED if self._joined else JOINING
            documents = {name: read.document for name, read in self._documents.items()}
            mine = self._document()
            own = _member(self._config.name, mine, silent, mine)
            others = [
                _member(name, documents.get(name), now - seen.since, mine, living=seen.living)
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
        joined: tuple[MemberRecords, Reading] | None = None
        while not self._leaving.is_set():
            began = time.monotonic()
            try:
                if joined is None:
                    joined = self._join()
                elif self._alive():
                    self._beat(*joined)
            except AlreadyRunningError as error:
                self._on_refusal(error)
                return
            except MemwalOpsError as error:
                self._failed(redact(f"{error} {error.remedy}"))
            except Exception as error:  # noqa: BLE001 - the tables are maintained without the fleet
                self._failed(redact(f"Unexpected {type(error).__name__}: {error}"))
            self._leaving.wait(max(0.0, began + self._heartbeat / BEATS - time.monotonic()))
        if joined is not None:
            try:
                self._budget = self._read_budget()
                joined[0].leave(self._document())
                self._log.info("fleet_left", member=self._config.name)
            except MemwalOpsError as error:
                self._log.warning("fleet_not_left", member=self._config.name, error=redact(str(error)))

    def _join(self) -> tuple[MemberRecords, Reading] | None:
        """Return the records of the fleet once the name is this member's, and it is known which of the others live.

        The name is free, its own from before a restart, or that of a member that is dead. Of two supervisors with
        copies of one state folder, the second does not join.
        """
        records, name = self._open(), self._config.name
        view = FleetView(self._heartbeat)
        while True:
            began = time.monotonic()
            listed = records.listed()
            newest = listed.newest
            other = None if name not in newest else records.read(name, newest[name])
            before = view.seen.get(name)
            own = other is not None and other.instance == self._holder.instance
            if before is not None and newest.get(name, before.number) != before.number:
                raise name_taken(name, other, copied=own)
            view = view.after(newest, began, time.monotonic())
            # Its own record from before a restart stands still: it was read twice.
            settled = before is not None and view.without(name).settled if own else view.settled
            if settled:
                break
            if self._leaving.wait(self._heartbeat / BEATS):
                return None
        self._view = view.without(name)
        for living in sorted(self._view.living):
            if (twin := records.read(living, newest[living])) is not None:
                self._check_twin(living, twin)
        if other is not None and not own:
            # Its state folder was lost, or is another one: what was used is charged on.
            records.end(name, newest[name], other, listed.age(name))
        records.begin(listed)
        joined = records, Reading(records, self._holder.instance, self._heartbeat)
        self._beat(*joined)
        return joined

    def _check_twin(self, name: str, other: MemberRecord) -> None:
        """Refuse to be a second member with the identity of one state folder: leases do not tell them apart."""
        if other.instance == self._holder.instance:
            raise name_taken(name, other, copied=True)

    def _open(self) -> MemberRecords:
        options = dict(self._config.storage_options)
        if scheme_of(self._config.uri) != "file":
            # A store that hangs must be noticed within a heartbeat or two, whatever its client waits for.
            options.setdefault("timeout", f"{max(1, round(self._heartbeat))}s")
        retry = RetryPolicy(deadline=self._heartbeat / BEATS)
        store = open_store(resolve(self._config.uri, options), retry=retry)
        probe_conditional_writes(store)
        return MemberRecords(store, self._config.name)

    def _beat(self, records: MemberRecords, reading: Reading) -> None:
        # Outside the lock: it takes that of the scheduler.
        budget = self._read_budget()
        began = time.monotonic()
        with self._lock:
            self._budget = budget
            document = self._document()
        if budget is not None:
            reading.per = float(budget["per"])
        listed = records.beat(document)
        ended, now = time.monotonic(), time.time()
        view = self._view.after(listed.newest, began, ended)
        documents = reading.read(listed, now)
        reading.forget(view.forgotten, listed)
        for name in view.living:
            # Both joined at once: the one whose name comes first stays.
            if name < self._config.name and (twin := documents[name].document) is not None:
                self._check_twin(name, twin)
        others = reading.others(listed, len(view.living), now)
        reading.sweep()
        if budget is not None and others is not None:
            self._on_others(others)
        with self._lock:
            changed = self._living != view.living
            self._view, self._living, self._documents = view, view.living, documents
            self._joined, self._error, self._succeeded = True, None, ended
        if changed:
            self._log.info("fleet_changed", member=self._config.name, others=", ".join(sorted(view.living)) or "none")
            self._on_change()

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

    def _document(self) -> MemberRecord:
        return MemberRecord(
            process=self._process,
            instance=self._holder.instance,
            holder=self._holder.name,
            version=__version__,
            started=self._started,
            tables=self._tables,
            known=self._known,
            entries=self._entries,
            budget=self._budget,
        )


def _member(
    name: str, document: MemberRecord | None, age: float, own: MemberRecord, *, living: bool = True
) -> MemberStatus:
    return {
        "name": name,
        "holder": None if document is None else document.holder,
        "version": None if document is None else document.version,
        "started": None if document is None else document.started,
        "living": living,
        "tables": None if document is None else document.tables,
        "known_tables": None if document is None else document.known,
        "same_tables": document is None or not document.entries or document.entries == own.entries,
        "same_budget": document is None or is_same(document.budget, own.budget),
        "refused_use": None
        if document is None or own.budget is None
        else refused_use(document.budget, float(own.budget["per"])) or None,
        "seconds_since_heartbeat": round(age, 3),
    }


class FoundTables:
    """The tables of the configuration. Only the scheduler's thread calls it, but for :meth:`elsewhere`.

    ``tables``: all of them; of a fleet, the scheduler has this member's share. ``on_found``: called with the tables
    after each discovery.
    """

    def __init__(self, scheduler: Scheduler, member: Member | None) -> None:
        self.tables: Sequence[discovery.FoundTable] = ()
        self.faults: tuple[discovery.Fault, ...] = ()
        self.on_found: Callable[[Sequence[discovery.FoundTable], Sequence[TableSettings]], None] = lambda *_: None
        self._scheduler, self._member = scheduler, member
        # By store: its entries, and what was found last; and the stores that are asked now.
        self._stores = discovery.by_store(scheduler.settings.tables)
        self._parts: dict[str, discovery.Discovery] = {}
        self._asked: set[str] = set()
        self._formats: dict[str, str] = {}
        self._log = get_logger(__name__)

    @property
    def pending(self) -> list[str]:
        """The patterns and URIs of stores that have not answered yet: their tables are not known."""
        known = {table.name for table in self.tables}
        return [
            str(entry.pattern or entry.uri) for entry in self._unanswered if entry.pattern or entry.name not in known
        ]

    @property
    def _unanswered(self) -> list[TableSettings]:
        return [entry for store, entries in self._stores.items() if store not in self._parts for entry in entries]

    def find_named(self) -> None:
        """Take the tables that are named with their format and without branches: they need no request."""
        entries = self._scheduler.settings.tables
        named = [entry for entry in entries if entry.uri is not None and entry.format and entry.branches == ()]
        self._take(discovery.discover_in_store(named))

    def find(self) -> None:
        """Expand all patterns, and take the tables."""
        self._parts = discovery.discover_stores(self._stores, self._formats)
        self._take(discovery.merged(self._parts.values()))

    def find_beside(self, then: Callable[[], None]) -> None:
        """Ask each store on a thread of its own; the scheduler's takes the tables of each, and calls ``then``."""
        self._stores = discovery.by_store(self._scheduler.settings.tables)
        for store, entries in self._stores.items():
            if store not in self._asked:
                self._asked.add(store)
                # A daemon thread: a store that hangs must not keep the process from exiting.
                threading.Thread(target=self._ask, args=(store, entries, then), name="discovery", daemon=True).start()

    def _ask(self, store: str, entries: list[TableSettings], then: Callable[[], None]) -> None:
        try:
            listed = discovery.discover_in_store(entries, self._formats)
        except Exception as error:  # noqa: BLE001 - the maintenance of known tables continues
            why = redact(f"{type(error).__name__}: {error}")
            listed = discovery.Discovery(
                (), tuple(discovery.Fault(str(entry.pattern or entry.uri), why, 1) for entry in entries)
            )
        self._scheduler.post(lambda: self._answered(store, entries, listed, then))

    def _answered(
        self, store: str, entries: list[TableSettings], listed: discovery.Discovery, then: Callable[[], None]
    ) -> None:
        self._asked.discard(store)
        if self._stores.get(store) != entries:
            self.find_beside(then)  # the configuration was reloaded meanwhile
            return
        known = {**self._parts, store: listed}
        self._parts = {store: known[store] for store in self._stores if store in known}
        self._take(discovery.merged(self._parts.values()))
        then()

    def _take(self, listed: discovery.Discovery) -> None:
        self.faults = listed.faults
        tables = list(listed.tables)
        stay = {fault.pattern for fault in listed.faults} | {entry.pattern or entry.uri for entry in self._unanswered}
        if stay:
            # If a pattern cannot be expanded now, or not yet, the tables that it matched before stay.
            names = {table.name for table in tables}
            tables += [
                table
                for table in self.tables
                if {table.settings.pattern, table.settings.uri} & stay and table.name not in names
            ]
        for fault in listed.faults:
            self._log.warning("pattern_failed", pattern=fault.pattern, error=fault.why)
        self.tables = tables
        self.on_found(tables, self._scheduler.settings.tables)
        self.share()

    def share(self) -> None:
        """Give the scheduler this member's share of the tables; all of them if there is no fleet."""
        mine = self.tables
        if self._member is not None:
            mine = self._member.share(mine, _digest(self._scheduler.settings.tables))
        self._scheduler.set_tables(mine)

    def elsewhere(self, name: str) -> str:
        """Return the other member of the fleet that maintains a table; empty: none does."""
        uri = next((table.uri for table in self.tables if table.name == name), None)
        return "" if uri is None or self._member is None else self._member.owner_of(uri)


def _digest(entries: Iterable[TableSettings]) -> str:
    named = sorted((one.uri or "", one.pattern or "", one.include, one.exclude, one.branches or ()) for one in entries)
    return blake2b(repr(named).encode(errors="surrogateescape"), digest_size=8).hexdigest()
