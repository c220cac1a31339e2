"""Write again what a region has lost: entries of its log, generations, and versions of its manifest.

The log has each row before a generation has it, so that most losses are none: a generation whose entries are all there
is written again from them, and a version of the manifest that is missing between two others says nothing that the
newest does not say. What is really gone is named, in rows and keys where these can be read, and is left out only if an
operator accepts the loss: then an entry without rows takes the place of one that cannot be read, a generation has the
rows that are left, and a manifest is made from the newest one before it. Numbers and order stay as they were, so that
writers, readers and merges go on by their own rules.
"""

from __future__ import annotations

import secrets
from collections import deque
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING
from uuid import UUID

from memwal_ops import errors
from memwal_ops.core.quarantine import object_place
from memwal_ops.core.repair import Fix, FixAttempt, Keep, Loss, UnsafeError
from memwal_ops.formats.lance.files.blobs import lance_rows
from memwal_ops.formats.lance.files.datasets import readable
from memwal_ops.formats.lance.files.version_files import VERSIONS_FOLDER
from memwal_ops.formats.lance.generations.generation import generation_ref, open_generation
from memwal_ops.formats.lance.generations.generation_files import read_region_contents
from memwal_ops.formats.lance.generations.region_identity import RegionValues, table_spec
from memwal_ops.formats.lance.generations.wal import read_epochs, wal_entry_path, wal_references
from memwal_ops.formats.lance.indexes.snapshots import read_snapshot
from memwal_ops.formats.lance.jobs.repair.choices import region_place, without_number
from memwal_ops.formats.lance.log.memtable import build_indexes, generation_indexes
from memwal_ops.formats.lance.log.region_columns import RegionColumns, region_columns
from memwal_ops.formats.lance.log.region_files import WalEntry, put_generation, read_entry
from memwal_ops.formats.lance.log.region_log import LoggedColumns, read_shard_entry
from memwal_ops.formats.lance.regions.key_files import KEY_INDEX_PAGES
from memwal_ops.formats.lance.regions.specs import MANUAL, by_region, region_values
from memwal_ops.formats.lance.retention.schema_history import SchemaHistory
from memwal_ops.formats.lance.wire import region_manifest
from memwal_ops.formats.lance.wire.names import parse_generation_dir, parse_wal_entry_name, region_folder
from memwal_ops.formats.lance.wire.version_manifest import decode_version_manifest
from memwal_ops.storage.api import Store, results_of
from memwal_ops.text import counted, span_text

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from memwal_ops.core.verification import Inconsistency
    from memwal_ops.formats.lance.regions.manifests import RegionManifestStore
    from memwal_ops.formats.lance.table import Table
    from memwal_ops.formats.lance.wire.memwal_index import RegionRow

_CONCURRENT_READS = 8
_MAX_BYTES = 64 << 20
# Claims that the lost versions of a manifest may have made, where not even the hint counts them.
_UNKNOWN_CLAIMS = 1000
_DAMAGE = (
    errors.GenerationCorruptError,
    errors.GenerationMissingError,
    errors.InvalidFormatError,
    errors.ObjectNotFoundError,
)


def swap_region(
    table: Table, seen: region_manifest.RegionManifest, wanted: region_manifest.RegionManifest, keep: Keep
) -> FixAttempt:
    """Publish the next manifest with the content of ``wanted``, made from ``seen``."""
    place = region_place(table, seen.region_id)
    before, after = without_number(seen.source), without_number(region_manifest.encode_region_manifest(wanted))
    keep(place.name, before, after)
    return FixAttempt.DONE if place.swap(before, after) else FixAttempt.CONFLICT


# -- entries of the log


def entry_fix(table: Table, finding: Inconsistency) -> Fix[Table]:
    """Put an entry without rows in the place of one that is missing, or cannot be read.

    Every writer writes such entries when it claims a region, so that every replay goes over it to those behind it.
    """
    region, _, number = finding.about.partition("/")
    region_id, entry_id = UUID(region), int(number)
    if _last_entry(table, region_id) < entry_id:
        return _end_of_log(table, region_id)
    path = wal_entry_path(region_id, entry_id, table.layout_of(region_id))

    def make(table: Table, keep: Keep) -> FixAttempt:
        manifest = table.region(region_id).latest(checked=True)
        place = object_place(table.store, path)
        seen = place.read()
        if entry_id <= (manifest.replay_after_wal_id or 0) or _read(table, region_id, entry_id) is not None:
            return FixAttempt.GONE
        layout = table.layout_of(region_id)
        epoch = _epoch_before(table, manifest, entry_id)
        data = layout.empty_entry(region_columns(table).schema, epoch, path)
        keep(place.name, seen, data)
        return FixAttempt.DONE if place.swap(seen, data) else FixAttempt.CONFLICT

    entry = f"entry {entry_id} of the log of region {region_id}"
    return Fix(f"entry:{finding.about}", f"put an entry without rows in the place of {entry}", make, Loss(entry))


def _end_of_log(table: Table, region_id: UUID) -> Fix[Table]:
    """Lower the hint to the end of the log to an entry that exists: what was put behind it is gone."""
    last = _last_entry(table, region_id)

    def make(table: Table, keep: Keep) -> FixAttempt:
        manifest = table.region(region_id).latest(checked=True)
        end = _last_entry(table, region_id)
        if end >= (manifest.wal_id_last_seen or 0):
            return FixAttempt.GONE
        return swap_region(table, manifest, replace(manifest, wal_id_last_seen=end or None), keep)

    loss = Loss(f"all entries behind entry {last} of the log of region {region_id}")
    return Fix(f"end:{region_id}", f"let the log of region {region_id} end with entry {last}", make, loss)


def _last_entry(table: Table, region_id: UUID) -> int:
    """The last entry that exists, or up to which all are flushed."""
    flushed = table.region(region_id).latest(checked=True).replay_after_wal_id or 0
    return max((*read_region_contents(table.store, region_id, table.layout_of(region_id)).wal.ids, flushed))


def _epoch_before(table: Table, manifest: region_manifest.RegionManifest, entry_id: int) -> int:
    """The writer epoch of the nearest earlier entry that can be read, which may be flushed; 1 if there is none.

    A lower one than the true one is no risk: entries of earlier epochs are valid, and it has no rows.
    """
    ids = read_region_contents(table.store, manifest.region_id, table.layout_of(manifest.region_id)).wal.ids
    return next(reversed(_epochs(table, manifest.region_id, [known for known in ids if known < entry_id])), 1)


def _read(table: Table, region_id: UUID, entry_id: int) -> WalEntry | None:
    """An entry with its rows; None if it is missing, or cannot be read."""
    try:
        if table.layout_of(region_id).generations_in_log:
            return read_entry(table.store, region_id, entry_id)
        return read_shard_entry(table, region_id, entry_id)
    except errors.WalCorruptError:
        return None


# -- generations


def generation_fix(table: Table, finding: Inconsistency) -> Fix[Table]:
    """Write a generation that is lost or damaged again, from the log.

    Raises ``UnsafeError``: its files are what they were, and something else keeps it from being merged.
    """
    region, _, number = finding.about.partition("/")
    region_id, generation = UUID(region), int(number)
    planned = _remains(table, region_id, generation)
    if planned is None:
        raise UnsafeError("The generation can be read again.")

    def make(table: Table, keep: Keep) -> FixAttempt:
        remains = _remains(table, region_id, generation)
        if remains is None:
            return FixAttempt.GONE
        if remains.loss != planned.loss:
            raise UnsafeError(f"What can be read of it changed since it was planned. Lost now: {remains.loss}.")
        return swap_region(table, remains.manifest, remains.written(table), keep)

    text = f"write generation {generation} of region {region_id} again from its log, with {planned}"
    return Fix(f"generation:{finding.about}", text, make, planned.loss)


@dataclass(frozen=True)
class _Remains:
    """What is left of a generation. ``columns`` are those of its rows."""

    manifest: region_manifest.RegionManifest
    generation: int
    entries: tuple[WalEntry, ...]
    columns: RegionColumns
    loss: Loss | None

    def __str__(self) -> str:
        rows = counted(sum(entry.rows.num_rows for entry in self.entries), "row")
        return f"{rows} of {counted(len(self.entries), 'entry', 'entries')}"

    def written(self, table: Table) -> region_manifest.RegionManifest:
        """The manifest that lists it, in a folder of its own. A folder that is never listed is gc's."""
        region_id, path = self.manifest.region_id, f"{secrets.token_hex(4)}_gen_{self.generation}"
        copied = not table.layout_of(region_id).generations_in_log
        put_generation(table.store, table.location, region_id, path, self.entries, self.columns, copied=copied)
        if self.entries:
            build_indexes(table, f"{region_folder(region_id)}/{path}", generation_indexes(table, strict=False))
        size, rows = (sum(getattr(entry.rows, name) for entry in self.entries) for name in ("nbytes", "num_rows"))
        again = region_manifest.FlushedGeneration(self.generation, path, in_memory_bytes=size, physical_rows=rows)
        others = (flushed for flushed in self.manifest.flushed_generations if flushed.generation != self.generation)
        listed = sorted((*others, again), key=lambda flushed: flushed.generation)
        return replace(self.manifest, flushed_generations=tuple(listed))


def _remains(table: Table, region_id: UUID, generation: int) -> _Remains | None:
    """What is left of a generation; None: it is merged, or nothing is wrong with it.

    Raises:
        UnsafeError: its files are what they were, and something else keeps it from being merged; or its entries are of
            other columns than the table has now.
    """
    manifest = table.region(region_id).latest(checked=True)
    flushed = next((flushed for flushed in manifest.flushed_generations if flushed.generation == generation), None)
    merged = table.index.merged_generations.get(region_id, 0)
    if generation <= merged or (flushed is not None and _is_intact(table, manifest, flushed)):
        return None
    ids = _entries_of(table, manifest, generation, flushed, merged)
    read = results_of(lambda entry_id: _read(table, region_id, entry_id), ids, threads=_CONCURRENT_READS)
    entries = tuple(entry for entry in read if entry is not None and entry.rows.num_rows)
    bad = [entry_id for entry_id, entry in zip(ids, read, strict=True) if entry is None]
    loss = None
    expected = None if flushed is None else flushed.physical_rows
    rows = sum(entry.rows.num_rows for entry in entries)
    if bad or not ids or (expected is not None and rows != expected):
        where = f"entry {_spans(bad)} of its log" if bad else "the entries that its log does not have"
        what = f"what generation {generation} of region {region_id} had in {where}"
        keys = None if flushed is None else _lost_keys(table.store, region_id, flushed, entries)
        loss = Loss(what, None if expected is None else max(0, expected - rows), keys)
    return _Remains(manifest, generation, entries, _columns(table, region_id, entries), loss)


def _is_intact(
    table: Table, manifest: region_manifest.RegionManifest, flushed: region_manifest.FlushedGeneration
) -> bool:
    """Whether all of a generation can be read. Raises ``UnsafeError`` if it is not damaged, and refused."""
    try:
        opened = open_generation(table, generation_ref(manifest.region_id, flushed), SchemaHistory(table))
        opened.read_keys()
        deque(opened.read_rows(max_bytes=_MAX_BYTES), maxlen=0)
    except _DAMAGE:
        return False
    except errors.MemwalOpsError as error:
        raise UnsafeError(f"It is not damaged, but refused: {error} {error.remedy}") from error
    return True


def _entries_of(
    table: Table,
    manifest: region_manifest.RegionManifest,
    generation: int,
    flushed: region_manifest.FlushedGeneration | None,
    merged: int,
) -> Sequence[int]:
    """The ids of the entries that a generation was flushed from; none if that cannot be known any more.

    By what its own manifest refers to; else between the ends of the flush before and of its own, which the versions
    of the region's manifest show, and in the region layout what the generations around it refer to. Entries of
    generations that are merged may be among the first: they are merged again below the newer ones, and change nothing.
    """
    region_id, layout = manifest.region_id, table.layout_of(manifest.region_id)
    references = {
        flushed.generation: sorted(_references(table.store, region_id, flushed))
        for flushed in (manifest.flushed_generations if layout.generations_in_log else ())
    }
    if flushed is not None and references.get(generation):
        return references[generation]
    ends = {0: 0, manifest.current_generation - 1: manifest.replay_after_wal_id or 0}
    store = table.region(region_id)
    for version in store.versions():
        try:
            known = store.read(version)
        except errors.RegionManifestCorruptError:
            continue
        ends.setdefault(known.current_generation - 1, known.replay_after_wal_id or 0)
    for number, named in references.items():
        if named:
            ends.setdefault(number, named[-1])
            ends.setdefault(number - 1, named[0] - 1)
    if generation == merged + 1:
        ids = read_region_contents(table.store, region_id, layout).wal.ids
        ends.setdefault(merged, ids[0] - 1 if ids else 0)
    start, end = ends.get(generation - 1), ends.get(generation)
    return () if start is None or end is None else range(start + 1, end + 1)


def _references(store: Store, region_id: UUID, flushed: region_manifest.FlushedGeneration) -> frozenset[int]:
    try:
        return wal_references(store, f"{region_folder(region_id)}/{flushed.path}") or frozenset()
    except (errors.InvalidFormatError, errors.ObjectNotFoundError):
        return frozenset()


def _columns(table: Table, region_id: UUID, entries: Sequence[WalEntry]) -> RegionColumns:
    """The columns of the rows of a generation: of all its entries the same, as a writer flushes them.

    Where the rows are copied, the generation is as old as the copy. Timeline without the check of their age: a writer
    puts ``note``; ``note`` is dropped, and ``email`` added under its id; the generation is written again, and its
    notes are merged as e-mails.
    """
    own = region_columns(table)
    if not entries:
        return own
    known = LoggedColumns(table, region_id, own)
    columns = [known.of(entry, own) for entry in entries]
    if len({(laid.schema, laid.ids, laid is own) for laid in columns}) > 1:
        raise UnsafeError("Its entries have several sets of columns, as no generation of a writer has.")
    layout = table.layout_of(region_id)
    paths = (wal_entry_path(region_id, entry.entry_id, layout) for entry in entries)
    if not layout.generations_in_log and not all(map(known.is_current, paths)):
        raise UnsafeError("Columns of the table were dropped and added again since its entries were put.")
    return columns[0]


def _lost_keys(
    store: Store, region_id: UUID, flushed: region_manifest.FlushedGeneration, entries: Sequence[WalEntry]
) -> tuple[str, ...] | None:
    """The keys of the rows that are in a generation's key index, and not in these entries; None: unknown.

    The key index has the row addresses, and a generation has a fragment for each entry with rows.
    """
    folder = f"{region_folder(region_id)}/{flushed.path}"
    try:
        pages = lance_rows(store.get(f"{folder}/{KEY_INDEX_PAGES}"), "the key index")
        manifests = [meta.path for meta in store.list(f"{folder}/{VERSIONS_FOLDER}") if meta.path.endswith(".manifest")]
        fragments = decode_version_manifest(store.get(min(manifests))).manifest.fragments if manifests else ()
        pairs = [(row["values"], row["ids"]) for row in readable(pages.select(["values", "ids"]))]
    except (errors.InvalidFormatError, errors.ObjectNotFoundError, KeyError):
        return None
    names = {fragment.id: parse_wal_entry_name(fragment.files[0].path) for fragment in fragments if fragment.files}
    kept = {entry.entry_id for entry in entries}
    known = {at for at, name in names.items() if name is not None and name.entry_id in kept}
    if entries and not known:
        return None
    return tuple(sorted({str(value) for value, address in pairs if address >> 32 not in known}))


# -- versions of the manifest


def manifest_fix(table: Table, finding: Inconsistency) -> Fix[Table]:
    """Fill a gap between two versions of a region's manifest, or make the newest one again from what is left.

    Raises:
        UnsafeError: nothing is wrong any more, or what is left is of different regions, or shows no region values.
    """
    region_id = UUID(finding.about)
    missing = _gap(table.region(region_id))
    if missing:

        def fill(table: Table, keep: Keep) -> FixAttempt:
            del keep  # versions are added, and the others stay
            store = table.region(region_id)
            again = _gap(store)
            for version in again:
                data = region_manifest.encode_region_manifest(replace(_nearest(store, version), version=version))
                table.store.put_if_absent(store.path(version), data)
            return FixAttempt.DONE if again else FixAttempt.GONE

        what = f"{counted(len(missing), 'version')} of the manifest of region {region_id} again ({_spans(missing)})"
        return Fix(f"manifest:{region_id}", f"write {what}, with the content of the version before", fill)

    planned = _Restored.of(table, region_id)
    if planned is None:
        raise UnsafeError("The newest version can be read again.")

    def make(table: Table, keep: Keep) -> FixAttempt:
        restored = _Restored.of(table, region_id)
        if restored is None:
            return FixAttempt.GONE
        if restored != planned:
            raise UnsafeError("What is left of the region changed since it was planned.")
        return restored.publish(table, keep)

    return Fix(f"manifest:{region_id}", planned.text, make, planned.loss)


def _gap(store: RegionManifestStore) -> list[int]:
    """The missing versions below the newest; none if the newest itself is lost or damaged.

    Proof that nothing is lost: a version has all of a region's state, and each one was made from the one before it, so
    that the newest has what the missing ones said. With the content of the version before, they say that they changed
    nothing; readers and writers that walk from there come to the newest. A writer that stalled since before cannot take
    a missing number any more, where it would hide what was flushed after it.
    """
    versions = store.versions()
    missing = sorted({*range(versions[0], versions[-1])} - {*versions}) if versions else []
    if not missing or (store.hint() or 0) > versions[-1]:
        return []
    try:
        newest = store.read(versions[-1])
    except errors.RegionManifestCorruptError:
        return []
    before = _nearest(store, missing[0])
    for name in ("writer_epoch", "current_generation", "replay_after_wal_id"):
        if (getattr(before, name) or 0) > (getattr(newest, name) or 0):
            raise UnsafeError(f"{name} falls from version {before.version} to {newest.version}: one is of a copy.")
    return missing


def _nearest(store: RegionManifestStore, version: int) -> region_manifest.RegionManifest:
    """The version before, or the next one before that can be read; else the first one after it."""
    versions = store.versions()
    earlier = [known for known in versions if known < version]
    for known in (*reversed(earlier), *versions[len(earlier) :]):
        try:
            return store.read(known)
        except errors.RegionManifestCorruptError:
            continue
    raise UnsafeError("No version of the manifest can be read.")


@dataclass(frozen=True)
class _Restored:
    """A manifest that is made from the newest one that can be read, the log, and the folders of generations.

    Its epoch is above each that a lost version may have had, so that every writer that had the region is fenced.
    """

    manifest: region_manifest.RegionManifest
    text: str
    loss: Loss

    @classmethod
    def of(cls, table: Table, region_id: UUID) -> _Restored | None:
        """What is left; None: the newest version can be read, and no entry of the log is of a later writer.

        Raises ``UnsafeError``: the region has no version, and nothing else shows which rows are routed to it.
        """
        store = table.region(region_id)
        versions, hint = store.versions(), store.hint() or 0
        readable, damaged = _newest_readable(store, versions)
        base = _first(table, region_id) if readable is None else readable
        layout = table.layout_of(region_id)
        contents = read_region_contents(table.store, region_id, layout)
        after = base.replay_after_wal_id or 0
        entries = [entry_id for entry_id in contents.wal.ids if entry_id > after]
        last_epoch = max(_epochs(table, region_id, entries), default=0)
        newest = max((*versions, hint))
        if readable is not None and base.version == newest and last_epoch <= base.writer_epoch:
            return None
        merged = table.index.merged_generations.get(region_id, 0)
        current, listed = max(base.current_generation, merged + 1), [*base.flushed_generations]
        complete = entries[0] == after + 1 if entries else layout.generations_in_log
        if not complete:  # generations that were flushed since are not in the log: it was collected, or lost
            after = entries[0] - 1 if entries else after
            for number, path in _unlisted(contents.directories, current):
                listed.append(region_manifest.FlushedGeneration(number, path))
                current = number + 1
        lost = _UNKNOWN_CLAIMS if readable is None else min(newest - base.version, _UNKNOWN_CLAIMS)
        manifest = replace(
            base,
            version=damaged[0] if damaged else max(versions, default=hint) + 1,
            writer_epoch=max(base.writer_epoch, last_epoch) + lost + 1,
            replay_after_wal_id=after or None,
            wal_id_last_seen=max((base.wal_id_last_seen or 0, *entries)) or None,
            current_generation=current,
            flushed_generations=tuple(listed),
        )
        origin = "the MemWAL index and the log" if readable is None else f"version {base.version} and the log"
        flushed = f"{counted(len(entries), 'log entry', 'log entries')} from {after + 1} on"
        text = (
            f"write version {manifest.version} of the manifest of region {region_id} from {origin}, with "
            f"{counted(len(listed), 'generation')}; the next writer flushes {flushed}"
        )
        later = f" after version {base.version}" if readable is not None else ""
        what = f"what the manifest of region {region_id} recorded{later}, for example that it is sealed"
        return cls(manifest, text, Loss(what, 0 if complete else None))

    def publish(self, table: Table, keep: Keep) -> FixAttempt:
        """Put it, or replace the version that cannot be read; then write the hint, which may name a lost version."""
        store = table.region(self.manifest.region_id)
        place = object_place(table.store, store.path(self.manifest.version))
        seen, data = place.read(), region_manifest.encode_region_manifest(self.manifest)
        keep(place.name, seen, data)
        if not place.swap(seen, data):
            return FixAttempt.CONFLICT
        store.write_hint(self.manifest.version)
        return FixAttempt.DONE


def _newest_readable(
    store: RegionManifestStore, versions: Sequence[int]
) -> tuple[region_manifest.RegionManifest | None, list[int]]:
    """The newest version that can be read, and those above it that cannot, the newest first."""
    damaged: list[int] = []
    for version in reversed(versions):
        try:
            return store.read(version), damaged
        except errors.RegionManifestCorruptError:
            damaged.append(version)
    return None, damaged


def _epochs(table: Table, region_id: UUID, entries: Sequence[int]) -> list[int]:
    return [epoch for _, epoch in read_epochs(table, region_id, entries) if isinstance(epoch, int)]


def _unlisted(directories: Iterable[str], first: int) -> Iterator[tuple[int, str]]:
    """The generations from ``first`` on of which there is exactly one folder, ascending: number and folder.

    Of several, all but one are of flushes that failed, and nothing shows which.
    """
    folders: dict[int, list[str]] = {}
    for name in directories:
        parsed = parse_generation_dir(name)
        if parsed is not None and parsed.generation >= first:
            folders.setdefault(parsed.generation, []).append(name)
    yield from ((number, names[0]) for number, names in sorted(folders.items()) if len(names) == 1)


def _first(table: Table, region_id: UUID) -> region_manifest.RegionManifest:
    """The state of a region without a manifest: by the region snapshot; else without generations, for its first rows.

    Raises ``UnsafeError``: the table has region specs, and nothing shows the values by which rows are routed to it.
    """
    snapshot = read_snapshot(table)
    row = next((region for region in (snapshot.regions if snapshot else ()) if region.region_id == region_id), None)
    state = None if row is None else row.state
    values = _values(table, region_id, row)
    spec_id = MANUAL if values is None or values.spec.spec_id is None else values.spec.spec_id
    encoded = () if values is None else values.encoded()
    manifest = region_manifest.RegionManifest(
        region_id, 0, spec_id, 0, None, None, 1, (), region_manifest.RegionStatus.ACTIVE, encoded
    )
    if state is None:
        return manifest
    names = (
        "writer_epoch", "replay_after_wal_id", "wal_id_last_seen", "current_generation", "flushed_generations",
    )  # fmt: skip
    return replace(manifest, **{name: getattr(state, name) for name in names})


def _values(table: Table, region_id: UUID, row: RegionRow | None) -> RegionValues | None:
    """The values of a region by its row of the snapshot, or by the rows of its log; None: it belongs to no spec."""
    if row is not None and row.region_spec_id != MANUAL:
        spec = table_spec(table, row.region_spec_id)
        return RegionValues(spec, tuple(row.fields.get(field.field_id) for field in spec.fields))
    specs = [table_spec(table, stored.spec_id) for stored in table.index.region_specs]
    if row is not None or not specs:
        return None
    for entry_id in read_region_contents(table.store, region_id, table.layout_of(region_id)).wal.ids:
        entry = _read(table, region_id, entry_id)
        if entry is None or not entry.rows.num_rows:
            continue
        for spec in specs:
            groups = by_region(region_values(spec, entry.rows))
            values = RegionValues(spec, groups[0][0])
            if len(groups) == 1 and (len(specs) == 1 or values.has_region(region_id)):
                return values
    raise UnsafeError("Nothing shows the values by which rows are routed to the region: it has no row in its log.")


def _spans(numbers: Sequence[int]) -> str:
    """Numbers as text, runs of them as ``4-7``."""
    starts = [number for at, number in enumerate(numbers) if not at or numbers[at - 1] != number - 1]
    ends = [number for at, number in enumerate(numbers) if at + 1 == len(numbers) or numbers[at + 1] != number + 1]
    return ", ".join(span_text(start, end) for start, end in zip(starts, ends, strict=True))
