"""JSON records in a folder, named by ascending numbers and written by put-if-absent: leases and holds.

Put-if-absent decides who writes a number, on every store. A number is never written twice as long as the highest one
is never deleted: a writer that fills a gap below it sees that its number is not the highest.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from memwal_ops.errors import StorageError
from memwal_ops.storage.records import decode_record, encode_record

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from datetime import datetime

    from memwal_ops.storage.api import ObjectMeta, Store

_DIGITS = 20
_NAME = re.compile(rf"([0-9]{{{_DIGITS}}})\.([a-z]+)")
_RECORD = "json"


@dataclass(frozen=True, slots=True)
class NumberedRecords:
    """Numbered records of one folder.

    Attributes:
        store: the table's.
        folder: relative to the table.
        called: what a record is, for messages: ``hold``.
    """

    store: Store
    folder: str
    called: str

    def written(self, files: Iterable[ObjectMeta] | None = None) -> dict[int, datetime]:
        """When each record was written, by the store's clock, ascending by number; see :meth:`listed`."""
        return self.listed(files)[_RECORD]

    def listed(self, files: Iterable[ObjectMeta] | None = None) -> dict[str, dict[int, datetime]]:
        """As :meth:`written`, for the files of each suffix: ``json`` is always a key.

        Args:
            files: those of the folder, as just listed; None: they are listed now.
        """
        found: dict[str, dict[int, datetime]] = {_RECORD: {}}
        for meta in sorted(self.store.list(self.folder) if files is None else files, key=lambda meta: meta.path):
            name = _NAME.fullmatch(meta.path.removeprefix(f"{self.folder}/"))
            if name is not None:
                found.setdefault(name[2], {})[int(name[1])] = meta.last_modified
        return found

    def read(self, number: int) -> Any:
        """The document of a record.

        Raises:
            ObjectNotFoundError: it was deleted.
            UnsupportedFeatureError: a later release wrote it.
            ValueError: it is no JSON document.
        """
        return decode_record(self.store.get(self.path(number)), self.path(number))

    def put_if_absent(self, number: int, document: Mapping[str, object]) -> bool:
        """Write a record under a number; return whether the number was free.

        Raises:
            StorageError: the store failed, or no number is left.
        """
        if number >= 10**_DIGITS:
            raise StorageError(
                f"No number is left for another {self.called} in {self.folder}.",
                remedy="Inspect the file with the highest number; if memwal-ops did not write it, delete it while no "
                "supervisor runs.",
            )
        return self.store.put_if_absent(self.path(number), encode_record(document))

    def delete_records(self, numbers: Iterable[int], *suffixes: str) -> None:
        """Delete records, and the files beside them that have one of the suffixes."""
        paths = [self.path(number, suffix) for number in numbers for suffix in (*suffixes, _RECORD)]
        if paths:
            self.store.delete_many(paths)

    def unreadable(self, number: int, error: Exception, remedy: str) -> StorageError:
        """The error for a record that is not what this release writes."""
        return StorageError(f"{self.path(number)} is not a readable {self.called} ({error}).", remedy=remedy)

    def path(self, number: int, suffix: str = _RECORD) -> str:
        """Path of a number's file, relative to the table."""
        return f"{self.folder}/{number:0{_DIGITS}d}.{suffix}"


def printable(text: str) -> str:
    """The text as it can be printed: JSON can contain lone surrogates."""
    return text.encode(errors="replace").decode()
