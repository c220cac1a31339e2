"""Record who acted: as an event of the log, and as a line of JSON in the state folder."""

from __future__ import annotations

import errno
import json
import os
import threading
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from memwal_ops.log import get_logger
from memwal_ops.storage.redaction import redact

if TYPE_CHECKING:
    from collections.abc import Mapping

FILE = "audit.jsonl"
_MAX_BYTES = 4 << 20


class Audit:
    """The audit log; ``folder``: the state folder, None: only the log. Of 4 MiB and more, one older file is kept."""

    def __init__(self, folder: str | None) -> None:
        """Write nothing yet."""
        self._path = None if folder is None else os.path.join(folder, FILE)
        self._lock = threading.Lock()
        self._log = get_logger(__name__)

    def record(self, action: str, status: int, *, who: str | None, client: str, **details: Any) -> None:
        """Record an action, or that it was refused, with the status of its response."""
        entry = {
            "at": datetime.now(UTC).isoformat(timespec="milliseconds"),
            "action": action,
            "status": status,
            "who": who,
            "client": client,
            **{name: _redacted(value) for name, value in details.items() if value},
        }
        self._log.info("http_action", **{name: value for name, value in entry.items() if name != "at"})
        if self._path is not None:
            self._append(self._path, entry)

    def _append(self, path: str, entry: Mapping[str, Any]) -> None:
        with self._lock:
            try:
                file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o640)
                try:
                    size, line = os.fstat(file).st_size, json.dumps(entry).encode() + b"\n"
                    if os.write(file, line) < len(line):
                        os.ftruncate(file, size)  # the disk is full: the next entry begins a line
                        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                    large = size + len(line) > _MAX_BYTES
                finally:
                    os.close(file)
                if large:
                    os.replace(path, f"{path}.1")
            except OSError as error:  # the disk may be full: the event of the log remains
                self._log.error("audit_not_written", file=path, error=error.strerror)


def _redacted(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _redacted(one) for name, one in value.items()}
    return redact(value) if isinstance(value, str) else value
