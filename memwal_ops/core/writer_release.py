"""What the Lance release that wrote a generation did differently.

Measured release by release (tests/contracts/old_pylance.md), because a table may hold generations
that were flushed long ago. Two habits lose data for whoever reads them like today's:

* up to 12, a generation's fields are numbered from 0, whatever ids the base table had then;
* 7 wrote rows newest first and hid no older ones, so "highest row address" is the oldest write.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from memwal_ops.core.versions import read_version_manifest

if TYPE_CHECKING:
    from memwal_ops.format._pb import table_pb2
    from memwal_ops.format.version_manifest import VersionManifest
    from memwal_ops.storage.api import Store

_FIRST_WITH_BASE_IDS = 13
_NEWEST_FIRST = 7


@dataclass(frozen=True, slots=True)
class WrittenBy:
    """The generation's own manifest, and what follows from the release in it.

    Attributes:
        manifest: of the generation's dataset.
        major: major release number of Lance; None where the manifest names no Lance release.
    """

    manifest: table_pb2.Manifest
    major: int | None

    @property
    def numbers_fields_from_zero(self) -> bool:
        """Whether field ids are those of the generation and not of the base table."""
        return self.major is not None and self.major < _FIRST_WITH_BASE_IDS

    @property
    def newest_row_first(self) -> bool:
        """Whether the lowest row address of a key is its newest write.

        Not in the region layout (generations that point into ``wal/`` by base paths), whose order
        the specification fixes for every writer (S0-192).
        """
        return self.major == _NEWEST_FIRST and not self.manifest.base_paths


def read_written_by(store: Store, folder: str, version: int) -> WrittenBy:
    """Who wrote the dataset at ``folder``; one request.

    Raises:
        InvalidFormatError: its manifest does not decode.
        ObjectNotFoundError: it has no such version.
    """
    manifest: VersionManifest = read_version_manifest(store, version, folder=folder)
    writer = manifest.manifest.writer_version
    number = re.match(r"(\d+)\.", writer.version)
    known = writer.library == "lance" and number is not None
    return WrittenBy(manifest.manifest, int(number[1]) if known and number else None)
