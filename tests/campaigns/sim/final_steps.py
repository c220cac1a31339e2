"""The end of a history: all that keeps anything is taken away, and what is left must be just that."""

from __future__ import annotations

import re
import shutil
from dataclasses import replace
from datetime import timedelta

import lance
import pyarrow as pa

from memwal_ops import open_table
from memwal_ops.core.candidates import Verdict
from memwal_ops.core.options import VerificationOptions
from memwal_ops.errors import RegionReplacedError, SchemaProjectionError, runbook
from memwal_ops.formats.lance.jobs import adopt, expire, merge, verify
from memwal_ops.formats.lance.jobs.catchup import job as catchup
from memwal_ops.formats.lance.jobs.gc import job as gc
from memwal_ops.formats.lance.options import AdoptOptions
from tests.campaigns.sim.copy_steps import CopySteps
from tests.campaigns.sim.owner_steps import OwnerSteps
from tests.campaigns.sim.seen import HINT
from tests.campaigns.sim.writers import ShardTable
from tests.support.gc_options import IMMEDIATE
from tests.support.tables import wire
from tests.support.tables.files import Files
from tests.support.tables.model import assert_same
from tests.support.tables.reading import read_base

# Keys that no history writes.
_USED_AGAIN = 1 << 50


class FinalSteps(CopySteps, OwnerSteps):
    """The last round of every job, and what stands behind it."""

    def end(self, *, posts: bool, go_on: bool) -> None:
        """Take away all that keeps anything; then nothing is left but what the options say, and it still works."""
        self.trail.append("end")
        while self.tags:
            self._untag()
        while self.branches:
            self._unbranch()
        while self.holds:
            self._release()
        self._verify("error", but="index_catchup")  # pylance's own updates leave them; catchup corrects them
        self.made.flush()
        if isinstance(self.made, ShardTable):
            for region in self.made.regions:
                assert not self.made.wake(region)
            self.made.bury()
        self._merge_all(self.made)
        catchup.apply(open_table(self.uri), catchup.CatchupOptions())
        self._check_claims()
        expire.apply(open_table(self.uri), expire.ExpireOptions(timedelta(0), 1, allow_unsafe=True))
        options = IMMEDIATE if posts else replace(IMMEDIATE, fence_retention=timedelta(0))
        self.witness.posts_stay = posts
        self.witness.promised = frozenset()
        # The drain of the first run makes a manifest version, which frees an older one for the second.
        for _ in range(3):
            before = self.witness.scan()
            last = gc.apply(open_table(self.uri), options)
            if last.decision == "nothing_to_delete":
                break
        assert last.decision == "nothing_to_delete", last.to_json()
        assert self.witness.scan() == before, "a run that found nothing changed something"
        # What a killed commit's detached manifest referred to was kept as long as that was there.
        expire.apply(open_table(self.uri), expire.ExpireOptions(timedelta(0), 1, allow_unsafe=True))
        self.witness.look({"gc", "expire", "untag", "unbranch"})
        self._check_left(posts=posts)
        self._verify("error", "warning")
        if self.twin is not None:
            self._end_of_copy()
        if go_on and isinstance(self.made, ShardTable):
            self._use_a_region_again()
        if go_on:
            self._go_on()

    def _verify(self, *severities: str, but: str = "") -> None:
        """No history of allowed steps leaves what verify calls so."""
        found = verify.verified(open_table(self.uri), VerificationOptions(deep=True)).to_json()["findings"]
        # What a person must decide (adopt) is told as such, and no damage.
        asked = {runbook(SchemaProjectionError.exit_code), runbook(RegionReplacedError.exit_code)}
        wrong = [
            one
            for one in found
            if one["severity"] in severities and one["runbook"] not in asked and one["check"] != but
        ]
        assert not wrong, f"verify finds {wrong}"

    def _use_a_region_again(self) -> None:
        """In a copy a region's folder is removed, and a writer creates it again with the same id.

        Whatever it flushes is merged, or stands: until a person decides, and then it is merged.
        """
        progress = open_table(self.uri).index.merged_generations
        if not progress:
            return
        region, merged = min(progress.items())
        uri = f"{self.uri}-again"
        shutil.copytree(self.uri, uri, ignore=shutil.ignore_patterns("*.tmp.*", "*#*"))
        shutil.rmtree(f"{uri}/_mem_wal/{region}")
        dataset = lance.dataset(uri)
        (key,) = self.made.model.keys
        keys = [_USED_AGAIN + number for number in range(merged + 2)]
        for one in keys:
            with dataset.mem_wal_writer(str(region)) as writer:
                row = {name: one if name == key else None for name in dataset.schema.names}
                writer.put(pa.Table.from_pylist([row], schema=dataset.schema))
            merge.apply(open_table(uri), merge.MergeOptions())
            gc.apply(open_table(uri), IMMEDIATE)
        base = set(lance.dataset(uri).to_table([key]).column(0).to_pylist())
        standing = len(wire.region_manifest(Files(uri), str(region)).generations)
        assert base.issuperset(keys) or standing == len(keys), "rows of a region whose id was used again are lost"
        adopt.apply(open_table(uri), AdoptOptions(answer="unmerged"))
        assert merge.apply(open_table(uri), merge.MergeOptions()).exit_code == 0
        gc.apply(open_table(uri), IMMEDIATE)
        assert base.union(keys) == set(lance.dataset(uri).to_table([key]).column(0).to_pylist())
        shutil.rmtree(uri)

    def _check_claims(self) -> None:
        """After an undisturbed catch-up, every index covers all rows, and this is recorded."""
        table = open_table(self.uri)
        merged = dict(table.index.merged_generations)
        if any(merged.values()):
            claims = {name: dict(claim) for name, claim in table.index.index_catchup.items()}
            names = {one.name for one in lance.dataset(self.uri).describe_indices()} - {wire.MEM_WAL_INDEX}
            assert claims == dict.fromkeys(names, merged)

    def _check_left(self, *, posts: bool) -> None:
        witness = self.witness
        ((_, newest),) = witness.versions.items()
        left = {path for path in witness.files if path.startswith("_mem_wal/")}
        must: set[str] = set()
        may: set[str] = set()
        for region, seen in witness.regions.items():
            assert seen.manifest is not None
            assert not seen.manifest.generations, f"{seen.manifest.generations} of {region} stay: {self._held()}"
            log, guards = witness.end_of_log(region, posts=posts)
            version, folder = seen.manifest.version, f"_mem_wal/{region}/manifest"
            must |= log | {f"{folder}/{HINT}"}
            must |= {f"{folder}/{wire.bit_reversed(one)}.binpb" for one in (version, version - 1) if one}
            may |= guards
        assert must <= left, f"gone: {sorted(must - left)}"
        assert left <= must | may, f"left behind: {sorted(left - must - may)}"
        external = {path for path in witness.files if re.fullmatch(r"_indices/[^/]+/index\.lance", path)}
        assert external == {newest.snapshot} - {None}
        assert not [path for path in witness.files if path.startswith("_versions/d")]
        # Files that no version ever named are left by whoever was killed, or lost a race; pylance's clean-up
        # takes them when they are a week old.
        held = {path for path in witness.files if path in witness.named}
        assert held >= newest.files
        left = held - newest.files - witness.under_way
        assert not left, f"of versions that are gone: {sorted(left)}"
        wanted = self.made.columns.seen(self.made.expected(), max(number for _, number in witness.versions))
        assert_same(newest.rows, wanted)

    def _held(self) -> list[str]:
        report = gc.plan(open_table(self.uri), IMMEDIATE)
        return [f"{item.path}: {item.why}" for item in report.items[Verdict.HELD] if item.generation]

    def _go_on(self) -> None:
        """Writers, mergers and queries by the index find nothing missing."""
        self.made.step(2)
        self.made.flush()
        self._merge_all(self.made)
        self.witness.look({"merge"})
        dataset = lance.dataset(self.uri)
        rows = read_base(self.uri)
        newest = max(number for _, number in self.witness.versions)
        assert rows.keys() == self.made.columns.seen(self.made.expected(), newest).keys()
        for (key,) in list(rows)[:2]:
            assert dataset.count_rows(f"id = {key}") == 1
