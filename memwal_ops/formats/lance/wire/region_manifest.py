"""Decode and encode region manifests and their version hint; unknown fields are preserved."""

from __future__ import annotations

import enum
import json
import re
from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from google.protobuf.message import DecodeError

from memwal_ops.errors import RegionManifestCorruptError
from memwal_ops.formats.lance.wire._pb import memwal_pb2 as pb
from memwal_ops.formats.lance.wire.names import U64_MAX, region_manifest_name

if TYPE_CHECKING:
    from collections.abc import Collection
    from uuid import UUID

# Characters and names that are not allowed for a directory of the region's folder.
_NO_NAMES = frozenset({"", ".", ".."})
_NO_NAME = re.compile(r"[/\\\x00-\x1f\x7f]")


class RegionStatus(enum.Enum):
    """Whether a region accepts writes. A sealed one never does again."""

    ACTIVE = 0
    SEALED = 1


@dataclass(frozen=True, slots=True)
class FlushedGeneration:
    """One flushed generation as a manifest lists it (S0-049).

    ``path`` is a directory below the region's folder. The sizes, in bytes and rows, are recorded by the
    writer; None if its release did not record them.
    """

    generation: int
    path: str
    in_memory_bytes: int | None = None
    physical_rows: int | None = None
    primary_key_bytes: int | None = None

    @property
    def accounted_bytes(self) -> int | None:
        """The generation's size in the writer's memory, including its key index, in bytes; None if not recorded."""
        return None if self.in_memory_bytes is None else self.in_memory_bytes + (self.primary_key_bytes or 0)


@dataclass(frozen=True, slots=True)
class RegionManifest:
    """One version of a region's state (S0-040 to S0-049).

    ``flushed_generations`` ascend. ``region_fields`` are the values by which rows are routed to the region, as stored
    (``wire.region_fields``). ``source`` is the message that it was decoded from, including unknown fields. A field that
    is None is absent: no WAL entry was flushed, or seen, yet.
    """

    region_id: UUID
    version: int
    region_spec_id: int
    writer_epoch: int
    replay_after_wal_id: int | None
    wal_id_last_seen: int | None
    current_generation: int
    flushed_generations: tuple[FlushedGeneration, ...]
    status: RegionStatus
    region_fields: tuple[tuple[str, bytes], ...] = ()
    source: bytes = field(default=b"", repr=False, compare=False)

    @property
    def sealed(self) -> bool:
        """Whether the region accepts no more writers."""
        return self.status is RegionStatus.SEALED

    def unmerged(self, progress: int) -> tuple[FlushedGeneration, ...]:
        """The listed generations above a merge progress, ascending."""
        return tuple(one for one in self.flushed_generations if one.generation > progress)

    def next(self) -> RegionManifest:
        """The same state with the next version number."""
        return replace(self, version=self.version + 1)

    def without_generations(self, generations: Collection[int]) -> RegionManifest:
        """The same state without some flushed generations (S0-060, S0-183)."""
        kept = tuple(one for one in self.flushed_generations if one.generation not in generations)
        return replace(self, flushed_generations=kept)

    def with_wal_id_last_seen(self, entry_id: int) -> RegionManifest:
        """The same state with another hint to the end of the log (S0-172)."""
        return replace(self, wal_id_last_seen=entry_id)


def decode_region_manifest(data: bytes, *, region_id: UUID, version: int) -> RegionManifest:
    """Decode a manifest file and check that its region and version are those of its path.

    Raises:
        RegionManifestCorruptError: empty, truncated, not a protobuf message; another region or version
            than in its path; a generation listed twice, numbered 0 or above the current one; a path
            that is not a directory name; an unknown status.
    """
    message = pb.RegionManifest()
    try:
        message.ParseFromString(data)
    except DecodeError as error:
        raise _corrupt(region_id, version, "is truncated or not a protobuf message") from error
    if message.version != version:
        raise _corrupt(region_id, version, f"contains version {message.version} instead")
    if message.region_id.uuid != region_id.bytes:
        raise _corrupt(region_id, version, f"belongs to another region ({message.region_id.uuid.hex() or 'none'})")
    try:
        status = RegionStatus(message.status)
    except ValueError as error:
        raise _corrupt(region_id, version, f"has the unknown status {message.status}") from error
    return RegionManifest(
        region_id,
        version,
        message.region_spec_id,
        message.writer_epoch,
        message.replay_after_wal_id if message.HasField("replay_after_wal_id") else None,
        message.wal_id_last_seen if message.HasField("wal_id_last_seen") else None,
        message.current_generation,
        _generations(message, region_id, version),
        status,
        tuple((entry.field_id, entry.value) for entry in message.region_field_entries),
        data,
    )


def listed_as_stored(source: bytes) -> list[int]:
    """The numbers of the generations that a manifest lists, in the order of its bytes."""
    return [entry.generation for entry in pb.RegionManifest.FromString(source).flushed_generations]


def encode_region_manifest(manifest: RegionManifest) -> bytes:
    """Encode a manifest; unknown fields are copied from ``source``."""
    message = pb.RegionManifest()
    message.ParseFromString(manifest.source)
    known = {entry.generation: entry for entry in message.flushed_generations}
    entries = []
    for flushed in manifest.flushed_generations:
        number = flushed.generation
        entry = deepcopy(known[number]) if number in known else pb.FlushedGeneration(generation=number)
        entry.path = flushed.path
        _set_optional(entry, "in_memory_bytes", flushed.in_memory_bytes)
        _set_optional(entry, "physical_rows", flushed.physical_rows)
        _set_optional(entry, "primary_key_bytes", flushed.primary_key_bytes)
        entries.append(entry)
    message.version = manifest.version
    message.region_id.uuid = manifest.region_id.bytes
    message.region_spec_id = manifest.region_spec_id
    message.writer_epoch = manifest.writer_epoch
    _set_optional(message, "replay_after_wal_id", manifest.replay_after_wal_id)
    _set_optional(message, "wal_id_last_seen", manifest.wal_id_last_seen)
    message.current_generation = manifest.current_generation
    message.status = manifest.status.value  # type: ignore[assignment]  # the stub wants its own enum; the wire has a number
    if not manifest.source:  # set when the region is created, and never changed (S0-084)
        for name, value in manifest.region_fields:
            message.region_field_entries.add(field_id=name, value=value)
    del message.flushed_generations[:]
    message.flushed_generations.extend(entries)
    return message.SerializeToString(deterministic=True)


def encode_version_hint(version: int) -> bytes:
    """The bytes of ``version_hint.json`` (S0-052)."""
    return json.dumps({"version": version}).encode()


def decode_version_hint(data: bytes) -> int | None:
    """The version in a hint; None if it does not decode, since it is only a hint (S0-052)."""
    try:
        document = json.loads(data)
    except (ValueError, RecursionError):
        return None
    version = document.get("version") if isinstance(document, dict) else None
    return version if type(version) is int and 0 < version <= U64_MAX else None


def _generations(message: pb.RegionManifest, region_id: UUID, version: int) -> tuple[FlushedGeneration, ...]:
    """The generations, ascending. A writer that repeats a put after a lost response may list one twice; it counts once.

    A manifest may list a million: if they are ascending, as writers list them, duplicates are found without a set.
    """
    flushed: list[FlushedGeneration] = []
    last = 0
    for entry in message.flushed_generations:
        generation = entry.generation
        if generation <= last:
            return _in_any_order(message, region_id, version)
        last = generation
        flushed.append(_generation(entry, message, region_id, version))
    return tuple(flushed)


def _in_any_order(message: pb.RegionManifest, region_id: UUID, version: int) -> tuple[FlushedGeneration, ...]:
    seen: dict[int, pb.FlushedGeneration] = {}
    for entry in message.flushed_generations:
        if seen.setdefault(entry.generation, entry) != entry:
            raise _corrupt(region_id, version, f"lists generation {entry.generation} twice with different entries")
    return tuple(_generation(seen[generation], message, region_id, version) for generation in sorted(seen))


def _generation(
    entry: pb.FlushedGeneration, message: pb.RegionManifest, region_id: UUID, version: int
) -> FlushedGeneration:
    if not 0 < entry.generation < message.current_generation:
        raise _corrupt(
            region_id,
            version,
            f"lists generation {entry.generation}, but the current one is {message.current_generation}",
        )
    if entry.path in _NO_NAMES or _NO_NAME.search(entry.path):
        raise _corrupt(region_id, version, f"gives generation {entry.generation} the path {entry.path!r}")
    return FlushedGeneration(
        entry.generation,
        entry.path,
        entry.in_memory_bytes if entry.HasField("in_memory_bytes") else None,
        entry.physical_rows if entry.HasField("physical_rows") else None,
        entry.primary_key_bytes if entry.HasField("primary_key_bytes") else None,
    )


def _set_optional(message: pb.RegionManifest | pb.FlushedGeneration, name: str, value: int | None) -> None:
    if value is None:
        message.ClearField(name)
    else:
        setattr(message, name, value)


def _corrupt(region_id: UUID, version: int, what: str) -> RegionManifestCorruptError:
    name = region_manifest_name(version)
    return RegionManifestCorruptError(f"Region {region_id}: manifest version {version} {what} (file {name}).")
