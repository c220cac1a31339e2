"""The ways that are compared, each run as a process of its own: ``python -m benchmarks.ways WAY URI``.

Prints one JSON line: seconds of the work alone (imports and opening the interpreter not counted),
peak resident memory of the process in MiB, and what the way did.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import lance
import pyarrow as pa
from lance.mem_wal import CompactedSsTable

from benchmarks.memory import as_command, peak_mib, reset_peak
from memwal_ops.formats.lance.generations.backlog import read_backlog
from memwal_ops.formats.lance.jobs import merge
from memwal_ops.formats.lance.table import open_lance_table


def today(uri: str) -> dict[str, Any]:
    """What users write by hand: per generation, delete its tombstones, then one marked merge_insert."""
    table = open_lance_table(uri)
    for ref in read_backlog(table).pending:
        source = lance.dataset(f"{uri}/{ref.folder}").to_table()
        gone = source.filter(source["_tombstone"]).select(["id"])
        if gone.num_rows:
            lance.dataset(uri).merge_insert("id").when_matched_delete().execute(gone)
        live = source.filter(pa.compute.invert(source["_tombstone"])).drop(["_tombstone"])
        upsert = lance.dataset(uri).merge_insert("id").when_matched_update_all().when_not_matched_insert_all()
        upsert.mark_sstables_as_compacted([CompactedSsTable(str(ref.region_id), ref.generation)])
        upsert.execute(live)
    return {"version": lance.dataset(uri).version}


def floor(uri: str) -> dict[str, Any]:
    """Read every generation once and write the rows once, streaming, into a table of their own."""
    table = open_lance_table(uri)
    schema = table.dataset.schema

    def batches() -> Any:
        for ref in read_backlog(table).pending:
            yield from lance.dataset(f"{uri}/{ref.folder}").to_batches(columns=schema.names)

    reader = pa.RecordBatchReader.from_batches(schema, batches())
    written = lance.write_dataset(reader, f"{uri}.floor", mode="overwrite")
    return {"rows": written.count_rows()}


def ours(uri: str, *budget: str) -> dict[str, Any]:
    """``memwal-ops merge``; an optional argument is the budget of a pass in bytes."""
    as_command()
    options = merge.MergeOptions(max_bytes=int(budget[0])) if budget else merge.MergeOptions()
    report = merge.apply(open_lance_table(uri), options)
    phases: dict[str, float] = {}
    for entry in report.passes:
        for name, seconds in (entry.result.phases if entry.result else {}).items():
            phases[name] = phases.get(name, 0.0) + seconds
    return {"passes": len(report.passes), "phases": {name: round(value, 3) for name, value in phases.items()}}


WAYS = {"today": today, "floor": floor, "ours": ours}


def main() -> None:
    """Run one way and print its line."""
    way, uri, *arguments = sys.argv[1:]
    reset_peak()
    started, worked = time.perf_counter(), time.process_time()
    did = WAYS[way](uri, *arguments)
    seconds, cpu = time.perf_counter() - started, time.process_time() - worked
    print(json.dumps({"way": way, "seconds": seconds, "cpu": cpu, "peak_mib": round(peak_mib(), 1), **did}))


if __name__ == "__main__":
    main()
