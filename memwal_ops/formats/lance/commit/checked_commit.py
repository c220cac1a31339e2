"""Let pylance compute and rebase a commit, check the version that it would publish, and publish that by put-if-absent.

pylance's compaction remaps indexes and publishes them in one call, after it published a version that reserves ids of
fragments. So it cannot be aborted and its result published later. But pylance leaves publication to a namespace if the
dataset was opened by one: it stores each version that it would publish under a temporary name, also each one that it
rebased over concurrent commits, and the namespace gives it its number. Here that is done after a check of exactly that
version, by the same conditional put as all other commits. A run that is killed in between leaves the temporary file,
which looks like one of a table whose versions are recorded in DynamoDB: on S3 a mark tells that it need not be.
"""

from __future__ import annotations

import uuid
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import lance
from lance_namespace import (
    CreateTableVersionResponse,
    DescribeTableVersionResponse,
    LanceNamespace,
    ListTableVersionsResponse,
    TableVersion,
    TableVersionNotFoundError,
)

from memwal_ops.errors import CommitConflictError, LeaseLostError, MemwalOpsError
from memwal_ops.formats.lance.commit.own_thread import OwnThread
from memwal_ops.formats.lance.commit.publication import advance_hint, is_taken, publish
from memwal_ops.formats.lance.files.datasets import handle_options, metered
from memwal_ops.formats.lance.files.lance_errors import lance_errors
from memwal_ops.formats.lance.files.versions import CHECKED_MARK, VERSIONS_FOLDER, list_versions, version_path
from memwal_ops.formats.lance.wire.version_manifest import decode_version_manifest
from memwal_ops.storage.locations import LOCAL, bucket_and_prefix

if TYPE_CHECKING:
    from collections.abc import Callable

    from memwal_ops.formats.lance.table import Table


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
    if table.location.scheme == "s3" and not table.listed.has(CHECKED_MARK):
        table.store.put_if_absent(CHECKED_MARK, b"{}\n")
    versions = _CheckedVersions(table, check)

    def committed() -> int:
        dataset = versions.open()
        commit(dataset)
        return int(dataset.version)

    try:
        with lance_errors("commit to", table.location.uri):
            return versions.thread.wait_for(committed)
    except MemwalOpsError as error:
        if versions.refused is not None:
            raise versions.refused from error
        raise


@dataclass(eq=False)
class _CheckedVersions(LanceNamespace):
    """The versions of one table, as a namespace for pylance.

    Attributes:
        table: the version that the commit was computed on.
        check: see :func:`commit_checked`.
        refused: what it raised, or that the lease is lost.
        thread: that of the run.
    """

    table: Table
    check: Callable[[Table], object]
    refused: BaseException | None = None
    thread: OwnThread = field(default_factory=OwnThread)
    name: str = field(default_factory=lambda: f"memwal-ops-{uuid.uuid4()}")

    def open(self) -> lance.LanceDataset:
        """A handle on the table, whose commits are left to this namespace."""
        return metered(
            lance.LanceDataset(
                self.table.location.uri,
                self.table.version,
                **handle_options(self.table.location),
                namespace_client=self,
                table_id=[self.table.location.uri],
                namespace_client_managed_versioning=True,
            )
        )

    def namespace_id(self) -> str:
        """A name that no other one has: pylance shares connections of those with the same."""
        return self.name

    def create_table_version(self, request: Any) -> CreateTableVersionResponse:
        """Check and publish a version that pylance has stored under a temporary name."""
        return self.thread.run(lambda: self._create(int(request["version"]), str(request["manifest_path"])))

    def describe_table_version(self, request: Any) -> DescribeTableVersionResponse:
        """Where the manifest of a version is."""
        return self.thread.run(lambda: self._describe(int(request["version"])))

    def list_table_versions(self, request: Any) -> ListTableVersionsResponse:
        """The existing versions, the newest first."""
        return self.thread.run(lambda: self._list(request.get("limit")))

    def _describe(self, version: int) -> DescribeTableVersionResponse:
        known = version == self.table.version or (self.refused is None and is_taken(self.table, version))
        if not known:
            raise TableVersionNotFoundError(f"There is no version {version}.")
        return DescribeTableVersionResponse(version=self._at(version))

    def _list(self, limit: int | None) -> ListTableVersionsResponse:
        newest = sorted(list_versions(self.table.store).numbered, reverse=True)[:limit]
        return ListTableVersionsResponse(versions=[self._at(version) for version in newest])

    def _create(self, version: int, staged: str) -> CreateTableVersionResponse:
        path = f"{VERSIONS_FOLDER}/{staged.rpartition('/')[2]}"
        data = self.table.store.get(path)
        self.table.discard([path])
        self._check(data)
        try:
            publish(self.table, data, version)
        except LeaseLostError as error:  # nothing was published, and nothing may be
            self.refused = error
            raise
        advance_hint(self.table, version)
        return CreateTableVersionResponse(version=self._at(version))

    def _check(self, data: bytes) -> None:
        if self.refused is None:
            try:
                self.check(replace(self.table, manifest=decode_version_manifest(data)))
            except BaseException as error:  # noqa: BLE001 - pylance would turn it into text, and try again
                self.refused = error
        if self.refused is not None:
            raise CommitConflictError("This version must not be published.")

    def _at(self, version: int) -> TableVersion:
        location = self.table.location
        root = location.uri if location.scheme in LOCAL else bucket_and_prefix(location)[1]
        path = f"{root}/{version_path(version, self.table.naming)}"
        return TableVersion(version=version, manifest_path=path.lstrip("/"))
