"""Build and parse file names: WAL entries, region folders, generation directories, version manifests.

A migration records the layout of a table in its version, and the one that it had before. Without a migration the files
of the regions determine the layout. After one, files of both layouts lie side by side, and the record determines the
layout of new regions. It is stored in the table configuration (manifest field 16), which every commit of pylance
preserves.
"""

from __future__ import annotations

import enum
import re
from copy import deepcopy
from typing import TYPE_CHECKING, NamedTuple

from memwal_ops.errors import TableCorruptError
from memwal_ops.formats.lance.wire.version_manifest import TABLE_CONFIG

if TYPE_CHECKING:
    from collections.abc import Iterable
    from uuid import UUID

    from memwal_ops.formats.lance.wire._pb import table_pb2


INDICES_FOLDER = "_indices"
MEM_WAL_FOLDER = "_mem_wal"
JOB_PROPERTY = "memwal-ops.job"
"""The transaction property with the job that made a version."""
WRITER_EPOCH = "writer_epoch"
"""The key of the writer epoch in a WAL entry's schema metadata (S0-032)."""
U64_MAX = 2**64 - 1
_BITS = 64
_V2_DIGITS = 20
DETACHED = 1 << 63
"""The bit that the number of every detached version has."""

_BIT_REVERSED = re.compile(r"[01]{64}")
_WAL_ENTRY = re.compile(r"([01]{64})\.(arrow|lance)")
_REGION_MANIFEST = re.compile(r"([01]{64})\.binpb")
# The temporary file that pylance writes on a local file system, before it links it to its name if that is free.
_STAGED = re.compile(r"[01]{64}\.(?:arrow|lance|binpb)\.tmp\.[0-9a-f]{32}")
_GENERATION = re.compile(r"([0-9a-f]{8})_gen_([1-9][0-9]{0,19})")
# The temporary file of a version that pylance leaves to a namespace to publish.
_STAGED_VERSION = re.compile(r"([^-]+\.manifest)-[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}")
_VERSION = re.compile(r"(d?)(0|[1-9][0-9]{0,19}|[0-9]{20})\.manifest", re.ASCII)


def bit_reversed(number: int) -> str:
    """64 binary digits, lowest bit first: 5 is ``1010…0`` (S0-034). Raises ``ValueError`` outside u64."""
    if not 0 <= number <= U64_MAX:
        raise ValueError(f"{number} is not an unsigned 64-bit number")
    return format(number, f"0{_BITS}b")[::-1]


def parse_bit_reversed(text: str) -> int | None:
    """The number of a bit-reversed name; None for any other text."""
    return int(text[::-1], 2) if _BIT_REVERSED.fullmatch(text) else None


def region_folder(region_id: UUID) -> str:
    """The folder of a region, relative to the table's root (S0-033)."""
    return f"{MEM_WAL_FOLDER}/{region_id}"


def log_folder(generation: str) -> str:
    """Folder of the log entries of the region that has the generation at a folder, relative to the table's root."""
    return f"{generation.rpartition('/')[0]}/wal"


def region_manifest_name(version: int) -> str:
    """File name of a region manifest version (S0-056)."""
    return f"{bit_reversed(version)}.binpb"


def parse_region_manifest_name(name: str) -> int | None:
    """The version of a region manifest's file name; None for any other file, and for version 0."""
    match = _REGION_MANIFEST.fullmatch(name)
    return (parse_bit_reversed(match[1]) or None) if match else None


class WalEntryName(NamedTuple):
    """The name of a WAL entry. Its suffix depends on the layout."""

    entry_id: int
    suffix: str


def wal_entry_name(entry_id: int, suffix: str) -> str:
    """File name of a WAL entry (S0-034); ``suffix`` is ``lance`` (region layout) or ``arrow`` (shard)."""
    return f"{bit_reversed(entry_id)}.{suffix}"


def parse_wal_entry_name(name: str) -> WalEntryName | None:
    """Parse a WAL entry's file name; None for any other file."""
    match = _WAL_ENTRY.fullmatch(name)
    return WalEntryName(int(match[1][::-1], 2), match[2]) if match else None


def is_staged_name(name: str) -> bool:
    """Whether it is a temporary file of a WAL entry or a region manifest (local files only)."""
    return _STAGED.fullmatch(name) is not None


class GenerationDir(NamedTuple):
    """The name of a generation's directory (S0-037). Its prefix is random."""

    prefix: str
    generation: int


def parse_generation_dir(name: str) -> GenerationDir | None:
    """Parse the name of a generation's directory; None for any other name."""
    match = _GENERATION.fullmatch(name)
    return GenerationDir(match[1], int(match[2])) if match and int(match[2]) <= U64_MAX else None


class NamingScheme(enum.Enum):
    """How a table names its version manifests (S3-046)."""

    V1 = "V1"
    V2 = "V2"


class VersionName(NamedTuple):
    """The version in a manifest's file name. ``scheme`` is None for a detached one, whose name is of neither scheme."""

    version: int
    scheme: NamingScheme | None

    @property
    def detached(self) -> bool:
        """Whether it is a detached version, which readers that open the newest version do not find."""
        return self.scheme is None


def version_manifest_name(version: int, scheme: NamingScheme) -> str:
    """File name of a table version's manifest below ``_versions/``."""
    if scheme is NamingScheme.V1:
        return f"{version}.manifest"
    return f"{U64_MAX - version:0{_V2_DIGITS}d}.manifest"


def detached_manifest_name(version: int) -> str:
    """File name of a detached version's manifest."""
    return f"d{version}.manifest"


def parse_version_manifest_name(name: str) -> VersionName | None:
    """Parse the name of a file below ``_versions/``; None if it is not a manifest.

    Twenty digits are V2: a V1 name of that length would be a version above 10^19.
    """
    match = _VERSION.fullmatch(name)
    number = U64_MAX + 1 if match is None else int(match[2])
    if match is None or number > U64_MAX:
        return None
    if match[1]:
        return VersionName(number, None)
    if len(match[2]) == _V2_DIGITS:
        return VersionName(U64_MAX - number, NamingScheme.V2)
    return VersionName(number, NamingScheme.V1)


def parse_staged_manifest_name(name: str) -> VersionName | None:
    """Parse the name of a manifest that waits to be published under its number; None for any other file."""
    match = _STAGED_VERSION.fullmatch(name)
    return parse_version_manifest_name(match[1]) if match else None


def naming_scheme(names: Iterable[str]) -> NamingScheme | None:
    """The naming scheme of all manifests; None if there is no manifest.

    Raises ``TableCorruptError``: both schemes in one table (S3-047): readers would disagree on the newest version.
    """
    schemes: dict[NamingScheme, str] = {}
    for name in names:
        parsed = parse_version_manifest_name(name)
        if parsed is not None and parsed.scheme is not None:
            schemes.setdefault(parsed.scheme, name)
    if len(schemes) > 1:
        raise TableCorruptError(
            f"Version manifests are named by both schemes ({' and '.join(sorted(schemes.values()))}); "
            "readers would disagree on the newest version.",
            remedy="Find out which files were copied in, and move them out of _versions/; then run the command again.",
        )
    return next(iter(schemes), None)


_LAYOUT = "memwal-ops.layout"
_BEFORE = "memwal-ops.layout-before"


class LayoutRecord(NamedTuple):
    """The record of a migration between the current layouts, by their names.

    ``before``: the one that a rollback restores; None: the last migration was rolled back.
    """

    layout: str
    before: str | None


def layout_record(manifest: table_pb2.Manifest) -> LayoutRecord | None:
    """The record of a version; None: the table was not migrated between the current layouts."""
    if _LAYOUT not in manifest.config:
        return None
    return LayoutRecord(manifest.config[_LAYOUT], dict(manifest.config).get(_BEFORE))


def with_layout_record(manifest: table_pb2.Manifest, record: LayoutRecord | None) -> table_pb2.Manifest:
    """A copy of the manifest with that record; None: with none."""
    changed = deepcopy(manifest)
    changed.config.pop(_LAYOUT, None)
    changed.config.pop(_BEFORE, None)
    if record is None:
        return changed
    changed.config[_LAYOUT] = record.layout
    if record.before is not None:
        changed.config[_BEFORE] = record.before
    changed.writer_feature_flags |= TABLE_CONFIG  # releases that would drop it must not write
    return changed
