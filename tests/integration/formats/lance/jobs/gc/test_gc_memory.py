"""What the collector keeps in memory and what it reads, against how much there is: a bound, and no time.

Each is a process of its own, so that its peak is its own; the store is made up (benchmarks/gc.py), so that a
million files need none.
"""

from __future__ import annotations

import json
from dataclasses import asdict, replace

import pytest

from benchmarks.gc import in_child
from benchmarks.gc_simulated import History, Stand

pytestmark = pytest.mark.long

MIB = 1 << 20


def planned(stand: Stand) -> dict[str, int]:
    """Peaks in bytes, of a process that plans."""
    found: dict[str, int] = in_child("--plan", json.dumps(asdict(stand)))
    assert found["listed"] == stand.objects
    assert found["verdicts"] == stand.regions * (stand.entries + stand.directories + 3), "one for each thing"
    return found


@pytest.mark.parametrize(
    ("few", "larger", "mib_for_100_000"),
    [
        pytest.param(Stand(entries=100_000), {"entries": 400_000}, 8, id="a log"),
        pytest.param(Stand(25, 900, 10, 10), {"regions": 75}, 3, id="regions"),
        pytest.param(Stand(directories=3_000, files=10), {"directories": 9_000}, 15, id="directories"),
    ],
)
@pytest.mark.long
def test_memory_hardly_grows_with_objects(few: Stand, larger: dict[str, int], mib_for_100_000: float) -> None:
    many = replace(few, **larger)
    small, large = planned(few), planned(many)
    grown = (large["peak"] - small["peak"]) / MIB
    assert grown < mib_for_100_000 * (many.objects - few.objects) / 100_000
    assert large["peak"] < 300 * MIB


def test_fifty_thousand_directories() -> None:
    """Three quarters of them stand in the region manifest, too; ``make bench`` has twice as many."""
    assert planned(Stand(directories=50_000, files=1))["peak"] < 300 * MIB


@pytest.mark.req("S0-189")
def test_fifty_thousand_versions_are_read_by_their_ends() -> None:
    """Each tenth has 10,000 fragments, hence some 700 KB; their progress is all that is asked for."""
    history = History()
    found = in_child("--retention", json.dumps(asdict(history)))
    assert found["versions"] == history.versions
    assert found["all_bytes"] > 3_000 * MIB
    assert found["read"] < found["all_bytes"] / 20
    large = history.versions // history.large_every
    assert found["calls"] == {"first": history.versions + large + 2, "again": 2}, "a version is read once"
    assert found["peak"] - found["before"] < 80 * MIB
    assert found["needed_by_the_oldest"] == "versions 1 to 499", "they merged nothing yet"
    assert found["needed_by_nearly_all"] == "versions 1 to 49999"
