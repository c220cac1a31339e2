"""The state folder of a supervisor: its lock, its identity, the path of its history."""

from __future__ import annotations

import os
import uuid
from collections.abc import Mapping
from contextlib import suppress

from memwal_ops.errors import AlreadyRunningError, HistoryError
from memwal_ops.places import default_state_dir
from memwal_ops.storage.local import lock_within
from memwal_ops.supervisor.config.model import Config


def private_opener(path: str, flags: int) -> int:
    """Open a file that its owner alone can read: URIs, options and logs of runs are in it. Also one that exists."""
    file = os.open(path, flags, 0o600)
    with suppress(OSError):  # another user's
        os.fchmod(file, 0o600)
    return file


def make_private(folder: str) -> None:
    """Make a folder that its owner alone can enter, whatever the umask; one that exists, if it is empty or a state's.

    One with other files in it, such as a home folder, keeps its mode: the files of the service are private in any case.
    """
    os.makedirs(folder, mode=0o700, exist_ok=True)
    names = os.listdir(folder)
    if not names or "lock" in names:
        with suppress(OSError):  # another user's
            os.chmod(folder, 0o700)


def state_dir(config: Config, environ: Mapping[str, str] | None = None) -> str:
    """Return the folder: as configured, else that of the service whose ``environ`` it is, else of one that is asked."""
    if config.state_dir is not None:
        return os.path.abspath(os.path.expanduser(config.state_dir))
    return default_state_dir(os.environ) if environ is None else default_state_dir(environ, unit="")


def history_path(config: Config, environ: Mapping[str, str] | None = None) -> str:
    """Return the path of the history file."""
    path = config.history.path
    return os.path.join(state_dir(config, environ), "history.sqlite") if path is None else os.path.expanduser(path)


def instance_of(path: str) -> str:
    """Return the id of a state folder without locking it; empty: no service has used it."""
    try:
        with open(os.path.join(path, "instance"), encoding="ascii") as file:
            return file.read().strip()
    except (OSError, ValueError):
        return ""


def members_of(path: str) -> int:
    """Return how many members the fleet of a state folder's service had when it was last read; 1: it is not known."""
    try:
        with open(os.path.join(path, "members"), encoding="ascii") as file:
            return max(1, int(file.read()))
    except (OSError, ValueError):
        return 1


class StateDir:
    """The state folder, locked by one process. The kernel releases the lock however the process ends.

    ``instance``: an id that survives restarts: a service that was killed still owns its leases.
    """

    def __init__(self, path: str) -> None:
        """Create the folder and lock it. Raises ``AlreadyRunningError``, or ``HistoryError``: it cannot be written."""
        self.path = path
        try:
            make_private(path)
            self._lock = private_opener(os.path.join(path, "lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC)
        except OSError as error:
            raise HistoryError(f"The state folder {path} cannot be written: {error.strerror}.") from error
        holder = lock_within(self._lock, 0)
        if holder is not None:
            os.close(self._lock)
            raise AlreadyRunningError(f"Another supervisor, process {holder}, uses the state folder {path}.")
        try:
            self.instance = self._identity()
            self._members = members_of(path)
        except OSError as error:
            os.close(self._lock)
            raise HistoryError(f"The state folder {self.path} cannot be written: {error.strerror}.") from error

    def fault(self) -> str | None:
        """Return why writes to the folder are lost (it was removed or replaced), or None."""
        try:
            current, locked = os.stat(os.path.join(self.path, "lock")), os.fstat(self._lock)
        except OSError as error:
            return f"The state folder {self.path} cannot be read any more: {error.strerror}. Restart the service."
        if (current.st_dev, current.st_ino) != (locked.st_dev, locked.st_ino):
            return f"The state folder {self.path} was replaced. Restart the service."
        return None

    @property
    def members(self) -> int:
        """How many members the fleet had when it was last read; 1: it is not known."""
        return self._members

    @members.setter
    def members(self, number: int) -> None:
        if number != self._members:
            self._members = number
            # Where that fails, fewer are known after a restart: the status reports the folder.
            with suppress(OSError):
                self._write("members", str(number))

    def close(self) -> None:
        """Release the lock."""
        os.close(self._lock)

    def _identity(self) -> str:
        path = os.path.join(self.path, "instance")
        try:
            with open(path, encoding="ascii") as file:
                return str(uuid.UUID(file.read().strip()))
        except (OSError, ValueError):
            instance = str(uuid.uuid4())
        self._write("instance", instance)
        return instance

    def _write(self, name: str, text: str) -> None:
        path = os.path.join(self.path, name)
        with open(f"{path}.new", "w", encoding="ascii", opener=private_opener) as file:
            file.write(f"{text}\n")
        os.replace(f"{path}.new", path)
