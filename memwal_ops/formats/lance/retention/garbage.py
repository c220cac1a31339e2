"""Find the files of the base table to which no version refers any more.

A file is garbage if no manifest of the table refers to it (of main, of any branch, detached), and

* an expired version referred to it, or
* it is older than a week: left by a killed commit. Younger files may belong to a commit in progress.

Files that Lance does not write in these folders are kept, and so are files behind a directory link.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime, timedelta
from itertools import chain, islice
from typing import TYPE_CHECKING

from memwal_ops.formats.lance.files.referenced_files import (
    BASE_FOLDERS,
    file_key,
    is_unfinished,
    list_manifests,
    list_manifests_of_others,
    missing_files,
    read_references,
    references,
    version_of_main,
)
from memwal_ops.formats.lance.files.versions import VERSIONS_FOLDER, is_same_file, version_path
from memwal_ops.formats.lance.retention.set_aside import list_set_aside

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator

    from memwal_ops.formats.lance.retention.newest_files import NewestFiles
    from memwal_ops.formats.lance.retention.set_aside import SetAside
    from memwal_ops.formats.lance.table import Table
    from memwal_ops.storage.api import ObjectMeta, Store

# As long as pylance's own clean-up waits: a bulk load writes for days before it commits.
UNFINISHED_AGE = timedelta(days=7)
_BATCH = 1000
_MISSING = 1000


@dataclass(slots=True)
class Needed:
    """The files that manifests need, by key, as far as these were read.

    Attributes:
        keys: of all files to which a version that is kept refers.
        lasting: of those to which a version refers that not only its age keeps.
        own: of those that must exist for a version of the table's own branch to be readable.
        on_branches: of those to which other branches and detached versions refer.
        expired: of all files to which an expired version refers, needed or not.
        copies: the manifests that were set aside, as of the first call of :meth:`read`.
    """

    keys: set[str] = field(default_factory=set)
    lasting: set[str] = field(default_factory=set)
    own: set[str] = field(default_factory=set)
    on_branches: set[str] = field(default_factory=set)
    expired: set[str] = field(default_factory=set)
    copies: tuple[SetAside, ...] = ()
    _complete: bool = False
    # Objects and not paths: a version's number, so its path, may be used again. Of the own branch, and of others.
    _seen: tuple[set[ObjectMeta], set[ObjectMeta]] = field(default_factory=lambda: (set(), set()))

    def read(self, table: Table, expiring: Collection[str] = (), young: Collection[str] = ()) -> None:
        """Read every manifest that was not read before; the first call also reads the copies that were set aside.

        Manifests are listed before copies, and listed again if one was deleted before it was read: so a version that
        another run expires meanwhile is found in one of the two. Before files of expired versions are deleted,
        tags, branches and holds must be listed after the first call, and versions that were put back be read again.

        Args:
            table: any version of it.
            expiring: paths of manifests that count as expired, for a plan.
            young: paths of manifests that only their age keeps.

        Raises:
            TableCorruptError: a manifest does not decode; the result must not be used.
            UnsupportedFeatureError: a manifest may refer to files in unknown ways.
        """
        while not (self._read_own(table, expiring, young) and self._read_others(table)):
            pass
        if not self._complete:
            self._complete = True
            self.copies = list_set_aside(table.store)
            for _, found in read_references(table.store, [one.meta.path for one in self.copies]):
                self.expired |= found.all

    def _read_own(self, table: Table, expiring: Collection[str], young: Collection[str]) -> bool:
        fresh = {path: meta for path, meta in list_manifests(table.store).items() if meta not in self._seen[0]}
        opened = version_path(table.version, table.naming)
        is_known = opened in fresh and is_same_file(table.file, fresh[opened])
        known = [(opened, references(table.manifest))] if is_known else []
        for path, found in chain(
            known, read_references(table.store, sorted(fresh.keys() - {path for path, _ in known}))
        ):
            self._seen[0].add(fresh.pop(path))
            if path in expiring:
                self.expired |= found.all
                continue
            self.keys |= found.all
            if path not in young:
                self.lasting |= found.all
            if version_of_main(path) is not None:
                self.own |= found.own
            else:
                self.on_branches |= found.all
        return not fresh

    def _read_others(self, table: Table) -> bool:
        others = list_manifests_of_others(table.branch)
        fresh = {path: meta for path, meta in others.items() if meta not in self._seen[1]}
        for path, found in read_references(table.branch.root, sorted(fresh)):
            self._seen[1].add(fresh.pop(path))
            self.keys |= found.all
            self.lasting |= found.all
            self.on_branches |= found.all
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
    needed: Needed,
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
    found = Garbage()
    absent = set(needed.own)
    files = _garbage(store, needed, now, found, absent, newest)
    while batch := list(islice(files, _BATCH)):
        found.objects += len(batch)
        found.bytes += sum(meta.size for meta in batch)
        if not on_batch(batch):
            return found
    found.complete = True
    found.missing = tuple(missing_files(store, sorted(absent)[:_MISSING]))
    return found


def _garbage(
    store: Store, needed: Needed, now: datetime, found: Garbage, absent: set[str], newest: NewestFiles | None
) -> Iterator[ObjectMeta]:
    for folder in (*BASE_FOLDERS, VERSIONS_FOLDER):
        for meta in store.list(folder):
            key = file_key(meta.path)
            if newest is not None:
                newest.see(meta)
            absent.discard(key or "")
            if key is None:
                if is_unfinished(meta.path):
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
    paths = [path for path in list_manifests(store, VERSIONS_FOLDER) if version_of_main(path) is not None]
    missing_keys = frozenset(missing)
    unreadable = {}
    for path, refers in read_references(store, paths):
        version = version_of_main(path)
        if version is not None and (absent := refers.own & missing_keys):
            unreadable[version] = min(absent)
    return unreadable
