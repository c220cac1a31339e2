"""Find the tables of the configuration, and give the scheduler those that are this supervisor's."""

from __future__ import annotations

import threading
from hashlib import blake2b
from typing import TYPE_CHECKING

from memwal_ops.log import get_logger
from memwal_ops.storage.redaction import redact
from memwal_ops.supervisor.scheduling.discovery import Discovery, Fault, discover

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from memwal_ops.supervisor.config.effective import TableSettings
    from memwal_ops.supervisor.membership.member import Member
    from memwal_ops.supervisor.scheduling.discovery import FoundTable
    from memwal_ops.supervisor.scheduling.scheduler import Scheduler


class FoundTables:
    """The tables of the configuration. Only the scheduler's thread calls it, but for :meth:`elsewhere`.

    Attributes:
        tables: all of them; of a fleet, the scheduler has this member's share.
        faults: of the last discovery.
        on_found: called with the tables after each discovery.
    """

    def __init__(self, scheduler: Scheduler, member: Member | None) -> None:
        """Begin without tables."""
        self.tables: Sequence[FoundTable] = ()
        self.faults: tuple[Fault, ...] = ()
        self.on_found: Callable[[Sequence[FoundTable], Sequence[TableSettings]], None] = lambda *_: None
        self._scheduler, self._member = scheduler, member
        self._discovering = False
        self._formats: dict[str, str] = {}
        self._log = get_logger(__name__)

    def find_named(self) -> None:
        """Take the tables that are named with their format, which need no listing."""
        named = [entry for entry in self._scheduler.settings.tables if entry.pattern is None]
        self._take(discover(entry for entry in named if entry.format is not None))

    def find(self) -> None:
        """Expand all patterns, and take the tables."""
        self._take(discover(self._scheduler.settings.tables, self._formats))

    def find_beside(self, then: Callable[[], None]) -> None:
        """Expand them on a thread; the scheduler's takes the tables and calls ``then``."""
        if self._discovering:
            return
        self._discovering = True
        entries = self._scheduler.settings.tables

        def expand() -> None:
            try:
                discovery = discover(entries, self._formats)
            except Exception as error:  # noqa: BLE001 - the maintenance of known tables continues
                why = redact(f"{type(error).__name__}: {error}")
                discovery = Discovery((), tuple(Fault(str(entry.pattern or entry.uri), why, 1) for entry in entries))
            self._scheduler.post(lambda: found(discovery))

        def found(discovery: Discovery) -> None:
            self._discovering = False
            if entries is not self._scheduler.settings.tables:
                self.find_beside(then)  # the configuration was reloaded meanwhile
                return
            self._take(discovery)
            then()

        # A daemon thread: a store that hangs must not keep the process from exiting.
        threading.Thread(target=expand, name="discovery", daemon=True).start()

    def _take(self, discovery: Discovery) -> None:
        self.faults = discovery.faults
        tables = list(discovery.tables)
        broken = {fault.pattern for fault in discovery.faults}
        if broken:
            # If a pattern cannot be expanded now, the tables that it matched before stay.
            names = {table.name for table in tables}
            tables += [
                table
                for table in self.tables
                if {table.settings.pattern, table.settings.uri} & broken and table.name not in names
            ]
            for fault in discovery.faults:
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
    """Return a digest of the tables that a configuration names; members of a fleet compare it."""
    named = sorted((one.uri or "", one.pattern or "", one.include, one.exclude, one.branches or ()) for one in entries)
    return blake2b(repr(named).encode(errors="surrogateescape"), digest_size=8).hexdigest()
