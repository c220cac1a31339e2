"""Notify targets of findings, on a thread of its own: the scheduler never waits for a server.

Each target has its own view of what it was told. What differs from that is sent as one message, once it has held for
``group_wait`` and the limit of messages allows it; a message that fails is made anew by what holds at the next attempt.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from memwal_ops.log import get_logger
from memwal_ops.supervisor.notify.changes import after, changes
from memwal_ops.supervisor.notify.channels import NotificationError, send
from memwal_ops.supervisor.notify.message import Message
from memwal_ops.supervisor.notify.told import Told, ToldFile

if TYPE_CHECKING:
    from collections.abc import Callable

    from memwal_ops.supervisor.config.model import NotifyConfig, TargetConfig
    from memwal_ops.supervisor.notify.changes import Change, Found

_STEP_SECONDS, _BUSY_FACTOR = 15.0, 10.0
_HOUR = 3600.0
_FIRST_RETRY, _LONGEST_RETRY = 30.0, 900.0


@dataclass(frozen=True, slots=True)
class Findings:
    """What holds now. Of ``unread`` tables, which were not polled yet, nothing is resolved."""

    found: tuple[Found, ...]
    unread: frozenset[str] = frozenset()


class FindingNotifier:
    """Notifies the targets of a configuration.

    Args:
        read: returns what holds now; None if it is not known yet.
        path: of the file with what was told.
        service: the name of this service, for messages.
        on_result: called with a target's name and ``succeeded`` or ``failed``.
        now: the wall clock, in seconds.
    """

    def __init__(
        self,
        config: NotifyConfig,
        *,
        read: Callable[[], Findings | None],
        path: str,
        service: str,
        on_result: Callable[[str, str], None],
        now: Callable[[], float] = time.time,
    ) -> None:
        """Send nothing yet."""
        self._config = config
        self._read = read
        self._path = path
        self._file: ToldFile | None = None
        self._service = service
        self._on_result = on_result
        self._now = now
        self._since: dict[str, float] = {}
        self._retry: dict[str, tuple[float, float]] = {}
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None

    def configure(self, config: NotifyConfig) -> None:
        """Use another configuration from the next step on, and start the thread if there are targets."""
        self._config = config
        if config.targets and self._thread is None:
            self._thread = threading.Thread(target=self._work, name="notify", daemon=True)
            self._thread.start()

    def close(self, timeout: float) -> None:
        """Stop; a message that is being sent gets ``timeout`` seconds to end."""
        self._stopped.set()
        if self._thread is not None:
            self._thread.join(timeout)

    def step(self, *, wait: bool = True) -> None:
        """Send to each target what it was not told yet; ``wait``: after ``group_wait``."""
        config = self._config
        if not config.targets:
            return
        now_holds = self._read()
        if now_holds is None:
            return
        if self._file is None:
            self._file = ToldFile(self._path)
        for target in config.targets:
            self._tell(target, now_holds, self._file.targets.setdefault(target.name, Told()), wait=wait)
        names = {target.name for target in config.targets}
        self._file.targets = {name: told for name, told in self._file.targets.items() if name in names}
        self._file.write()

    def _tell(self, target: TargetConfig, holds: Findings, told: Told, *, wait: bool) -> None:
        now = self._now()
        wanted = [one for one in holds.found if target.level == "warning" or one.level == "critical"]
        made = changes(told.found, wanted, lambda table: table not in holds.unread)
        if not made:
            self._since.pop(target.name, None)
            return
        since = self._since.setdefault(target.name, now)
        told.sent = [one for one in told.sent if now - _HOUR < one <= now]
        grouped = not wait or now - since >= self._config.group_wait.total_seconds()
        not_before, _ = self._retry.get(target.name, (0.0, 0.0))
        if grouped and now >= not_before and len(told.sent) < self._config.max_per_hour:
            self._send(target, told, made, now)

    def _send(self, target: TargetConfig, told: Told, made: list[Change], now: float) -> None:
        sent = datetime.fromtimestamp(now, UTC).isoformat(timespec="seconds")
        message = Message(self._service, (self._config.link or "").rstrip("/"), sent, made)
        try:
            send(target, message)
        except Exception as error:  # noqa: BLE001 - whatever another server, or a library, does
            _, pause = self._retry.get(target.name, (0.0, _FIRST_RETRY / 2))
            pause = min(2 * pause, _LONGEST_RETRY)
            self._retry[target.name] = (now + pause, pause)
            text = str(error) if isinstance(error, NotificationError) else type(error).__name__
            get_logger(__name__).warning("notification_failed", target=target.name, error=text, retry_in=pause)
            self._on_result(target.name, "failed")
            return
        self._retry.pop(target.name, None)
        self._since.pop(target.name, None)
        told.found = after(told.found, made)
        told.sent.append(now)
        self._on_result(target.name, "succeeded")

    def _work(self) -> None:
        pause = _STEP_SECONDS
        while not self._stopped.wait(pause):
            began = time.monotonic()
            try:
                self.step()
            except Exception:  # noqa: BLE001 - a bug here must not end all notifications
                get_logger(__name__).exception("internal_error")
            # Of many tables, finding out what holds may take some processor time: at most a tenth of one.
            group_wait = self._config.group_wait.total_seconds()
            pause = max(min(_STEP_SECONDS, group_wait), _BUSY_FACTOR * (time.monotonic() - began), 0.1)
