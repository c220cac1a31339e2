"""Prove of each index segment that it was built of living rows alone, or name it; and of expressions in transactions.

A compaction moves rows in an index, and leaves what was in it: terms of a text, keys of a bitmap, codes. So a segment
is clean only if it was built by reading fragments that are still there, with the same files, and of which none holds a
row that must be gone. The version that it was built on shows these fragments. That version expires; so what it showed
is recorded below ``_mem_wal_ops/erase/``. What is not shown by either is built anew.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING
from uuid import UUID

from memwal_ops.core.numbered_records import NumberedRecords
from memwal_ops.errors import InvalidFormatError, ObjectNotFoundError
from memwal_ops.formats.lance.files.versions import read_version_manifest
from memwal_ops.formats.lance.jobs.erase.target import fragment_key
from memwal_ops.formats.lance.wire.version_manifest import by_name, decode_fragment_bitmap

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

    from memwal_ops.formats.lance.table import Table
    from memwal_ops.formats.lance.wire._pb import table_pb2
    from memwal_ops.formats.lance.wire.version_manifest import VersionManifest
    from memwal_ops.storage.api import Store

ERASE_FOLDER = "_mem_wal_ops/erase"
_KEPT_RECORDS = 2
_SHOWN = 5


@dataclass
class Segments:
    """The evidence on index segments, of one run.

    Attributes:
        store: the table's.
        inherited: of a branch: ids of segments of its table that are proven there.
        proven: by segment id the digest of the fragments that it was built of.
        of_others: ids of transactions whose expressions are of no row that must be gone, and of which rows.
    """

    store: Store
    inherited: Collection[str] = ()
    proven: dict[str, str] = field(default_factory=dict)
    of_others: set[str] = field(default_factory=set)
    _manifests: dict[int, VersionManifest | None] = field(default_factory=dict)
    _recorded: dict[str, str] = field(default_factory=dict)
    _recorded_of_others: set[str] = field(default_factory=set)

    def read(self) -> None:
        """Read what earlier runs recorded."""
        records = _records(self.store)
        for number in records.written():
            try:
                found = records.read(number)
                self._recorded |= {str(key): str(digest) for key, digest in found["segments"].items()}
                self._recorded_of_others |= {str(one) for one in found.get("of_others", ())}
            except (ObjectNotFoundError, ValueError, KeyError, TypeError):
                continue  # it only saves that an index is built anew

    def is_of_others(self, transaction: str, where: str, shows: Callable[[], bool]) -> bool:
        """Whether the expression in a transaction is of rows that do not match: by what was recorded, or ``shows``."""
        # Of the expression so little that no guess at a value in it can be confirmed.
        key = f"{transaction} {hashlib.sha256(where.encode()).hexdigest()[:6]}"
        if key not in self.of_others and (key in self._recorded_of_others or shows()):
            self.of_others.add(key)
        return key in self.of_others

    def dirty(self, table: Table, shown: VersionManifest, stained: Collection[int]) -> Mapping[str, str]:
        """The indexes of a version with a segment that may hold such rows, by name, each with the reason.

        Args:
            table: any version of the table.
            shown: the version.
            stained: its fragments that hold such rows.
        """
        fragments = {int(one.id): one for one in shown.manifest.fragments}
        found: dict[str, str] = {}
        for name, entries in by_name(shown).items():
            for entry in entries:
                why = self._why(table, entry, fragments, stained)
                if why is not None:
                    found.setdefault(name, f"segment {UUID(bytes=entry.uuid.uuid)} {why}")
        return found

    def _why(
        self,
        table: Table,
        entry: table_pb2.IndexMetadata,
        fragments: Mapping[int, table_pb2.DataFragment],
        stained: Collection[int],
    ) -> str | None:
        if entry.HasField("base_id"):
            if str(UUID(bytes=entry.uuid.uuid)) in self.inherited:
                return None
            return "belongs to the table of which this one is a shallow clone"
        covered = decode_fragment_bitmap(entry.fragment_bitmap)
        if gone := covered - fragments.keys():
            return f"was built of fragments that are gone ({_some(gone)})"
        if holding := covered & set(stained):
            return f"covers fragments that hold such rows ({_some(holding)})"
        key = str(UUID(bytes=entry.uuid.uuid))
        digest = _digest(covered, fragments)
        if self._recorded.get(key) == digest or self._built_of(table, entry) == digest:
            self.proven[key] = digest
            return None
        return "may have been built of rows that were rewritten since: nothing shows that it was not"

    def _built_of(self, table: Table, entry: table_pb2.IndexMetadata) -> str | None:
        """The digest of the fragments that a segment was built of, if versions that exist show it."""
        built_on = self._manifest(table, int(entry.dataset_version))
        if built_on is None:
            return None
        for version in range(int(entry.dataset_version) + 1, table.version + 1):
            if (shown := self._manifest(table, version)) is None:
                return None
            same = [one for one in (shown.indexes.indices if shown.indexes else ()) if one.uuid.uuid == entry.uuid.uuid]
            if same:
                fragments = {int(one.id): one for one in built_on.manifest.fragments}
                covered = decode_fragment_bitmap(same[0].fragment_bitmap)
                return _digest(covered, fragments) if covered <= fragments.keys() else None
        return None

    def _manifest(self, table: Table, version: int) -> VersionManifest | None:
        if version not in self._manifests:
            try:
                self._manifests[version] = read_version_manifest(table.store, version, table.naming)
            except (ObjectNotFoundError, InvalidFormatError):
                self._manifests[version] = None
        return self._manifests[version]

    def record(self) -> None:
        """Store what is proven, before the versions that show it expire; nothing if it is stored already."""
        known = self.proven.items() <= self._recorded.items() and self.of_others <= self._recorded_of_others
        if known or not (self.proven or self.of_others):
            return
        records = _records(self.store)
        numbers = [*records.written()]
        number = max(numbers, default=0) + 1
        while not records.put_if_absent(number, {"segments": self.proven, "of_others": sorted(self.of_others)}):
            number += 1
        records.delete_records(numbers[: -_KEPT_RECORDS + 1])
        self._recorded |= self.proven
        self._recorded_of_others |= self.of_others

    def forget(self) -> None:
        """Drop the manifests of versions: new ones were published."""
        self._manifests.clear()


def _records(store: Store) -> NumberedRecords:
    return NumberedRecords(store, ERASE_FOLDER, "record of an erasure")


def _digest(covered: Collection[int], fragments: Mapping[int, table_pb2.DataFragment]) -> str:
    keys = [fragment_key(fragments[one]) for one in sorted(covered)]
    return hashlib.sha256(json.dumps(keys).encode()).hexdigest()


def _some(numbers: Collection[int]) -> str:
    shown = ", ".join(map(str, sorted(numbers)[:_SHOWN]))
    return shown + (f" and {len(numbers) - _SHOWN:,} more" if len(numbers) > _SHOWN else "")
