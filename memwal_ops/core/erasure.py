"""Report what still holds rows that must be gone, and decide from that how far their erasure is. Shared by all formats.

A deleted row is in many places: data files, indexes, old versions, the log, files of killed runs. Each is a
:class:`RowHolder`. A run removes those that it may; those that another program or a person keeps are named. Indexes
elsewhere that follow a table have its rows, so each is recorded at the table, for its erase to know them.
"""

from __future__ import annotations

import enum
import os
import platform
import uuid
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from datetime import datetime
from typing import Any

from memwal_ops import errors
from memwal_ops.core.documents import document
from memwal_ops.storage.api import Store
from memwal_ops.storage.clock import PLANNED_BY
from memwal_ops.storage.records import decode_record, encode_record
from memwal_ops.text import counted, counted_as, paragraph, size_text

FOLDER = "_mem_wal_ops/followers"


@dataclass(frozen=True)
class Follower:
    """An index that follows a table.

    ``host``: the machine that wrote this. ``erased``: the version of the table that it had when an erasure left no
    deleted row in it; 0: never.
    """

    uuid: str
    folder: str
    host: str
    erased: int = 0

    @property
    def path(self) -> str:
        """The record's path in the table."""
        return f"{FOLDER}/{self.uuid}.json"

    @property
    def is_here(self) -> bool:
        """Whether its folder is on this machine."""
        return os.path.isdir(self.folder)


def record_follower(store: Store, uuid: str, folder: str, erased: int | None = None) -> None:
    """Record an index at the table that it follows, if that is not recorded yet; or that it was erased."""
    known = next((follower for follower in read_followers(store) if follower.uuid == uuid), None)
    kept = erased if erased is not None else 0 if known is None else known.erased
    wanted = Follower(uuid, os.path.abspath(folder), platform.node(), kept)
    if wanted != known:
        store.put(wanted.path, encode_record(asdict(wanted)))


def read_followers(store: Store) -> Iterator[Follower]:
    """The indexes that follow a table. Raises ``InvalidFormatError`` if a record cannot be read."""
    for meta in store.list(FOLDER):
        try:
            record = decode_record(store.get(meta.path), meta.path)
            follower = Follower(str(record["uuid"]), str(record["folder"]), str(record["host"]), int(record["erased"]))
        except errors.ObjectNotFoundError:
            continue  # deleted meanwhile
        except (ValueError, KeyError, TypeError) as error:
            raise errors.InvalidFormatError(
                f"{meta.path} is not a readable record of an index that follows the table: {error}",
                remedy="Delete it: the next catchup of the index writes it again.",
            ) from error
        yield follower


_SHOWN = 12


class EraseDecision(enum.StrEnum):
    """The outcome: nothing is left (``erased``), or why something is."""

    PLANNED = "planned"
    WAITING = "waiting"
    ERASED = "erased"
    HELD = "held"


@dataclass(frozen=True, slots=True)
class RowHolder:
    """Something that may hold a row which must be gone.

    Attributes:
        kind: ``fragment``, ``index``, ``version``, ``tag``, ``generation`` ...
        why: how it holds the row, and who must act if no run can remove it.
        until: when a run may remove it; None: at once.
        blocks: a run never removes it: a person or another program keeps it.
    """

    kind: str
    name: str
    why: str
    until: datetime | None = None
    blocks: bool = False

    def to_json(self) -> dict[str, Any]:
        """The entry of ``holders``."""
        until = None if self.until is None else self.until.isoformat(timespec="seconds")
        return {"kind": self.kind, "name": self.name, "because": self.why, "until": until, "blocks": self.blocks}

    def describe(self) -> str:
        """One line for people."""
        when = "" if self.until is None else f" (until {self.until:%Y-%m-%d %H:%M} UTC)"
        return f"{'HELD BY ' if self.blocks else ''}{self.kind} {self.name}: {self.why}{when}"


@dataclass(slots=True)
class ByteScan:
    """What was looked for, where, and what was found.

    Attributes:
        values: how many forms of values were looked for.
        too_short: how many values could not be told apart from others.
        staying: how many were found that rows which stay have, too.
        objects: how many objects were read, and ``bytes`` of them.
        decoded: how many of these were decoded, too.
        not_decoded: how many of these were not decoded in whole, by the reason.
        ignored_columns: columns whose values were not looked for.
        holders: the objects that have such a value.
    """

    values: int
    too_short: int = 0
    beyond: int = 0
    staying: int = 0
    objects: int = 0
    bytes: int = 0
    decoded: int = 0
    not_decoded: Counter[str] = field(default_factory=Counter)
    ignored_columns: tuple[str, ...] = ()
    holders: list[RowHolder] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """The entry ``byte_scan`` of a report and of a certificate."""
        return document(self, "holders")

    def describe(self) -> str:
        """One paragraph for people."""
        if not self.values:
            return "Nothing was looked for in bytes: of the rows, this run saw no value that is long enough."
        text = f"Looked for {counted(self.values, 'value')} of erased rows in {counted(self.objects, 'object')} "
        text += f"({size_text(self.bytes)}), {self.decoded:,} of them decoded, too."
        if self.too_short or self.beyond:
            text += f" Not looked for: {self.too_short:,} too short to be told apart, {self.beyond:,} too many."
        for why, number in self.not_decoded.items():
            text += f" Not decoded in whole: {counted(number, 'object')}, {why}."
        return paragraph(text, hanging="  ")


@dataclass(kw_only=True)
class EraseReport:
    """The report of an erasure.

    Attributes:
        applied: whether the run changed anything it could; False: it only planned.
        living: rows that match and are still there.
        done: what the run did, by name: ``rows_deleted``, ``fragments_rewritten`` ...
        not_seen: where no command can look.
        byte_scan: what was looked for in the bytes that stay; None: nothing yet, as something is still held.
    """

    applied: bool
    holders: tuple[RowHolder, ...]
    version: int
    living: int = 0
    done: dict[str, int] = field(default_factory=dict)
    not_seen: tuple[str, ...] = ()
    certificate: str | None = None
    byte_scan: ByteScan | None = None
    warnings: tuple[str, ...] = ()
    seconds: float = 0.0
    run_id: str = field(default_factory=lambda: str(uuid.uuid4()))

    @property
    def decision(self) -> EraseDecision:
        """The outcome in one word."""
        if any(holder.blocks for holder in self.holders):
            return EraseDecision.HELD
        if not self.holders and not self.living:
            return EraseDecision.ERASED
        waits = bool(self.holders) and all(holder.until is not None for holder in self.holders)
        return EraseDecision.WAITING if self.applied or (waits and not self.living) else EraseDecision.PLANNED

    @property
    def exit_code(self) -> int:
        """63 if something holds the rows that no run removes."""
        return errors.HeldError.exit_code if self.decision is EraseDecision.HELD else 0

    @property
    def until(self) -> datetime | None:
        """When the last of them may be removed; None: nothing waits."""
        return max((holder.until for holder in self.holders if holder.until is not None), default=None)

    def to_json(self, *, limit: int = 100) -> dict[str, Any]:
        """The document of ``erase --json``."""
        counts: dict[str, int] = {}
        for holder in self.holders:
            counts[holder.kind] = counts.get(holder.kind, 0) + 1
        return {
            "decision": self.decision.value,
            "apply": self.applied,
            "living": self.living,
            "done": dict(self.done),
            "counts": counts,
            "holders": [
                holder.to_json() for holder in sorted(self.holders, key=lambda holder: not holder.blocks)[:limit]
            ],
            "truncated": len(self.holders) > limit,
            "until": None if self.until is None else self.until.isoformat(timespec="seconds"),
            "certificate": self.certificate,
            "byte_scan": None if self.byte_scan is None else self.byte_scan.to_json(),
            "not_seen": list(self.not_seen),
            "version": self.version,
            "warnings": list(self.warnings),
            "seconds": round(self.seconds, 6),
            "run_id": self.run_id,
        }

    def describe(self) -> str:
        """The report as text for people."""
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        yield paragraph(f"{self.decision}: {self._headline()}")
        if self.done:
            words = [(number, name.replace("_", " ").rpartition(" ")) for name, number in self.done.items()]
            yield paragraph(", ".join(f"{counted_as(number, noun)} {verb}" for number, (noun, _, verb) in words))
        for holder in sorted(self.holders, key=lambda holder: not holder.blocks)[:_SHOWN]:
            yield paragraph(holder.describe(), indent="  ", hanging="    ")
        if len(self.holders) > _SHOWN:
            yield f"  and {len(self.holders) - _SHOWN:,} more; see --json."
        if self.certificate is not None:
            yield f"Certificate: {self.certificate}"
        if self.byte_scan is not None:
            yield self.byte_scan.describe()
        if self.not_seen:
            yield paragraph(f"Not seen from here: {'; '.join(self.not_seen)}.", hanging="  ")
        for warning in self.warnings:
            yield paragraph(f"WARNING: {warning}", hanging="  ")
        if self.decision is EraseDecision.PLANNED:
            yield PLANNED_BY
            yield "Add --apply to do it."

    def _headline(self) -> str:
        left = counted(len(self.holders), "place")
        match self.decision:
            case EraseDecision.ERASED:
                return "nothing that is listed here holds such a row."
            case EraseDecision.HELD:
                return f"{left} may hold such rows, and some stay until someone acts."
            case EraseDecision.WAITING:
                when = "" if self.until is None else f", until {self.until:%Y-%m-%d %H:%M} UTC"
                return f"{left} may hold such rows{when}. The next run continues."
            case _:
                return f"{counted(self.living, 'living row')} would be deleted; {left} may hold such rows."
