"""The records by which members of a fleet announce themselves: numbered ones in a folder for each, ``members/NAME/``.

They are written by put-if-absent, as leases are, so that of two supervisors with one name one notices.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from memwal_ops.core.numbered_records import NumberedRecords
from memwal_ops.errors import AlreadyRunningError, MemwalOpsError, ObjectNotFoundError, UnsupportedFeatureError
from memwal_ops.text import printable

if TYPE_CHECKING:
    from collections.abc import Mapping

    from memwal_ops.storage.api import Store

FOLDER = "members"
_KEPT = 8


@dataclass(frozen=True, slots=True)
class Document:
    """What a member says of itself; nothing of it decides which tables it has.

    Attributes:
        process: changes with each start; instance: is that of its state folder.
        tables: how many tables it maintains, of how many ``known``.
        entries: a digest of the tables of its configuration.
    """

    process: str
    instance: str
    holder: str
    version: str
    started: str
    tables: int
    known: int
    entries: str


class MemberRecords:
    """The records of all members, and the writer of one of them.

    Args:
        store: that of the fleet.
        name: of this member.
    """

    def __init__(self, store: Store, name: str) -> None:
        """Send no request yet."""
        self._store, self._name = store, name
        self._number: int | None = None

    def newest(self) -> dict[str, int]:
        """Return the number of the newest record of each member that has one; one listing."""
        found: dict[str, int] = {}
        for meta in self._store.list(FOLDER):
            _, _, below = meta.path.partition("/")
            name, _, file = below.partition("/")
            number, _, suffix = file.partition(".")
            if suffix == "json" and number.isascii() and number.isdigit():
                found[name] = max(found.get(name, 0), int(number))
        return found

    def read(self, name: str, number: int) -> Document | None:
        """Return a record of a member; None if it is gone, or is not readable by this release."""
        try:
            found: Any = self._of(name).read(number)
            names = ("process", "instance", "holder", "version", "started", "entries")
            text = {key: printable(str(found[key])) for key in names}
            return Document(**text, tables=int(found["tables"]), known=int(found["known"]))
        except (ObjectNotFoundError, UnsupportedFeatureError):
            return None
        except (KeyError, TypeError, ValueError, OverflowError, RecursionError):
            return None

    def begin(self, newest: Mapping[str, int]) -> None:
        """Continue with the name after its newest record: that member is dead, or was this one before a restart."""
        self._number = newest.get(self._name, 0)

    def beat(self, document: Document) -> dict[str, int]:
        """Write the next record, and return the numbers of the newest records of the others.

        Raises:
            AlreadyRunningError: another process writes records of this name.
            StorageError: the store failed.
        """
        assert self._number is not None  # noqa: S101 - after begin
        fields = {name: getattr(document, name) for name in Document.__slots__}
        written = self._of(self._name).put_if_absent(self._number + 1, fields)
        newest = self.newest()
        number = newest.pop(self._name, 0)
        if number > self._number and not (written and number == self._number + 1):
            # A response may be lost: then the record under the number is this process's own.
            found = self.read(self._name, number)
            if found is None or found.process != document.process:
                raise name_taken(self._name, found)
        self._number = max(self._number, number)
        if number % _KEPT == 0:
            self._prune(number)
        return newest

    def leave(self) -> None:
        """Delete the records of this member: the others take its tables at their next reading."""
        if self._number is not None:
            self.delete(self._name)

    def delete(self, name: str) -> None:
        """Delete the records of a member."""
        records = self._of(name)
        records.delete_records(records.written())

    def _prune(self, newest: int) -> None:
        records = self._of(self._name)
        records.delete_records(number for number in records.written() if number < newest)

    def _of(self, name: str) -> NumberedRecords:
        return NumberedRecords(self._store, f"{FOLDER}/{name}", "record of a member")


def name_taken(name: str, other: Document | None) -> MemwalOpsError:
    """Return the error for a name that another supervisor has."""
    who = "another supervisor" if other is None else f"another supervisor ({other.holder}, since {other.started})"
    return AlreadyRunningError(
        f"The name {name!r} is that of {who}, which is a member of the fleet.",
        remedy="Give each member a name of its own (fleet.name, for example ${HOSTNAME}), or stop the other one.",
    )
