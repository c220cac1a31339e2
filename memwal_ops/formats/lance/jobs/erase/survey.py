"""Find all that still holds rows which must be gone, in the base table: by reading what the store lists."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import pairwise
from typing import TYPE_CHECKING

from google.protobuf.message import DecodeError

from memwal_ops.core import certificate
from memwal_ops.core.erasure import Follower, RowHolder, read_followers
from memwal_ops.core.options import SAFE_AGE
from memwal_ops.core.quarantine import QUARANTINE_FOLDER
from memwal_ops.errors import InvalidFormatError, MemwalOpsError, ObjectNotFoundError
from memwal_ops.formats.lance.files import version_files
from memwal_ops.formats.lance.files.datasets import REFS_FOLDER, branch_location, open_dataset
from memwal_ops.formats.lance.files.named_files import damaged_deletions
from memwal_ops.formats.lance.jobs.erase.log import LogSurvey, RegionLogs, gc_options
from memwal_ops.formats.lance.jobs.erase.target import DictionaryValues, Segments, Target, fragment_key
from memwal_ops.formats.lance.retention.garbage import UNFINISHED_AGE, NeededFiles
from memwal_ops.formats.lance.retention.live_versions import LiveVersions
from memwal_ops.formats.lance.table import Table, load
from memwal_ops.formats.lance.wire._pb import table_pb2
from memwal_ops.formats.lance.wire.names import INDICES_FOLDER, parse_version_manifest_name
from memwal_ops.storage.api import ObjectMeta, Store, concurrently
from memwal_ops.storage.locations import BRANCHES_FOLDER, Location
from memwal_ops.storage.objects import open_store

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from datetime import datetime

    from memwal_ops.formats.lance.options import EraseOptions
    from memwal_ops.formats.lance.wire.version_manifest import VersionManifest


@dataclass(slots=True)
class Survey(certificate.TableSurvey):
    """What holds such rows.

    Attributes:
        stained: fragments of the newest version that hold them, with the reason.
        indexes: indexes with a segment that may hold them, with the reason.
        newest_mentions: whether the newest version has the expression of a deletion.
        versions: older versions that hold them, with the reason.
        on_branches: the objects of other branches by path, and why one cannot hold such a row; None: it may.
        log: what of the log does; None: there is none, or it was not read.
    """

    stained: Mapping[int, str] = field(default_factory=dict)
    indexes: Mapping[str, str] = field(default_factory=dict)
    newest_mentions: bool = False
    versions: dict[int, str] = field(default_factory=dict)
    on_branches: dict[str, str | None] = field(default_factory=dict)
    log: LogSurvey | None = None


_CONCURRENT_READS = 16
_OWN_FOLDER = "_mem_wal_ops/"
_NO_ROWS = "it has no rows"
_UNFINISHED = "no version refers to it; it may belong to a commit in progress, or a killed one"
_WITHOUT_VALUES = {
    version_files.DELETIONS_FOLDER: (
        re.compile(r"_deletions/\d+-\d+-\d+\.(arrow|bin)"),
        "it has numbers of rows alone",
    ),
    REFS_FOLDER: (re.compile(r"_refs/(tags|branches)/.+\.json"), "it has the name of a tag or a branch"),
}
# Records, by their number; what a migration has done; what probes and clocks write.
_RECORD = re.compile(
    r"_mem_wal_ops/((leases/[^/]+|holds|expiries|erase|progress|schema)/\d{20}(-[0-9a-f]{16})?\.[a-z]+"
    r"|legacy/.+|followers/[^/]+\.json|(probe|clock)/[^/]+|swap\.lock)"
)
Verdict = tuple[str | None, RowHolder | None]
"""Why an object cannot hold such a row, else None; and the holder, unless another one stands for the object."""


@dataclass(frozen=True, slots=True)
class ObjectVerdicts:
    """What decides about objects.

    Attributes:
        target: the rows.
        found: what was found in versions and indexes.
        needed: the keys to which any version refers.
        kept: the keys to which one refers that holds no such row.
        records: paths of records of expired versions' manifests without any value of such a row.
        now: by the store's clock.
    """

    target: Target
    found: Survey
    needed: NeededFiles
    kept: set[str]
    records: set[str]
    now: datetime

    def classify(self, meta: ObjectMeta) -> Verdict:
        """The verdict on an object."""
        path = meta.path
        folder = path.split("/", 1)[0]
        if folder in _WITHOUT_VALUES and _WITHOUT_VALUES[folder][0].fullmatch(path):
            return _WITHOUT_VALUES[folder][1], None
        if folder in version_files.BASE_FOLDERS:
            return self._of_the_base(meta, folder)
        if folder == version_files.VERSIONS_FOLDER:
            return self._manifest(meta)
        if path.startswith(_OWN_FOLDER):
            return self._own(path)
        if path in self.found.on_branches:
            return self.found.on_branches[path], None  # where it may hold one, the branch is named
        return None, RowHolder("unrecognized", path, "not a file of the table: move or delete it", blocks=True)

    def _of_the_base(self, meta: ObjectMeta, folder: str) -> Verdict:
        key = version_files.file_key(meta.path)
        if key is None and not version_files.is_unfinished(meta.path):
            return None, RowHolder("unrecognized", meta.path, "not a file of Lance: move or delete it", blocks=True)
        if key is None or key not in self.needed.keys:
            return None, self._leftover(meta, _UNFINISHED, expired=key in self.needed.expired)
        if key not in self.kept:
            return None, None  # its versions are named
        if folder == version_files.TRANSACTIONS_FOLDER:
            named = self.found.newest_mentions
            return None if named else "its version was read: no expression in it can be of such a row", None
        named = bool(self.found.stained if folder == version_files.DATA_FOLDER else self.found.indexes)
        return None if named else self._proof(folder), None

    def _proof(self, folder: str) -> str:
        if folder == INDICES_FOLDER:
            return "it was built of rows that are not deleted, from fragments that were read"
        if self.target.where is not None:
            return "it was read: no row in it matches, deleted or not"
        return "none of its rows was deleted before that time"

    def _leftover(self, meta: ObjectMeta, why: str, *, expired: bool = False) -> RowHolder:
        until = meta.last_modified + UNFINISHED_AGE
        return RowHolder("leftover", meta.path, why, until if until > self.now and not expired else None)

    def _manifest(self, meta: ObjectMeta) -> Verdict:
        if meta.path in {version_files.VERSION_HINT, version_files.CHECKED_MARK}:
            return _NO_ROWS, None
        name = parse_version_manifest_name(meta.path.rsplit("/", 1)[-1])
        if name is None or name.detached:
            return None, self._leftover(meta, "left by a commit, or a detached version")
        newest = self.found.newest_mentions and name.version == self.found.table.version
        named = newest or name.version in self.found.versions
        return None if named else "its version was read: it refers to no file with such rows", None

    def _own(self, path: str) -> Verdict:
        if path in self.records:
            return ("it is of an expired version, and was read: no expression in it can be of such a row", None)
        if path.startswith(f"{version_files.SET_ASIDE_FOLDER}/"):
            return None, RowHolder("leftover", path, "the manifest of a version that is being expired")
        if path.startswith(f"{QUARANTINE_FOLDER}/"):
            return None, RowHolder("quarantine", path, "kept by repair, and not searched: delete it", blocks=True)
        if _RECORD.fullmatch(path):
            return _NO_ROWS, None
        return None, RowHolder("unrecognized", path, "not a record of memwal-ops: move or delete it", blocks=True)


class Surveyor:
    """Surveys a table again and again in one run. What cannot change is read once."""

    def __init__(self, targets: Sequence[Target], store: Store, options: EraseOptions, now: datetime) -> None:
        """Read what earlier runs recorded.

        Args:
            targets: the rows that must be gone; others are to be deleted, too.
            store: the table's.
            options: the age of versions that may expire.
            now: by the store's clock.
        """
        self.targets, self.target = targets, targets[0]
        self.older_than, self.now, self._options = options.older_than, now, options
        self.gc_options = gc_options(options)
        self.merged = False
        self.kept: dict[int, str] = {}  # versions that an expiry keeps for other reasons than their age
        self._clean: set[str] = set()  # index segments of other branches, main among them, that are proven
        self.segments = Segments(store)
        self.segments.read()
        self._retention = LiveVersions()
        self._named = frozenset(map(os.path.realpath, options.followers))
        self._version = 0
        self._living: DictionaryValues = {}

    def newest(self, table: Table) -> Survey:
        """What of a table's newest version ``table`` holds such rows: its fragments and indexes, and no other file."""
        self.segments.forget()
        survey = Survey(table)
        self._retention.refresh(table, self.now)
        self._unaffected(table)
        self._version = table.version
        self._living = self.target.living_values(table) if _has_dictionaries(table.manifest) else {}
        survey.stained = self._stained(table.location, table.manifest)
        survey.indexes = self.segments.dirty(table, table.manifest, survey.stained)
        survey.newest_mentions = self._mentions(table, table.manifest) and self._is_old(table.version)
        return survey

    def survey(self, table: Table, *, branches: bool = True) -> Survey:
        """Find all holders of a table's newest version ``table``, and those that are in its other ``branches``."""
        survey = self.newest(table)
        survey.living = sum(
            len(batch) for target in self.targets for batch in target.living(table.dataset, table.location.uri)
        )
        for version, shown in self.others(table):
            if (why := self._why(table, version, shown)) is not None:
                survey.versions[version] = why
        survey.log = self._log(table)
        if survey.log is not None:
            reading = {number: self._retention.reading(*number) for number in survey.log.numbers}
            survey.versions |= {
                version: why
                for version, why in survey.log.versions(reading).items()
                if version not in survey.versions and version != table.version
            }
        survey.holders += self._holders(table, survey)
        if survey.log is not None:
            waits = (holder.until for holder in survey.holders if holder.kind == "version" and holder.until is not None)
            survey.holders += survey.log.holders(max(waits, default=None))
        places = _places(table)
        without = _within(table.branch.folder, places)
        if branches:
            survey.holders += self._branches(table, survey, places)
        elif table.branch.name is None:
            without = (f"{BRANCHES_FOLDER}/",)
        survey.holders += self._followers(table)
        survey.holders += self._objects(table, survey, without)
        return survey

    def _log(self, table: Table) -> LogSurvey | None:
        """What of the log holds such rows; None: there is no log."""
        if not table.regions.region_ids:
            return None
        return RegionLogs(table, self.target, self.gc_options, self.merged, now=self.now).read()

    def _is_old(self, version: int) -> bool:
        return self.target.before is None or self._retention.written(version) < self.target.before

    def _unaffected(self, table: Table) -> None:
        """Note fragments of which nothing was deleted at the time before which rows must be gone."""
        before = self.target.before
        if before is None:
            return
        then = max(
            (version for version in self._retention.versions if self._retention.written(version) < before), default=None
        )
        if then is None:
            return
        shown = table.manifest_of(then)
        whole = (
            {fragment_key(fragment) for fragment in shown.manifest.fragments if not fragment.HasField("deletion_file")}
            if shown
            else set()
        )
        for version in range(then, table.version + 1):
            for fragment in (table.manifest_of(version) or shown or table.manifest).manifest.fragments:
                if fragment_key(fragment) in whole and fragment.HasField("deletion_file"):
                    self.target.unaffected.add(fragment_key(fragment, deletions=True))

    def _stained(self, location: Location, shown: VersionManifest) -> dict[int, str]:
        opened = cache(partial(open_dataset, location, version=int(shown.manifest.version)))
        stained = self.target.stained([*shown.manifest.fragments], shown, opened)
        if _has_dictionaries(shown) and (self.target.where is not None or shown.manifest.version == self._version):
            for fragment in shown.manifest.fragments:
                why = None if fragment.id in stained else self.target.unused(fragment, opened, self._living)
                stained |= {} if why is None else {int(fragment.id): why}
        return stained

    def others(self, table: Table) -> Iterator[tuple[int, VersionManifest | None]]:
        """The versions but the newest; None for one that is gone or cannot be read."""
        versions = [version for version in self._retention.versions if version != table.version]
        yield from concurrently(table.manifest_of, versions, threads=_CONCURRENT_READS)

    def _why(self, table: Table, version: int, shown: VersionManifest | None) -> str | None:
        if shown is None:
            return "it cannot be read, so that it may hold such rows"
        if self.target.before is not None and self._retention.written(version) < self.target.before:
            return "it is older than the deletions"
        for number, why in self._stained(table.location, shown).items():
            return f"fragment {number}: {why}"
        for name, why in self.segments.dirty(table, shown, ()).items():
            return f"index {name}: {why}"
        if self.target.where is not None and self._mentions(table, shown):
            return "its transaction has the expression of a deletion, which may be of such rows"
        return None

    def _mentions(self, table: Table, shown: VersionManifest) -> bool:
        """Whether the transaction of a version may have values of such rows in it."""

        def had_none_before() -> bool:
            before = table.manifest_of(int(shown.manifest.version) - 1)
            return before is not None and not self._stained(table.location, before)

        try:
            transaction = _transaction(table.store, shown)
        except InvalidFormatError:
            return True
        where = self.target.where or ""

        def is_of_others() -> bool:
            return self.segments.is_of_others(transaction.uuid, where, had_none_before) if transaction else True

        return self.target.mentions(transaction, is_of_others)

    def _record_mentions(self, table: Table, path: str) -> bool:
        """Whether recorded manifests of expired versions may have values of such rows; some are kept for a branch."""
        try:
            return any(
                self._mentions(table, shown) for shown in version_files.decode_manifests(path, table.store.get(path))
            )
        except (ObjectNotFoundError, InvalidFormatError):
            return True

    def _holders(self, table: Table, found: Survey) -> Iterator[RowHolder]:
        for number, why in found.stained.items():
            yield RowHolder("fragment", str(number), why)
        for name, why in found.indexes.items():
            yield RowHolder("index", name, why, blocks="shallow clone" in why)
        if found.newest_mentions:
            yield RowHolder("transaction", f"version {table.version}", "it has the expression of a deletion")
        protected = self._retention.protected()
        listed = self._retention.versions
        following = dict(pairwise(listed))
        for version, why in found.versions.items():
            if version in protected:
                kept = protected[version]
                kind = next((kind for kind in ("tag", "hold", "branch") if kept.startswith(kind)), "version")
                yield RowHolder(kind, kept.removeprefix(f"{kind} "), f"keeps version {version}: {why}", blocks=True)
                continue
            if version in self.kept:
                yield RowHolder("version", str(version), f"{why}; it is kept: {self.kept[version]}", blocks=True)
                continue
            until = None
            if self.older_than:
                last = following.get(version, version)
                until = max(
                    self._retention.written(version) + self.older_than,
                    self._retention.written(last) + min(self.older_than, SAFE_AGE),
                )
            yield RowHolder("version", str(version), why, until if until is not None and until > self.now else None)

    def followers(self, table: Table) -> Iterator[Follower]:
        """Indexes elsewhere that follow the table, and may have such rows."""
        for follower in read_followers(table.store):
            if not self._has_erased(table, follower.erased):
                yield follower

    def _has_erased(self, table: Table, version: int) -> bool:
        """Whether what was erased at a version is all that must be gone."""
        if version not in self._retention.versions:
            return False
        if self.target.before is not None:
            return self._retention.written(version) >= self.target.before
        manifest = version_files.read_version_manifest(table.store, version, table.naming).manifest
        if (damage := damaged_deletions(table.location, table.store, manifest, table.sound)) is not None:
            raise damage.error
        return not any(len(rows) for rows in self.target.living(open_dataset(table.location, version=version), ""))

    def is_named(self, follower: Follower) -> bool:
        """Whether the options name its folder, and it is here: any writer of the table can write a record."""
        return follower.is_here and os.path.realpath(follower.folder) in self._named

    def _followers(self, table: Table) -> Iterator[RowHolder]:
        for follower in self.followers(table):
            named = self.is_named(follower)
            where = "this table" if named else f"this table on {follower.host}, or did: {follower.path} records it"
            act = f"memwal-ops erase {follower.folder} --deleted-before {self.now:%Y-%m-%d} --apply"
            give = f"give --follower {follower.folder}, or " if follower.is_here and not named else ""
            why = f"follows {where}; {give}erase it, too: {act}"
            yield RowHolder("index folder", follower.folder, why, blocks=not named)
        recorded = {os.path.realpath(follower.folder) for follower in read_followers(table.store)}
        for folder in sorted(self._named - recorded):
            why = f"is named, and no record in the table has it: memwal-ops catchup {folder} writes that"
            yield RowHolder("index folder", folder, why, blocks=True)

    def _branches(self, table: Table, found: Survey, places: set[str]) -> Iterator[RowHolder]:
        """The other branches of the table, main among them, that have such rows; notes what their objects are."""
        for place in sorted(places - {table.branch.folder}):
            name = place.removeprefix(f"{BRANCHES_FOLDER}/")
            try:
                branch = self._survey_branch(table, name or None)
            except MemwalOpsError as error:
                yield RowHolder("branch", name or "main", f"it cannot be read: {error}", blocks=True)
                continue
            name = name or "main"
            found.on_branches |= {f"{place}/{meta.path}": why for meta, why in branch.objects}
            if branch.holders:
                why = branch.holders[0]
                remedy = f"erase it there, too: memwal-ops erase URI --branch {name}"
                text = f"{why.kind} {why.name}: {why.why}; {remedy}, or delete the branch"
                yield RowHolder("branch", name, text, blocks=True)

    def _survey_branch(self, table: Table, name: str | None) -> Survey:
        location = branch_location(table.location, table.branch.name, name)
        branch = load(location, open_store(location))
        target = self.target
        targets = [Target(target.where, target.before, target.values, target.routing, target.prefixes)]
        surveyor = type(self)(targets, branch.store, self._options, self.now)
        surveyor.segments.inherited = self.segments.proven.keys() | self._clean
        survey = surveyor.survey(branch, branches=False)
        self._clean |= surveyor.segments.proven.keys()
        return survey

    def _objects(self, table: Table, found: Survey, without: tuple[str, ...]) -> Iterator[RowHolder]:
        """Classify every object of the table; yields those that may hold such rows and are not named otherwise."""
        # Listed before the manifests: a version that is committed meanwhile is read, or not in the list.
        listed = [meta for meta in table.store.list() if not meta.path.startswith(without)]
        needed = NeededFiles()
        needed.read(table)
        needed.read_records(table)
        kept = set(version_files.references(table.manifest).all)
        for version in _newer(listed, table.version):
            shown = table.manifest_of(version)
            if (why := self._why(table, version, shown)) is not None or shown is None:
                found.versions[version] = why or ""
                yield RowHolder("version", str(version), f"{why}; it was committed while this run read the table")
            else:
                kept |= version_files.references(shown).all
        for version, shown in self.others(table):
            if version not in found.versions and shown is not None:
                kept |= version_files.references(shown).all
        in_log = {} if found.log is None else {meta.path: why for meta, why in found.log.objects}
        records = [meta for meta in listed if meta.path.startswith(f"{version_files.SET_ASIDE_FOLDER}/")]
        clean_records = {meta.path for meta in records if not self._record_mentions(table, meta.path)}
        objects = ObjectVerdicts(self.target, found, needed, kept, clean_records, self.now)
        for meta in listed:
            if meta.path in in_log:
                found.objects.append((meta, in_log[meta.path]))
                continue
            why, holder = objects.classify(meta)
            found.objects.append((meta, why))
            if holder is not None:
                yield holder


def _has_dictionaries(shown: VersionManifest) -> bool:
    return any(schema_field.logical_type.startswith("dict:") for schema_field in shown.manifest.fields)


def _places(table: Table) -> set[str]:
    """The folders of all branches, below the root; that of main is empty."""
    folders = [version_files.VERSIONS_FOLDER, BRANCHES_FOLDER]
    listed = (meta.path.rpartition("/") for folder in folders for meta in table.branch.root.list(folder))
    return {
        place.removesuffix(version_files.VERSIONS_FOLDER).strip("/")
        for place, _, name in listed
        if place.endswith(version_files.VERSIONS_FOLDER) and parse_version_manifest_name(name)
    }


def _within(place: str, places: set[str]) -> tuple[str, ...]:
    """The folders in that of a branch which are not its own: those of branches ``NAME/MORE``."""
    return tuple(f"{other.removeprefix(f'{place}/')}/" for other in places if place and other.startswith(f"{place}/"))


def _newer(listed: list[ObjectMeta], version: int) -> Iterator[int]:
    """The versions in a listing that are newer than the one that was read."""
    for meta in listed:
        folder, _, name = meta.path.rpartition("/")
        parsed = parse_version_manifest_name(name) if folder == version_files.VERSIONS_FOLDER else None
        if parsed is not None and not parsed.detached and parsed.version > version:
            yield parsed.version


def _transaction(store: Store, shown: VersionManifest) -> table_pb2.Transaction | None:
    """The transaction of a version: in its manifest or, by older releases of Lance, in a file of its own.

    Raises:
        InvalidFormatError: the file does not decode.
    """
    name = shown.manifest.transaction_file
    if shown.transaction is not None or not name:
        return shown.transaction
    try:
        return table_pb2.Transaction.FromString(store.get(f"{version_files.TRANSACTIONS_FOLDER}/{name}"))
    except ObjectNotFoundError:
        return None
    except DecodeError as error:
        raise InvalidFormatError(f"{version_files.TRANSACTIONS_FOLDER}/{name} does not decode: {error}.") from error
