"""Create an index folder, or open one as an immutable ``Table``: an epoch of the published view, without the store."""

from __future__ import annotations

import os
import shutil
import uuid
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from memwal_ops.core.anchors import CommitGuard, GuardedTable, Unguarded
from memwal_ops.core.protocols import Blocked, TableFormat, TableSummary
from memwal_ops.core.registry import formats, job_specs
from memwal_ops.errors import InvalidUsageError, MemwalOpsError, TableCorruptError, TableNotFoundError
from memwal_ops.formats.lm_diskann import files, publishing, wire
from memwal_ops.formats.lm_diskann.library import CACHE, OVERLAY, Index
from memwal_ops.formats.lm_diskann.source import Source, read_source, unusable_error
from memwal_ops.formats.lm_diskann.store import LOG, NAME, Store as Database
from memwal_ops.formats.lm_diskann.vectors import real, whole
from memwal_ops.formats.lm_diskann.view import View
from memwal_ops.formats.lm_diskann.wire import Parameters, State

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from memwal_ops.core.job import JobSpec
    from memwal_ops.storage.api import Store
    from memwal_ops.storage.locations import Location


@dataclass(frozen=True)
class Table(GuardedTable):
    """One epoch of an index folder.

    Attributes:
        delta_blocks: versions that are not merged; ``delta_nodes``: nodes with any.
        tombstones: deleted nodes whose slots are not free yet.
        view_error: why readers cannot open the published view; the state is then that of the store.
        file_errors: the other files that are missing or cut short.
        guard: checked before each durable step.
        steps: performs durable steps; None: they are run directly.
    """

    location: Location
    store: Store
    parameters: Parameters
    state: State
    delta_blocks: int
    delta_nodes: int
    tombstones: int
    view_number: int
    view_error: MemwalOpsError | None = None
    file_errors: tuple[MemwalOpsError, ...] = ()
    guard: CommitGuard = field(default_factory=Unguarded)
    steps: files.Step | None = field(default=None, repr=False)

    @property
    def format(self) -> TableFormat:
        """The format of index folders."""
        return formats()["lm_diskann"]

    @property
    def jobs(self) -> Mapping[str, JobSpec]:
        """All jobs of the format."""
        return job_specs("lm_diskann")

    @property
    def revision(self) -> int:
        """The epoch."""
        return self.state.epoch

    @property
    def faults(self) -> tuple[MemwalOpsError, ...]:
        """What stops readers or jobs: the view, a file, or a followed table that the index cannot follow."""
        faults = [self.view_error, *self.file_errors]
        try:
            read_source(self.location.uri, self.state.followed)
        except MemwalOpsError as error:
            faults.append(error)
        if self.state.unusable:
            faults.append(unusable_error(self.location.uri, self.state.unusable))
        return tuple(fault for fault in faults if fault is not None)

    @property
    def blocked(self) -> tuple[Blocked, ...]:
        """The faults, as all formats report them."""
        entries = ((fault.reason, str(fault), fault.remedy) for fault in self.faults)
        names = ("reason", "detail", "remedy")
        return tuple(Blocked("", *entry[:2], dict(zip(names, entry, strict=True))) for entry in entries)

    def check_files(self) -> None:
        """Check what a plan cannot do without. Raises ``TableCorruptError`` or ``StorageError``."""
        for error in self.file_errors:
            raise error

    def has_revision(self, revision: int) -> bool:
        """Whether an epoch is retained, according to the current view."""
        state = self.newest().state
        return state.retained_from <= revision <= state.epoch

    def newest(self) -> Table:
        """The newest published epoch; with the same guard."""
        return replace(load(self.location, self.store), guard=self.guard, steps=self.steps)

    def summary(self) -> TableSummary:
        """See :meth:`memwal_ops.core.protocols.TableFormat.summarize`."""
        return self.format.summarize(self)

    def step(self, name: str, act: Callable[[], Any]) -> Any:
        """Perform a durable step, if the guard allows it. Raises ``LeaseLostError``: it does not."""
        del name
        self.guard.check()
        return act()

    @property
    def durable(self) -> files.Step:
        """The function that performs the durable steps of a job."""
        return self.steps or self.step

    def open(self, wait: float, *, changes: bool = False) -> Index:
        """Open the index for a job; with ``changes``, with space for transactions. Raises as :class:`Index`."""
        # When the store is closed, its log is checkpointed into the file, so nothing is lost.
        self.guard.register([LOG])
        cache, overlay = (CACHE, OVERLAY) if changes else (0, 0)
        return Index(self.location.uri, wait=wait, cache_bytes=cache, overlay_bytes=overlay, step=self.durable)


def load(location: Location, store: Store) -> Table:
    """Open the newest published epoch; that of the store if the view cannot be read, so that jobs can publish it.

    Raises:
        TableCorruptError: metadata are damaged, the graph is missing, or the view is damaged, and the store cannot be
            read now.
        UnsupportedFeatureError: it is of a later release of the format.
    """
    parameters = files.read_parameters(location.uri)
    try:
        view = View(location.uri, parameters)
    except (TableCorruptError, TableNotFoundError) as error:
        if not os.path.isfile(os.path.join(location.uri, files.GRAPH)):
            raise
        return _from_store(location, store, parameters, error)
    try:
        faults = tuple(_file_errors(location.uri, view))
        return Table(
            location, store, parameters, view.state, view.delta_blocks, len(view.delta_nodes), len(view.dead),
            view.number, file_errors=faults,
        )  # fmt: skip
    finally:
        view.close()


def _file_errors(folder: str, view: View) -> Iterator[MemwalOpsError]:
    """The files that are missing or cut short, by their sizes alone. Reads a newer view if it explains a size."""
    while True:
        try:
            view.check_graph()
            break
        except TableCorruptError as error:
            if not view.refresh():  # else gc cut the end off
                yield error
                break
    try:
        files.check_store_file(os.path.join(folder, NAME))
    except MemwalOpsError as error:
        yield error


def _from_store(location: Location, store: Store, parameters: Parameters, error: MemwalOpsError) -> Table:
    """The newest epoch by the store. Raises ``error`` if that cannot be read, or if a writer has it."""
    with ExitStack() as opened:
        try:
            lock = files.WriterLock(location.uri, 0)
            opened.callback(lock.release)
            database = Database(location.uri, parameters, read_only=True)
            opened.callback(database.close)
            (nodes,) = database.columns("SELECT node_id FROM lmd_delta_blocks")
            (dead,) = database.columns("SELECT node_id FROM lmd_tombstoned_nodes")
        except MemwalOpsError:
            raise error from None
        state, faults = database.state, list[MemwalOpsError]()
        try:
            length = os.path.getsize(os.path.join(location.uri, files.GRAPH))
            files.check_graph(location.uri, length, state.slot_count, parameters.layout.block_size)
        except TableCorruptError as short:
            faults.append(short)
        return Table(
            location, store, parameters, state, len(nodes), len({*nodes.tolist()}), len(dead), 0, error, (*faults,)
        )


def create(
    folder: str | os.PathLike[str],
    *,
    dimension: int,
    metric: str = "l2",
    R: int = 70,  # noqa: N803 - named as in the paper, like L
    alpha: float = 1.2,
    L: int = 100,  # noqa: N803
    quantizer: str = "pq",
    follows: Source | None = None,
) -> None:
    """Create an empty index folder, and its parents. With ``follows``, ``catchup`` inserts the rows of a table.

    Raises:
        InvalidUsageError: a parameter is of another type, or out of bounds; or the folder is not empty.
        StorageError: the disk is full, or failed.
        UnsupportedFeatureError: the folder is remote.
    """
    path = files.local_path(folder)
    parameters = wire.Parameters(
        whole("dimension", dimension), metric, whole("R", R), real("alpha", alpha), whole("L", L), quantizer,
        uuid.uuid4(),
    )  # fmt: skip
    # Created under a temporary name: a killed run never leaves a partial index under the final name.
    fresh = f"{path}.{parameters.uuid.hex}.new"
    try:
        os.makedirs(os.path.join(fresh, files.READERS))
        for name in (files.GRAPH, files.WRITER):
            with open(os.path.join(fresh, name), "xb") as file:
                os.fsync(file.fileno())
        Database.create(os.path.join(fresh, NAME), parameters.uuid)
        publishing.first_view(fresh, parameters, State(1))
        if follows is not None:
            follows.write(fresh)
        files.replace_file(fresh, files.METADATA, [wire.encode_metadata(parameters)])
        files.sync_folder(fresh)
        os.rename(fresh, path)
    except BaseException as error:
        shutil.rmtree(fresh, ignore_errors=True)
        if not isinstance(error, OSError):
            raise
        if os.path.lexists(path):
            raise InvalidUsageError(
                f"{path} exists already, and is not an empty folder.", remedy="Choose another name for the folder."
            ) from error
        raise files.io_error(error) from error
    files.sync_folder(os.path.dirname(path) or "/")
