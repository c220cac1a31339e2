"""What the witness keeps of versions, generations and regions, and how it decodes a manifest by itself."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pyroaring import BitMap

from tests.support.tables import wire

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.tables.model import Key, Row, Rows

HINT = "version_hint.json"
#: An unknown field of the MemWAL details, as a later release may write one: our commits must keep it.
LATER_RELEASE = wire.Field(1001, b"kept", 2)
# Of a data file, and of a deletion vector.
_BASE_ID = 7
_OUR_JOB = re.compile(rb"memwal-ops\.job.{2}([a-z]+)")


@dataclass
class SeenVersion:
    """A version as it read when it was first seen; rows by the columns' traits."""

    progress: dict[str, int]
    rows: Rows
    snapshot: str | None
    has_mem_wal: bool
    files: frozenset[str]
    indexes: dict[str, frozenset[int]]  # name: covered fragments
    claims: dict[str, dict[str, int]]
    fragments: dict[Key, int]


@dataclass
class SeenGeneration:
    """A generation as it was when it was first listed."""

    files: frozenset[str]
    rows: list[tuple[bool, Row]]


@dataclass
class SeenRegion:
    """Everything that a region's log and manifest ever showed."""

    entries: dict[int, int | None] = field(default_factory=dict)  # id: writer epoch
    manifest: wire.RegionManifest | None = None

    @property
    def posts(self) -> dict[int, int]:
        """Per epoch its first entry."""
        found: dict[int, int] = {}
        for entry, epoch in sorted(self.entries.items()):
            if epoch is not None:
                found.setdefault(epoch, entry)
        return found


def progress_of(details: list[wire.Field]) -> dict[str, int]:
    return {wire.uuid_of(one, 1): int(wire.get(one, 2)) for one in wire.sub(details, 9)}


def job_of(manifest: wire.ManifestFile) -> str | None:
    """Which of our jobs made a version; None: another program."""
    found = _OUR_JOB.search(manifest.transaction or b"", re.DOTALL)
    return None if found is None else found[1].decode()


def files_of(manifest: wire.ManifestFile, folder: str = "") -> Iterator[str]:
    """The data files and deletion vectors that a version names; of a branch those of its own are below ``folder``."""
    for fragment in wire.sub(manifest.fields, 2):
        for file in wire.sub(fragment, 2):
            yield f"{_place(file, folder)}data/{bytes(wire.get(file, 1)).decode()}"
        for deleted in wire.sub(fragment, 3):
            suffix = "bin" if wire.get(deleted, 1) else "arrow"
            name = f"{wire.get(fragment, 1)}-{wire.get(deleted, 2)}-{wire.get(deleted, 3)}"
            yield f"{_place(deleted, folder)}_deletions/{name}.{suffix}"


def _place(file: list[wire.Field], folder: str) -> str:
    """Where a file is: with a base path, below the root of the table."""
    return "" if any(one.number == _BASE_ID for one in file) else folder


def indexes_of(manifest: wire.ManifestFile) -> dict[str, frozenset[int]]:
    """Per index of the base table the fragments that its segments cover."""
    found: dict[str, frozenset[int]] = {}
    for entry in wire.sub(wire.decode(manifest.index or b""), 1):
        name = bytes(wire.get(entry, 3)).decode()
        if not name.startswith("__lance_"):
            covered = BitMap.deserialize(bytes(wire.get(entry, 5))) if wire.get(entry, 5) else ()
            found[name] = found.get(name, frozenset()) | frozenset(covered)
    return found
