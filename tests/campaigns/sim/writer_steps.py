"""Steps of writers and readers."""

from __future__ import annotations

import os

from memwal_ops import open_table
from memwal_ops.formats.lance.jobs.gc import job as gc
from tests.campaigns.sim.driver import PASSING, Driver
from tests.campaigns.sim.writers import RegionTable
from tests.support.gc_options import PATIENT
from tests.support.tables import wire
from tests.support.tables.files import Files
from tests.support.tables.model import assert_same


class WriterSteps(Driver):
    """What writers put, flush and lose; what readers find."""

    def _write(self) -> bool:
        before = len(self.made.model.log)
        self.made.step()
        return len(self.made.model.log) > before

    def _delete(self) -> bool:
        at = self.rng.randrange(len(self.made.regions))
        numbers = self.made._some(self.made._live[at], 6)
        if numbers:
            self.made.delete(numbers)
        return bool(numbers)

    def _flush(self) -> bool:
        region = self.rng.choice(self.made.regions)
        before = self._generations(region)
        self.made.flush(region)
        return self._generations(region) > before

    def _burst(self) -> bool:
        """Writers are fast for a while, and no merge runs: generations accumulate."""
        before = len(self.made.model.log)
        for _ in range(self.rng.randint(2, 4)):
            self.made.step()
            self.made.flush(self.rng.choice(self.made.regions))
        return len(self.made.model.log) > before

    def _generations(self, region: str) -> int:
        if not os.path.isdir(f"{self.uri}/_mem_wal/{region}/manifest"):
            return 0
        return wire.region_manifest(Files(self.uri), region).current_generation

    def _claim(self) -> bool:
        self.made.claim(self.rng.choice(self.made.regions))
        return True

    def _die_in_flush(self) -> bool:
        before = len(self.witness.scan())
        self.made.die_in_flush(self.rng.choice(self.made.regions))
        return len(self.witness.scan()) > before

    def _slow_flush(self) -> bool:
        """A collector runs while a writer has written a generation's files and did not publish them yet."""
        if not isinstance(self.made, RegionTable):
            return False
        region = self.rng.choice(self.made.regions)
        folder = self.made.flush_slowly(region)
        before = set(Files(self.uri).listing(folder))
        self.kinds.add("gc")
        gc.apply(open_table(self.uri), PATIENT)
        assert before <= set(Files(self.uri).listing(folder)), "the files of a flush under way are gone"
        self.made.end_of_flush(region)
        return True

    def _wake(self) -> bool:
        region = self.rng.choice(self.made.regions)
        assert not self.made.wake(region), "a fenced writer's put was accepted"
        return bool(self.made.stalled.get(region))

    def _reader(self) -> bool:
        if self.beside:
            return False
        self.look()
        return self.witness.promise()

    def _read_version(self) -> bool:
        """Somebody opens an old version, or a branch, and reads all of it."""
        branch, number = self.rng.choice(sorted(self.witness.versions))
        assert_same(self.witness.read(branch, number), self.witness.versions[branch, number].rows)
        return bool(branch) or number < max(self._versions())

    def _later(self) -> bool:
        if self.beside:
            return False
        seconds = PASSING.total_seconds()
        for path in self.witness.scan():
            full = f"{self.uri}/{path}"
            state = os.stat(full)
            os.utime(full, ns=(state.st_atime_ns, state.st_mtime_ns - int(seconds * 1e9)))
        self.witness.forget_times()
        self.witness.promised = frozenset()
        return True
