"""Encode and decode region records: which region's generations a table version contains.

``merged_generations`` identifies a region by its id alone, and an id may be reused: on a branch, in a
clone, after a region's folder was removed. So a merge also records which generation it merged last, by
the directory's name, which is random. The record is stored in the table configuration (manifest field 16), which
every commit of pylance preserves; fields of the MemWAL details that are unknown to pylance
are lost at its next merge with progress, index update or compaction (tests/integration/contracts).

One key with one entry per region: ``{region id, 32 hex digits}:{generation}:{mark}``, and ``:{adopted}`` if an
operator decided that the region's rows belong to the table.
"""

from __future__ import annotations

import hashlib
import re
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING
from uuid import UUID

from memwal_ops.formats.lance.wire.feature_flags import TABLE_CONFIG

if TYPE_CHECKING:
    from collections.abc import Mapping

    from memwal_ops.formats.lance.wire._pb import table_pb2

KEY = "memwal-ops.regions"
_WORD = re.compile(
    r"([0-9a-f]{32}):(0|[1-9][0-9]{0,19}):([0-9a-f]{8}|unmerged|undecided)(?::([1-9][0-9]{0,19}))?", re.ASCII
)
_MARK_BYTES = 4

UNMERGED = "unmerged"
UNDECIDED = "undecided"


@dataclass(frozen=True, slots=True)
class RegionRecord:
    """The record of one region in a version.

    Attributes:
        generation: the last of its generations that was merged when this was recorded.
        mark: identifies its directory, see :func:`mark_of`. ``unmerged``: an operator decided that none is
            merged, in the version that ``generation`` contains; ``undecided``: the region is older than the
            table's MemWAL index, and an operator has to decide.
        adopted: the version in which an operator decided that the region's rows belong to the table: the rows are
            for its columns, even if another table existed here when they were flushed. 0: no decision. Merges keep it.
    """

    generation: int
    mark: str
    adopted: int = 0

    def entry(self, region_id: UUID) -> str:
        """The record's entry in the configuration."""
        adopted = f":{self.adopted}" if self.adopted else ""
        return f"{region_id.hex}:{self.generation}:{self.mark}{adopted}"


def mark_of(path: str) -> str:
    """Eight hex digits that identify a generation's directory by its name."""
    return hashlib.blake2b(path.encode(), digest_size=_MARK_BYTES).hexdigest()


def region_records(manifest: table_pb2.Manifest) -> dict[UUID, RegionRecord]:
    """The records of a version; entries that do not parse are ignored, as if the region had no record."""
    words = manifest.config[KEY].split() if KEY in manifest.config else ()
    found = (match for word in words if (match := _WORD.fullmatch(word)) is not None)
    return {UUID(hex=match[1]): RegionRecord(int(match[2]), match[3], int(match[4] or 0)) for match in found}


def with_region_records(manifest: table_pb2.Manifest, records: Mapping[UUID, RegionRecord]) -> table_pb2.Manifest:
    """A copy of the manifest with these records, and those of all other regions unchanged."""
    changed = deepcopy(manifest)
    if not records:
        return changed
    every = region_records(manifest)
    for region_id, record in records.items():
        before = every.get(region_id)
        carried = record.adopted or (0 if before is None else before.adopted)
        every[region_id] = replace(record, adopted=carried)
    changed.config[KEY] = " ".join(record.entry(one) for one, record in sorted(every.items()))
    changed.writer_feature_flags |= TABLE_CONFIG  # releases that would drop it must not write
    return changed
