"""The service: a process around the conductor, with signals, schedules, HTTP, systemd, and a way to stop.

Stopping: the first SIGTERM or SIGINT begins nothing more and lets each run finish the step in hand, for
``stop_grace`` at most; a second one ends the workers at once. Both are safe: a job can be killed at any
moment. Leases are given back in both cases. SIGHUP reads the configuration again; a bad file changes nothing.
"""

from __future__ import annotations

import getpass
import os
import queue
import signal
import socket
import threading
import time
from datetime import UTC, datetime, timedelta
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from memwal_ops.core.leases import Holder
from memwal_ops.errors import HistoryError, MemwalOpsError
from memwal_ops.log import get_logger
from memwal_ops.storage.redaction import redact
from memwal_ops.supervisor.clockwork import Clockwork
from memwal_ops.supervisor.conductor import Conductor
from memwal_ops.supervisor.config import load_settings
from memwal_ops.supervisor.discovery import Discovery, Fault, discover
from memwal_ops.supervisor.heartbeat import Heartbeat
from memwal_ops.supervisor.history import History
from memwal_ops.supervisor.http import HttpServer
from memwal_ops.supervisor.leasing import LeaseDesk
from memwal_ops.supervisor.metrics import Metrics
from memwal_ops.supervisor.notify import Notifier
from memwal_ops.supervisor.pools import Pools
from memwal_ops.supervisor.state_dir import StateDir, history_path, state_dir
from memwal_ops.supervisor.status import status_of
from memwal_ops.version import __version__

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from memwal_ops.supervisor.pools import WorkerProcess
    from memwal_ops.supervisor.settings import Settings

_STEP_SECONDS = 0.5
_STALLED_SECONDS = 30.0
_MOST_DONE = 10_000
_LAST_SECONDS = 5.0
# Whoever started the service waits for it to be ready; tables that are not found yet come later.
_DISCOVERY_SECONDS = 15.0
_PRUNE = timedelta(hours=1)
_TERMINATED = 128 + signal.SIGTERM
# What a restart alone takes up.
_FIXED = ("state_dir", "history.path", "leases.enabled", "http", "misfire_grace")
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class Service:
    """One supervisor in this process."""

    def __init__(self, settings: Settings, *, once: bool = False, environ: Mapping[str, str] | None = None) -> None:
        """Take the state folder, open the history; nothing runs yet.

        Raises:
            AlreadyRunningError: another supervisor uses the state folder.
            HistoryError: it cannot be written.
            InvalidUsageError: the HTTP address cannot be had.
        """
        self._environ = os.environ if environ is None else environ
        self._log = get_logger(__name__)
        self._once = once
        # What only a start takes up is as it was then, however often the file is read again.
        self._at_start = settings.config
        self._signals: queue.SimpleQueue[signal.Signals] = queue.SimpleQueue()
        self._started = datetime.now(UTC)
        self._loaded = self._started
        self._config_error: str | None = None
        self._ready = False
        self._beat = time.monotonic()
        self._watched = self._told = 0.0
        self._done: list[dict[str, Any]] = []
        self._stop_began: float | None = None
        self._faults: tuple[Fault, ...] = ()
        self._discovering = False
        self._notifier = Notifier(self._environ)
        self._state = StateDir(state_dir(settings.config, self._environ))
        try:
            self._history = History.open(history_path(settings.config, self._environ))
            killed = self._history.mark_killed(self._started)
        except MemwalOpsError:
            self._state.close()
            raise
        if killed:
            self._log.warning("runs_were_killed", runs=killed)
        self._holder = Holder(self._state.instance, f"{_user()}@{socket.gethostname()} pid {os.getpid()}")
        self._metrics = Metrics(self.status)
        self._heartbeat = Heartbeat(lambda outcome: self._metrics.heartbeats.labels(outcome).inc())
        pools = Pools(self._on_message)
        pools.configure(dict(settings.config.pools))
        pools.log_level = settings.config.log_level.upper()
        desk = None
        if settings.config.leases.enabled:
            desk = LeaseDesk(self._holder, settings.config.leases.ttl, self._post)
        self.conductor = Conductor(
            settings,
            history=self._history,
            pools=pools,
            desk=desk,
            metrics=self._metrics,
            heartbeat=self._heartbeat,
            supervisor=self._holder.name,
            once=once,
        )
        self._clockwork = Clockwork(self.conductor, settings.config.misfire_grace)
        try:
            self._http = None if once else self._serve(settings)
        except MemwalOpsError:
            self._history.close()
            self._state.close()
            raise

    @property
    def http_port(self) -> int | None:
        """The port that is served; None where none is."""
        return None if self._http is None else self._http.port

    @property
    def done(self) -> list[dict[str, Any]]:
        """What :meth:`run_once` did, the first run first; to be asked when it is back."""
        return self._done

    @property
    def left(self) -> list[dict[str, Any]]:
        """What :meth:`run_once` left to other supervisors, whose leases stand; to be asked when it is back."""
        return self.conductor.left

    def run(self) -> int:
        """Work until a signal says stop; the exit code."""
        before = {number: signal.signal(number, self._on_signal) for number in _SIGNALS}
        began = time.monotonic()
        try:
            # What has a name needs no store: patterns may be slow to look at.
            with self.conductor.lock:
                self._take_up(discover(one for one in self.conductor.settings.tables if one.pattern is None))
            self._discover()
            self._clockwork.start()
            config = self.conductor.settings.config
            self._clockwork.every("discover", config.discover, self._discover)
            self._clockwork.every("prune", _PRUNE, self._prune)
            self.conductor.post(self._prune)
            while not self._stopped():
                self.conductor.step(self._step_seconds())
                self._tick()
                if not self._ready and time.monotonic() - began > _DISCOVERY_SECONDS:
                    self._log.warning("patterns_not_looked_at_yet", seconds=_DISCOVERY_SECONDS)
                    self._become_ready()
            return 0
        finally:
            self._close()
            for number, handler in before.items():
                signal.signal(number, handler)

    def run_once(self) -> int:
        """Do what is due, and come back with the highest exit code; 143 where a signal ended it before."""
        before = {number: signal.signal(number, self._on_signal) for number in _SIGNALS}
        try:
            self._take(discover(self.conductor.settings.tables))
            self.conductor.codes += [fault.exit_code for fault in self._faults]
            self.conductor.due_by_clock()
            for table in self.conductor.tables:
                self.conductor.look(table)
            while not self._stopped() and (self.conductor.waits or not self._signals.empty()):
                self.conductor.step(self._step_seconds())
                self._tick()
            if self._stop_began is not None:
                return _TERMINATED
            looks = (state.error_code for state in self.conductor.tables.values())
            return max([0, *self.conductor.codes, *looks])
        finally:
            self._close()
            for number, handler in before.items():
                signal.signal(number, handler)

    # -- what others ask

    def alive(self) -> tuple[bool, str]:
        """Whether the loop turns."""
        silent = time.monotonic() - self._beat
        if silent > _STALLED_SECONDS:
            return False, f"stalled: the main loop did nothing for {silent:.0f} s"
        return True, "ok"

    def ready(self) -> tuple[bool, str]:
        """Whether jobs are run."""
        if self._stop_began is not None:
            return False, "stopping"
        if not self._ready:
            return False, "starting"
        return (True, "ready") if self._clockwork.running else (False, "the scheduler does not run")

    def status(self) -> dict[str, Any]:
        """The document of ``/api/v1/status``."""
        tables, pools = status_of(self.conductor)
        for table in tables:
            for name, job in table["jobs"].items():
                # A run by backlog moves no schedule: the clockwork knows better than the last run.
                fires = self._clockwork.next_run(table["name"], name)
                job["next_due"] = job["next_due"] if fires is None else fires.isoformat(timespec="milliseconds")
        settings = self.conductor.settings
        return {
            "service": {
                "version": __version__,
                "pid": os.getpid(),
                "instance": self._holder.instance,
                "holder": self._holder.name,
                "started": self._started.isoformat(timespec="milliseconds"),
                "ready": self.ready()[0],
                "stopping": self._stop_began is not None,
                "leases": self.conductor.desk is not None,
                "state_dir": self._state.path,
                "state_error": self._state.fault() or self._history.fault,
                "config": {
                    "file": os.path.abspath(settings.path),
                    "loaded": self._loaded.isoformat(timespec="milliseconds"),
                    "error": self._config_error,
                },
                "discovery_faults": [{"pattern": fault.pattern, "error": fault.why} for fault in self._faults],
            },
            "pools": pools,
            "tables": tables,
        }

    # -- signals

    def _on_message(self, worker: WorkerProcess, message: dict[str, Any] | None) -> None:
        self.conductor.on_message(worker, message)

    def _post(self, event: Callable[[], None]) -> None:
        self.conductor.post(event)

    def _on_signal(self, number: int, _: object) -> None:
        self._signals.put(signal.Signals(number))
        self.conductor.post(_nothing)  # wakes the loop

    def _tick(self) -> None:
        self._beat = time.monotonic()
        with self.conductor.lock:
            self._clockwork.check_clock()
        while not self._signals.empty():
            number = self._signals.get()
            if number is signal.SIGHUP:
                self._reload()
            elif self._stop_began is None:
                self._begin_to_stop(number)
            else:
                self._log.warning("stopping_at_once", signal=number.name)
                self._stop_began = float("-inf")
        self._tell_systemd()

    def _begin_to_stop(self, number: signal.Signals) -> None:
        self._log.info("stopping", signal=number.name, in_hand=self.conductor.in_hand)
        self._stop_began = time.monotonic()
        self._notifier.stopping()
        self._clockwork.stop()
        with self.conductor.lock:
            self.conductor.stop()

    def _stopped(self) -> bool:
        if self._stop_began is None:
            return False
        grace = self.conductor.settings.config.stop_grace.total_seconds()
        return not self.conductor.in_hand or time.monotonic() - self._stop_began > grace

    def _reload(self) -> None:
        if self._stop_began is not None:
            return
        self._notifier.reloading()
        path = self.conductor.settings.path
        try:
            settings = load_settings(path, self._environ)
            fixed = [name for name in _FIXED if (get := attrgetter(name))(self._at_start) != get(settings.config)]
        except MemwalOpsError as error:
            self._config_error = redact(str(error))
            self._metrics.reloads.labels("failed").inc()
            self._log.error("config_not_reloaded", file=path, error=self._config_error, still="the one from before")
            self._notifier.ready(f"the configuration is bad, the old one goes on: {self._config_error}")
            return
        self._config_error = None
        if fixed:
            self._config_error = f"{', '.join(fixed)}: taken up by a restart only; the rest holds"
            self._log.warning("config_needs_restart", keys=", ".join(fixed))
        self._loaded = datetime.now(UTC)
        self._metrics.reloads.labels("succeeded").inc()
        with self.conductor.lock:
            self.conductor.set_settings(settings)
        self._clockwork.every("discover", settings.config.discover, self._discover)
        self._discover()
        self._log.info("config_reloaded", file=path)
        self._notifier.ready(self._status_line())

    # -- chores

    def _discover(self) -> None:
        """Look at the patterns on a thread of its own; the tables follow."""
        if self._discovering:
            return
        self._discovering = True
        entries = self.conductor.settings.tables

        def look() -> None:
            try:
                found = discover(entries)
            except Exception as error:  # noqa: BLE001 - the tables that are known go on
                why = redact(f"{type(error).__name__}: {error}")
                found = Discovery((), tuple(Fault(str(one.pattern or one.uri), why, 1) for one in entries))
            self.conductor.post(lambda: self._discovered(found, entries))

        # A store that hangs must not keep the process from ending.
        threading.Thread(target=look, name="discovery", daemon=True).start()

    def _discovered(self, found: Discovery, entries: object) -> None:
        self._discovering = False
        if entries is not self.conductor.settings.tables:
            self._discover()  # another configuration meanwhile
            return
        self._take_up(found)
        if not self._ready:
            self._become_ready()

    def _take_up(self, found: Discovery) -> None:
        self._take(found)
        self._clockwork.sync()

    def _become_ready(self) -> None:
        self._ready = True
        self._notifier.ready(self._status_line())
        self._log.info("ready", tables=len(self.conductor.tables), http=self.http_port)

    def _take(self, found: Discovery) -> None:
        self._faults = found.faults
        tables = list(found.tables)
        broken = {fault.pattern for fault in found.faults}
        if broken:
            # What a pattern found before stays where it cannot be looked at now.
            names = {table.name for table in tables}
            known = (state.table for state in self.conductor.tables.values())
            tables += [
                one for one in known if {one.settings.pattern, one.settings.uri} & broken and one.name not in names
            ]
            for fault in found.faults:
                self._log.warning("pattern_failed", pattern=fault.pattern, error=fault.why)
        self.conductor.set_tables(tables)

    def _prune(self) -> None:
        limits = self.conductor.settings.config.history
        try:
            gone = self._history.prune(datetime.now(UTC), limits.keep, limits.max_runs)
        except HistoryError as error:
            self._log.error("history_not_written", error=str(error))
        else:
            self._log.debug("history_pruned", runs=gone)

    def _serve(self, settings: Settings) -> HttpServer | None:
        http = settings.config.http
        if not http.enabled:
            return None
        return HttpServer(
            http.host,
            http.port,
            alive=self.alive,
            ready=self.ready,
            metrics=self._metrics.expose,
            status=self.status,
            runs=self._history.runs,
        )

    def _step_seconds(self) -> float:
        watchdog = self._notifier.watchdog_seconds
        return _STEP_SECONDS if watchdog is None else min(_STEP_SECONDS, watchdog)

    def _tell_systemd(self) -> None:
        every = self._notifier.watchdog_seconds
        now = time.monotonic()
        if every is not None and now - self._watched >= every:
            self._watched = now
            self._notifier.watchdog()
        if self._ready and self._stop_began is None and now - self._told >= _LAST_SECONDS:
            self._told = now
            self._notifier.status(self._status_line())

    def _status_line(self) -> str:
        waiting = sum(int(state.figures.get("generations", 0)) for state in self.conductor.tables.values())
        failing = sum(bool(entry.failures) for entry in self.conductor.entries())
        bad = " The configuration file is bad; the one from before holds." if self._config_error else ""
        return (
            f"{len(self.conductor.tables)} tables, {self.conductor.in_hand} jobs running, "
            f"{waiting} generations waiting, {failing} jobs failing.{bad}"
        )

    def _close(self) -> None:
        """Whatever is in hand ends now; leases are given back."""
        self._clockwork.stop()
        self.conductor.stopping = True
        at_once = self._stop_began == float("-inf")
        pools = self.conductor.pools
        if at_once:
            pools.kill()
        else:
            pools.close(_LAST_SECONDS)
        ends = time.monotonic() + _LAST_SECONDS
        self.conductor.step(0.0)
        while self.conductor.in_hand and time.monotonic() < ends and not at_once:
            self.conductor.step(0.1)
        self.conductor.abandon()
        if self.conductor.desk is not None:
            self.conductor.desk.close(wait=True)
        self._heartbeat.close(0.0 if at_once else _LAST_SECONDS)
        if self._http is not None:
            self._http.close()
        if self._once:
            runs = self._history.runs(limit=_MOST_DONE)
            began = self._started.isoformat(timespec="milliseconds")
            self._done = [one for one in reversed(runs) if one["started"] >= began]
        self._history.close()
        self._state.close()
        self._log.info("stopped")


def _nothing() -> None:
    return


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return "unknown"
