"""Find what of the log holds rows that must be gone, and why it is still there; empty the entries that must stay.

Generations and entries are deleted by gc, with its proofs; its gates say why one is kept, and until when. An entry that
is kept as a fence post alone need not have its rows: only its place and its writer epoch matter.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cache, partial
from typing import TYPE_CHECKING, Any
from uuid import UUID

import pyarrow as pa

from memwal_ops.core.candidates import Gate, Verdict
from memwal_ops.core.erasure import RowHolder
from memwal_ops.errors import InvalidFormatError, MemwalOpsError, ObjectNotFoundError
from memwal_ops.formats.lance.files.datasets import lance_errors, literal, open_dataset, plain
from memwal_ops.formats.lance.generations.region_identity import region_values_of
from memwal_ops.formats.lance.jobs.gc import job as gc
from memwal_ops.formats.lance.jobs.gc.evidence import CandidateKind, LanceCandidate
from memwal_ops.formats.lance.options import EraseOptions, GcOptions
from memwal_ops.formats.lance.wire.names import MEM_WAL_FOLDER, parse_generation_dir, parse_wal_entry_name
from memwal_ops.formats.lance.wire.region_manifest import encode_field, field_type

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping
    from datetime import datetime

    from memwal_ops.formats.lance.jobs.erase.target import Target
    from memwal_ops.formats.lance.table import Table
    from memwal_ops.storage.api import ObjectMeta

_POST = "fence post"
_NOT_MERGED = "not merged"
_STAYS = (_NOT_MERGED, "not flushed", "generation ", "a base version", "region manifest version")
_NEXT_RUN = timedelta(minutes=15)
_NAMED = (
    "its manifests have a value of {} of such rows, by which the table's region spec routes them: copy the rows into a "
    "table whose spec has a bucket of it instead, and delete this one"
)
CLEAN = "it was read: it has no such row"


def identity_columns(table: Table) -> dict[str, set[Any]]:
    """The columns whose values the table's region specs store as they are; each without a value."""
    names = {schema_field.id: schema_field.name for schema_field in table.manifest.manifest.fields}
    specs = table.memwal.region_specs if table.memwal else ()
    sources = (
        spec_field.source_ids[0] for spec in specs for spec_field in spec.fields if spec_field.transform == "identity"
    )
    return {names[source]: set() for source in sources if source in names}


@dataclass
class LogSurvey(ABC):
    """What of a log holds such rows, in any layout.

    Attributes:
        merged: whether this run merged already: what is not merged now is blocked.
        objects: every object of it, and why it cannot hold such a row; None: it may.
    """

    table: Table
    target: Target
    options: GcOptions
    merged: bool = False
    objects: list[tuple[ObjectMeta, str | None]] = field(default_factory=list)

    @property
    def numbers(self) -> list[tuple[UUID, int]]:
        """Region and number of the generations that hold such rows."""
        return []

    @abstractmethod
    def versions(self, reading: Mapping[tuple[UUID, int], list[int]]) -> Mapping[int, str]:
        """Versions whose readers need a part of the log that holds such rows; of generations, ``reading`` has them."""

    @abstractmethod
    def holders(self, versions_until: datetime | None) -> Iterable[RowHolder]:
        """What holds such rows, with what keeps it; versions may expire at ``versions_until``."""

    def empty_posts(self) -> int:
        """Empty the entries that must stay and need not have their rows; return how many."""
        return 0

    def _why_file(self, meta: ObjectMeta, search: Callable[[], str | None]) -> str | None:
        """Why a file of the log may hold such a row, searched once in a run; None: it has none, or it is gone."""

        def why() -> str | None:
            try:
                return search()
            except ObjectNotFoundError:
                return None
            except InvalidFormatError as error:
                return f"it cannot be read: {error}"

        return self.target.once((meta.path, meta.size, meta.last_modified), why)


def gc_options(options: EraseOptions) -> GcOptions:
    """The grace times of gc: no longer than the versions have to be old, and no shorter than is safe."""

    def bound(default: timedelta, name: str) -> timedelta:
        safe, _ = GcOptions.minimums[name]
        return min(default, options.older_than if options.allow_unsafe else max(options.older_than, safe))

    default = GcOptions()
    return GcOptions(
        reader_grace=bound(default.reader_grace, "reader_grace"),
        orphan_min_age=bound(default.orphan_min_age, "orphan_min_age"),
        drain_after=bound(default.drain_after, "drain_after"),
        allow_unsafe=options.allow_unsafe,
    )


@dataclass
class RegionLogs(LogSurvey):
    """What of the logs of regions holds such rows, as of one listing.

    Attributes:
        now: by the store's clock.
        entries: log entries that hold them, by path.
        generations: generation folders that do, with the reason.
        unknown: objects that are not of a log.
    """

    now: datetime = field(kw_only=True)
    entries: dict[str, str] = field(default_factory=dict)
    generations: dict[str, str] = field(default_factory=dict)
    unknown: list[str] = field(default_factory=list)
    _written: dict[str, datetime] = field(default_factory=dict)

    def read(self) -> RegionLogs:
        """List the log, and search all of it."""
        listed = list(self.table.store.list(MEM_WAL_FOLDER))
        folders: dict[str, list[ObjectMeta]] = {}
        for meta in listed:
            parts = meta.path.split("/")
            if len(parts) > 3 and parse_generation_dir(parts[2]) is not None:  # noqa: PLR2004 - _mem_wal/REGION/NAME/FILE
                folders.setdefault("/".join(parts[:3]), []).append(meta)
        self._written |= {folder: min(file.last_modified for file in files) for folder, files in folders.items()}
        spanning = self._first_after(folders)
        for folder, files in folders.items():
            search = partial(self._why_generation, folder, spanning)
            if (why := self.target.once((folder, len(files)), search)) is not None:
                self.generations[folder] = why
        for meta in listed:
            self.objects.append((meta, self._classify(meta)))
        return self

    def _classify(self, meta: ObjectMeta) -> str | None:
        region, _, rest = meta.path.removeprefix(f"{MEM_WAL_FOLDER}/").partition("/")
        first, _, name = rest.partition("/")
        if first == "manifest":
            return "it has no rows"
        if parse_generation_dir(first) is not None and name:
            folder = f"{MEM_WAL_FOLDER}/{region}/{first}"
            return None if folder in self.generations else CLEAN
        if first == "wal" and parse_wal_entry_name(name) is not None:
            self._written[meta.path] = meta.last_modified
            if (why := self._why_file(meta, partial(self._why_entry, UUID(region), meta))) is None:
                return CLEAN
            self.entries[meta.path] = why
            return None
        self.unknown.append(meta.path)
        return None

    def _why_generation(self, folder: str, spanning: set[str]) -> str | None:
        if self.target.before is not None:
            old = self._written[folder] < self.target.before or folder in spanning
            return "it may have rows that were deleted before that time" if old else None
        return self.target.search(cache(partial(open_dataset, self.table.location, folder)))

    def _first_after(self, folders: Iterable[str]) -> set[str]:
        """Per region the first generation that was flushed after the time: its rows may have been written before."""
        first: dict[str, tuple[int, str]] = {}
        for folder in folders:
            _, region, name = folder.split("/")
            parsed = parse_generation_dir(name)
            if parsed is not None and self.target.before is not None and self._written[folder] >= self.target.before:
                first[region] = min(first.get(region, (parsed.generation, folder)), (parsed.generation, folder))
        return {folder for _, folder in first.values()}

    def _why_entry(self, region_id: UUID, meta: ObjectMeta) -> str | None:
        layout = self.table.layout_of(region_id)
        if self.target.before is not None:
            old = meta.last_modified < self.target.before and layout.entry_rows(self.table.store, meta.path)
            return "it has rows from before that time" if old else None
        return self.target.matches(layout.entry_table(self.table.store, meta.path))

    def versions(self, reading: Mapping[tuple[UUID, int], list[int]]) -> Mapping[int, str]:
        """See the base class."""
        return {
            version: f"its readers need generation {generation} of region {region_id}"
            for (region_id, generation), versions in reading.items()
            for version in versions
        }

    @property
    def numbers(self) -> list[tuple[UUID, int]]:
        """See the base class."""
        numbers = []
        for folder in self.generations:
            _, region, name = folder.split("/")
            parsed = parse_generation_dir(name)
            assert parsed is not None  # noqa: S101 - found by its name
            numbers.append((UUID(region), parsed.generation))
        return numbers

    def holders(self, versions_until: datetime | None) -> Iterator[RowHolder]:
        """See the base class."""
        yield from self._regions()
        if not (self.entries or self.generations or self.unknown):
            return
        kept = {candidate.path: candidate for candidate in gc.candidates(self.table, self.options)}
        for folder, why in self.generations.items():
            yield self._holder("generation", folder, why, kept.get(folder), versions_until)
        for path, why in self.entries.items():
            yield self._holder("log entry", path, why, kept.get(path), versions_until)
        for path in self.unknown:
            yield RowHolder("unrecognized", path, "not a file of the log: move or delete it", blocks=True)

    def _regions(self) -> Iterator[RowHolder]:
        """Regions that are named by a value of such rows, which no row that stays has."""
        named: dict[tuple[str, pa.DataType], list[tuple[UUID, Any]]] = {}
        routing = self.target.routing
        looked_at = routing and (self.target.where is not None or any(routing.values()))
        for region_id in self.table.regions.region_ids if looked_at else ():
            try:
                region = region_values_of(self.table, self.table.region(region_id).latest())
            except MemwalOpsError as error:
                yield RowHolder(
                    "region", str(region_id), f"it may be named by a value of such rows: {error}", blocks=True
                )
                continue
            for spec_field, value in zip(region.spec.fields, region.values, strict=True) if region is not None else ():
                if value is not None and spec_field.transform == "identity":
                    column = str(spec_field.sources[0]), field_type(spec_field.result_type)
                    named.setdefault(column, []).append((region_id, value))
        for (name, kind), regions in named.items():
            values = pa.array([value for _, value in regions], kind)
            expected, of_rows = self.target.expects(name, values, self.table.schema), routing.get(name, set())
            for at, (region_id, value) in enumerate(regions):
                of_such_a_row = at in expected or of_rows & {value, encode_field(value, kind)}
                if of_such_a_row and not self._stays_in_use(name, values[at : at + 1]):
                    yield RowHolder("region", str(region_id), _NAMED.format(name), blocks=True)

    def _stays_in_use(self, column: str, value: pa.Array) -> bool:
        if (compared := literal(plain(value)[0], value.type)) is None:
            return False
        where = f"`{column}` = {compared} AND ({self.target.where or 'false'}) IS NOT TRUE"
        with lance_errors("read", self.table.location.uri):
            scanner = self.table.dataset.scanner(filter=where, columns=[], with_row_id=True, limit=1)
            return bool(scanner.to_table().num_rows)

    def _holder(
        self, kind: str, path: str, why: str, kept: LanceCandidate | None, versions_until: datetime | None
    ) -> RowHolder:
        if kept is None or kept.verdict is Verdict.DELETE:
            return RowHolder(kind, path, why)
        unmet = [gate for gate in kept.gates if not gate.met]
        if not self.merged and any(gate.text.startswith(_NOT_MERGED) for gate in unmet):
            return RowHolder(kind, path, f"{why}; it is merged first")
        if kept.kind == CandidateKind.UNKNOWN or any(self._stays(gate) for gate in unmet):
            return RowHolder(kind, path, f"{why}; {kept.why}", blocks=True)
        if unmet and all(gate.text.startswith(_POST) for gate in unmet):
            return RowHolder(kind, path, f"{why}; it is emptied, as its place must stay")
        until = max(self._until(path, gate, versions_until) for gate in unmet) if unmet else None
        return RowHolder(kind, path, f"{why}; {kept.why}", until)

    @staticmethod
    def _stays(gate: Gate) -> bool:
        """Whether a gate waits for an act, and not for a time or a version that expires."""
        if gate.until is not None or "has its rows in it" in gate.text:
            return False
        needed = gate.text.startswith("needed by") and "(memwal-ops expire)" not in gate.text
        return needed or gate.text.startswith(_STAYS)

    def _until(self, path: str, gate: Gate, versions_until: datetime | None) -> datetime:
        if gate.until is not None:
            return gate.until
        soon = self.now + max(self.options.reader_grace, _NEXT_RUN)
        if gate.text.startswith("merged less than"):
            return max(soon, self._written.get(path, self.now) + self.options.drain_after)
        if gate.text.startswith("needed by") and versions_until is not None:
            return max(soon, versions_until)
        return soon

    def empty_posts(self) -> int:
        """Write entries that are kept as fence posts alone without their rows, in place; return how many.

        No writer and no reader replays them any more, and no generation has its rows there. A writer that finds the
        place taken reads no more of it than the epoch. If gc deletes one meanwhile, an entry without rows is there
        again, which the next gc deletes.
        """
        if not self.entries:
            return 0
        emptied = 0
        for candidate in gc.candidates(self.table, self.options):
            unmet = [gate for gate in candidate.gates if not gate.met]
            if (
                candidate.path not in self.entries
                or not unmet
                or not all(gate.text.startswith(_POST) for gate in unmet)
            ):
                continue
            assert candidate.region_id is not None  # noqa: S101 - an entry is one of a region
            try:
                data = self.table.layout_of(candidate.region_id).emptied_entry(self.table.store, candidate.path)
            except MemwalOpsError:
                continue  # it stays, and is named
            self.table.store.put(candidate.path, data)
            emptied += 1
        return emptied
