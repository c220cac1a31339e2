"""Keep what each target was told, over restarts: no flood after one, and no finding that is told twice."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from memwal_ops.log import get_logger
from memwal_ops.supervisor.notify.changes import Found

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass
class Told:
    """What one target knows.

    Attributes:
        found: the findings that it was told, by key.
        sent: when messages were sent in the last hour, seconds since the epoch.
    """

    found: Mapping[str, Found] = field(default_factory=dict)
    sent: list[float] = field(default_factory=list)


class ToldFile:
    """The state of all targets, in a file of the state folder. One that cannot be read or written is logged."""

    def __init__(self, path: str) -> None:
        """Read the file, if there is one."""
        self._path = path
        self._written = ""
        self.targets: dict[str, Told] = {}
        try:
            with open(path, encoding="utf-8") as file:
                self.targets = {name: _read(one) for name, one in json.load(file)["targets"].items()}
        except FileNotFoundError:
            pass
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            get_logger(__name__).warning("notifications_not_read", file=path, error=f"{type(error).__name__}: {error}")

    def write(self) -> None:
        """Write the file, if anything has changed."""
        document = {
            name: {"sent": told.sent, "found": [found.to_json() for found in told.found.values()]}
            for name, told in self.targets.items()
        }
        text = json.dumps({"version": 1, "targets": document})
        if text == self._written:
            return
        new = f"{self._path}.new"
        try:
            with open(new, "w", encoding="utf-8", opener=_private) as file:
                file.write(text)
            os.replace(new, self._path)
            self._written = text
        except OSError as error:
            with suppress(OSError):
                os.unlink(new)
            get_logger(__name__).warning("notifications_not_written", file=self._path, error=str(error))


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def _read(document: Mapping[str, Any]) -> Told:
    found = [Found(**one) for one in document["found"]]
    return Told({one.key: one for one in found}, [float(one) for one in document["sent"]])
