"""Find the files of the base table to which no version refers any more.

A file is garbage if no manifest of the table refers to it (of main, of any branch, detached), and

* an expired version referred to it, or
* it is older than a week: left by a killed commit. Younger files may belong to a commit in progress.

Files that Lance does not write in these folders are kept, and so are files behind a directory link.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from itertools import chain, islice
from typing import TYPE_CHECKING

from memwal_ops.core.anchors import delete_proven
from memwal_ops.errors import InvalidFormatError, InvariantViolatedError, ObjectNotFoundError, TableReplacedError
from memwal_ops.formats.lance.files import version_files
from memwal_ops.formats.lance.retention.identity import table_anchor
from memwal_ops.formats.lance.retention.live_versions import named_versions
from memwal_ops.formats.lance.wire.names import JOB_PROPERTY, parse_staged_manifest_name, parse_version_manifest_name
from memwal_ops.formats.lance.wire.version_manifest import decode_version_manifest
from memwal_ops.storage.clock import store_time

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

    from memwal_ops.formats.lance.retention.damage import NewestFiles
    from memwal_ops.formats.lance.table import Table
    from memwal_ops.storage.api import ObjectMeta, Store


# A version is expired in this order: its manifest is recorded, with those of its batch; the manifest is deleted; the
# files to which no other version refers are deleted; the record is deleted. So every listed version can be read; a
# killed run leaves a record, from which the next run reads which files were the versions' own; and a version that turns
# out to be needed while its files exist (a tag made in the same moment) is put back.
#
# Timeline of the loss in any other order: the data files of version 3 are deleted, the process is killed,
# version 3 is still listed; a reader opens it, and its files are missing.


def list_set_aside(store: Store) -> list[str]:
    """The records of manifests: of this run, of concurrent runs, and of killed runs."""
    return sorted(meta.path for meta in store.list(version_files.SET_ASIDE_FOLDER) if meta.path.endswith(".manifests"))


def read_set_aside(store: Store, path: str) -> list[tuple[int, bytes]]:
    """The manifests of a record, each with its version; none if another run deleted it meanwhile."""
    try:
        return version_files.decode_set_aside(store.get(path), path)
    except ObjectNotFoundError:
        return []


def record(store: Store, manifests: Sequence[tuple[int, bytes]]) -> str:
    """Write a record of manifests, each with its version, unless it is there; return its path."""
    data = version_files.encode_set_aside(manifests)
    path = f"{version_files.SET_ASIDE_FOLDER}/{manifests[0][0]:020d}-{hashlib.sha256(data).hexdigest()[:16]}.manifests"
    if not store.put_if_absent(path, data) and store.get(path) != data:
        raise InvariantViolatedError(f"The content of {path} does not match the hash in its name.")
    return path


def put_back(table: Table, needed: Collection[int], listed: Collection[int]) -> tuple[int, ...]:
    """Publish needed versions again that were set aside and are not listed, and return their numbers.

    Only a version that can be read is put back. If two manifests of the same number were set aside, it is ambiguous
    which one is needed, and neither is put back: gc still reports the tag that refers to it.
    """
    missing = {*needed}.difference(listed)
    recorded: dict[int, set[bytes]] = {}
    for path in list_set_aside(table.store) if missing else ():
        for version, data in read_set_aside(table.store, path):
            if version in missing:
                recorded.setdefault(version, set()).add(data)
    done = []
    for version, (data, *others) in recorded.items():
        if not others and not version_files.missing_files(
            table.store, version_files.references(decode_version_manifest(data)).own
        ):
            table.store.put_back(version_files.version_path(version, table.naming), data)
            done.append(version)
    return tuple(done)


# A commit takes seconds between its detached manifest and its version; after an hour its process is dead.
_ABANDONED_AFTER = timedelta(hours=1)
# A manifest that is staged may be any writer's, whose catalog may still publish it; as old as other unfinished files.
_STAGED_AGE = timedelta(days=7)
_RUN_PROPERTY = "memwal-ops.run_id"


@dataclass(frozen=True, slots=True)
class Leftover:
    """A detached manifest, and its number. ``job`` and ``run_id`` are None if memwal-ops did not write it.

    No reader opens either; they use space, and a clean-up by pylance keeps the files to which they refer. Leftovers of
    memwal-ops are recognized by their transaction properties (docs/jobs.md); those of other writers are never deleted.

    ``transaction`` is its transaction file, unless a version refers to that file: then the
    commit was killed after it had been published.
    """

    manifest: ObjectMeta
    version: int
    job: str | None
    run_id: str | None
    transaction: str | None


def find_leftovers(table: Table) -> Iterator[Leftover]:
    """All detached manifests, of any writer and any age. One listing if there are none."""
    for meta in table.store.list(version_files.VERSIONS_FOLDER, after=f"{version_files.VERSIONS_FOLDER}/d"):
        name = parse_version_manifest_name(meta.path.rsplit("/", 1)[-1])
        if name is None or not name.detached:
            continue
        try:
            left = decode_version_manifest(table.store.get(meta.path))
        except ObjectNotFoundError:
            continue
        except InvalidFormatError:
            yield Leftover(meta, name.version, None, None, None)
            continue
        properties = {} if left.transaction is None else left.transaction.transaction_properties
        if left.transaction is None or JOB_PROPERTY not in properties:
            yield Leftover(meta, name.version, None, None, None)
            continue
        file = left.manifest.transaction_file
        built_on = left.transaction.read_version
        if not file or built_on >= table.version or _transaction_file(table, built_on + 1) == file:
            file = ""
        path = f"{version_files.TRANSACTIONS_FOLDER}/{file}" if file else None
        yield Leftover(meta, name.version, properties[JOB_PROPERTY], properties.get(_RUN_PROPERTY), path)


def sweep_leftovers(table: Table, *, abandoned_after: timedelta = _ABANDONED_AFTER) -> int:
    """Delete abandoned detached manifests of memwal-ops. One listing if there are none.

    Ages are measured by the slower of the local clock and the store's; manifests to which a tag or a branch refers
    are kept at any age.

    Returns:
        How many objects were deleted; 0 if the table may have been replaced since ``table`` was read.
    """
    own = [left for left in find_leftovers(table) if left.job is not None]
    if not own:
        return 0
    old, named = store_time(table.store) - abandoned_after, named_versions(table)
    paths = [
        path
        for left in own
        if left.manifest.last_modified <= old and left.version not in named
        for path in (left.manifest.path, left.transaction)
        if path is not None
    ]
    return _deleted(table, paths)


def sweep_staged(table: Table) -> int:
    """Delete staged manifests that are a week old, of versions that were published since; no request if there are none.

    Returns:
        How many were deleted.
    """
    names = {meta: parse_staged_manifest_name(meta.path.rsplit("/", 1)[-1]) for meta in table.listed.files}
    past = [meta for meta, name in names.items() if name is not None and name.version <= table.version]
    old = store_time(table.store) - _STAGED_AGE if past else None
    paths = [meta.path for meta in past if old is not None and meta.last_modified <= old]
    return _deleted(table, paths)


def _deleted(table: Table, paths: list[str]) -> int:
    """Delete these files, unless the table may have been replaced since it was read."""
    try:
        return delete_proven(table.store, paths, [table_anchor(table)]).deleted if paths else 0
    except TableReplacedError:
        return 0


def _transaction_file(table: Table, version: int) -> str | None:
    try:
        return version_files.read_version_manifest(table.store, version, table.naming).manifest.transaction_file
    except ObjectNotFoundError:
        return None


# As long as pylance's own clean-up waits: a bulk load writes for days before it commits.
UNFINISHED_AGE = timedelta(days=7)
_BATCH = 1000
_MISSING = 1000


@dataclass(slots=True)
class NeededFiles:
    """The files that manifests need, by key, as far as these were read.

    Attributes:
        keys: of all files to which a version that is kept refers.
        lasting: of those to which a version refers that not only its age keeps.
        own: of those that must exist for a version of the table's own branch to be readable.
        on_branches: of those to which other branches and detached versions refer.
        expired: of all files to which an expired version refers, needed or not.
        records: paths of the records of manifests that were set aside.
        listed: the versions of the table's own branch that were read as listed.
    """

    keys: set[str] = field(default_factory=set)
    lasting: set[str] = field(default_factory=set)
    own: set[str] = field(default_factory=set)
    on_branches: set[str] = field(default_factory=set)
    expired: set[str] = field(default_factory=set)
    records: dict[str, None] = field(default_factory=dict)
    listed: set[int] = field(default_factory=set)
    _known: version_files.Known = field(default_factory=dict)
    # Objects and not paths: a version's number, so its path, may be used again. Of the own branch, and of others.
    _seen: tuple[set[ObjectMeta], set[ObjectMeta]] = field(default_factory=lambda: (set(), set()))

    def read(self, table: Table, young: Collection[str] = (), *, without: Collection[str] = ()) -> None:
        """Read every manifest that was not read before; list them again if one was deleted before it was read.

        ``young`` are paths of manifests that only their age keeps; those of ``without`` expire, and are not read.
        Raises as :func:`version_files.read_references`; the result must not be used then.
        """
        while not (self._read_own(table, young, without) and self._read_others(table)):
            pass

    def read_records(self, table: Table) -> None:
        """Read the records of manifests that were set aside by others; raises as :meth:`read`, which is called before.

        So a version that another run expires meanwhile is found in one of the two. Before files of expired versions are
        deleted, tags, branches and holds must be listed after this, and versions that were put back be read again.
        """
        for path in list_set_aside(table.store):  # one at a time: each may have megabytes
            for _, named in version_files.read_references(
                table.store, [path] if path not in self.records else (), self._known
            ):
                self.expired |= named.all
            self.records.setdefault(path)

    def set_aside(self, table: Table, versions: Iterable[int], *, apply: bool = True) -> frozenset[int]:
        """Record manifests of main that are to be deleted; return the versions, without those that do not exist.

        Requests: one for each, and one for the record; without ``apply`` they are only read. Raises ``StorageError``:
        the record could not be written; ``TableCorruptError``: a manifest does not decode.
        """
        manifests = []
        paths = {version_files.version_path(version, table.naming): version for version in versions}
        for path, data in version_files.contents(table.store, paths):
            self.expired |= version_files.decoded_references(path, data, self._known).all
            manifests.append((paths[path], data))
        if manifests and apply:
            self.records[record(table.store, manifests)] = None
        return frozenset(version for version, _ in manifests)

    def _read_own(self, table: Table, young: Collection[str], without: Collection[str]) -> bool:
        fresh = {
            path: meta
            for path, meta in version_files.list_manifests(table.store).items()
            if meta not in self._seen[0] and path not in without
        }
        opened = version_files.version_path(table.version, table.naming)
        is_known = opened in fresh and version_files.is_same_file(table.file, fresh[opened])
        known = [(opened, version_files.references(table.manifest))] if is_known else []
        paths = sorted(fresh.keys() - {path for path, _ in known})
        for path, named in chain(known, version_files.read_references(table.store, paths, self._known)):
            self._seen[0].add(fresh.pop(path))
            self.keys |= named.all
            if path not in young:
                self.lasting |= named.all
            if (version := version_files.version_of_main(path)) is not None:
                self.listed.add(version)
                self.own |= named.own
            else:
                self.on_branches |= named.all
        return not fresh

    def _read_others(self, table: Table) -> bool:
        others = version_files.list_manifests_of_others(table.branch)
        fresh = {path: meta for path, meta in others.items() if meta not in self._seen[1]}
        for path, named in version_files.read_references(table.branch.root, sorted(fresh), self._known):
            self._seen[1].add(fresh.pop(path))
            self.keys |= named.all
            self.lasting |= named.all
            self.on_branches |= named.all
        return not fresh


@dataclass(frozen=True, slots=True)
class Later:
    """What only its age keeps: bytes of versions and of files. ``by``: when all are old enough."""

    bytes: int
    by: datetime

    def to_json(self) -> dict[str, object]:
        """The entry ``later``."""
        return {"bytes": self.bytes, "by": self.by.isoformat(timespec="seconds")}


@dataclass(slots=True)
class Garbage:
    """The garbage, and missing files.

    Attributes:
        objects: number of garbage files.
        bytes: their size.
        for_branches: files of expired versions that are kept since a branch or a detached version refers to them.
        complete: whether the listing was completed.
        later: bytes of files that become garbage with time alone: a young version needs them, or they are young.
        until: when the last unreferenced one of these is old enough; None: there is none.
        missing: keys of missing files to which a version of main refers, ascending; the first 1,000.
    """

    objects: int = 0
    bytes: int = 0
    for_branches: int = 0
    later: int = 0
    until: datetime | None = None
    missing: tuple[str, ...] = ()
    complete: bool = False

    def defer(self, meta: ObjectMeta) -> None:
        """Count a file to which no version refers, and that may belong to a commit in progress."""
        self.later += meta.size
        self.until = max(self.until or meta.last_modified, meta.last_modified + UNFINISHED_AGE)


def find_garbage(
    store: Store,
    needed: NeededFiles,
    now: datetime,
    on_batch: Callable[[list[ObjectMeta]], bool] = lambda _: True,
    newest: NewestFiles | None = None,
) -> Garbage:
    """List the base files once and select those that are garbage.

    Args:
        now: by the store's clock, UTC.
        on_batch: called with up to 1,000 files at a time; returns whether to continue.
        newest: sees all files.
    """
    garbage = Garbage()
    absent = set(needed.own)
    files = _garbage(store, needed, now, garbage, absent, newest)
    while batch := list(islice(files, _BATCH)):
        garbage.objects += len(batch)
        garbage.bytes += sum(meta.size for meta in batch)
        if not on_batch(batch):
            return garbage
    garbage.complete = True
    garbage.missing = tuple(version_files.missing_files(store, sorted(absent)[:_MISSING]))
    return garbage


def _garbage(
    store: Store, needed: NeededFiles, now: datetime, found: Garbage, absent: set[str], newest: NewestFiles | None
) -> Iterator[ObjectMeta]:
    for folder in (*version_files.BASE_FOLDERS, version_files.VERSIONS_FOLDER):
        for meta in store.list(folder):
            key = version_files.file_key(meta.path)
            if newest is not None:
                newest.see(meta)
            absent.discard(key or "")
            if key is None:
                if version_files.is_unfinished(meta.path):
                    if now - meta.last_modified > UNFINISHED_AGE:
                        yield meta
                    else:
                        found.defer(meta)
            elif key in needed.keys:
                found.later += 0 if key in needed.lasting else meta.size
                found.for_branches += key in needed.expired and key in needed.on_branches and key not in needed.own
            elif key in needed.expired or now - meta.last_modified > UNFINISHED_AGE:
                yield meta
            else:
                found.defer(meta)


def unreadable_versions(store: Store, missing: Collection[str]) -> dict[int, str]:
    """One missing file for each listed version of main that refers to any. Reads every manifest again."""
    paths = [
        path
        for path in version_files.list_manifests(store, version_files.VERSIONS_FOLDER)
        if version_files.version_of_main(path) is not None
    ]
    missing_keys = frozenset(missing)
    unreadable = {}
    for path, refers in version_files.read_references(store, paths):
        version = version_files.version_of_main(path)
        if version is not None and (absent := refers.own & missing_keys):
            unreadable[version] = min(absent)
    return unreadable
