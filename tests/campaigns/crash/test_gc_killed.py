"""Kill gc on S3: nothing that is needed goes, nothing else stays.

Every call of every job, on local files: tests/campaigns/faults; collectors as processes beside others:
tests/campaigns/soak.
"""

from __future__ import annotations

import random
from dataclasses import replace
from datetime import timedelta

import lance
import pytest

from memwal_ops import open_table
from memwal_ops.formats.lance.jobs import expire
from memwal_ops.formats.lance.jobs.gc import job as gc
from tests.campaigns.faults.tables import litter
from tests.support.dying_store import DyingStore, Killed
from tests.support.gc_options import IMMEDIATE
from tests.support.tables.files import Files
from tests.support.tables.model import assert_same
from tests.support.tables.reading import read_base, read_lsm, read_spec
from tests.support.tables.workload import Workload

NOW = expire.ExpireOptions(timedelta(0), 1, allow_unsafe=True)
ENOUGH_RUNS = 4


def to_the_end(uri: str, options: dict[str, str] | None = None) -> int:
    """Collect until nothing is left; how often something was."""
    for run in range(ENOUGH_RUNS):
        report = gc.apply(open_table(uri, options), IMMEDIATE)
        assert not report.failed
        if report.decision == "nothing_to_delete":
            return run
    raise AssertionError("gc does not come to an end")


def files_of(files: Files) -> set[str]:
    """All but what jobs write for themselves: probes and announcements of the killed ones."""
    return {path for path in files.listing("") if not path.startswith("_mem_wal_ops/")}


@pytest.mark.s3
def test_gc_on_s3(bucket: tuple[str, dict[str, str]]) -> None:
    """At a call of each kind, before or after it is carried out; a copy of the table for each."""
    uri, options = bucket
    made = Workload(11, regions=1, base_rows=12, columns="vector").create(f"{uri}/t.lance", options)
    litter(made)
    made.close()
    source = Files(made.uri, options)
    original = {path: source.get(path) for path in source.listing("")}

    def copied(name: str) -> Files:
        files = Files(f"{uri}/{name}.lance", options)
        for path, data in original.items():
            files.put(path, data)
        return files

    unkilled = copied("unkilled")
    table = open_table(unkilled.uri, options)
    counting = DyingStore(table.store, 1 << 30, after=False)
    gc.apply(replace(table, store=counting), IMMEDIATE)
    to_the_end(unkilled.uri, options)
    wanted = files_of(unkilled)
    kinds = {
        name: [at for at, one in enumerate(counting.calls, 1) if one == name] for name in sorted(set(counting.calls))
    }
    rng = random.Random(5)
    for at in sorted({rng.choice(calls) for calls in kinds.values()} | {*kinds["delete_many"][-2:]}):
        after = rng.random() < 0.5
        files = copied(f"killed-{at}")
        table = open_table(files.uri, options)
        with pytest.raises(Killed):
            gc.apply(replace(table, store=DyingStore(table.store, at, after=after)), IMMEDIATE)
        assert_same(read_spec(files.uri, options), made.expected(), seed=f"call {at}")
        assert_same(read_lsm(files.uri, options), made.expected(), seed=f"call {at}")
        read_base(files.uri, options, version=lance.dataset(files.uri, version="kept", storage_options=options).version)
        to_the_end(files.uri, options)
        assert files_of(files) == wanted, f"call {at}"
        assert_same(read_spec(files.uri, options), made.expected(), seed=f"call {at}")
