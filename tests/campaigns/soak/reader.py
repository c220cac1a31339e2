"""A reader, until it is killed: ``python -m tests.campaigns.soak.reader FOLDER SEED``.

Half of the time it reads what is newest, within the grace that the collectors give; half of the time
it takes a hold on some version by the command line, reads, goes on to something else for longer than
any grace, and must find the same rows then. An error within the time that was promised is one that
the collectors made.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from typing import TYPE_CHECKING

from obstore.exceptions import GenericError

from tests.campaigns.soak.account import note
from tests.campaigns.soak.jobs import EXIT_VERSION_GONE, command
from tests.campaigns.soak.place import Place, check, look, read

if TYPE_CHECKING:
    from typing import Any

TTL = 60
_FAILURES = (OSError, ValueError, KeyError, GenericError)


def _lost_connection(place: Place, error: Exception) -> bool:
    """Whether the network failed: obstore does not repeat a listing whose answer was cut off, and pylance does once."""
    return "://" in place.uri and "HTTP error" in str(error)


def read_now(place: Place, floor: dict[int, int]) -> str:
    """The newest version; what was seen once must be seen again."""
    started = time.monotonic()
    try:
        rows = read(place, look(place))
    except _FAILURES as error:
        if _lost_connection(place, error):
            return "store failed"
        if time.monotonic() - started < place.grace:
            raise
        return "overstayed"
    reached = check(place, rows, whole=False)
    back = {region: (last, reached[region]) for region, last in floor.items() if reached[region] < last}
    assert not back, f"a later reader saw less: {back}"
    floor.update(reached)
    return "read"


def read_long(place: Place, rng: random.Random) -> str:
    """A version under a hold, twice."""
    try:
        versions = [int(one["version"]) for one in place.dataset().versions()]
    except (OSError, ValueError) as error:
        if _lost_connection(place, error):
            return "store failed"
        if "not found" not in str(error).lower():
            raise
        return "version gone"  # pylance lists them, and then opens each
    version = rng.choice([versions[-1], rng.choice(versions)])
    started = time.monotonic()
    code, held = _hold(place, "--version", str(version), "--ttl", f"{TTL}s")
    if code == EXIT_VERSION_GONE:
        return "version gone"
    if code:
        return f"hold refused with {code}"
    try:
        view = look(place, version)
        first = read(place, view)
        check(place, first, whole=False)
        time.sleep(min(place.grace * rng.uniform(0.5, 3), TTL / 3))
        second = read(place, view)
    except _FAILURES as error:
        if _lost_connection(place, error):
            return "store failed"
        if time.monotonic() - started < TTL:
            raise
        return "overstayed"
    assert _same(first, second), f"version {version} with {view.generations} reads as another"
    _hold(place, "--release", str(held["id"]))
    return "read twice"


def _hold(place: Place, *arguments: str) -> tuple[int, Any]:
    done = subprocess.run(command(place, "hold", *arguments), capture_output=True, text=True, check=False)
    if done.returncode not in {0, EXIT_VERSION_GONE, *place.lost_races}:
        raise AssertionError(f"hold ended with {done.returncode}: {done.stdout}{done.stderr}")
    return done.returncode, json.loads(done.stdout) if done.returncode == 0 else None


def _same(first: Any, second: Any) -> bool:
    base, generations = first
    other, others = second
    return (
        base.keys() == other.keys()
        and all(rows.sort_by("id").equals(other[region].sort_by("id")) for region, rows in base.items())
        and all(one.equals(two) for (_, one), (_, two) in zip(generations, others, strict=True))
    )


def main() -> None:
    """Read until killed."""
    folder, seed = sys.argv[1:]
    place, rng = Place.load(folder), random.Random(int(seed))
    floor: dict[int, int] = {}
    parent = os.getppid()
    while os.getppid() == parent:
        long = rng.random() < 0.5
        said = read_long(place, rng) if long else read_now(place, floor)
        note(place.folder, "hold" if long else "read", said)


if __name__ == "__main__":
    main()
