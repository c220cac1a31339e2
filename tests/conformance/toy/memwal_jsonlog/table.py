"""Open a table as an immutable ``Table``, pinned to one version, and publish the next version."""

from __future__ import annotations

import json
import uuid
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from memwal_jsonlog import FORMAT, MARKER
from memwal_ops.core.anchors import GuardedStore
from memwal_ops.core.registry import job_specs
from memwal_ops.errors import TableCorruptError, UnsupportedFeatureError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from memwal_ops.core.anchors import CommitGuard
    from memwal_ops.core.job import JobSpec
    from memwal_ops.core.protocols import TableSummary
    from memwal_ops.storage.api import Store
    from memwal_ops.storage.locations import Location

RELEASE = 1
Rows = dict[str, Any]


@dataclass(frozen=True)
class Table:
    """A version; ``merged`` is the last log entry that is in ``rows``."""

    location: Location
    store: Store
    revision: int
    merged: int
    rows: Rows

    format = FORMAT

    @property
    def jobs(self) -> Mapping[str, JobSpec]:
        return job_specs(FORMAT.name)

    def has_revision(self, revision: int) -> bool:
        return self.store.head(base_path(revision)) is not None

    def newest(self) -> Table:
        return load(self.location, self.store)  # the guard is in the store

    def with_guard(self, guard: CommitGuard) -> Table:
        return replace(self, store=GuardedStore(self.store, guard))

    def summary(self) -> TableSummary:
        return FORMAT.summarize(self)

    def waiting(self) -> tuple[list[int], int | None]:
        """The unmerged log entries, in order, up to the first missing one, which is returned, too."""
        found = {number_of(meta.path) for meta in self.store.list("log")}
        wanted = range(self.merged + 1, max(found, default=0) + 1)
        for number in wanted:
            # Checked again: a listing may have passed the position of 5 before 5 and 6 were written.
            if number not in found and self.store.head(log_path(number)) is None:
                return [*range(self.merged + 1, number)], number
        return [*wanted], None

    def publish(self, rows: Rows, merged: int) -> bool:
        """Publish the next version, rows and progress in one object; False if another run did first.

        The id makes the bytes unique: otherwise two merges of one backlog would publish the same bytes, and a lost
        answer ("exists") could not be distinguished from a conflict.
        """
        document = {"version": self.revision + 1, "merged": merged, "rows": rows, "run": uuid.uuid4().hex}
        data, path = json.dumps(document).encode(), base_path(self.revision + 1)
        return self.store.put_if_absent(path, data) or self.store.get(path) == data


def load(location: Location, store: Store) -> Table:
    """Open the newest version of a table.

    Raises:
        UnsupportedFeatureError: it was written by a later release of the format.
        TableCorruptError: its newest version is missing, or cannot be read.
    """
    release = read_json(store, MARKER).get("release")
    if release != RELEASE:
        raise UnsupportedFeatureError(f"{location.uri} has release {release!r} of jsonlog, not {RELEASE}.")
    revision = max((number_of(meta.path) for meta in store.list("base")), default=0)
    found = read_json(store, base_path(revision)) if revision else {}
    match found:
        case {"version": int(version), "merged": int(merged), "rows": dict(rows)} if version == revision:
            return Table(location, store, revision, merged, rows)
    raise TableCorruptError(f"{location.uri} has no readable version; the newest is {revision}.")


def read_json(store: Store, path: str) -> Rows:
    """Read a JSON object. Raises ``ObjectNotFoundError``, ``TableCorruptError``."""
    try:
        found = json.loads(store.get(path))
    except ValueError as error:
        raise TableCorruptError(f"{path} in {store.root} is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise TableCorruptError(f"{path} in {store.root} is not a JSON object.")
    return found


def blocked_at(number: int) -> dict[str, Any]:
    """The ``blocked`` entry of reports for a log entry that is missing or damaged."""
    return {"entry": number, "reason": "blocked", "detail": f"Log entry {number} is missing or damaged."}


def base_path(revision: int) -> str:
    return f"base/{revision:010}.json"


def log_path(number: int) -> str:
    return f"log/{number:010}.json"


def number_of(path: str) -> int:
    """The number in a file name; 0 for any other name."""
    stem = path.rpartition("/")[2].removesuffix(".json")
    return int(stem) if stem.isascii() and stem.isdigit() and path in {base_path(int(stem)), log_path(int(stem))} else 0
