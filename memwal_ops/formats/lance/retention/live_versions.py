"""Track which versions of a table can be opened, and which generations they need.

A reader of base version N reads N's fragments and, on top of them, every generation that N has not merged. As long as N
can be opened, those generations must be kept (S0-189). N can be opened while its manifest exists: by its number, by a
tag, on a branch. A tag, a branch or a hold keeps a manifest from being expired; a generation is kept by the manifest.

A table that was opened at a branch's path has the versions of that branch. What keeps them is read from the root
of the table: the tags on the branch, and the branches that left from it, directly or not, with their versions. Those
of other branches never read its generations.

A table may have 50,000 versions. Only the merge progress of each matters, and only merges change it:
it is stored per region as the versions at which it changed. A version is immutable, so it is
read only once, however often the retention is refreshed.
"""

from __future__ import annotations

import copy
from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import pairwise, repeat
from typing import TYPE_CHECKING, Any, NamedTuple

from memwal_ops.core.holds import Hold, holds, holds_in_force
from memwal_ops.errors import InvalidFormatError, LegacyLayoutError, ObjectNotFoundError, TableCorruptError
from memwal_ops.formats.lance.files.datasets import REFS_FOLDER, branch_folder, lance_errors, list_tags
from memwal_ops.formats.lance.files.version_files import VERSIONS_FOLDER, decode_named, list_versions
from memwal_ops.formats.lance.indexes.base_indexes import covered_by
from memwal_ops.formats.lance.wire.memwal_index import MemWalIndex, decode_memwal_index, find_memwal_entry, is_legacy
from memwal_ops.formats.lance.wire.names import MEM_WAL_FOLDER
from memwal_ops.formats.lance.wire.version_manifest import index_section_by_ends, index_section_length, last_fields
from memwal_ops.storage.api import LinkError, ObjectMeta, Store, concurrently

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence
    from uuid import UUID

    from memwal_ops.formats.lance.table import Table
    from memwal_ops.formats.lance.wire._pb import table_pb2


_WHOLE = 64 << 10
_HEAD = 24 << 10
# The trailer, and in front of it the small fields of the manifest, unless the table has much metadata.
_TAIL = 8 << 10
# A search by one of these finds rows that the index does not cover only in the generations; with a scalar index,
# such rows are found by scanning the base.
_SEARCHED = ("VectorIndexDetails", "InvertedIndexDetails")


@dataclass(frozen=True, slots=True)
class VersionProgress:
    """The properties of a version that garbage collection depends on.

    Attributes:
        merged_generations: per region the last generation that the base table contains and that its vector and
            text indexes cover; a search by an index that is behind still reads the generations above.
        index_uuid: id of the MemWAL index entry, by which an external snapshot is named; None: no MemWAL index,
            so that readers do not read generations.
        points_into_mem_wal: whether files of its base table may be below ``_mem_wal/``.
        base_generations: per region the last generation that the base table contains, whatever indexes cover; None:
            the same as ``merged_generations``.
    """

    merged_generations: Mapping[UUID, int]
    index_uuid: UUID | None
    points_into_mem_wal: bool = False
    base_generations: Mapping[UUID, int] | None = None


def read_version_progress(store: Store, manifest: ObjectMeta) -> VersionProgress:
    """Read the progress: one request for a small manifest, 2 or 3 for a large one, 4 if an index is behind.

    Large manifests are read by ranges: a table with 10,000 fragments has manifests of
    megabytes, and garbage collection reads every version that can still be opened.

    Args:
        manifest: the version's file, from a listing.

    Raises:
        InvalidFormatError: the file does not decode.
        TableCorruptError: its MemWAL index does not decode.
        ObjectNotFoundError: the version was expired since.
    """
    if manifest.size > _WHOLE:
        progress = _by_ends(store, manifest)
        if progress is not None:
            return progress
    data = store.get(manifest.path)
    if not data:
        raise InvalidFormatError(f"{manifest.path} is empty.")
    version = decode_named(manifest.path, data)
    progress = _progress(version.indexes, version.manifest, version.manifest.fragments)
    assert progress is not None  # noqa: S101 - the fragments are given
    return progress


def _by_ends(store: Store, manifest: ObjectMeta) -> VersionProgress | None:
    """Read the progress from the two ends of the file; None if the whole file is needed."""
    head = store.get_range(manifest.path, 0, _HEAD)
    needed = index_section_length(head)
    if len(head) < needed <= manifest.size:
        head += store.get_range(manifest.path, len(head), needed - len(head))
    end = max(len(head), manifest.size - _TAIL)
    tail = head[manifest.size - _TAIL :] + store.get_range(manifest.path, end, manifest.size - end)
    decided, section = index_section_by_ends(head, tail)
    last = last_fields(tail)
    return None if not decided or last is None else _progress(section, last, None)


def _progress(
    section: table_pb2.IndexSection | None,
    manifest: table_pb2.Manifest,
    fragments: Collection[table_pb2.DataFragment] | None,
) -> VersionProgress | None:
    """The progress of a version by its index section and base paths; None: the fragments are needed, too."""
    points = any(MEM_WAL_FOLDER in base.path.split("/") for base in manifest.base_paths)
    entry = find_memwal_entry(section)
    # Readers of the legacy layout open no generation below _mem_wal/.
    if section is None or entry is None or is_legacy(entry):
        return VersionProgress({}, None, points)
    index = decode_memwal_index(entry)
    base, merged = index.merged_generations, _lowered(index, section, fragments)
    return None if merged is None else VersionProgress(merged, index.uuid, points, None if base == merged else base)


def _lowered(
    index: MemWalIndex, section: table_pb2.IndexSection, fragments: Collection[table_pb2.DataFragment] | None
) -> Mapping[UUID, int] | None:
    """Merge progress, lowered to what vector and text indexes cover: by catch-up entries, or by fragments (S0-188).

    None: the fragments are needed, and are not given.
    """
    merged = dict(index.merged_generations)
    segments: dict[str, list[table_pb2.IndexMetadata]] = {}
    for entry in section.indices:
        if entry.index_details.type_url.endswith(_SEARCHED):
            segments.setdefault(entry.name, []).append(entry)
    reached = dict(merged)
    for name, entries in segments.items():
        catchup = index.index_catchup.get(name, {})
        if all(catchup.get(region_id, 0) >= generation for region_id, generation in merged.items()):
            continue
        if fragments is None:
            return None
        covered = covered_by(entries)
        if all(fragment.id in covered for fragment in fragments):
            continue
        reached = {region_id: min(generation, catchup.get(region_id, 0)) for region_id, generation in reached.items()}
    return reached


_CONCURRENT_READS = 16
_CHUNK = 512
_SHOWN = 3
# No branch has an empty name.
_DETACHED = ""
_NO_VERSION = 1 << 64


class LiveVersions:
    """All versions of one table that can be opened, as of the last :meth:`refresh`.

    "Own" are the versions of the branch that was opened, mostly main.

    Args:
        progress: whether to read what versions have merged; without it none has, and none is ``unreadable``.

    Attributes:
        tags: branch (None: main) and version of each tag.
        holds: the reader holds in force, on own versions.
        newest: the newest own version; 0: none is listed.
    """

    def __init__(self, *, progress: bool = True) -> None:
        """Start empty, before the first :meth:`refresh`."""
        self._progress = progress
        self.tags: Mapping[str, tuple[str | None, int]] = {}
        self.holds: tuple[Hold, ...] = ()
        self.newest = 0
        self._own: str | None = None
        self._refs: Mapping[str, ObjectMeta] | None = None
        self._branches: Mapping[str, Any] = {}
        self._branched: Mapping[int, Sequence[str]] = {}
        self._trees: dict[str | None, _Tree] = {}

    def refresh(self, table: Table, now: datetime) -> None:
        """List the versions, tags, branches and holds again, and read the versions that are new.

        Args:
            table: any version of it.
            now: the time at which holds are in force, UTC.

        Requests: one listing per 1,000 own versions, and of each branch that left from them, one to four for each new
        version, a listing of holds and one of tags and branches, and what pylance needs to read these if they changed.

        Raises:
            InvalidUsageError: the root of the branch is not known.
            StorageError: the store failed; the retention must not be used.
        """
        self.read_names(table, now)
        root = table.branch.root
        own, detached = list_versions(table.store)
        self.newest = max(own, default=0)
        listed: dict[str | None, tuple[Store, Mapping[int, ObjectMeta]]] = {
            self._own: (table.store, own),
            _DETACHED: (table.store, detached),
        }
        for name in filter(self._left_from_own, self._branches):
            listed[name] = root, list_versions(root, f"{branch_folder(name)}/{VERSIONS_FOLDER}").numbered
        self._trees = {name: self._trees.get(name, _Tree()) for name in listed}
        for tree, (store, versions) in listed.items():
            self._trees[tree].refresh(store, versions, progress=self._progress)

    def read_names(self, table: Table, now: datetime) -> None:
        """List the tags, branches and holds alone: what :meth:`protected` returns."""
        self._own = table.branch.name
        self._read_refs(table)
        self.holds = holds_in_force(table.store, now)
        branched: dict[int, list[str]] = {}
        for name, branch in self._branches.items():
            if branch["parent_branch"] == self._own:
                branched.setdefault(int(branch["parent_version"]), []).append(name)
        self._branched = branched

    def _left_from_own(self, branch: str | None) -> bool:
        """Whether a branch left from an own version, or from a branch that did; true if that is not known."""
        passed = {self._own}
        while branch not in passed:
            passed.add(branch)
            if branch is None:
                return False
            branch = self._branches.get(branch, {"parent_branch": self._own})["parent_branch"]
        return len(passed) > 1

    def _read_refs(self, table: Table) -> None:
        """Read the tags and branches, unless a listing shows that their files are those that were read.

        The listing is made before the files are read, so a change between the two appears in the next listing.
        On local files a link may lead to a file that changes; there all are always read.
        """
        files = None
        root = table.branch.root
        if not root.root.startswith("/"):
            files = {meta.path: meta for meta in root.list(REFS_FOLDER)}
            if files == self._refs and all(meta.e_tag is not None for meta in files.values()):
                return
            if not files:
                self.tags, self._branches, self._refs = {}, {}, files
                return
        if self._refs is not None and table.location.expires:
            table = table.newest()  # pylance keeps the credentials with which it opened
        self.tags = tags_of(table)
        with lance_errors("list the branches of", table.location.uri):
            self._branches = table.handle.get().branches.list()
        self._refs = files

    @property
    def unreadable(self) -> Mapping[str, str]:
        """The reason for each version file that cannot be read. Such a version may need every generation."""
        reasons = {path: why for tree in self._trees.values() for path, why in tree.unreadable.items()}
        # Every version that pylance can open must be in the listing: it may be behind a link, or the listing be stale.
        for name, (branch, version) in self.tags.items():
            tree = self._trees.get(branch)
            if (tree is None and self._left_from_own(branch)) or (tree is not None and not tree.reads(version)):
                why = f"the tag refers to version {version}, which is not in the listing, or cannot be read"
                reasons[f"{REFS_FOLDER}/tags/{name}.json"] = why
        for branch in self._trees:
            if branch and not self._trees[branch].all_versions:
                reasons[branch_folder(branch)] = "the branch has no version that is in the listing"
        return reasons

    @property
    def branches(self) -> int:
        """The number of branches that left from own versions, directly or not."""
        return sum(bool(name) and name != self._own for name in self._trees)

    @property
    def points_into_mem_wal(self) -> bool:
        """Whether a version may have data files below ``_mem_wal/``: then nothing there is deletable."""
        return any(tree.into_mem_wal for tree in self._trees.values())

    @property
    def versions(self) -> tuple[int, ...]:
        """The own versions, ascending."""
        return self._trees[self._own].all_versions

    def written(self, version: int) -> datetime:
        """When an own version was published, by the store's clock, UTC."""
        return self._trees[self._own].written(version)

    def progress_at(self, moment: datetime | None) -> Mapping[UUID, int]:
        """The merge progress of the newest own version that was published by then; None: by now.

        As everywhere here, it is lowered to what indexes that search cover. Only versions without a gap up to the
        newest count. Timeline of the loss otherwise: version 5 merges, and is tagged; 40 days later version 3 is
        restored as 6, which a reader keeps open; 7 merges again, and 6 is expired: by version 5, what 6 lacks was
        merged 40 days ago.
        """
        own = self._trees[self._own]
        later: int | None = None
        for version in reversed(own.all_versions):
            if later is not None and version != later - 1:
                break
            if moment is None or own.written(version) <= moment:
                return own.progress(version)
            later = version
        return {}

    def is_below(self, progress: Mapping[UUID, int], *, after: int) -> bool:
        """Whether the base of an own version after that one, if it has a MemWAL index, has less of a region."""
        own = self._trees[self._own]
        below = (own.base.below(own.versions, region_id, merged) for region_id, merged in progress.items())
        return any(versions and versions[-1] > after for versions in below)

    def progress(self, version: int) -> Mapping[UUID, int]:
        """The merge progress of the base of an own version."""
        return self._trees[self._own].base.at(version)

    def last_with(self, regions: Collection[UUID]) -> int | None:
        """The first own version without which it is not known what of these regions is merged; None: the newest has it.

        The newest has less progress than an earlier one if the MemWAL index was removed since.
        """
        own = self._trees[self._own]
        now = own.base.at(self.newest) if own.has_index(self.newest) else {}
        above = (own.base.last_above(own.versions, region_id, now.get(region_id, 0)) for region_id in regions)
        return min((version for version in above if version is not None), default=None)

    def manifest_bytes(self, version: int) -> int:
        """The size of the manifest of an own version."""
        return self._trees[self._own].size(version)

    def without(self, versions: Collection[int]) -> LiveVersions:
        """The retention without these own versions. A shallow copy, which must not be refreshed."""
        reduced = copy.copy(self)
        own = copy.copy(self._trees[self._own])
        own.versions = [version for version in own.versions if version not in versions]
        reduced._trees = {**self._trees, self._own: own}  # noqa: SLF001 - of the same class
        return reduced

    def named(self) -> frozenset[int]:
        """The own versions to which a tag or a branch refers."""
        return frozenset(self._branched) | {version for branch, version in self.tags.values() if branch == self._own}

    def protected(self) -> Mapping[int, str]:
        """The own versions that must not be expired, each with the tags, branches and holds that keep it."""
        at, named = {version for hold in self.holds for version in hold.versions}, self._named(self._own)
        return {
            version: ", ".join(
                [
                    *named.get(version, ()),
                    *(f"branch {name} left from version {version}" for name in self._branched.get(version, ())),
                ]
            )
            for version in at | self.named()
        }

    def reading(self, region_id: UUID, generation: int) -> list[int]:
        """The own versions whose readers need a generation, ascending."""
        return self._trees[self._own].below(region_id, generation)

    def names_index(self, uuid: UUID) -> bool:
        """Whether a version may refer to the index entry of that id; true if any version cannot be read."""
        return bool(self.unreadable) or any(uuid in tree.index_uuids for tree in self._trees.values())

    def needs(self, region_id: UUID, generation: int) -> str | None:
        """The versions, tags, branches and holds that need a generation, as text; None: it is not needed."""
        if self.unreadable:
            path, why = next(iter(self.unreadable.items()))
            return f"{path} cannot be read, and may need it: {why}"
        trees = sorted(self._trees.items(), key=lambda item: item[0] or "")
        parts = [
            self._described(name, versions) for name, tree in trees if (versions := tree.below(region_id, generation))
        ]
        return " and ".join(parts) or None

    def _described(self, branch: str | None, versions: Sequence[int]) -> str:
        kept = self._named(branch)
        named = [text for version in sorted(kept) if _contains(versions, version) for text in kept[version]]
        text = _span(versions)
        if branch == _DETACHED:
            text = "a commit in progress or a detached version"
        elif branch != self._own:
            text = f"branch {branch} ({text})"
        if named:
            more = f" and {len(named) - _SHOWN} more" if len(named) > _SHOWN else ""
            text += f" ({', '.join(named[:_SHOWN])}{more})"
        return text

    def _named(self, branch: str | None) -> Mapping[int, list[str]]:
        """By version of a branch the tags and holds on it, as text; each is read once, however many there are."""
        named: dict[int, list[str]] = defaultdict(list)
        for name, (tree, version) in sorted(self.tags.items()):
            if tree == branch:
                named[version].append(f"tag {name} at version {version}")
        for hold in self.holds if branch == self._own else ():
            for version in hold.versions:
                what = f"hold {hold.number} of {hold.by} on version {version}"
                named[version].append(f"{what} until {hold.until:%Y-%m-%d %H:%M} UTC")
        return named


def tags_of(table: Table) -> Mapping[str, tuple[str | None, int]]:
    """By the name of each tag its branch and version.

    pylance lists none of them if the name of one is not ASCII: it escapes the file's name again. Then we read them.

    Raises:
        StorageError: the store failed.
    """
    try:
        with lance_errors("list the tags of", table.location.uri):
            tags = table.handle.get().tags.list()
    except ObjectNotFoundError:
        return list_tags(table.branch.root)
    return {name: (tag["branch"], int(tag["version"])) for name, tag in tags.items()}


def named_versions(table: Table) -> frozenset[int]:
    """The versions of the table's branch to which a tag, a branch or a hold refers, also detached ones and ended holds.

    For deleting a version by another proof than its expiry; no clock is read.
    """
    with lance_errors("list the branches of", table.location.uri):
        branches = table.handle.get().branches.list().values()
    own = table.branch_name
    named = {version for branch, version in tags_of(table).values() if branch == own}
    named |= {int(branch["parent_version"]) for branch in branches if branch["parent_branch"] == own}
    return frozenset(named | {held for hold in holds(table) if not hold.released for held in hold.versions})


class _Progress:
    """Progress per region, as the versions at which it changed."""

    def __init__(self) -> None:
        # Per region, ascending: (first version, progress from that version on). Before the first: 0.
        self._changes: dict[UUID, list[tuple[int, int]]] = {}
        self._last: Mapping[UUID, int] = {}
        # Regions whose progress fell at some version: that of all others is ascending.
        self._fell: set[UUID] = set()

    def add(self, version: int, merged: Mapping[UUID, int]) -> None:
        """Add a version later than all before."""
        if merged != self._last:
            for region_id in merged.keys() | self._last.keys():
                progress = merged.get(region_id, 0)
                if progress != self._last.get(region_id, 0):
                    if progress < self._last.get(region_id, 0):
                        self._fell.add(region_id)
                    self._changes.setdefault(region_id, []).append((version, progress))
            self._last = merged

    def at(self, version: int) -> Mapping[UUID, int]:
        """The progress of a version."""
        versions = {}
        for region_id, changes in self._changes.items():
            before = bisect_right(changes, version, key=lambda change: change[0])
            if before and changes[before - 1][1]:
                versions[region_id] = changes[before - 1][1]
        return versions

    def last_above(self, versions: Sequence[int], region_id: UUID, generation: int) -> int | None:
        """The last of the versions, ascending, whose progress in the region is above the generation."""
        changes = [*self._changes.get(region_id, ()), (_NO_VERSION, 0)]
        for (start, progress), (end, _) in reversed(list(pairwise(changes))):
            at = bisect_left(versions, end) - 1
            if progress > generation and at >= 0 and versions[at] >= start:
                return versions[at]
        return None

    def below(self, versions: Sequence[int], region_id: UUID, generation: int) -> list[int]:
        """Those of the versions, ascending, whose progress in the region is below the generation."""
        recorded = self._changes.get(region_id, [])
        if region_id not in self._fell:  # a region may list tens of thousands of generations, and each is asked for
            at = bisect_left(recorded, generation, key=lambda change: change[1])
            end = recorded[at][0] if at < len(recorded) else _NO_VERSION
            return list(versions[: bisect_left(versions, end)])
        changes = [(0, 0), *recorded, (_NO_VERSION, generation)]
        below: list[int] = []
        for (start, progress), (end, _) in pairwise(changes):
            if progress < generation:
                below += versions[bisect_left(versions, start) : bisect_left(versions, end)]
        return below


class _Seen(NamedTuple):
    """What is kept of a version. Its file is recognized: a number may be used again after a clean-up.

    ``unreadable``: the path of a file that cannot be read; ``index_uuid``: that of the MemWAL index.
    """

    size: int
    written: float
    e_tag: str | None
    unreadable: str | None = None
    index_uuid: UUID | None = None

    def is_of(self, meta: ObjectMeta) -> bool:
        """Whether it was read from a file that is listed."""
        return (self.size, self.written, self.e_tag) == (meta.size, meta.last_modified.timestamp(), meta.e_tag)


@dataclass(slots=True)
class _Tree:
    """The versions of one branch, or those that are detached.

    Attributes:
        versions: those with a MemWAL index, ascending. The others have no generations to read.
        index_uuids: ids of their MemWAL index entries, and how many versions have each.
        unreadable: the reason for each file that cannot be read.
        into_mem_wal: those that may have data files below ``_mem_wal/``.
    """

    into_mem_wal: set[int] = field(default_factory=set)
    versions: list[int] = field(default_factory=list)
    index_uuids: Counter[UUID] = field(default_factory=Counter)
    unreadable: dict[str, str] = field(default_factory=dict)
    _seen: dict[int, _Seen] = field(default_factory=dict)
    # What readers of a version do not need, and what its base has.
    merged: _Progress = field(default_factory=_Progress)
    base: _Progress = field(default_factory=_Progress)
    # The progress is complete up to this version, including versions that no longer exist.
    _highest: int = 0

    @property
    def all_versions(self) -> tuple[int, ...]:
        """All versions, including those without a MemWAL index, ascending."""
        return tuple(sorted(self._seen))

    def reads(self, version: int) -> bool:
        """Whether the version exists and can be read."""
        return version in self._seen and self._seen[version].unreadable is None

    def written(self, version: int) -> datetime:
        return datetime.fromtimestamp(self._seen[version].written, UTC)

    def size(self, version: int) -> int:
        return self._seen[version].size

    def refresh(self, store: Store, listed: Mapping[int, ObjectMeta], *, progress: bool = True) -> None:
        """Drop the versions that no longer exist, and read the new ones."""
        fresh = sorted(listed.keys() - self._seen.keys())
        changed = any(not seen.is_of(listed[version]) for version, seen in self._seen.items() if version in listed)
        if changed or (fresh and fresh[0] < self._highest):
            self._forget()
            fresh = sorted(listed)
        for expired in self._seen.keys() - listed.keys():
            self._drop(expired)
        outcomes: Iterable[tuple[int, VersionProgress | str | _Expired]] = zip(fresh, repeat(VersionProgress({}, None)))
        if progress:
            outcomes = concurrently(
                lambda version: _read(store, listed[version]), fresh, threads=_CONCURRENT_READS, chunk=_CHUNK
            )
        for version, outcome in outcomes:
            self._add(version, listed[version], outcome)

    def progress(self, version: int) -> Mapping[UUID, int]:
        """The merge progress of a version that exists; nothing if it has no MemWAL index."""
        return self.merged.at(version) if self.has_index(version) else {}

    def has_index(self, version: int) -> bool:
        """Whether a version exists, and has a MemWAL index."""
        return _contains(self.versions, version)

    def below(self, region_id: UUID, generation: int) -> list[int]:
        """Versions with a progress in the region below the generation, ascending."""
        return self.merged.below(self.versions, region_id, generation)

    def _add(self, version: int, meta: ObjectMeta, outcome: VersionProgress | str | _Expired) -> None:
        if isinstance(outcome, _Expired):
            return
        file = meta.size, meta.last_modified.timestamp(), meta.e_tag
        self._highest = version
        if isinstance(outcome, str):
            self._seen[version] = _Seen(*file, unreadable=meta.path)
            self.unreadable[meta.path] = outcome
            return
        self._seen[version] = _Seen(*file, index_uuid=outcome.index_uuid)
        if outcome.points_into_mem_wal:
            self.into_mem_wal.add(version)
        if outcome.index_uuid is None:
            return
        self.versions.append(version)
        self.index_uuids[outcome.index_uuid] += 1
        merged, base = outcome.merged_generations, outcome.base_generations
        self.merged.add(version, merged)
        self.base.add(version, merged if base is None else base)

    def _drop(self, version: int) -> None:
        seen = self._seen.pop(version)
        self.into_mem_wal.discard(version)
        self.unreadable.pop(seen.unreadable or "", None)
        if seen.index_uuid is not None:
            del self.versions[bisect_left(self.versions, version)]
            self.index_uuids[seen.index_uuid] -= 1
            if not self.index_uuids[seen.index_uuid]:
                del self.index_uuids[seen.index_uuid]

    def _forget(self) -> None:
        for collection in (self.into_mem_wal, self.versions, self.index_uuids, self.unreadable, self._seen):
            collection.clear()
        self.merged, self.base = _Progress(), _Progress()
        self._highest = 0


class _Expired:
    """A version that was expired between the listing and the read."""


def _read(store: Store, meta: ObjectMeta) -> VersionProgress | str | _Expired:
    try:
        return read_version_progress(store, meta)
    except ObjectNotFoundError:
        return _Expired()
    except (InvalidFormatError, TableCorruptError, LegacyLayoutError, LinkError) as error:
        return str(error)


def _contains(ascending: Sequence[int], version: int) -> bool:
    at = bisect_left(ascending, version)
    return at < len(ascending) and ascending[at] == version


def _span(versions: Sequence[int]) -> str:
    if len(versions) == 1:
        return f"version {versions[0]}"
    if versions[-1] - versions[0] + 1 == len(versions):
        return f"versions {versions[0]} to {versions[-1]}"
    return f"{len(versions)} versions from {versions[0]} to {versions[-1]}"
