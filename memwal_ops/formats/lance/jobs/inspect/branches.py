"""Read the branches of a table: where each left, when it was written last, and what those that are stale hold."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from memwal_ops.core.documents import document
from memwal_ops.core.registry import MAIN
from memwal_ops.errors import ObjectNotFoundError
from memwal_ops.formats.lance.files.branch import branch_folder, list_branches
from memwal_ops.formats.lance.files.referenced_files import DATA_FOLDER
from memwal_ops.formats.lance.files.versions import VERSIONS_FOLDER, decode_named
from memwal_ops.formats.lance.wire.names import parse_version_manifest_name
from memwal_ops.text import counted, paragraph, size_text

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from datetime import datetime

    from memwal_ops.core.protocols import TableBranch
    from memwal_ops.formats.lance.table import Table
    from memwal_ops.storage.api import ObjectMeta


@dataclass(frozen=True, slots=True)
class BranchState:
    """A branch.

    Attributes:
        record: as the root has it.
        version: its newest version; None: none is listed.
        versions: the number of its versions.
        written: when its newest version was published.
        stale: whether that is longer ago than asked.
        bytes: of a stale one, the size of all objects below its folder.
        kept_bytes: of a stale one, the size of data files of other branches that its newest version needs, and the
            newest version of main does not.
    """

    record: TableBranch
    version: int | None
    versions: int
    written: datetime | None
    stale: bool
    bytes: int | None = None
    kept_bytes: int | None = None

    def to_json(self) -> dict[str, object]:
        """The entry of ``branches``; times as of ISO 8601."""
        root = document(self.record, "parent_revision", parent=self.record.parent or MAIN)
        return root | {"parent_version": self.record.parent_revision} | document(self, "record")


def read_branches(table: Table, before: datetime) -> tuple[BranchState, ...]:
    """The branches of a table that was opened at its root, ascending by name.

    Requests: a listing of their records; for each branch a request and a listing, for a stale one two of each.

    Args:
        table: at its root; of a branch, or of an export, nothing is read.
        before: a branch that was written last before that is stale.
    """
    if table.branch_name is not None or table.location.files is not None:
        return ()
    return tuple(_state(table, record, before) for record in list_branches(table.store))


def _state(table: Table, record: TableBranch, before: datetime) -> BranchState:
    folder = branch_folder(record.name)
    named = (
        (parse_version_manifest_name(meta.path.rpartition("/")[2]), meta)
        for meta in table.store.list(f"{folder}/{VERSIONS_FOLDER}")
    )
    versions = {name.version: meta for name, meta in named if name is not None and not name.detached}
    if not versions:
        return BranchState(record, None, 0, None, record.created < before)
    newest = versions[max(versions)]
    state = BranchState(record, max(versions), len(versions), newest.last_modified, newest.last_modified < before)
    if not state.stale:
        return state
    objects = list(table.store.list(folder))
    kept = _kept_bytes(table, newest, objects, folder)
    size = sum(meta.size for meta in objects)
    return BranchState(record, state.version, state.versions, state.written, state.stale, size, kept)


def _kept_bytes(table: Table, newest: ObjectMeta, objects: Iterable[ObjectMeta], folder: str) -> int:
    try:
        manifest = decode_named(newest.path, table.store.get(newest.path)).manifest
    except ObjectNotFoundError:
        return 0  # expired since it was listed
    below = f"{folder}/{DATA_FOLDER}/"
    elsewhere = {meta.path.removeprefix(below) for meta in objects if meta.path.startswith(below)}
    elsewhere |= {file.path for fragment in table.manifest.manifest.fragments for file in fragment.files}
    files = {file.path: file.file_size_bytes for fragment in manifest.fragments for file in fragment.files}
    return sum(size for path, size in files.items() if path not in elsewhere)


def describe_branches(branches: Sequence[BranchState], version: int) -> Iterator[str]:
    """The tree, and a paragraph for each stale branch."""
    if branches:
        yield f"\nbranches:\n  {MAIN}, version {version}"
    yield from _tree(branches, None, 2)
    for one in branches:
        if not one.stale:
            continue
        when = one.written or one.record.created
        holds = f"version {one.record.parent_revision} of {one.record.parent or MAIN}"
        if one.bytes is not None:
            holds += f", {size_text(one.bytes)} of its own"
        if one.kept_bytes:
            holds += f", and {size_text(one.kept_bytes)} of files that {MAIN} does not need"
        yield paragraph(
            f"STALE: branch {one.record.name}: nobody wrote to it since {when:%Y-%m-%d %H:%M} UTC; it holds {holds}.",
            hanging="  ",
        )


def _tree(branches: Sequence[BranchState], parent: str | None, depth: int) -> Iterator[str]:
    names = {one.record.name for one in branches}
    for one in branches:
        record = one.record
        lost = parent is None and record.parent is not None and record.parent not in names
        if record.parent != parent and not lost:
            continue
        left = f"left version {record.parent_revision} of {record.parent or MAIN}"
        versions = f"at version {one.version}, with {counted(one.versions, 'version')}"
        yield f"{'  ' * depth}{record.name}, {left}: {'no version is listed' if one.version is None else versions}"
        yield from _tree(branches, record.name, depth + 1)
