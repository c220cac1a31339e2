"""The interface of a table format: :class:`TableFormat` and :class:`Table`.

No code above ``formats/`` depends on the format of a table. A format is an object under the entry point
``memwal_ops.formats``; docs/formats/adding-one.md shows how to write one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Protocol, Self, runtime_checkable

from memwal_ops.core.anchors import CommitGuard
from memwal_ops.core.demo import DemoSpec
from memwal_ops.core.job import InitSpec, JobSpec
from memwal_ops.errors import MemwalOpsError
from memwal_ops.storage.api import Listing, Store
from memwal_ops.storage.locations import Location


class TableFormat(Protocol):
    """A table format. Importing one imports neither pylance nor any other heavy library."""

    @property
    def name(self) -> str:
        """Its name in entry points, ``--format`` and reports: ``lance``, ``zeppelin``, ``lm_diskann``."""

    @property
    def suffix(self) -> str:
        """The conventional suffix of its tables' folders, which short names of tables leave out; may be empty."""

    def part_of(self, blocked: Mapping[str, Any]) -> tuple[str, str]:
        """The name of the part that a ``blocked`` entry of a report is about, and the place of the fault in it.

        For example ``Region 3f...`` and ``generation 5``; empty strings if the entry has neither.
        """

    @property
    def init(self) -> InitSpec | None:
        """How ``memwal-ops init`` prepares a table of this kind; None: only other programs create tables."""

    @property
    def demo(self) -> DemoSpec | None:
        """The demo that ``memwal-ops demo --format`` runs; None: there is none."""

    def detect(self, root: Listing) -> bool:
        """Whether a listing of a root is that of a table of this format. All formats share one listing."""

    def open(self, location: Location, store: Store) -> Table:
        """Open the newest revision of the table. Raises ``MemwalOpsError``: it cannot be read, by kind."""

    def summarize(self, table: Any) -> TableSummary:
        """The state of a table of this format: backlog metrics and blocked parts. Reads only."""

    def missing_of(self, table: Any, revision: int) -> str | None:
        """A missing or damaged file that a listed revision needs; None if there is none, or no such revision."""


@dataclass(frozen=True, slots=True)
class Blocked:
    """A part of a table with a fault that keeps a job from continuing.

    Attributes:
        part: its name (for Lance: the region id); empty: the table as a whole.
        reason: the ``reason`` of the error class.
        document: the entry of ``blocked`` in JSON documents.
    """

    part: str
    reason: str
    detail: str
    document: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class TableSummary:
    """The state of a table at one poll. ``inspect``, ``status`` and the status page show it.

    ``backlog``: backlog metrics by name, of every job of the format's own package that has any. ``parts``: number of
    parts (regions, fragments ...) of the table.
    """

    revision: int
    backlog: Mapping[str, float]
    parts: int = 0
    blocked: tuple[Blocked, ...] = field(default=())


class Table(Protocol):
    """One revision of one table. Immutable: after a commit conflict, a job continues with ``newest()``."""

    @property
    def format(self) -> TableFormat:
        """Its format."""

    @property
    def location(self) -> Location:
        """Its URI and storage options; its ``repr`` contains no secret."""

    @property
    def store(self) -> Store:
        """The table's folder as an object store; checks the guard before each mutation."""

    @property
    def jobs(self) -> Mapping[str, JobSpec]:
        """The jobs that apply to this table; they depend on its layout or dialect, not on its format alone."""

    @property
    def revision(self) -> int:
        """The number of the revision. Rises with every commit; used by ``hold``, reports and the run history."""

    def has_revision(self, revision: int) -> bool:
        """Whether a revision is still listed. Called again after a hold is written: one request, or none."""

    def newest(self) -> Self:
        """The newest revision of the same table, with everything read again; it has the same guard."""

    def with_guard(self, guard: CommitGuard) -> Self:
        """The same revision with a guard that is checked before every publication and deletion."""

    def summary(self) -> TableSummary:
        """Its state: :meth:`TableFormat.summarize` of it."""


@runtime_checkable
class LocatesByCatalog(TableFormat, Protocol):
    """A format whose tables a catalog locates; optional.

    Its URIs have a scheme of the format's own, and none of its tables is detected by a listing. Where the catalog also
    decides which commit is next, a job calls ``guard.check()`` right before it commits: no store does it.
    """

    @property
    def schemes(self) -> frozenset[str]:
        """The schemes of its URIs, in lower case: ``iceberg+sql``."""

    def locate(self, uri: str, storage_options: Mapping[str, str]) -> Location:
        """The folder of a table with its storage options, as ``resolve_folder`` of ``storage.locations`` returns it.

        Called at each opening: the catalog may move the table. In the location that ``open`` gets, ``catalog`` is the
        URI. Raises ``MemwalOpsError``: the catalog has no such table, refused or failed, by kind.
        """


@runtime_checkable
class InspectsRefused(Protocol):
    """A format that shows refused tables; optional. No other job can open them."""

    def open_to_inspect(self, location: Location, store: Store) -> Table:
        """As ``open``, for the job ``inspect`` alone, which reports the reason."""


@runtime_checkable
class CompilesCode(Protocol):
    """A format whose jobs compile code on their first use; optional."""

    def warm(self) -> int:
        """Compile all of it now, for every process of this installation; the number of functions that were compiled.

        Raises ``MemwalOpsError``: an extra is not installed; the disk is full.
        """


@runtime_checkable
class ExplainsJobs(Protocol):
    """A table that gives a reason for each job that does not apply to it; optional."""

    def why_not(self, job: str) -> MemwalOpsError | None:
        """The reason, with what to do; None: it applies, there is no such job, or no particular reason."""


@dataclass(frozen=True, slots=True)
class TableBranch:
    """A branch of a table, as the table's root records it.

    ``parent``: the branch that it left; None: main. ``created``: when, by the clock of the program that made it; aware,
    UTC.
    """

    name: str
    parent: str | None
    parent_revision: int
    created: datetime


@runtime_checkable
class HasBranches(Protocol):
    """A format whose tables have branches, each a table at :func:`memwal_ops.storage.catalogs.branch_uri`; optional."""

    def branches(self, store: Store) -> tuple[TableBranch, ...]:
        """The branches of the table with that root, ascending by name."""


@runtime_checkable
class FindsStubs(Protocol):
    """A format whose tables leave stubs; optional.

    A drop or a creation that is interrupted leaves a folder that is no table.
    """

    def find_stub(self, location: Location, store: Store) -> Stub | None:
        """What is at a location without any revision; None: nothing, or a table."""


class Stub(Protocol):
    """A folder that is listed as a table and has no revision. ``repair`` alone applies to this :class:`Table`."""

    @property
    def evidence(self) -> str:
        """What it is, as a sentence."""

    @property
    def with_data(self) -> int:
        """The number of objects that may have rows."""


@runtime_checkable
class NamesWriters(Protocol):
    """A format whose revisions have the release of their writers; optional."""

    def last_writer(self, table: Any) -> str | None:
        """The release of the table's own writers, and the features that they need; None: it is not known."""


@runtime_checkable
class RecordsRevisions(Protocol):
    """A format that stores what its revisions show, before other programs delete them; optional."""

    def record_revisions(self, table: Any) -> None:
        """Store it for a table that was just opened; a few requests, and none that fails the caller."""


@runtime_checkable
class DetectsChanges(Protocol):
    """A format that detects changes; optional. A few requests show that nothing was written to a table.

    A supervisor does not read an idle table again while nothing was written to it. The backlog metrics of the format's
    jobs must depend on nothing else, except those in seconds, which are ages and grow by themselves.
    """

    def fingerprint(self, table: Any) -> str | None:
        """The fingerprint of a table of this format that was just opened, before its backlog is read.

        None: something was written since it was opened.
        """

    def is_unchanged(self, store: Store, fingerprint: str) -> bool:
        """Whether the table still has a fingerprint; it is not opened."""


@runtime_checkable
class AnnouncesCommits(Protocol):
    """A format of whose objects some alone announce a commit; optional. Of others, each object does."""

    def announces_commit(self, path: str) -> bool:
        """Whether an object written at that path below a table may change what its jobs find to do."""


@runtime_checkable
class RemembersCommit(Protocol):
    """A table that keeps its commit's revision; optional. What it published itself is not read again."""

    def committed(self) -> Self | None:
        """The revision that was published on this one; None: it has to be read."""
