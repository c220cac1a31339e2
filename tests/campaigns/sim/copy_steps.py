"""Steps on copies of the table: nothing that is done to one may touch the other."""

from __future__ import annotations

import random
import shutil
from contextlib import contextmanager, suppress
from copy import copy
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING
from uuid import UUID

import lance

from memwal_ops import open_table
from memwal_ops.core.holds import holds, release_hold
from memwal_ops.errors import MemwalOpsError
from memwal_ops.formats.lance.jobs import expire, merge
from memwal_ops.formats.lance.jobs.catchup import job as catchup
from memwal_ops.formats.lance.jobs.gc import job as gc
from tests.campaigns.sim.driver import CALLS, JOBS
from tests.campaigns.sim.job_steps import JobSteps
from tests.campaigns.sim.seen import HINT
from tests.campaigns.sim.witness import Witness
from tests.campaigns.sim.writers import ShardTable
from tests.support.gc_options import IMMEDIATE
from tests.support.overtaken import Replaced
from tests.support.tables import wire
from tests.support.tables.files import Files

if TYPE_CHECKING:
    from collections.abc import Iterator


class CopySteps(JobSteps):
    """A copy that jobs maintain, a backup that takes a copy's place."""

    def restored_under_gc(self, rng: random.Random) -> None:
        """gc collects a copy of the table, and in the middle a backup of before takes the copy's place.

        Of the backup goes at most what gc takes of it by itself. Draws on ``rng`` alone, and touches nothing of the
        history, so that the histories of all seeds stay what they are.
        """
        if not isinstance(self.made, ShardTable):  # a region layout's copy has its log in the original
            return
        there, backup, alone = (f"{self.uri}-{name}" for name in ("there", "backup", "alone"))
        shutil.copytree(self.uri, backup, ignore=shutil.ignore_patterns("*.tmp.*", "*#*"))
        shutil.copytree(backup, there)
        shutil.copytree(backup, alone)
        options = replace(IMMEDIATE, fence_retention=timedelta(0))
        assert gc.apply(open_table(alone), options).replaced is None
        merge.apply(open_table(there), merge.MergeOptions())
        catchup.apply(open_table(there), catchup.CatchupOptions())
        expire.apply(open_table(there), expire.ExpireOptions(timedelta(0), 1, allow_unsafe=True))
        if rng.random() < 0.5:
            gc.apply(open_table(there), replace(options, max_deletes=1))  # drains

        def restore() -> None:
            shutil.rmtree(there)
            shutil.copytree(backup, there)

        table = open_table(there)
        store = Replaced(table.store, rng.randint(1, 2 * CALLS["gc"]), restore)
        with suppress(MemwalOpsError):  # it was half there while it was read
            gc.apply(replace(table, store=store), options)
        if store.happened:
            kept = {*Files(alone).listing("")} - {path for path in Files(alone).listing("") if path.endswith(HINT)}
            gone = (kept & {*Files(backup).listing("")}) - {*Files(there).listing("")}
            assert not gone, f"gc took of a backup that was restored beneath it: {sorted(gone)}"
            before, after = {*Files(backup).listing("")}, {*Files(there).listing("")}
            for region in wire.regions(Files(backup)):
                had = wire.region_manifest(Files(backup), region).generations
                left = wire.region_manifest(Files(alone), region).generations
                folder = f"_mem_wal/{region}/manifest"
                for path in sorted(before - after):  # a loud gap is what gc may leave: its page copies the file back
                    if path.startswith(folder):
                        shutil.copy2(f"{backup}/{path}", f"{there}/{path}")
                manifest = open_table(there).region(UUID(region)).latest(checked=True)
                now = {one.generation: one.path for one in manifest.flushed_generations}
                # It may have noticed the backup before it drained, or drained it, as it drains the backup by itself.
                assert left.items() <= now.items() <= had.items(), f"region {region} after a restore: {now}"
                lost = {path for one in now.values() for path in before - after if f"/{region}/{one}/" in path}
                assert not lost, f"region {region} lists after a restore, and lacks, {sorted(lost)}"
        for place in (there, backup, alone):
            shutil.rmtree(place)

    def _copy(self) -> bool:
        """The table is copied, file by file. What a region layout's copy holds lies in the original: docs/jobs.md."""
        if not isinstance(self.made, ShardTable) or self.twin is not None:
            return False
        self.made.flush()
        self.look()
        shutil.copytree(self.uri, f"{self.uri}-copy", ignore=shutil.ignore_patterns("*.tmp.*", "*#*"))
        made = copy(self.made)
        made.uri, made.columns = f"{self.uri}-copy", self.made.columns.copy()
        self.twin = Witness(made)
        self.twin.restored = set(self.witness.restored)
        self.twin.look(())
        return True

    def _job_on_copy(self) -> bool:
        if self.twin is None:
            return False
        # Whichever has something to do: a history has few steps left once its table is copied.
        for kind in self.rng.sample(JOBS, len(JOBS)):
            self._say(kind)
            with self._on_the_copy():
                done = self._job(kind, open_table(self.twin.uri))
            self.twin.look({kind})
            if done:
                return True
        return False

    @contextmanager
    def _on_the_copy(self) -> Iterator[None]:
        """Whatever is chosen for a job is for the copy; promises to readers of the original stand."""
        promised = self.witness.promised
        try:
            yield
        finally:
            self.witness.promised = promised

    def _end_of_copy(self) -> None:
        """When the original is merged and collected, the copy still has everything."""
        assert self.twin is not None
        uri = self.twin.uri
        dataset = lance.dataset(uri)
        for tag in dataset.tags.list():
            dataset.tags.delete(tag)
        for branch in dataset.branches.list():
            dataset.branches.delete(branch)
        for hold in holds(open_table(uri)):
            release_hold(open_table(uri), hold.number)
        self._merge_all(self.twin.made)
        catchup.apply(open_table(uri), catchup.CatchupOptions())
        expire.apply(open_table(uri), expire.ExpireOptions(timedelta(0), 1, allow_unsafe=True))
        # What a killed commit left needs generations too, until it is collected itself.
        while self._collect(open_table(uri), IMMEDIATE).decision != "nothing_to_delete":
            pass
        self.twin.look({"merge", "catchup", "expire", "gc", "untag", "unbranch"})
        assert not self.twin.generations, "the copy keeps unneeded generations"
        shutil.rmtree(uri)
