"""Commit by pylance, which rebases over concurrent commits: changes of a plain table, and compactions of any.

There is no merge progress that a rebase could revert, and a commit of exactly V + 1 would starve if writers append
in a loop. pylance's conflict check refuses conflicting changes: another change of the same index, or a rewrite of the
fragments that the segments cover.

pylance's compaction remaps indexes and publishes them in one call, after it published a version that reserves ids of
fragments. So it cannot be aborted and its result published later. But pylance leaves publication to a namespace if the
dataset was opened by one: it stores each version that it would publish under a temporary name, also each one that it
rebased over concurrent commits, and the namespace gives it its number. Here that is done after a check of exactly that
version (:func:`commit_checked`), by the same conditional put as all other commits. A run that is killed in between
leaves the temporary file, which looks like one of a table whose versions are recorded in DynamoDB: on S3 a mark tells
that it need not be.

pylance calls the namespace in threads of its own, in which nothing may call it again, nor another library with such
threads: the process would be aborted. And a run's listener, its signals and its context belong to the thread of the
run. So what it calls is run in the thread that waits for it (:class:`OwnThread`).
"""

from __future__ import annotations

import threading
import uuid
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, TypeVar

import lance

from memwal_ops.core.context import record
from memwal_ops.core.holds import holds_in_force
from memwal_ops.errors import (
    CommitConflictError,
    LeaseLostError,
    MemwalOpsError,
    ObjectNotFoundError,
    UnsupportedFeatureError,
)
from memwal_ops.formats.lance.commit import publication
from memwal_ops.formats.lance.commit.index_build import IndexBuild, to_pylance
from memwal_ops.formats.lance.files import datasets, version_files
from memwal_ops.formats.lance.wire.version_manifest import VersionManifest, decode_version_manifest
from memwal_ops.log import get_logger
from memwal_ops.storage.locations import LOCAL, bucket_and_prefix

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from memwal_ops.formats.lance.indexes.base_indexes import BaseIndex
    from memwal_ops.formats.lance.table import Table
    from memwal_ops.formats.lance.wire._pb import table_pb2
    from memwal_ops.storage.api import Store


_T = TypeVar("_T")
# Only a limit: the waiting thread is notified.
_SECONDS = 1.0


@dataclass(eq=False)
class OwnThread:
    """Waits for a call in another thread, and runs what that asks for.

    Attributes:
        interrupted: Ctrl-C or SIGTERM while it waited: nothing is run any more.
    """

    interrupted: BaseException | None = None
    _asked: tuple[Callable[[], Any], Future[Any]] | None = None
    _wake: threading.Event = field(default_factory=threading.Event)
    _ended: bool = False

    def run(self, function: Callable[[], _T]) -> _T:
        """Run a function in the thread that waits; for pylance's threads, one at a time."""
        answer: Future[_T] = Future()
        self._asked = function, answer
        self._wake.set()
        while True:
            try:
                return answer.result(_SECONDS)
            except TimeoutError:
                if self._ended and not answer.done():
                    raise InterruptedError("The run ends.") from None

    def wait_for(self, call: Callable[[], _T]) -> _T:
        """Make a call in another thread, wait for its end, and return or raise what it does.

        Raises:
            BaseException: what interrupted the wait; the call has ended then.
        """
        outcome: Future[_T] = Future()
        thread = threading.Thread(target=self._call, args=(call, outcome), name="pylance call", daemon=True)
        thread.start()
        try:
            while not outcome.done():
                try:
                    self._serve()
                except BaseException as error:  # noqa: BLE001 - the other thread must end first
                    self.interrupted = self.interrupted or error
        finally:
            self._ended = True
        if self.interrupted is not None:
            raise self.interrupted
        return outcome.result()

    def _serve(self) -> None:
        """Run what is asked for, if anything is; an interrupted one is answered at the next time."""
        self._wake.wait(_SECONDS)
        self._wake.clear()
        if self._asked is None:
            return
        function, answer = self._asked
        if not answer.done():
            try:
                if self.interrupted is not None:
                    raise InterruptedError("The run was interrupted.")
                answer.set_result(function())
            except Exception as error:  # noqa: BLE001 - raised in the other thread
                answer.set_exception(error)
        self._asked = None

    def _call(self, call: Callable[[], _T], outcome: Future[_T]) -> None:
        try:
            outcome.set_result(call())
        except BaseException as error:  # noqa: BLE001 - raised in the thread that waits
            outcome.set_exception(error)
        self._wake.set()


def commit_checked(
    table: Table, commit: Callable[[lance.LanceDataset], object], check: Callable[[Table], object]
) -> int:
    """Commit with a call of pylance, each of whose versions is checked before it is published.

    Args:
        table: the version that the commit was computed on.
        commit: the call, with a handle on that version.
        check: called with ``table`` with the manifest of each version that would be published, which pylance cannot
            open; what it raises ends the commit.

    Returns:
        The version that was published.

    Raises:
        BaseException: what ``check`` raised; the version that it was called with was not published, nor was any other
            one with its files.
        LeaseLostError: the run may publish nothing any more.
        MemwalOpsError: pylance failed.
    """
    if table.location.scheme == "s3" and not table.listed.has(version_files.CHECKED_MARK):
        table.store.put_if_absent(version_files.CHECKED_MARK, b"{}\n")
    versions = _CheckedVersions(table, check)

    def committed() -> int:
        dataset = versions.open()
        commit(dataset)
        return int(dataset.version)

    try:
        with datasets.lance_errors("commit to", table.location.uri):
            return versions.thread.wait_for(committed)
    except MemwalOpsError as error:
        if versions.refused is not None:
            raise versions.refused from error
        raise


class _Response(dict[str, Any]):
    """A response of the namespace, as pylance takes it."""

    def model_dump(self) -> dict[str, Any]:
        """Its fields."""
        return self


@dataclass(eq=False)
class _CheckedVersions:
    """The versions of one table, as a namespace for pylance.

    It is no subclass of ``LanceNamespace``: pylance needs only its methods, and ``lance_namespace`` takes a second to
    import.
    ``refused`` is what the check of :func:`commit_checked` raised, or that the lease is lost.
    """

    table: Table
    check: Callable[[Table], object]
    refused: BaseException | None = None
    thread: OwnThread = field(default_factory=OwnThread)
    name: str = field(default_factory=lambda: f"memwal-ops-{uuid.uuid4()}")

    def open(self) -> lance.LanceDataset:
        """A handle on the table, whose commits are left to this namespace."""
        return datasets.metered(
            lance.LanceDataset(
                self.table.location.uri,
                self.table.version,
                **datasets.handle_options(self.table.location),
                namespace_client=self,
                table_id=[self.table.location.uri],
                namespace_client_managed_versioning=True,
            )
        )

    def namespace_id(self) -> str:
        """A name that no other one has: pylance shares connections of those with the same."""
        return self.name

    def create_table_version(self, request: Any) -> _Response:
        """Check and publish a version that pylance has stored under a temporary name."""
        return self.thread.run(lambda: self._create(int(request["version"]), str(request["manifest_path"])))

    def describe_table_version(self, request: Any) -> _Response:
        """Where the manifest of a version is."""
        return self.thread.run(lambda: self._describe(int(request["version"])))

    def list_table_versions(self, request: Any) -> _Response:
        """The existing versions, the newest first."""
        return self.thread.run(lambda: self._list(request.get("limit")))

    def _describe(self, version: int) -> _Response:
        known = version == self.table.version or (self.refused is None and publication.is_taken(self.table, version))
        if not known:
            from lance_namespace.errors import TableVersionNotFoundError  # noqa: PLC0415 - see the class

            raise TableVersionNotFoundError(f"There is no version {version}.")
        return _Response(version=self._at(version))

    def _list(self, limit: int | None) -> _Response:
        newest = sorted(version_files.list_versions(self.table.store).numbered, reverse=True)[:limit]
        return _Response(versions=[self._at(version) for version in newest])

    def _create(self, version: int, staged: str) -> _Response:
        path = f"{version_files.VERSIONS_FOLDER}/{staged.rpartition('/')[2]}"
        data = self.table.store.get(path)
        self.table.discard([path])
        self._check(data)
        try:
            publication.publish(self.table, data, version)
        except LeaseLostError as error:  # nothing was published, and nothing may be
            self.refused = error
            raise
        publication.advance_hint(self.table, version)
        return _Response(version=self._at(version))

    def _check(self, data: bytes) -> None:
        if self.refused is None:
            try:
                self.check(replace(self.table, manifest=decode_version_manifest(data)))
            except BaseException as error:  # noqa: BLE001 - pylance would turn it into text, and try again
                self.refused = error
        if self.refused is not None:
            raise CommitConflictError("This version must not be published.")

    def _at(self, version: int) -> dict[str, Any]:
        location = self.table.location
        root = location.uri if location.scheme in LOCAL else bucket_and_prefix(location)[1]
        path = f"{root}/{version_files.version_path(version, self.table.naming)}"
        return {"version": version, "manifest_path": path.lstrip("/")}


_CLEAN_UP = "lance.auto_cleanup."
_REMEDY = "Turn the setting off (dataset.optimize.disable_auto_cleanup()) and let memwal-ops expire do it, or {}."


def commit_segments(table: Table, build: IndexBuild, note: publication.CommitNote) -> None:
    """Publish ``build``, which was built on ``table``, in whichever version comes next.

    Raises:
        CommitLostError: a concurrent commit conflicts with it, or the table was replaced; nothing was published.
        UnsupportedFeatureError: pylance's commit would delete what a hold keeps, or lose a part of an entry.
        MemwalOpsError: the store failed. It is not known whether the segments were published, so that their files
            must be kept.
    """
    current = {one.uuid.uuid: one for one in table.manifest.index_entries}
    operation = lance.LanceOperation.CreateIndex(
        [to_pylance(entry) for entry in build.added], [to_pylance(current[segment.bytes]) for segment in build.removed]
    )
    _check_commit(table)
    publication.refuse_missing_files(table, [version_files.index_key(entry) for entry in build.added])
    try:
        _commit(table, operation, note)
    except MemwalOpsError as error:
        published = _is_published(table, build)
        if published:
            return
        if datasets.is_commit_conflict(error):
            raise publication.commit_lost(table, table.version + 1, files_unreferenced=published is False) from error
        raise


def commit_coverage(
    table: Table,
    old: Iterable[table_pb2.IndexMetadata],
    new: Iterable[table_pb2.IndexMetadata],
    note: publication.CommitNote,
) -> None:
    """Replace entries of ``table``'s indexes by others with the same files, in whichever version comes next.

    Raises:
        CommitLostError: a concurrent commit conflicts with it, or the table was replaced; nothing was published.
        MemwalOpsError: the store failed, or see :func:`commit_segments`; it may have been published.
    """
    operation = lance.LanceOperation.CreateIndex(
        [to_pylance(entry) for entry in new], [to_pylance(entry) for entry in old]
    )
    _commit_or_lose(table, operation, note)


def commit_deletion(table: Table, operation: lance.LanceOperation.Delete, note: publication.CommitNote) -> None:
    """Publish deletions that were computed on ``table``, in whichever version comes next.

    Raises:
        CommitLostError: a concurrent commit conflicts with it; nothing was published.
        MemwalOpsError: the store failed; it may have been published.
    """
    _commit_or_lose(table, operation, note)


def _commit_or_lose(table: Table, operation: lance.LanceOperation.BaseOperation, note: publication.CommitNote) -> None:
    _check_commit(table)
    try:
        _commit(table, operation, note)
    except MemwalOpsError as error:
        if datasets.is_commit_conflict(error):
            raise publication.commit_lost(table, table.version + 1) from error
        raise


def _check_commit(table: Table) -> None:
    table.guard.check()  # here, since the commit is pylance's own and bypasses our store
    publication.refuse_gaps(table)
    refuse_auto_cleanup(table)


def _commit(table: Table, operation: lance.LanceOperation.BaseOperation, note: publication.CommitNote) -> None:
    transaction = lance.Transaction(
        read_version=table.version, operation=operation, transaction_properties=note.properties()
    )
    with datasets.lance_errors("commit a change of", table.location.uri):
        options = datasets.lance_options(table.location)
        record(int(lance.LanceDataset.commit(table.location.uri, transaction, storage_options=options).version))


def lacks_columns(table: Table, index: BaseIndex) -> bool:
    """Whether a column of an index was dropped: pylance's conflict check does not detect that.

    Every query with a filter fails then, also on other columns.
    """
    known = {column.id for column in table.manifest.manifest.fields}
    return any(not known.issuperset(entry.fields) for entry in index.segments)


def drop_index(table: Table, name: str) -> Table:
    """Drop an index whose column is gone; return the newest version."""
    _check_commit(table)
    with datasets.lance_errors("drop an index of", table.location.uri):
        dataset = datasets.open_dataset(table.location, version=table.version)
        dataset.drop_index(name)
        record(int(dataset.version))
    get_logger(__name__).warning("index_without_column_dropped", table=table.location.uri, index=name)
    return table.newest()


def _is_published(table: Table, build: IndexBuild) -> bool | None:
    """Whether a version after ``table``'s names the segments; None: a version that may have is gone."""
    newest = table.newest()
    if _names(newest.manifest, build):
        return True
    complete = True
    for version in range(table.version + 1, newest.version):
        try:
            if _names(version_files.read_version_manifest(newest.store, version, newest.naming), build):
                return True
        except ObjectNotFoundError:
            complete = False
    return False if complete else None


def _names(manifest: VersionManifest, build: IndexBuild) -> bool:
    added = {entry.uuid.uuid for entry in build.added}
    return not added.isdisjoint(entry.uuid.uuid for entry in manifest.index_entries)


def refuse_auto_cleanup(table: Table) -> None:
    """Refuse a commit of pylance's own that may clean up: if a hold is in force, or below the base folders is a link.

    If a table has the setting ``lance.auto_cleanup.*``, pylance deletes old versions in each N-th commit. It respects
    tags and branches, but not holds, and follows symbolic links out of the table. Detached commits do not start it (a
    contract test shows that). All jobs make detached commits, except those that call this.

    Raises:
        UnsupportedFeatureError: with the hold or the link.
    """
    if not any(key.startswith(_CLEAN_UP) for key in table.manifest.manifest.config):
        return
    hold = next(iter(holds_in_force(table.store, datetime.now(UTC))), None)
    if hold is not None:
        raise UnsupportedFeatureError(
            f"{table.location.uri} has the setting lance.auto_cleanup, by which pylance may delete version "
            f"{hold.versions[0]} in this commit, and hold {hold.number} of {hold.by} keeps it.",
            remedy=_REMEDY.format("wait until the hold ends; a tag instead of it is respected"),
        )
    link = _first_link(table.store) if table.location.scheme == "file" else None
    if link is not None:
        raise UnsupportedFeatureError(
            f"{table.location.uri} has the setting lance.auto_cleanup, and pylance's clean-up deletes the files behind "
            f"the symbolic link {link}.",
            remedy=_REMEDY.format("put the files themselves into the table's folder"),
        )


def _first_link(store: Store) -> str | None:
    bases = {version_files.VERSIONS_FOLDER, *version_files.BASE_FOLDERS}
    if links := bases.intersection(store.list_level("").links):
        return min(links)
    folders = [*bases]
    while folders:
        level = store.list_level(folders.pop())
        if level.links:
            return level.links[0]
        folders += [*level.directories, *level.empty]
    return None
