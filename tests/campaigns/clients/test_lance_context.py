"""lance-context, which merges MemWAL tables by itself, beside our jobs: its real package, on local files and S3."""

from __future__ import annotations

import json
import subprocess
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import lance
import pytest

from memwal_ops import run_job
from tests.campaigns.clients.environments import NoEnvironmentError, python_of
from tests.support.faulty_proxy import FaultyProxy
from tests.support.s3_server import options_for

if TYPE_CHECKING:
    from pathlib import Path

pytest_plugins = ["tests.support.s3_server"]

PACKAGE, LIMIT = "lance-context 0.6.7", 120
PROGRAM = """
import json, sys
from lance_context import GenericStore
uri, options, steps = sys.argv[1], json.loads(sys.argv[2]), sys.argv[3:]
schema = {"id": {"type": "string", "nullable": False}, "v": "int64"}
store = GenericStore.open(uri, schema, storage_options=options or None)
for step in steps:
    if step == "merge":
        print("merged", store.cleanup_wal(), flush=True)
        continue
    first, last, value = map(int, step.split(","))
    store.add([{"id": f"k{key:03d}", "v": value} for key in range(first, last)])
    store.flush()
"""


@pytest.fixture(scope="module")
def python() -> str:
    try:
        return python_of(PACKAGE)
    except NoEnvironmentError as error:
        pytest.skip(str(error))


def command(python: str, uri: str, options: dict[str, str], *steps: str) -> list[str]:
    return [python, "-c", PROGRAM, uri, json.dumps(options), *steps]


def theirs(python: str, uri: str, options: dict[str, str], *steps: str) -> str:
    ended = subprocess.run(
        command(python, uri, options, *steps), capture_output=True, text=True, timeout=LIMIT, check=False
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def values(uri: str, options: dict[str, str]) -> dict[str, int]:
    rows = lance.dataset(uri, storage_options=options or None).to_table().to_pylist()
    assert len({row["id"] for row in rows}) == len(rows)
    return {row["id"]: row["v"] for row in rows}


@pytest.mark.parametrize("where", ["local", "s3"])
def test_both_merge_in_turns(
    python: str, tmp_path: Path, where: str, s3_bucket: str, s3_options: dict[str, str]
) -> None:
    uri, options = (str(tmp_path / "t"), {}) if where == "local" else (f"s3://{s3_bucket}/t", s3_options)
    expected: dict[str, int] = {}
    for turn in range(3):
        first = 10 * turn
        assert "merged" in theirs(python, uri, options, f"{first},{first + 20},{turn}", "0,5,-1", "merge")
        expected |= {f"k{key:03d}": turn for key in range(first, first + 20)} | {f"k{key:03d}": -1 for key in range(5)}
        blocked = run_job(uri, "merge", storage_options=options)
        assert [fault.error.reason for fault in blocked.blocked] == ["drained_elsewhere"]
        assert "which is" not in str(blocked.blocked[0].error), "the base version of the time names the program"
        planned = run_job(uri, "adopt", storage_options=options, drained=True, apply=False)
        assert [(region.missing, region.unknown, region.unread) for region in planned.regions] == [((), (), ())]
        if turn == 1:
            assert run_job(uri, "adopt", storage_options=options, drained=True).exit_code == 0
        theirs(python, uri, options, f"{first},{first + 1},{100 + turn}")
        expected[f"k{first:03d}"] = 100 + turn
        merged = run_job(uri, "merge", storage_options=options, accept_drained=True)
        assert (merged.decision, merged.exit_code) == ("merged", 0)
        assert values(uri, options) == expected
        assert run_job(uri, "gc", storage_options=options).exit_code == 0
    assert run_job(uri, "inspect", storage_options=options).to_json()["merged_elsewhere"]["program"] == (
        "lance 9.0.0, update"
    )


@dataclass
class HeldProxy(FaultyProxy):
    """Holds the first put of a data file of the base: what the client merges is read by then."""

    arrived: threading.Event = field(default_factory=threading.Event)
    released: threading.Event = field(default_factory=threading.Event)

    def note(self, method: str, path: str) -> None:
        super().note(method, path)
        if method in {"PUT", "POST"} and "/t/data/" in path:
            self.arrived.set()
            self.released.wait(LIMIT)


def test_its_merge_after_ours_puts_older_rows_over_newer_ones(
    python: str, s3_bucket: str, s3_options: dict[str, str], s3_endpoint: str
) -> None:
    """Theirs reads generation 1; ours merges 1 and 2; theirs puts 1: the base has the older rows. We name the keys."""
    uri = f"s3://{s3_bucket}/t"
    theirs(python, uri, s3_options, "0,10,1")
    with HeldProxy(s3_endpoint) as proxy:
        merging = subprocess.Popen(
            command(python, uri, options_for(proxy.endpoint), "merge"),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        assert proxy.arrived.wait(LIMIT)
        theirs(python, uri, s3_options, "0,5,2")
        assert run_job(uri, "merge", storage_options=s3_options).decision == "merged"
        assert values(uri, s3_options)["k000"] == 2
        proxy.released.set()
        said = merging.communicate(timeout=LIMIT)[0]
    assert values(uri, s3_options)["k000"] == 1, said
    keys = tuple(f"k{key:03d}" for key in range(5))
    found = run_job(uri, "inspect", storage_options=s3_options)
    assert [*found.merged_elsewhere.overwritten.values()] == [keys]
    assert "PROBLEM: the base table has older rows of 5 keys" in found.describe()
    assert [*run_job(uri, "merge", storage_options=s3_options).overwritten.values()] == [keys]
    collected = run_job(uri, "gc", storage_options=s3_options, reader_grace="0s", allow_unsafe=True)
    assert collected.exit_code == 0
    assert [*run_job(uri, "inspect", storage_options=s3_options).merged_elsewhere.overwritten.values()] == [keys]
    theirs(python, uri, s3_options, "0,5,3")
    assert run_job(uri, "merge", storage_options=s3_options, accept_drained=True).exit_code == 0
    assert run_job(uri, "inspect", storage_options=s3_options).merged_elsewhere.overwritten == {}
    assert {values(uri, s3_options)[key] for key in keys} == {3}
