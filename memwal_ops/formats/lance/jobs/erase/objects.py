"""Say of each object of a table why it cannot hold a row that must be gone, or name it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from memwal_ops.core.erasure import Holder
from memwal_ops.core.quarantine import QUARANTINE_FOLDER
from memwal_ops.formats.lance.files.branch import REFS_FOLDER
from memwal_ops.formats.lance.files.referenced_files import (
    BASE_FOLDERS,
    DATA_FOLDER,
    DELETIONS_FOLDER,
    file_key,
    is_unfinished,
)
from memwal_ops.formats.lance.files.versions import (
    CHECKED_MARK,
    SET_ASIDE_FOLDER,
    TRANSACTIONS_FOLDER,
    VERSION_HINT,
    VERSIONS_FOLDER,
)
from memwal_ops.formats.lance.retention.garbage import UNFINISHED_AGE
from memwal_ops.formats.lance.wire.names import INDICES_FOLDER, parse_version_manifest_name

if TYPE_CHECKING:
    from datetime import datetime

    from memwal_ops.formats.lance.jobs.erase.found import Survey
    from memwal_ops.formats.lance.jobs.erase.target import Target
    from memwal_ops.formats.lance.retention.garbage import Needed
    from memwal_ops.storage.api import ObjectMeta

_OWN_FOLDER = "_mem_wal_ops/"
_NO_ROWS = "it has no rows"
_UNFINISHED = "no version refers to it; it may belong to a commit in progress, or a killed one"
_WITHOUT_VALUES = {
    DELETIONS_FOLDER: (re.compile(r"_deletions/\d+-\d+-\d+\.(arrow|bin)"), "it has numbers of rows alone"),
    REFS_FOLDER: (re.compile(r"_refs/(tags|branches)/.+\.json"), "it has the name of a tag or a branch"),
}
# Records, by their number; what a migration has done; what probes and clocks write.
_RECORD = re.compile(
    r"_mem_wal_ops/((leases/[^/]+|holds|expiries|erase|progress|schema)/\d{20}(-[0-9a-f]{16})?\.[a-z]+"
    r"|legacy/.+|followers/[^/]+\.json|(probe|clock)/[^/]+|swap\.lock)"
)
Verdict = tuple[str | None, Holder | None]
"""Why an object cannot hold such a row, else None; and the holder, unless another one stands for the object."""


@dataclass(frozen=True, slots=True)
class Objects:
    """What decides about objects.

    Attributes:
        target: the rows.
        found: what was found in versions and indexes.
        needed: the keys to which any version refers.
        kept: the keys to which one refers that holds no such row.
        copies: paths of manifests of expired versions without any value of such a row.
        now: by the store's clock.
    """

    target: Target
    found: Survey
    needed: Needed
    kept: set[str]
    copies: set[str]
    now: datetime

    def classify(self, meta: ObjectMeta) -> Verdict:
        """The verdict on an object."""
        path = meta.path
        folder = path.split("/", 1)[0]
        if folder in _WITHOUT_VALUES and _WITHOUT_VALUES[folder][0].fullmatch(path):
            return _WITHOUT_VALUES[folder][1], None
        if folder in BASE_FOLDERS:
            return self._of_the_base(meta, folder)
        if folder == VERSIONS_FOLDER:
            return self._manifest(meta)
        if path.startswith(_OWN_FOLDER):
            return self._own(path)
        if path in self.found.on_branches:
            return self.found.on_branches[path], None  # where it may hold one, the branch is named
        return None, Holder("unrecognized", path, "not a file of the table: move or delete it", blocks=True)

    def _of_the_base(self, meta: ObjectMeta, folder: str) -> Verdict:
        key = file_key(meta.path)
        if key is None and not is_unfinished(meta.path):
            return None, Holder("unrecognized", meta.path, "not a file of Lance: move or delete it", blocks=True)
        if key is None or key not in self.needed.keys:
            return None, self._leftover(meta, _UNFINISHED, expired=key in self.needed.expired)
        if key not in self.kept:
            return None, None  # its versions are named
        if folder == TRANSACTIONS_FOLDER:
            named = self.found.newest_mentions
            return None if named else "its version was read: no expression in it can be of such a row", None
        named = bool(self.found.stained if folder == DATA_FOLDER else self.found.indexes)
        return None if named else self._proof(folder), None

    def _proof(self, folder: str) -> str:
        if folder == INDICES_FOLDER:
            return "it was built of rows that are not deleted, from fragments that were read"
        if self.target.where is not None:
            return "it was read: no row in it matches, deleted or not"
        return "none of its rows was deleted before that time"

    def _leftover(self, meta: ObjectMeta, why: str, *, expired: bool = False) -> Holder:
        until = meta.last_modified + UNFINISHED_AGE
        return Holder("leftover", meta.path, why, until if until > self.now and not expired else None)

    def _manifest(self, meta: ObjectMeta) -> Verdict:
        if meta.path in {VERSION_HINT, CHECKED_MARK}:
            return _NO_ROWS, None
        name = parse_version_manifest_name(meta.path.rsplit("/", 1)[-1])
        if name is None or name.detached:
            return None, self._leftover(meta, "left by a commit, or a detached version")
        newest = self.found.newest_mentions and name.version == self.found.table.version
        named = newest or name.version in self.found.versions
        return None if named else "its version was read: it refers to no file with such rows", None

    def _own(self, path: str) -> Verdict:
        if path in self.copies:
            return ("it is of an expired version, and was read: no expression in it can be of such a row", None)
        if path.startswith(f"{SET_ASIDE_FOLDER}/"):
            return None, Holder("leftover", path, "the manifest of a version that is being expired")
        if path.startswith(f"{QUARANTINE_FOLDER}/"):
            return None, Holder("quarantine", path, "kept by repair, and not searched: delete it", blocks=True)
        if _RECORD.fullmatch(path):
            return _NO_ROWS, None
        return None, Holder("unrecognized", path, "not a record of memwal-ops: move or delete it", blocks=True)
