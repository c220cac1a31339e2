"""Find all that still holds rows which must be gone, in the base table: by reading what the store lists."""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial
from itertools import pairwise
from typing import TYPE_CHECKING

from memwal_ops.core.erasure import SAFE_AGE, Holder
from memwal_ops.errors import InvalidFormatError, ObjectNotFoundError
from memwal_ops.formats.lance.files.datasets import open_dataset
from memwal_ops.formats.lance.files.referenced_files import (
    references,
)
from memwal_ops.formats.lance.files.versions import (
    VERSIONS_FOLDER,
    decode_named,
    read_version_manifest,
)
from memwal_ops.formats.lance.jobs.erase.found import Survey
from memwal_ops.formats.lance.jobs.erase.log import LogSurvey, gc_options
from memwal_ops.formats.lance.jobs.erase.objects import Objects
from memwal_ops.formats.lance.jobs.erase.segments import Segments
from memwal_ops.formats.lance.jobs.erase.target import Target, fragment_key
from memwal_ops.formats.lance.retention.garbage import Needed
from memwal_ops.formats.lance.retention.live_versions import Retention
from memwal_ops.formats.lance.wire.names import parse_version_manifest_name
from memwal_ops.storage.concurrently import concurrently
from memwal_ops.storage.locations import BRANCHES_FOLDER

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from datetime import datetime

    import lance

    from memwal_ops.core.erasure import EraseOptions
    from memwal_ops.formats.lance.jobs.erase.found import AnyLog
    from memwal_ops.formats.lance.table import Table
    from memwal_ops.formats.lance.wire.version_manifest import VersionManifest
    from memwal_ops.storage.api import ObjectMeta, Store
    from memwal_ops.storage.locations import Location

_CONCURRENT_READS = 16
_OWN_FOLDER = "_mem_wal_ops/"
_NO_ROWS = "it has no rows"


class Surveyor:
    """Surveys a table again and again in one run; what cannot change is read once."""

    def __init__(self, targets: Sequence[Target], store: Store, options: EraseOptions, now: datetime) -> None:
        """Read what earlier runs recorded.

        Args:
            targets: the rows that must be gone; others are to be deleted, too.
            store: the table's.
            options: the age of versions that may expire.
            now: by the store's clock.
        """
        self.targets, self.target = targets, targets[0]
        self.older_than, self.now = options.older_than, now
        self.gc_options = gc_options(options)
        self.merged = False
        self.kept: dict[int, str] = {}  # versions that an expiry keeps for other reasons than their age
        self.segments = Segments(store)
        self.segments.read()
        self._retention = Retention()

    def newest(self, table: Table) -> Survey:
        """What of a table's newest version ``table`` holds such rows: its fragments and indexes, and no other file."""
        self.segments.forget()
        found = Survey(table)
        self._retention.refresh(table, self.now)
        self._unaffected(table)
        found.stained = self._stained(table.location, table.manifest)
        found.indexes = self.segments.dirty(table, table.manifest, found.stained)
        found.newest_mentions = self.target.mentions(table.manifest) and self._is_old(table.version)
        return found

    def survey(self, table: Table) -> Survey:
        """Find all holders of a table's newest version ``table``."""
        found = self.newest(table)
        found.living = sum(
            len(batch) for target in self.targets for batch in target.living(table.dataset, table.location.uri)
        )
        for version, shown in self.others(table):
            if (why := self._why(table, version, shown)) is not None:
                found.versions[version] = why
        found.log = self._log(table)
        if found.log is not None:
            reading = {one: self._retention.reading(*one) for one in found.log.numbers}
            found.versions |= {
                version: why
                for version, why in found.log.versions(reading).items()
                if version not in found.versions and version != table.version
            }
        found.holders += self._holders(table, found)
        if found.log is not None:
            waits = (one.until for one in found.holders if one.kind == "version" and one.until is not None)
            found.holders += found.log.holders(max(waits, default=None))
        found.holders += self._branches(table)
        found.holders += self._objects(table, found)
        return found

    def _log(self, table: Table) -> AnyLog | None:
        """What of the log holds such rows; None: there is no log."""
        if not table.regions.region_ids:
            return None
        return LogSurvey(table, self.target, self.gc_options, self.now, self.merged).read()

    def _is_old(self, version: int) -> bool:
        return self.target.before is None or self._retention.written(version) < self.target.before

    def _unaffected(self, table: Table) -> None:
        """Note fragments of which nothing was deleted at the time before which rows must be gone."""
        before = self.target.before
        if before is None:
            return
        then = max((one for one in self._retention.versions if self._retention.written(one) < before), default=None)
        if then is None:
            return
        shown = _read(table, then)
        whole = (
            {fragment_key(one) for one in shown.manifest.fragments if not one.HasField("deletion_file")}
            if shown
            else set()
        )
        for version in range(then, table.version + 1):
            for one in (_read(table, version) or shown or table.manifest).manifest.fragments:
                if fragment_key(one) in whole and one.HasField("deletion_file"):
                    self.target.unaffected.add(fragment_key(one, deletions=True))

    def _stained(self, location: Location, shown: VersionManifest) -> Mapping[int, str]:
        opened = cache(partial(open_dataset, location, version=int(shown.manifest.version)))
        return self.target.stained([*shown.manifest.fragments], opened)

    def others(self, table: Table) -> Iterator[tuple[int, VersionManifest | None]]:
        """The versions but the newest; None for one that is gone or cannot be read."""
        versions = [one for one in self._retention.versions if one != table.version]
        yield from concurrently(partial(_read, table), versions, threads=_CONCURRENT_READS)

    def _why(self, table: Table, version: int, shown: VersionManifest | None) -> str | None:
        """Why an older version holds such rows."""
        if shown is None:
            return "it cannot be read, so that it may hold such rows"
        if self.target.before is not None and self._retention.written(version) < self.target.before:
            return "it is older than the deletions"
        for number, why in self._stained(table.location, shown).items():
            return f"fragment {number}: {why}"
        for name, why in self.segments.dirty(table, shown, ()).items():
            return f"index {name}: {why}"
        if self.target.where is not None and self.target.mentions(shown):
            return "its transaction has the expression of a deletion"
        return None

    def _holders(self, table: Table, found: Survey) -> Iterator[Holder]:
        for number, why in found.stained.items():
            yield Holder("fragment", str(number), why)
        for name, why in found.indexes.items():
            yield Holder("index", name, why, blocks="shallow clone" in why)
        if found.newest_mentions:
            yield Holder("transaction", f"version {table.version}", "it has the expression of a deletion")
        protected = self._retention.protected()
        listed = self._retention.versions
        following = dict(pairwise(listed))
        for version, why in found.versions.items():
            if version in protected:
                kept = protected[version]
                kind = next((one for one in ("tag", "hold", "branch") if kept.startswith(one)), "version")
                yield Holder(kind, kept.removeprefix(f"{kind} "), f"keeps version {version}: {why}", blocks=True)
                continue
            if version in self.kept:
                yield Holder("version", str(version), f"{why}; it is kept: {self.kept[version]}", blocks=True)
                continue
            until = None
            if self.older_than:
                last = following.get(version, version)
                until = max(
                    self._retention.written(version) + self.older_than,
                    self._retention.written(last) + min(self.older_than, SAFE_AGE),
                )
            yield Holder("version", str(version), why, until if until is not None and until > self.now else None)

    def _branches(self, table: Table) -> Iterator[Holder]:
        """The other branches of the table, main among them, that have such rows."""
        own = (f"{table.branch.folder}/{VERSIONS_FOLDER}/").lstrip("/")
        places: dict[str, list[ObjectMeta]] = {}
        folders = [BRANCHES_FOLDER, *([VERSIONS_FOLDER] if table.branch.name is not None else [])]
        for folder in folders:
            for meta in table.branch.root.list(folder):
                place, _, name = meta.path.rpartition("/")
                if (
                    place.endswith(VERSIONS_FOLDER)
                    and not meta.path.startswith(own)
                    and parse_version_manifest_name(name)
                ):
                    places.setdefault(place.removesuffix(VERSIONS_FOLDER).strip("/"), []).append(meta)
        for place, manifests in sorted(places.items()):
            name = place.removeprefix(f"{BRANCHES_FOLDER}/") or "main"
            if (why := self._why_branch(table, place, manifests)) is not None:
                remedy = f"erase it there, too: memwal-ops erase URI --branch {name}"
                yield Holder("branch", name, f"{why}; {remedy}, or delete the branch", blocks=True)

    def _why_branch(self, table: Table, place: str, manifests: list[ObjectMeta]) -> str | None:
        """Why a branch holds such rows: it refers to files of this table that do, or has some of its own."""
        newest = references(table.manifest).all
        for meta in manifests:
            try:
                shown = decode_named(meta.path, table.branch.root.get(meta.path))
            except ObjectNotFoundError:
                continue
            except InvalidFormatError as error:
                return f"{meta.path} cannot be read: {error}"
            number = int(shown.manifest.version)
            if self.target.before is not None:
                shared = [
                    one for one in shown.manifest.fragments if any(file.HasField("base_id") for file in one.files)
                ]
                if any(f"data/{file.path}" not in newest for one in shared for file in one.files):
                    return f"its version {number} refers to files that this one does not need any more"
                continue
            opened = cache(partial(_open_branch, table, place, number))
            for fragment, why in self.target.stained([*shown.manifest.fragments], opened).items():
                return f"its version {number}, fragment {fragment}: {why}"
        return None

    def _objects(self, table: Table, found: Survey) -> Iterator[Holder]:
        """Classify every object of the table; yields those that may hold such rows and are not named otherwise."""
        needed = Needed()
        needed.read(table)
        kept = set(references(table.manifest).all)
        for version, shown in self.others(table):
            if version not in found.versions and shown is not None:
                kept |= references(shown).all
        in_log = {} if found.log is None else {meta.path: why for meta, why in found.log.objects}
        objects = Objects(self.target, found, needed, kept, self.now)
        for meta in table.store.list():
            if meta.path in in_log:
                found.objects.append((meta, in_log[meta.path]))
                continue
            why, holder = objects.classify(meta)
            found.objects.append((meta, why))
            if holder is not None:
                yield holder


def _open_branch(table: Table, place: str, version: int) -> lance.LanceDataset:
    root = table.branch.root.root
    location = replace(table.location, uri=root) if table.branch.name is not None else table.location
    return open_dataset(location, place, version=version)


def _read(table: Table, version: int) -> VersionManifest | None:
    try:
        return read_version_manifest(table.store, version, table.naming)
    except (ObjectNotFoundError, InvalidFormatError):
        return None
