"""The feature flags of a table's manifest, by name, and which of them this release supports.

A manifest has two sets: a reader must know all flags of the first, a writer those of both. The releases from 11 on
were measured: a feature's is the first one that opens a table with its flag. Lance gave some other numbers before that.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from memwal_ops.errors import TableCorruptError, UnsupportedFeatureError

if TYPE_CHECKING:
    from memwal_ops.formats.lance.wire._pb import table_pb2

DELETION_FILES = 1
STABLE_ROW_IDS = 2
TABLE_CONFIG = 8
BASE_PATHS = 16
NO_TRANSACTION_FILES = 32
MIXED_FILE_VERSIONS = 256
_MANAGED, _MANAGED_SETTING = 1 << 14, "lance.blob.managed"
SHOWN_FEATURES = STABLE_ROW_IDS | BASE_PATHS | MIXED_FILE_VERSIONS
"""Those on which clients depend that are older than a table's writers."""

RECORDS = "memwal-ops.format"
"""In a table's configuration: the format of all records of memwal-ops in its manifest; 1 without it. A release that
changes them, so that an earlier one would misread them, sets a higher one."""
_RECORDS_FORMAT = 1
_EARLY = "11 or earlier"


@dataclass(frozen=True, slots=True)
class Feature:
    """A feature of tables that needs programs which know it.

    Attributes:
        flag: its bit.
        name: what it is.
        since: the first release of Lance that opens such a table by default; empty: none up to 14.0.2.
        supported: whether this release reads and writes such tables.
        paired: whether a manifest has its flag in both sets or in none; else Lance does not open it.
    """

    flag: int
    name: str
    since: str = ""
    supported: bool = False
    paired: bool = False

    def __str__(self) -> str:
        release = f"since Lance {self.since}" if self.since else "in no release of Lance up to 14.0.2"
        return f"{self.name} (feature flag {self.flag}, {release})"


FEATURES = (
    Feature(DELETION_FILES, "deletion files", _EARLY, supported=True),
    Feature(STABLE_ROW_IDS, "stable row ids", _EARLY, supported=True),
    Feature(4, "v2 data files", _EARLY, supported=True),
    Feature(TABLE_CONFIG, "table config", _EARLY, supported=True),
    Feature(BASE_PATHS, "base paths", _EARLY, supported=True),
    Feature(NO_TRANSACTION_FILES, "no transaction files", _EARLY, supported=True),
    Feature(64, "data overlay files"),
    Feature(128, "covered index metadata", "11"),
    Feature(MIXED_FILE_VERSIONS, "mixed data file versions", "12", supported=True, paired=True),
    Feature(512, "a fragment reuse index on stable row ids"),
    Feature(1024, "a fragment reuse index with transitions, in _fri/", "13", paired=True),
    Feature(2048, "spilled row lineage, or managed blobs of an unreleased Lance", "14"),
    Feature(4096, "a fragment tree"),
    Feature(8192, "independent covering fields"),
    Feature(_MANAGED, "managed blobs, in _blobs/", "14", paired=True),
    Feature(1 << 15, "field ids that are never reused", "14"),
    Feature(1 << 16, "zone write seeds", paired=True),
)
"""All that are known, by flag."""

_SUPPORTED = sum(feature.flag for feature in FEATURES if feature.supported)


def check_readable(manifest: table_pb2.Manifest) -> None:
    """Refuse reader feature flags that this release does not support (S3-012), and records of a later release.

    Raises:
        TableCorruptError: only one of a pair of flags is set, which no release of Lance writes or opens.
        UnsupportedFeatureError: with the names of the features, or the format of the records.
    """
    reader, writer = manifest.reader_feature_flags, manifest.writer_feature_flags
    half = [feature for feature in FEATURES if feature.paired and (reader ^ writer) & feature.flag]
    if half:
        raise TableCorruptError(
            f"The manifest of version {manifest.version} has {half[0]} as a flag of readers or of writers only; Lance "
            "opens no such table."
        )
    _check(reader, "read")
    records = dict(manifest.config).get(RECORDS, str(_RECORDS_FORMAT))
    if records != str(_RECORDS_FORMAT):
        raise UnsupportedFeatureError(
            f"A newer release of memwal-ops wrote version {manifest.version}: its records have format {records:.40}, "
            f"and this one reads {_RECORDS_FORMAT}.",
            remedy="Upgrade memwal-ops here to the release that runs elsewhere on this table.",
        )


def check_writable(manifest: table_pb2.Manifest) -> None:
    """Refuse reader and writer feature flags that this release does not support (S3-013); raises as above."""
    check_readable(manifest)
    _check(manifest.writer_feature_flags, "written")


def check_next(manifest: table_pb2.Manifest) -> None:
    """Refuse a table whose next version would have a feature that this release does not support.

    Releases before 14 write the setting for managed blobs into the schema, and no flag; pylance 14 sets the flag in
    each of its commits.

    Raises:
        UnsupportedFeatureError: with the name of the feature.
    """
    if manifest.schema_metadata.get(_MANAGED_SETTING, b"").strip().lower() == b"true":
        raise UnsupportedFeatureError(
            f"The schema has {_MANAGED_SETTING}, by which the next version would have a feature that this release of "
            f"memwal-ops does not support: {next(one for one in FEATURES if one.flag == _MANAGED)}.",
            remedy="With the release that writes the table, turn it off: lance.dataset(URI).update_schema_metadata("
            f'{{"{_MANAGED_SETTING}": "false"}}).',
        )


def _check(flags: int, what: str) -> None:
    refused = flags & ~_SUPPORTED
    if not refused:
        return
    named = {feature.flag: str(feature) for feature in FEATURES}
    found = (1 << bit for bit in range(refused.bit_length()) if refused >> bit & 1)
    features = " and ".join(named.get(flag, f"feature flag {flag}, which is unknown to it") for flag in found)
    raise UnsupportedFeatureError(
        f"The table must not be {what} by this release of memwal-ops, which does not support {features}."
    )
