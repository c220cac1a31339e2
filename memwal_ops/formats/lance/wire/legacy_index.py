"""The details of the MemWAL index of Lance 0.31 to 1.x: a list of MemWALs, each with a state and an owner (S1-006).

Current releases use the same type URL for other details, and give field 1 another meaning; the first byte differs.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from google.protobuf.message import DecodeError

from memwal_ops.errors import InvalidFormatError, TableCorruptError
from memwal_ops.formats.lance.wire._pb import memwal_pb2 as pb
from memwal_ops.formats.lance.wire.u64_segment import EMPTY, U64Segment, decode_segment, encode_segment

if TYPE_CHECKING:
    from collections.abc import Iterable


class State(enum.IntEnum):
    """The life of a MemWAL, in its order (S1-017 to S1-020)."""

    OPEN = 0
    SEALED = 1
    FLUSHED = 2
    MERGED = 3


@dataclass(frozen=True, slots=True, order=True)
class MemWalId:
    """A MemWAL: a generation of a region; both are unique together (S1-007). Generations begin at 0."""

    region: str
    generation: int

    def __str__(self) -> str:
        return f"generation {self.generation} of region {self.region!r}"


@dataclass(frozen=True, slots=True)
class MemWal:
    """One MemWAL (S1-010 to S1-024).

    Attributes:
        id: its region and generation.
        mem_table_location: where its rows are for readers, likely ``memory://...``.
        wal_location: the root of its log; never changes.
        wal_entries: the ids of its log's entries, from 0 on; others at the root are not part of it.
        state: see :class:`State`.
        owner_id: who may change it.
        last_updated_dataset_version: the table version that changed it last.
        source: the message that it was decoded from, with fields that this release does not define.
    """

    id: MemWalId
    mem_table_location: str
    wal_location: str
    wal_entries: U64Segment = EMPTY
    state: State = State.OPEN
    owner_id: str = ""
    last_updated_dataset_version: int = 0
    source: bytes = field(default=b"", repr=False, compare=False)


def decode_mem_wals(details: bytes) -> tuple[MemWal, ...]:
    """Decode legacy details, in their stored order.

    Raises:
        TableCorruptError: no protobuf, a MemWAL without an id or with a duplicate one, an unknown state,
            entries that do not decode.
    """
    message = pb.LegacyMemWalIndexDetails()
    try:
        message.ParseFromString(details)
    except (DecodeError, UnicodeDecodeError) as error:
        raise TableCorruptError(
            f"The details of the legacy MemWAL index are not a protobuf message: {error}"
        ) from error
    found = tuple(map(decode_mem_wal, message.mem_wal_list))
    ids = [one.id for one in found]
    if len({*ids}) < len(ids):
        twice = next(one for one in ids if ids.count(one) > 1)
        raise TableCorruptError(f"The legacy MemWAL index lists {twice} twice.")
    return found


def decode_mem_wal(message: pb.LegacyMemWal) -> MemWal:
    """Decode one MemWAL. Raises as :func:`decode_mem_wals`."""
    if not message.HasField("id"):
        raise TableCorruptError("The legacy MemWAL index lists a MemWAL without an id.")
    mem_wal_id = MemWalId(message.id.region, message.id.generation)
    try:
        state = State(message.state)
        entries = decode_segment(message.wal_entries)
    except (ValueError, InvalidFormatError) as error:
        raise TableCorruptError(f"The legacy MemWAL index cannot be read at {mem_wal_id}: {error}") from error
    return MemWal(
        mem_wal_id,
        message.mem_table_location,
        message.wal_location,
        entries,
        state,
        message.owner_id,
        message.last_updated_dataset_version,
        message.SerializeToString(deterministic=True),
    )


def encode_mem_wals(mem_wals: Iterable[MemWal]) -> bytes:
    """The details that list these MemWALs; empty for none, which every release reads as an empty MemWAL index."""
    return pb.LegacyMemWalIndexDetails(mem_wal_list=map(encode_mem_wal, mem_wals)).SerializeToString(deterministic=True)


def encode_mem_wal(mem_wal: MemWal) -> pb.LegacyMemWal:
    """The message of one MemWAL; entries that did not change keep the bytes of their encoding."""
    message = pb.LegacyMemWal()
    message.ParseFromString(mem_wal.source)
    message.id.region, message.id.generation = mem_wal.id.region, mem_wal.id.generation
    message.mem_table_location, message.wal_location = mem_wal.mem_table_location, mem_wal.wal_location
    if not message.wal_entries or decode_segment(message.wal_entries) != mem_wal.wal_entries:
        message.wal_entries = encode_segment(mem_wal.wal_entries)
    message.state = mem_wal.state.value  # type: ignore[assignment]  # the stub wants its own enum; the wire has a number
    message.owner_id = mem_wal.owner_id
    message.last_updated_dataset_version = mem_wal.last_updated_dataset_version
    return message
