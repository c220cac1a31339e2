"""Requests of whole commands on S3, those of pylance included. Opening the table is among them."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import lance
import pytest

from benchmarks.server import BUCKET, counting_server
from benchmarks.workload import Shape, make
from memwal_ops import run_job
from memwal_ops.core.figures import poll_table
from memwal_ops.core.registry import open_table
from memwal_ops.storage.probe import probe_conditional_writes

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Iterator

SMALL = Shape(base=2_000, regions=1, generations=1, rows=1_000)
# Writers put two log entries or more, as their clock ticks: then the end of the log is two requests further, and a
# snapshot notes it in the region's manifest, with four more.
TICKS = 6


@pytest.fixture(scope="module")
def counted() -> Iterator[tuple[dict[str, str], Counter[str]]]:
    """A server that counts."""
    with counting_server() as server:
        yield server


@pytest.mark.long
def test_requests_of_commands(counted: tuple[dict[str, str], Counter[str]]) -> None:
    """One small table: what is read of it, merged into it, and maintained with nothing left to do."""
    options, requests = counted
    uri = f"s3://{BUCKET}/commands.lance"
    make(uri, SMALL, storage_options=options)
    probe_conditional_writes(open_table(uri, options).store)
    made: dict[str, int] = {}
    for command in ("inspect", "merge", "catchup", "maintain", "maintain again"):
        requests.clear()
        job = command.partition(" ")[0]
        run_job(uri, job, storage_options=options, apply=job == "maintain" or None)
        made[command] = requests.total()
    most = {"inspect": 13, "merge": 23, "catchup": 44, "maintain": 171, "maintain again": 98}
    assert all(made[command] <= most[command] + TICKS for command in most), sorted(made.items())


@pytest.mark.long
def test_requests_of_further_generations(counted: tuple[dict[str, str], Counter[str]]) -> None:
    """Each costs its manifest, its data file and its deletion file."""
    options, requests = counted
    made: dict[int, int] = {}
    inspected: dict[int, int] = {}
    polled: dict[int, int] = {}
    for generations in (1, 11):
        uri = f"s3://{BUCKET}/{generations}.lance"
        make(uri, replace(SMALL, generations=generations), storage_options=options)
        table = open_table(uri, options)
        probe_conditional_writes(table.store)
        requests.clear()
        run_job(uri, "inspect", storage_options=options)
        inspected[generations] = requests.total()
        requests.clear()
        poll_table(table, [table.jobs["merge"]])
        polled[generations] = requests.total()
        requests.clear()
        assert run_job(uri, "merge", storage_options=options).decision == "merged"
        made[generations] = requests.total()
    assert made[11] - made[1] <= 10 * 3 + TICKS, made
    assert inspected[11] - inspected[1] <= 10 + TICKS, "the manifest of each"
    assert polled[11] - polled[1] <= 10, "the manifest of each"


@pytest.mark.long
def test_requests_of_a_second_index(counted: tuple[dict[str, str], Counter[str]]) -> None:
    """The newest version is read once for all indexes, and after each commit.

    About 15 compare the answers of one index, and five tell which rows its segment holds.
    """
    options, requests = counted
    uri = f"s3://{BUCKET}/indexes.lance"
    make(uri, SMALL, storage_options=options)
    lance.dataset(uri, storage_options=options).create_scalar_index("number", "BTREE")
    run_job(uri, "merge", storage_options=options)
    requests.clear()
    assert run_job(uri, "catchup", storage_options=options).decision == "caught_up"
    assert requests.total() <= 92, requests
    requests.clear()
    run_job(uri, "catchup", storage_options=options)
    assert requests.total() <= 7, "as for one index"
