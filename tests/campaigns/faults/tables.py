"""One littered table per layout, on which every job has real work to do, and a way back to it within milliseconds."""

from __future__ import annotations

import copy
import hashlib
import os
import shutil
import uuid
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal
from unittest.mock import patch

import lance

from memwal_ops import open_table
from memwal_ops.errors import StorageError, UnsupportedFeatureError
from memwal_ops.formats.lance.commit import commit
from memwal_ops.formats.lance.jobs import expire, merge, snapshot
from memwal_ops.formats.lance.jobs.catchup import job as catchup
from memwal_ops.formats.lance.jobs.gc import job as gc
from memwal_ops.storage import probe
from tests.campaigns.sim.witness import Witness
from tests.campaigns.sim.writers import RegionTable, ShardTable
from tests.support.dying_store import DyingStore, Killed
from tests.support.gc_options import IMMEDIATE
from tests.support.tables.files import Files

if TYPE_CHECKING:
    from collections.abc import Callable

    from memwal_ops.formats.lance.table import Table
    from tests.support.tables.lsm_table import LsmTable

Layout = Literal["shard", "region"]
LAYOUTS: tuple[Layout, ...] = ("shard", "region")
#: So old is everything on a prepared table: older than what a patient collector waits for.
AGE = timedelta(hours=2)
START = "start"
# What a table's maker holds beside its files; open writers cannot be copied, and there are none.
_NOT_COPIED = {"_writers", "stalled", "schema", "_schema", "_template"}


@dataclass(frozen=True, slots=True)
class Moment:
    """All of a table at one moment: hard links to its files, the model behind it, a witness that has seen it."""

    backup: str
    files: dict[str, tuple[int, int, int]]
    state: dict[str, Any]
    digest: str
    witness: Witness


@dataclass
class Prepared:
    """A table, and the moments to which it can be put back.

    The region layout cannot be moved, since its paths are absolute: the table is put right in place, by
    links to what it was. No process writes into an existing file; :meth:`verify` proves it.
    """

    layout: Layout
    made: RegionTable | ShardTable
    moments: dict[str, Moment] = field(default_factory=dict)

    @property
    def uri(self) -> str:
        return self.made.uri

    def keep(self, name: str, witness: Witness) -> Moment:
        """Remember what stands now."""
        backup = f"{self.uri}.moments/{name}"
        shutil.copytree(self.uri, backup, copy_function=os.link)
        moment = Moment(backup, scan(self.uri), _state(self.made), _digest(backup), witness.fork())
        self.moments[name] = moment
        return moment

    def restore(self, name: str = START) -> Witness:
        """Put the table right, files and model; a witness that knows it.

        Its store is proven, whatever ran before: to prove it is a job of its own.
        """
        probe._proven.add(self.uri)
        moment, now = self.moments[name], scan(self.uri)
        for path in now.keys() - moment.files.keys():
            os.unlink(f"{self.uri}/{path}")
        for path, known in moment.files.items():
            if now.get(path) != known:
                target = f"{self.uri}/{path}"
                if path in now:
                    os.unlink(target)
                os.makedirs(os.path.dirname(target), exist_ok=True)
                os.link(f"{moment.backup}/{path}", target)
        if self.made._stamp != moment.state["_stamp"]:  # each write has a stamp of its own
            self.made.__dict__.update(copy.deepcopy(moment.state))
        return moment.witness.fork()

    def is_at_start(self) -> bool:
        """Whether all files are as they were at the start."""
        return scan(self.uri) == self.moments[START].files

    def forget(self) -> None:
        """All moments but the start."""
        for name in self.moments.keys() - {START}:
            shutil.rmtree(self.moments.pop(name).backup)

    def verify(self) -> None:
        """Fail if a file was changed in place instead of being replaced."""
        for name, moment in self.moments.items():
            assert _digest(moment.backup) == moment.digest, f"a file of {name} was changed in place"


def scan(folder: str) -> dict[str, tuple[int, int, int]]:
    """Per path below a folder size, time and inode."""
    found = {}
    folders = [folder]
    while folders:
        with os.scandir(folders.pop()) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    folders.append(entry.path)
                else:
                    state = entry.stat()
                    found[entry.path[len(folder) + 1 :]] = (state.st_size, state.st_mtime_ns, state.st_ino)
    return found


def _digest(folder: str) -> str:
    digest = hashlib.sha256()
    for path in sorted(scan(folder)):
        with open(f"{folder}/{path}", "rb") as file:
            digest.update(path.encode() + file.read())
    return digest.hexdigest()


def _state(made: RegionTable | ShardTable) -> dict[str, Any]:
    return copy.deepcopy({name: value for name, value in vars(made).items() if name not in _NOT_COPIED})


def age(uri: str, by: timedelta = AGE) -> None:
    """All files get older."""
    for path, (_, modified, _) in scan(uri).items():
        os.utime(f"{uri}/{path}", ns=(modified - int(by.total_seconds() * 1e9),) * 2)


def prepare(
    layout: Layout, folder: str, *, regions: int = 2, more: Callable[[Prepared], None] | None = None
) -> Prepared:
    """A new table with work for every job; see :func:`litter`. ``more`` is done to it before it is kept."""
    kind = {"shard": ShardTable, "region": RegionTable}[layout]
    made: RegionTable | ShardTable = kind(
        11, regions=regions, base_rows=12, columns="vector", stable_row_ids=layout == "region"
    )
    made.create(f"{folder}/{layout}.lance")
    litter(made)
    made.die_in_flush(made.regions[0])
    if regions > 1:
        made.claim(made.regions[0])
        made.put([0, 4])
    if isinstance(made, ShardTable):
        made.bury()
        made.close()
    prepared = Prepared(layout, made)
    if more is not None:
        more(prepared)
    age(made.uri)
    witness = Witness(made)
    witness.look(())
    prepared.keep(START, witness)
    return prepared


def litter(made: LsmTable) -> None:
    """A backlog of two regions, indexes that are behind, and every kind of garbage, of each also some that is none."""
    now = expire.ExpireOptions(timedelta(0), 1, allow_unsafe=True)

    def table() -> Table:
        return open_table(made.uri, made.storage_options)

    lance.dataset(made.uri, storage_options=made.storage_options).create_index(
        "vec", "IVF_FLAT", num_partitions=2, name="vec_idx"
    )
    _fill(made, 6)
    merge.apply(table(), merge.MergeOptions())
    catchup.apply(table(), catchup.CatchupOptions())
    expire.apply(table(), now)
    gc.apply(table(), replace(IMMEDIATE, reader_grace=timedelta(hours=1)))  # taken off the list, and not deleted
    _fill(made, 8)
    merge.apply(table(), merge.MergeOptions())
    catchup.apply(table(), catchup.CatchupOptions())
    expire.apply(table(), now)  # unneeded, and still listed by the manifest
    # The next version shows the columns of what is flushed now, and the tag needs that; nothing needs this one.
    lance.dataset(made.uri, storage_options=made.storage_options).update_metadata({"before": "the flush"})
    _fill(made, 10)
    snapshot.apply(table(), snapshot.SnapshotOptions(0))
    lance.dataset(made.uri, storage_options=made.storage_options).tags.create("kept", table().version)
    _leave_half_a_commit(made)
    if made.regions[1:]:
        merge.apply(table(), merge.MergeOptions())  # the tag needs these
        _fill(made, 12)
    files = Files(made.uri, made.storage_options)
    (standing, *_) = [path for path in files.listing("_indices") if path.endswith("/index.lance")]
    files.put(f"_indices/{uuid.UUID(int=7)}/index.lance", files.get(standing))
    for at, region in enumerate(made.regions[1:], 1):
        made.put([at, at + len(made.regions)])
        made.flush(region)


def _fill(made: LsmTable, number: int) -> None:
    """A generation of the first region; ``number`` stays as it is, so that no fragment is ever emptied."""
    made.put([0, number])
    made.delete([2])
    made.flush(made.regions[0])


def _leave_half_a_commit(made: LsmTable) -> None:
    """A merge that died between its detached manifest and its version; on S3, one without a temporary folder."""
    for at in range(1, 200):
        table = open_table(made.uri, made.storage_options)
        try:
            with patch.object(commit, "LOCAL", frozenset({"file", "memory", "s3"})):
                merge.apply(replace(table, store=DyingStore(table.store, at, after=True)), merge.MergeOptions())
        except (Killed, StorageError, UnsupportedFeatureError):
            if any(
                path.startswith("_versions/d") for path in Files(made.uri, made.storage_options).listing("_versions")
            ):
                return
    raise AssertionError("no call at which a merge leaves its detached manifest")
