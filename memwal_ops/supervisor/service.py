"""Run the scheduler as a service, with timers, signals, HTTP and systemd notification.

Stopping: after the first SIGTERM or SIGINT nothing more starts, and each run finishes its current step, within
``stop_grace``; a second one ends the workers at once. Both are safe: a job can be killed at any moment. Leases are
released in both cases. SIGHUP reads the configuration again; an invalid file changes nothing.
"""

from __future__ import annotations

import os
import queue
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from operator import attrgetter
from typing import Any

from memwal_ops.core.fleet_budget import Others
from memwal_ops.core.holds import user_at_host
from memwal_ops.core.leases import Holder
from memwal_ops.errors import HistoryError, MemwalOpsError
from memwal_ops.log import get_logger
from memwal_ops.storage.options import redact
from memwal_ops.supervisor import notify
from memwal_ops.supervisor.actions import Actions
from memwal_ops.supervisor.config.effective import Settings, TableSettings
from memwal_ops.supervisor.config.loader import load_settings
from memwal_ops.supervisor.config.model import NotifyConfig
from memwal_ops.supervisor.events import EventListener, TableRoutes
from memwal_ops.supervisor.http.access import token_file_of
from memwal_ops.supervisor.http.acting import Audit
from memwal_ops.supervisor.http.connections import Certificate
from memwal_ops.supervisor.http.server import HttpServer
from memwal_ops.supervisor.membership.member import FoundTables, Member
from memwal_ops.supervisor.observe import status_document
from memwal_ops.supervisor.observe.findings import NOT_READ, not_read_text, service_findings
from memwal_ops.supervisor.observe.heartbeat import Heartbeat, SystemdNotifier
from memwal_ops.supervisor.observe.metrics import Metrics, push
from memwal_ops.supervisor.observe.pages import Pages
from memwal_ops.supervisor.observe.spending import Spending
from memwal_ops.supervisor.observe.status import (
    ScheduledTables,
    budget_status,
    events_status,
    paused,
    published_budget,
    status_of,
)
from memwal_ops.supervisor.scheduling.discovery import FoundTable
from memwal_ops.supervisor.scheduling.scheduler import Scheduler
from memwal_ops.supervisor.scheduling.timers import Timers
from memwal_ops.supervisor.state import directory
from memwal_ops.supervisor.state.history import History
from memwal_ops.supervisor.state.pauses import FLEET, Pauses
from memwal_ops.supervisor.state.samples import Sampler, budget_sample
from memwal_ops.supervisor.workers.leasing import LeaseClient
from memwal_ops.supervisor.workers.pools import Pools, WorkerProcess
from memwal_ops.version import __version__

_STEP_SECONDS = 0.5
_STALLED_SECONDS = 30.0
_MAX_RUNS_SHOWN = 10_000
_STATUS_INTERVAL_SECONDS = 5.0
_CLOSE_TIMEOUT_SECONDS, _POLL_END_SECONDS = 5.0, 1.0
# After that time the service reports that it is ready; tables that are not discovered yet are added later.
_DISCOVERY_SECONDS = 15.0
_PRUNE = timedelta(hours=1)
_SAMPLES = timedelta(seconds=20)
# The first page of a table waits so long for its history, which a poll reads.
_FIRST_HISTORY_SECONDS, _HISTORY_WAIT_SECONDS = 3.0, 0.05
_TERMINATED = 128 + signal.SIGTERM
# Settings that take effect at a restart only.
_RESTART_ONLY = ("state_dir", "history.path", "leases.enabled", "http", "misfire_grace", "fleet", "events")
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class Service:
    """One supervisor in this process."""

    # Why this supervisor cannot be a member of its fleet.
    _refusal: MemwalOpsError | None = None
    _listener: EventListener | None = None

    def __init__(self, settings: Settings, *, once: bool = False) -> None:
        """Lock the state folder and open the history; run nothing yet. Raises what its parts raise, by kind."""
        self._log = get_logger(__name__)
        self._once = once
        # Reloads are compared with this: keys in _RESTART_ONLY keep their values until a restart.
        self._at_start = settings.config
        self._signals: queue.SimpleQueue[signal.Signals] = queue.SimpleQueue()
        self._started = datetime.now(UTC)
        self._loaded = self._started
        self._config_error: str | None = None
        self._ready = False
        self._beat = time.monotonic()
        self._last_watchdog_sent = self._last_status_sent = 0.0
        self._done: list[dict[str, Any]] = []
        self._stop_began: float | None = None
        self._sampler = Sampler()
        self._notifier = SystemdNotifier(os.environ)
        self._state = directory.StateDir(directory.state_dir(settings.config, os.environ))
        try:
            pauses = Pauses(self._state.path)
            self._history = History.open(directory.history_path(settings.config, os.environ))
            killed = self._history.mark_killed(self._started)
        except MemwalOpsError:
            self._state.close()
            raise
        if killed:
            self._log.warning("runs_were_killed", runs=killed)
        self._holder = Holder(self._state.instance, f"{user_at_host()} pid {os.getpid()}")
        self._metrics = Metrics(self.status)
        self._heartbeat = Heartbeat(lambda outcome: self._metrics.heartbeats.labels(outcome).inc())
        pools = Pools(self._on_message)
        pools.configure(dict(settings.config.pools))
        pools.log_level = settings.config.log_level.upper()
        leases = None
        if settings.config.leases.enabled:
            leases = LeaseClient(self._holder, settings.config.leases.ttl, self._post)
        self.scheduler = Scheduler(
            settings,
            history=self._history,
            pools=pools,
            leases=leases,
            metrics=self._metrics,
            heartbeat=self._heartbeat,
            supervisor=self._holder.name,
            once=once,
            pauses=pauses,
        )
        self._member = self._make_member(settings)
        self._found = FoundTables(self.scheduler, self._member)
        self._timers = Timers(self.scheduler, settings.config.misfire_grace)
        self._spending = Spending(self._history, lambda: self.scheduler.settings.config.prices)
        self._pages = self._make_pages(settings)
        self._notifications = notify.FindingNotifier(
            settings.config.notify,
            read=self._findings,
            path=os.path.join(self._state.path, "notified.json"),
            service=self._holder.name,
            on_result=lambda target, outcome: self._metrics.notifications.labels(target, outcome).inc(),
        )
        try:
            self._http = None if once else self._serve(settings)
        except MemwalOpsError:
            self._history.close()
            self._state.close()
            raise
        self._pushed = push(self._metrics.registry)

    @property
    def http_port(self) -> int | None:
        """Return the HTTP port; None if HTTP is disabled."""
        return None if self._http is None else self._http.port

    @property
    def done(self) -> list[dict[str, Any]]:
        """Return the runs of :meth:`run_once`, the oldest first; valid after it has returned."""
        return self._done

    @property
    def leased_elsewhere(self) -> list[dict[str, Any]]:
        """Return the jobs that :meth:`run_once` skipped, as other supervisors hold their leases; valid after it."""
        return self.scheduler.leased_elsewhere

    def run(self) -> int:
        """Run until a signal stops the service; return the exit code.

        Raises ``AlreadyRunningError``: another member of the fleet has this one's name.
        """
        before = {number: signal.signal(number, self._on_signal) for number in _SIGNALS}
        began = time.monotonic()
        try:
            self._listener = self._make_listener()
            self._found.on_found = self._route
            # Named tables need no listing and start at once; patterns may be slow to expand.
            with self.scheduler.lock:
                self._found.find_named()
                self._timers.sync()
            self._discover()
            if self._member is not None:
                self._member.start()
            if self._listener is not None:
                self._listener.start()
            self._timers.start()
            config = self.scheduler.settings.config
            self._configure_notifications(config.notify)
            self._timers.every("discover", config.discover, self._discover)
            self._timers.every("prune", _PRUNE, self._prune)
            self._timers.every("samples", _SAMPLES, self._take_samples)
            self.scheduler.post(self._prune)
            while not self._stopped():
                self.scheduler.step(self._step_seconds())
                self._tick()
                if not self._ready and time.monotonic() - began > _DISCOVERY_SECONDS:
                    self._log.warning("discovery_not_finished", seconds=_DISCOVERY_SECONDS)
                    self._become_ready()
            if self._refusal is not None:
                raise self._refusal
            return 0
        finally:
            self._close()
            for number, handler in before.items():
                signal.signal(number, handler)

    def run_once(self) -> int:
        """Run what is due once; return the highest exit code, or 143 if a signal stopped it before."""
        before = {number: signal.signal(number, self._on_signal) for number in _SIGNALS}
        try:
            self._found.find()
            self.scheduler.codes += [fault.exit_code for fault in self._found.faults]
            self.scheduler.queue_scheduled()
            for table in self.scheduler.tables:
                self.scheduler.poll(table)
            while not self._stopped() and (self.scheduler.has_work or not self._signals.empty()):
                self.scheduler.step(self._step_seconds())
                self._tick()
            if self._stop_began is not None:
                return _TERMINATED
            poll_codes = (state.error_code for state in self.scheduler.tables.values())
            return max([0, *self.scheduler.codes, *poll_codes])
        finally:
            self._close()
            for number, handler in before.items():
                signal.signal(number, handler)

    # -- health and status

    def alive(self) -> tuple[bool, str]:
        """Return whether the event loop makes progress, and the text for ``/healthz``."""
        silent = time.monotonic() - self._beat
        if silent > _STALLED_SECONDS:
            return False, f"stalled: the main loop did nothing for {silent:.0f} s"
        return True, "ok"

    def ready(self) -> tuple[bool, str]:
        """Return whether jobs are run, and the text for ``/readyz``."""
        if self._stop_began is not None:
            return False, "stopping"
        if not self._ready:
            return False, "starting"
        if self._member is not None and self._member.joining:
            return False, "joining the fleet"
        return (True, "ready") if self._timers.running else (False, "the timers are not running")

    def status(self) -> dict[str, Any]:
        """Return the document of ``/api/v1/status``; its tables can be read once."""
        tables, pools = status_of(self.scheduler, self._timers)
        return {"service": self._service_status(), "pools": pools, "tables": tables}

    def _service_status(self) -> status_document.ServiceStatus:
        settings = self.scheduler.settings
        return {
            "version": __version__,
            "pid": os.getpid(),
            "instance": self._holder.instance,
            "holder": self._holder.name,
            "started": self._started.isoformat(timespec="milliseconds"),
            "ready": self.ready()[0],
            "stopping": self._stop_began is not None,
            "leases": self.scheduler.leases is not None,
            "paused": paused(self.scheduler, FLEET),
            "budget": budget_status(self.scheduler),
            "state_dir": self._state.path,
            "state_error": self._state.fault() or self._history.fault,
            "config": {
                "file": os.path.abspath(settings.path),
                "loaded": self._loaded.isoformat(timespec="milliseconds"),
                "error": self._config_error,
            },
            "discovery_faults": [{"pattern": fault.pattern, "error": fault.why} for fault in self._found.faults],
            "discovery_pending": self._found.pending,
            "delivery_faults": self._delivery_faults(),
            "fleet": None if self._member is None else self._member.status(),
            "events": None if self._listener is None else events_status(self.scheduler, self._listener),
        }

    def _delivery_faults(self) -> list[status_document.DeliveryFault]:
        faults = {**self._notifications.faults, **({"heartbeat": why} if (why := self._heartbeat.fault) else {})}
        return [{"target": target, "error": redact(error)} for target, error in sorted(faults.items())]

    # -- signals

    def _on_message(self, worker: WorkerProcess, message: dict[str, Any] | None) -> None:
        self.scheduler.on_message(worker, message)

    def _post(self, event: Callable[[], None]) -> None:
        self.scheduler.post(event)

    def _on_signal(self, number: int, _: object) -> None:
        self._signals.put(signal.Signals(number))
        self.scheduler.post(_wake_up)

    def _tick(self) -> None:
        self._beat = time.monotonic()
        with self.scheduler.lock:
            self._timers.check_clock()
            self._timers.fire()
        while not self._signals.empty():
            number = self._signals.get()
            if number is signal.SIGHUP:
                self._reload()
            elif self._stop_began is None:
                self._stop(number.name)
            else:
                self._log.warning("stopping_at_once", signal=number.name)
                self._stop_began = float("-inf")
        self._notify_systemd()

    def _refused(self, error: MemwalOpsError) -> None:
        """Stop, as this supervisor cannot be a member of the fleet; runs in flight finish their step."""
        self._refusal = error
        if self._stop_began is None:
            self._stop(error.reason)

    def _stop(self, why: str) -> None:
        self._log.info("stopping", signal=why, in_flight=self.scheduler.in_flight)
        self._stop_began = time.monotonic()
        if self._member is not None:
            self._member.leave()
        if self._listener is not None:
            self._listener.stop()
        self._notifier.stopping()
        self._timers.stop()
        with self.scheduler.lock:
            self.scheduler.stop()

    def _stopped(self) -> bool:
        if self._stop_began is None:
            return False
        grace = self.scheduler.settings.config.stop_grace.total_seconds()
        # A lease that is granted later expires by itself, or is given back by the next start.
        return not self.scheduler.runs or time.monotonic() - self._stop_began > grace

    def _reload(self) -> None:
        if self._stop_began is not None:
            return
        self._notifier.reloading()
        path = self.scheduler.settings.path
        try:
            settings = load_settings(path, os.environ)
            fixed = [
                name for name in _RESTART_ONLY if (get := attrgetter(name))(self._at_start) != get(settings.config)
            ]
        except MemwalOpsError as error:
            self._config_error = redact(str(error))
            self._metrics.reloads.labels("failed").inc()
            self._log.error("config_not_reloaded", file=path, error=self._config_error, still="the previous one")
            self._notifier.ready(f"invalid configuration file, the previous one stays in effect: {self._config_error}")
            return
        self._config_error = None
        if fixed:
            self._config_error = f"{', '.join(fixed)}: takes effect at a restart only; the rest is in effect"
            self._log.warning("config_needs_restart", keys=", ".join(fixed))
        self._loaded = datetime.now(UTC)
        self._metrics.reloads.labels("succeeded").inc()
        with self.scheduler.lock:
            self.scheduler.set_settings(settings)
        self._timers.every("discover", settings.config.discover, self._discover)
        self._configure_notifications(settings.config.notify)
        self._discover()
        self._log.info("config_reloaded", file=path)
        self._notifier.ready(self._status_line())

    # -- periodic tasks

    def _discover(self) -> None:
        self._found.find_beside(self._discovered)

    def _discovered(self) -> None:
        self._timers.sync()
        if not self._ready and not self._found.pending:
            self._become_ready()

    def _become_ready(self) -> None:
        self._ready = True
        self._notifier.ready(self._status_line())
        self._log.info("ready", tables=len(self.scheduler.tables), http=self.http_port)

    def _apply_share(self) -> None:
        if self._stop_began is None:
            self._found.share()
            self._timers.sync()

    def _prune(self) -> None:
        limits = self.scheduler.settings.config.history
        try:
            deleted = self._history.prune(datetime.now(UTC), limits.keep, limits.max_runs)
            self._history.thin_samples(datetime.now(UTC), limits.keep)
        except HistoryError as error:
            self._log.error("history_not_written", error=str(error))
        else:
            self._log.debug("history_pruned", runs=deleted)

    def _serve(self, settings: Settings) -> HttpServer | None:
        http = settings.config.http
        if not http.enabled:
            return None
        tokens = token_file_of(http, os.environ)
        if tokens is not None:
            tokens.tokens()  # raises if it cannot be used
        certificate = None
        if http.tls_certificate is not None and http.tls_key is not None:
            certificate = Certificate(*map(os.path.expanduser, (http.tls_certificate, http.tls_key)))
        self._pages.overview.start()
        return HttpServer(
            http.host,
            http.port,
            alive=self.alive,
            ready=self.ready,
            metrics=self._metrics.expose,
            status=self.status,
            runs=self._history.runs,
            run=self._history.run,
            pages=self._pages.page_at,
            sign_in=self._pages.sign_in,
            refused=self._pages.refused,
            acted=self._pages.acted,
            allowed_hosts=http.allowed_hosts,
            actions=Actions(self.scheduler, self._found.elsewhere),
            tokens=tokens,
            audit=Audit(self._state.path),
            certificate=certificate,
        )

    def _make_member(self, settings: Settings) -> Member | None:
        if settings.config.fleet is None or self._once:
            return None
        # Until it has read its fleet: as when that cannot be read any more.
        self._meet(Others(living=self._state.members - 1, until=0.0))
        return Member(
            settings.config.fleet,
            self._holder,
            alive=lambda: self.alive()[0],
            on_change=lambda: self._post(self._apply_share),
            on_refusal=lambda error: self._post(lambda: self._refused(error)),
            budget=lambda: published_budget(self.scheduler),
            on_others=lambda others: self._post(lambda: self._meet(others)),
        )

    def _meet(self, others: Others) -> None:
        self.scheduler.ranking.meet(others, self.scheduler.clock.now())
        self._state.members = 1 + others.living

    def _make_listener(self) -> EventListener | None:
        config, member = self.scheduler.settings.config.events, self._member
        if config is None:
            return None
        return EventListener(
            config,
            shared=member is not None and config.shared,
            ready=lambda: self._ready and (member is None or not member.joining),
            elsewhere=lambda uri: "" if member is None else member.owner_of(uri),
            on_event=lambda tables: self._post(lambda: self.scheduler.on_events(tables)),
            on_new=lambda _: self._post(self._discover),
            on_alive=lambda alive: self._post(lambda: setattr(self.scheduler.announced, "alive", alive)),
            count=lambda outcome: self._metrics.events.labels(outcome).inc(),
        )

    def _route(self, tables: Sequence[FoundTable], entries: Sequence[TableSettings]) -> None:
        if self._listener is not None:
            self._listener.routes = TableRoutes(tables, entries)

    def _make_pages(self, settings: Settings) -> Pages:
        return Pages(
            service=self._service_status,
            tables=ScheduledTables(self.scheduler, self._timers, self._history, self._spending),
            spending=self._spending,
            runs=self._history.runs,
            run=self._history.run,
            samples=self._history.samples,
            history=self._table_history,
            faults=lambda: self._found.faults,
            format_of=self._format_of,
            file=settings.path,
            elsewhere=self._found.elsewhere,
        )

    def _configure_notifications(self, config: NotifyConfig) -> None:
        self._metrics.init_targets(target.name for target in config.targets)
        self._notifications.configure(config)

    def _findings(self) -> notify.Findings | None:
        """What is wrong now, for notifications; None: not known yet."""
        if not (self._ready or self._once):
            return None
        status = self.status()
        # Not what is wrong with the targets: one of them would be told once it is right again.
        service: dict[str, Any] = {**status["service"], "delivery_faults": []}
        of_service = service_findings(service, self._found.faults, self.scheduler.settings.path)
        findings, unread = [notify.TableFinding.of("", finding) for finding in of_service], set()
        for table in status["tables"]:
            if table["state"] == NOT_READ:
                unread.add(table["name"])
            else:
                findings += [notify.TableFinding.of(table["name"], finding) for finding in self._pages.findings(table)]
        return notify.Findings(tuple(findings), frozenset(unread))

    def _take_samples(self) -> None:
        self.scheduler.recorder.write_polls()
        try:
            budget = budget_sample(budget_status(self.scheduler), time.time())
            self._history.add_samples([*self._sampler.take(self.scheduler.tables.values()), *budget])
        except HistoryError as error:
            self._log.error("history_not_written", error=str(error))

    def _table_history(self, name: str) -> Mapping[str, Any] | None:
        """The history of a table as last read, for the first time after a short wait; it is read again for the next."""
        self.scheduler.post(lambda: self.scheduler.read_history(name))
        state = self.scheduler.tables.get(name)
        ends = time.monotonic() + _FIRST_HISTORY_SECONDS
        while state is not None and state.history is None and state.error is None and time.monotonic() < ends:
            if state.history_read != float("-inf") and not (state.history_wanted or state.polling):
                break  # it was read, and there is none
            time.sleep(_HISTORY_WAIT_SECONDS)
        return None if state is None else state.history

    def _format_of(self, uri: str) -> str | None:
        with self.scheduler.lock:
            states = [*self.scheduler.tables.values()]
        return next((state.table.settings.format for state in states if state.table.uri == uri), None)

    def _step_seconds(self) -> float:
        watchdog = self._notifier.watchdog_seconds
        return _STEP_SECONDS if watchdog is None else min(_STEP_SECONDS, watchdog)

    def _notify_systemd(self) -> None:
        every = self._notifier.watchdog_seconds
        now = time.monotonic()
        if every is not None and now - self._last_watchdog_sent >= every:
            self._last_watchdog_sent = now
            self._notifier.watchdog()
        wanted = self._ready and self._notifier.is_on and self._stop_began is None
        if wanted and now - self._last_status_sent >= _STATUS_INTERVAL_SECONDS:
            self._last_status_sent = now
            self._notifier.status(self._status_line())

    def _status_line(self) -> str:
        waiting = sum(int(state.backlog.amount("backlog") or 0) for state in self.scheduler.tables.values())
        failing = sum(bool(entry.failures) for entry in self.scheduler.entries())
        unread = sum(state.polled is None and state.error is None for state in self.scheduler.tables.values())
        if unread:
            return f"{not_read_text(unread, len(self.scheduler.tables))}, {len(self.scheduler.runs)} jobs running"
        bad = " The configuration file is invalid; the previous one is in effect." if self._config_error else ""
        return (
            f"{len(self.scheduler.tables)} tables, {len(self.scheduler.runs)} jobs running, "
            f"backlog {waiting}, {failing} jobs failing.{bad}"
        )

    def _close(self) -> None:
        self._timers.stop()
        self.scheduler.stopping = True
        if self._member is not None:
            self._member.leave()
        at_once = self._stop_began == float("-inf")
        pools = self.scheduler.pools
        if at_once:
            pools.kill()
        else:
            pools.close(_CLOSE_TIMEOUT_SECONDS if self.scheduler.runs else _POLL_END_SECONDS)
        ends = time.monotonic() + (0.0 if at_once else _CLOSE_TIMEOUT_SECONDS)  # of all that follows, together

        def left() -> float:
            return max(0.0, ends - time.monotonic())

        self.scheduler.step(0.0)
        while self.scheduler.runs and left():
            self.scheduler.step(0.1)
        self.scheduler.abandon()
        self.scheduler.recorder.write_polls()
        if self.scheduler.leases is not None:
            self.scheduler.leases.close(left() / 2)
        if self._once and self._stop_began is None:
            self._notifications.step(wait=False)
        self._notifications.close(left())
        if self._pushed is not None and not at_once:
            self._pushed.close()
        self._heartbeat.close(left())
        if self._member is not None:
            self._member.wait(left())
        # Whatever reads the history ends before it is closed.
        self._pages.overview.close(left())
        if self._http is not None:
            self._http.close(left())
        if self._once:
            runs = self._history.runs(limit=_MAX_RUNS_SHOWN)
            began = self._started.isoformat(timespec="milliseconds")
            self._done = [run for run in reversed(runs) if run["started"] >= began]
        self._history.close()
        self._state.close()
        self._log.info("stopped")


def _wake_up() -> None:
    """Do nothing: an event that makes the loop check for signals."""
