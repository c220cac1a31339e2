"""The store of a table whose versions are recorded in DynamoDB (``s3+ddb://``): Lance's protocol for their manifests.

A commit (S3-053) puts the manifest under a staged name, ``N.manifest-UUID``, then an entry for its version in DynamoDB
if there is none, which decides; then it copies the manifest to ``N.manifest``, replaces the path in the entry, and
deletes the staged one. A reader finishes what a killed writer left (S3-054, S3-055). All else, and what is below
other folders than ``_versions/`` of the table and its branches, is as in S3.

The commit could be lost if another writer committed to ``s3://`` alone, or by another table in DynamoDB. So the first
write of a job leaves a mark in ``_versions/``, by which memwal-ops refuses the plain URI, and other tables in DynamoDB.
"""

from __future__ import annotations

import json
import re
import threading
import uuid
from contextlib import suppress
from typing import TYPE_CHECKING

from memwal_ops import errors
from memwal_ops.storage import api, locations, metering
from memwal_ops.storage.errors import RetryPolicy, call, is_absent
from memwal_ops.storage.object_store import ObjectStore
from memwal_ops.storage.wrapper import StoreWrapper

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from memwal_ops.storage.dynamodb import VersionEntries

_ROOT_FOLDER = "_versions"
_FOLDER = rf"(?P<folder>(?:tree/.+/)?{_ROOT_FOLDER})"
_NAME = rf"{_FOLDER}/(?P<name>[0-9]{{1,20}}\.manifest)"
_MANIFEST = re.compile(_NAME, re.ASCII)
_STAGED = re.compile(rf"{_NAME}-(?P<id>[^/]+)", re.ASCII)
_IS_FOLDER = re.compile(_FOLDER)
_V2_DIGITS = 20
_U64_MAX = 2**64 - 1
_LAST_NUMBERED = 2**63 - 1
_CONCURRENT = 16
MARK = ".dynamodb.json"
"""Below ``_versions/``: the table's versions are recorded in DynamoDB."""
MOVED = ".moved-from-dynamodb.json"
"""Below ``_versions/``: they were, until the table was migrated to plain S3."""


def is_staged(path: str) -> bool:
    """Whether a path is that of a staged manifest."""
    return _STAGED.fullmatch(path) is not None


def manifest_entries(store: api.Store) -> ManifestEntryStore | None:
    """The store with entries in DynamoDB that is wrapped; None: the store's own manifests are all."""
    while isinstance(store, StoreWrapper):
        store = store.inner
    return store if isinstance(store, ManifestEntryStore) else None


def refuse_plain_uri(
    location: locations.Location, store: api.Store, listed: Iterable[api.ObjectMeta], is_own: Callable[[str], bool]
) -> None:
    """Refuse ``s3://`` for a table whose versions are recorded in DynamoDB, as far as its files show that.

    They show a mark of memwal-ops, or a staged manifest that is not of its own commits to ``s3://``. A mark that was
    copied with the table's files counts for nothing. No request if there is none.

    ``listed``: the objects of ``_versions/``. ``is_own``: whether the staged manifest with a path may be left by a
    killed job of memwal-ops.

    Raises:
        UnsupportedFeatureError: they are.
    """
    names = {meta.path.rpartition("/")[2]: meta.path for meta in listed}
    if MOVED in names:
        return
    staged = next((path for path in names.values() if is_staged(path) and not is_own(path)), None)
    table, of_this = "TABLE", staged is not None
    if MARK in names:
        with suppress(errors.ObjectNotFoundError, ValueError, KeyError, TypeError):
            mark = json.loads(store.get(names[MARK]))
            table, of_this = mark["table"], mark["base_uri"] == locations.bucket_and_prefix(location)[1] or of_this
    if of_this:
        uri = f"{locations.DYNAMODB}{location.uri.removeprefix('s3')}?ddbTableName={table}"
        name = MARK if MARK in names else staged
        raise errors.UnsupportedFeatureError(
            f"The versions of {location.uri} are recorded in DynamoDB, as {name} shows: what is committed to s3:// "
            "beside it is lost.",
            remedy=f"Open {uri}, as the table's writers do. Of a copied table, or if all its writers use s3://, delete "
            f"_versions/{MARK} and all that is named _versions/*.manifest-*.",
        )


class ManifestEntryStore(ObjectStore):
    """A store under one root, whose manifests have entries in DynamoDB. Safe to use from several threads.

    ``client``: obstore's client, rooted at ``root``. ``prefix``: the root's path in the bucket, which is ``base_uri``
    of the table's entries.
    """

    def __init__(
        self,
        client: metering.Client,
        root: str,
        *,
        bucket: str,
        prefix: str,
        entries: VersionEntries,
        delete_batch: int = 1000,
        retry: RetryPolicy | None = None,
    ) -> None:
        super().__init__(client, root, delete_batch=delete_batch, retry=retry)
        self.entries = entries
        self._bucket = bucket
        self._prefix = prefix
        self._unmarked: set[str] = set()
        self._marked: set[str] = set()
        self._lock = threading.Lock()

    def get(self, path: str) -> bytes:
        """See :class:`ObjectStore`; an unfinished commit of that version is finished."""
        try:
            return super().get(path)
        except errors.ObjectNotFoundError:
            if not self._finished(path):
                raise
            return super().get(path)

    def head(self, path: str) -> api.ObjectMeta | None:
        """See :class:`ObjectStore`; an unfinished commit of that version is finished."""
        meta = super().head(path)
        return super().head(path) if meta is None and self._finished(path) else meta

    def list(self, prefix: str = "", *, after: str | None = None) -> Iterator[api.ObjectMeta]:
        """See :class:`ObjectStore`; unfinished commits are finished, and staged manifests are listed, too.

        Also those of versions that are not the newest: a writer that could not finish its commit goes on with the next.

        Raises:
            InvalidUsageError: of ``_versions/``: there are versions, and none of them has an entry.
            UnsupportedFeatureError: of ``_versions/``: the table was migrated to plain S3.
            TableCorruptError: of ``_versions/``: the newest entry has no manifest, or a newer manifest has no entry.
        """
        folder = prefix.removesuffix("/")
        newest = self._synchronized(folder) if _IS_FOLDER.fullmatch(folder) else None
        if newest is None and folder == _ROOT_FOLDER:
            newest = self._refuse_unrecorded()
        passed: set[str] = set()
        for meta in super().list(prefix, after=after):
            if newest is not None:
                self._refuse_beside(meta.path, newest)
            if _MANIFEST.fullmatch(meta.path):
                passed.add(meta.path)
            elif staged := _STAGED.fullmatch(meta.path):
                final = f"{staged['folder']}/{staged['name']}"
                self._finished(final)  # or another process did, since it was listed
                yield from filter(None, [None if final in passed else super().head(final)])
            yield meta

    def put(self, path: str, data: bytes) -> None:
        """See :class:`ObjectStore`; a manifest is never written without condition."""
        self._refuse_manifest(path)
        self.mark()
        super().put(path, data)

    def compare_and_swap(self, path: str, data: bytes, e_tag: str) -> bool:
        """See :class:`ObjectStore`; a manifest is never replaced."""
        self._refuse_manifest(path)
        self.mark()
        return super().compare_and_swap(path, data, e_tag)

    def put_if_absent(self, path: str, data: bytes) -> bool:
        """See :class:`ObjectStore`; of a manifest, the entry in DynamoDB decides (S3-053).

        Raises ``StoreUnavailableError``: no response; the version may have been committed.
        """
        self.mark()
        match = _MANIFEST.fullmatch(path)
        if match is None:
            return super().put_if_absent(path, data)
        base, version = self._base(match["folder"]), _version(match["name"])
        if self.head(path) is not None or self.entries.get(base, version) is not None:
            return False
        staged = f"{path}-{uuid.uuid4()}"
        super().put_if_absent(staged, data)
        entry = api.VersionEntry(version, self._key(staged), len(data))
        if not self._created(base, entry):
            super().delete_many([staged])
            return False
        with suppress(errors.StorageError):  # committed: the next reader finishes it
            self._finish(match["folder"], entry)
        return True

    def put_back(self, path: str, data: bytes) -> bool:
        """Write an expired version's manifest again: its entry is still there, so that no commit is made."""
        self.mark()
        return self.head(path) is None and super().put_if_absent(path, data)

    def delete_many(self, paths: Iterable[str]) -> api.DeleteReport:
        """See :class:`ObjectStore`; unfinished commits of what is to be deleted are finished before.

        Else the next reader of that version would copy a deleted manifest from the staged one, or find none. A reader
        that stalls since before it was finished copies it, too, if a killed process left it: so it is deleted first.
        Entries are kept, see :mod:`memwal_ops.storage.dynamodb`.
        """
        wanted = [*paths]
        self.mark()
        matches = [_MANIFEST.fullmatch(path) or _STAGED.fullmatch(path) for path in wanted]
        manifests = {f"{match['folder']}/{match['name']}" for match in matches if match is not None}
        api.results_of(self._finished, manifests, threads=_CONCURRENT)
        super().delete_many(self._left_staged(wanted))
        return super().delete_many(wanted)

    def mark(self) -> None:
        """Leave the mark in each folder with entries that was listed, once.

        Raises ``InvalidUsageError``: there is one of another table in DynamoDB, or of another bucket.
        """
        with self._lock:
            for folder in self._unmarked - self._marked:
                data = self._document(folder)
                if not super().put_if_absent(f"{folder}/{MARK}", data) and not self._is_marked(folder):
                    super().put(f"{folder}/{MARK}", data)
                self._marked.add(folder)

    def why_staged(self, path: str) -> str | None:
        """Why a staged manifest may be that of a commit that is not over; None: another one has its version for good.

        An entry of its version that names another path is a proof: entries are put if absent, and never deleted.
        """
        match = _STAGED.fullmatch(path)
        if match is None:
            return "it is no staged manifest"
        entry = self.entries.get(self._base(match["folder"]), _version(match["name"]))
        if entry is None:
            return f"version {_version(match['name'])} is not committed yet: it may become this one"
        return "its version is not finished" if entry.path == self._key(path) else None

    def probe_commits(self) -> None:
        """Verify the table in DynamoDB, and that it refuses a second entry for a version. For doctor and probe only.

        Raises:
            InvalidUsageError: it does not exist, or has other keys.
            ConditionalWriteUnsupportedError: a second entry was accepted.
        """
        self.entries.check()
        if not self.entries.probe(f"_mem_wal_ops/probe/{uuid.uuid4().hex}"):
            raise errors.ConditionalWriteUnsupportedError(
                f"The DynamoDB table {self.entries.table} accepted two entries for one version."
            )

    def versions_folders(self) -> Sequence[str]:
        """``_versions`` of the table, and of each branch."""
        paths = (meta.path for meta in super().list("tree"))
        matches = (_MANIFEST.fullmatch(path) or _STAGED.fullmatch(path) for path in paths)
        return [_ROOT_FOLDER, *sorted({match["folder"] for match in matches if match is not None})]

    def newest_entry(self, folder: str) -> api.VersionEntry | None:
        """The newest entry, its commit finished; None: there is none."""
        return self._synchronized(folder)

    def finish_all(self, folder: str) -> int:
        """Finish every unfinished commit of a folder; return the number of them. Reads all entries."""
        unfinished = [
            entry for entry in self.entries.all(self._base(folder)) if _STAGED.fullmatch(self._relative(entry))
        ]
        for entry in unfinished:
            self._finish(folder, entry)
        return len(unfinished)

    def has_moved(self, folder: str) -> bool:
        """Whether the later versions of a folder are fenced."""
        newest = self.entries.newest(self._base(folder))
        return newest is not None and newest.moved_to is not None

    def record_newest(self, folder: str) -> api.VersionEntry | None:
        """Put the entry of the newest version of a folder that has none, as Lance does when it opens one by number."""
        manifests = self._manifests(folder)
        if not manifests:
            return None
        meta = manifests[max(manifests)]
        self.entries.create(self._base(folder), api.VersionEntry(max(manifests), self._key(meta.path), meta.size))
        return self.newest_entry(folder)

    def fence(self, folder: str, newest: api.VersionEntry, versions: int, moved_to: str) -> bool:
        """Fence later versions, see :meth:`VersionEntries.fence`."""
        return self.entries.fence(self._base(folder), newest, versions, moved_to)

    def record_move(self, folder: str, moved_to: str) -> None:
        """Record below ``_versions/`` that the versions are no longer recorded in DynamoDB. Safe to repeat.

        Before that, what a killed migration did not fence is fenced.
        """
        if super().head(f"{folder}/{MOVED}") is None:
            self.entries.complete_fence(self._base(folder))
            super().put_if_absent(f"{folder}/{MOVED}", self._document(folder, moved_to=moved_to))
        super().delete_many([f"{folder}/{MARK}"])

    def _synchronized(self, folder: str) -> api.VersionEntry | None:
        """The newest entry of a folder, after its commit is finished (S3-055)."""
        newest = self.entries.newest(self._base(folder))
        if newest is None:
            return None
        if newest.version > _LAST_NUMBERED:
            raise errors.TableCorruptError(
                f"The newest entry of {self.root} in DynamoDB is that of a detached version, {newest.version}: pylance "
                "records each that it commits or opens by s3+ddb://, and takes it for the newest from then on.",
                remedy=f"Delete the items of the DynamoDB table {self.entries.table} with base_uri "
                f"{self._base(folder)} and a version above {_LAST_NUMBERED}; the detached manifests stay.",
            )
        if newest.moved_to is not None:
            with suppress(errors.StorageError):  # it may be read only, and who may write records it
                self.record_move(folder, newest.moved_to)
            raise errors.UnsupportedFeatureError(
                f"{self.root} was migrated to plain S3: its versions are no longer recorded in DynamoDB.",
                remedy=f"Open {newest.moved_to}, and let all writers do so.",
            )
        path = self._relative(newest)
        if _STAGED.fullmatch(path):
            self._finish(folder, newest)
        elif (meta := super().head(path)) is None or newest.size not in {None, meta.size}:
            if self.entries.newest(self._base(folder)) != newest:
                return self._synchronized(folder)  # others committed meanwhile, and that version expired
            self._refuse_stale(folder, newest, meta)
        self._unmarked.add(folder)
        return newest

    def _refuse_unrecorded(self) -> api.VersionEntry | None:
        """Refuse a table with versions, none of which has an entry; return the newest entry, if there is one now."""
        versions = self._manifests(_ROOT_FOLDER)
        if not versions or (newest := self._synchronized(_ROOT_FOLDER)) is not None:
            return newest if versions else None
        raise errors.InvalidUsageError(
            f"The table {self.entries.table} in DynamoDB has no entry of {self.root}, which has version "
            f"{max(versions)}: if its writers use another one, or none, commits by this URI are lost.",
            remedy="Write ddbTableName, region and dynamodb_endpoint as the table's writers do, or s3:// if they do. "
            "If they all use this URI from now on, record the newest version: "
            f"lance.dataset(URI, version={max(versions)}).",
        )

    def _manifests(self, folder: str) -> Mapping[int, api.ObjectMeta]:
        listed = [*super().list(folder)]
        return {_version(match["name"]): meta for meta in listed if (match := _MANIFEST.fullmatch(meta.path))}

    def _refuse_stale(self, folder: str, newest: api.VersionEntry, found: api.ObjectMeta | None) -> None:
        """Refuse a newest entry without its manifest, which may have been renamed since (V1 to V2 names)."""
        other = f"{folder}/{newest.version}.manifest", f"{folder}/{_U64_MAX - newest.version:020d}.manifest"
        if found is None and any(super(ManifestEntryStore, self).head(name) is not None for name in other):
            return
        state = "does not exist" if found is None else f"has {found.size} bytes instead of {newest.size}"
        raise errors.TableCorruptError(
            f"The newest entry in DynamoDB is version {newest.version}, and its manifest {newest.path} {state}.",
            remedy="If the table was dropped, or created again at the same path: dropping keeps the entries, by which "
            f"Lance refuses the new table, too. Delete the items with base_uri {self._base(folder)} then, or use "
            "another path. If two buckets have a table at that path, give each its own table in DynamoDB.",
        )

    def _refuse_beside(self, path: str, newest: api.VersionEntry) -> None:
        """Refuse a table with a version newer than all entries: it was committed to S3 alone."""
        match = _MANIFEST.fullmatch(path)
        if match is None or (version := _version(match["name"])) <= newest.version:
            return
        if self.entries.get(self._base(match["folder"]), version) is None:
            raise errors.TableCorruptError(
                f"Version {version} of {self.root} was committed to s3:// beside DynamoDB, in which {newest.version} "
                "is the newest: readers do not find it, and the next commit may replace it.",
                remedy="Stop the writers that use s3://, then record it, the oldest such version first: "
                f"lance.dataset(URI, version={version}) with the s3+ddb:// URI does that.",
            )

    def _finished(self, path: str) -> bool:
        """Finish the commit of a manifest's version if it is unfinished; whether it was."""
        match = _MANIFEST.fullmatch(path)
        if match is None:
            return False
        entry = self.entries.get(self._base(match["folder"]), _version(match["name"]))
        if entry is None or entry.moved_to is not None or not _STAGED.fullmatch(self._relative(entry)):
            return False
        self._finish(match["folder"], entry)
        return True

    def _left_staged(self, paths: Iterable[str]) -> Sequence[str]:
        """Staged manifests of the versions whose manifests are among the paths, which no commit needs."""
        manifests = {path: match["folder"] for path in paths if (match := _MANIFEST.fullmatch(path)) is not None}
        staged = [
            meta.path
            for folder in {*manifests.values()}
            for meta in super(ManifestEntryStore, self).list(folder)
            if (match := _STAGED.fullmatch(meta.path)) is not None and f"{folder}/{match['name']}" in manifests
        ]
        return [path for path in staged if self.why_staged(path) is None]

    def _finish(self, folder: str, entry: api.VersionEntry) -> None:
        """Copy a staged manifest to its final name, replace the entry's path, and delete it. Safe to repeat."""
        staged = self._relative(entry)
        match = _STAGED.fullmatch(staged)
        if match is None or match["folder"] != folder:
            raise errors.TableCorruptError(f"The entry of version {entry.version} in DynamoDB names {entry.path}.")
        final = f"{folder}/{match['name']}"
        self._copy(staged, final)
        meta = super().head(final)
        if meta is None or entry.size not in {None, meta.size}:
            if self.entries.get(self._base(folder), entry.version) != entry:
                return  # finished by another process, and expired since
            raise errors.TableCorruptError(
                f"Version {entry.version} of {self.root} is not finished, and its manifest {entry.path} is gone.",
                remedy=f"Restore that object (an earlier version of it, if the bucket has versioning), or delete the "
                f"item of version {entry.version} in DynamoDB: the table is then as it was before that commit.",
            )
        self.entries.finalize(self._base(folder), entry, self._key(final), meta.size)
        super().delete_many([staged])

    def _copy(self, source: str, target: str) -> None:
        """Copy an object in the store, if there is one: else another process finished the commit."""

        def attempt() -> None:
            try:
                metering.copy(self._client(writing=True), source, target)
            except Exception as error:
                if not is_absent(error):
                    raise

        call(attempt, path=target, action="write", policy=self._retry)

    def _created(self, base: str, entry: api.VersionEntry) -> bool:
        """Put the entry if absent; whether the version's entry is this one, also if a response was lost."""
        try:
            if self.entries.create(base, entry):
                return True
        except errors.StorageError:
            recorded = self.entries.get(base, entry.version)
            if recorded is None:
                raise  # it may still arrive: the staged manifest is kept
            return recorded.path == entry.path
        recorded = self.entries.get(base, entry.version)
        return recorded is not None and recorded.path == entry.path

    def _is_marked(self, folder: str) -> bool:
        """Whether the mark of a folder is not that of a table at another path, of which this one is a copy.

        Raises ``InvalidUsageError``: it names another table in DynamoDB, or the same table in another bucket.
        """
        try:
            mark = json.loads(super().get(f"{folder}/{MARK}"))
            recorded, bucket, same = mark["table"], mark.get("bucket"), mark["base_uri"] == self._base(folder)
        except (errors.ObjectNotFoundError, ValueError, KeyError, TypeError):
            return False
        if same and (recorded != self.entries.table or bucket not in {None, self._bucket}):
            where = f"that table in the bucket {bucket}" if bucket not in {None, self._bucket} else recorded
            raise errors.InvalidUsageError(
                f"The versions of {self.root} are recorded in {self.entries.table}, and {folder}/{MARK} names {where}: "
                "what is committed by the one is lost for the other.",
                remedy="Write the URI as the table's writers do. A copy in another bucket needs its own table in "
                f"DynamoDB. If all writers use this URI, and the other one is no longer used, delete {folder}/{MARK}.",
            )
        return bool(same)

    def _document(self, folder: str, **more: str) -> bytes:
        document = {"base_uri": self._base(folder), "bucket": self._bucket, "table": self.entries.table, **more}
        return json.dumps(document).encode()

    def _refuse_manifest(self, path: str) -> None:
        if _MANIFEST.fullmatch(path):
            raise errors.InvariantViolatedError(f"{path} would be written past its entry in DynamoDB.")

    def _base(self, folder: str) -> str:
        return "/".join(filter(None, (self._prefix, folder.removesuffix("_versions").removesuffix("/"))))

    def _key(self, path: str) -> str:
        return f"{self._prefix}/{path}"

    def _relative(self, entry: api.VersionEntry) -> str:
        return entry.path.removeprefix(f"{self._prefix}/")


def _version(name: str) -> int:
    digits = name.partition(".")[0]
    return _U64_MAX - int(digits) if len(digits) == _V2_DIGITS else int(digits)
