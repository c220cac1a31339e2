"""Look for a row that finds each planted bug, and is right without it; ``ONLY=NAME``: for this one."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.campaigns.pairs.dimensions import PLAINS
from tests.campaigns.pairs.planted import BUGS
from tests.campaigns.pairs.walk import Process

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

MOST = 24
PLACE = Path(__file__).parent / "found.json"


def main() -> int:
    """Write the table; 1 if one was not found."""
    found = json.loads(PLACE.read_text()) if PLACE.exists() else {}
    right, missing = Process(), []
    for name, bug in BUGS.items():
        if name in found or os.environ.get("ONLY", name) != name:
            continue
        planted = Process(name)
        for number in range(MOST):
            row, seed = {**PLAINS[bug.row.get("format", "lance")], **bug.row}, f"planted-{number}"
            kept = None if bug.steps is None else [*range(bug.steps)]
            outcome = planted.run(row, seed, kept)
            if outcome.kind and not right.run(row, seed, kept).kind:
                found[name] = {
                    "row": row, "seed": seed, "steps": kept, "kind": outcome.kind, "seconds": outcome.seconds
                }  # fmt: skip
                PLACE.write_text(json.dumps(found, indent=1) + "\n")
                print(f"{name}: {outcome.kind} after {number + 1} rows", flush=True)
                break
        else:
            missing.append(name)
            print(f"{name}: NOT FOUND by {MOST} rows", flush=True)
        planted.close()
    right.close()
    print("\n".join(table(found)))
    print(f"{len(found)} of {len(BUGS)} planted bugs are found.")
    return int(bool(missing))


def table(found: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """Each bug with what its row came to, and the values that are not the plainest."""
    for name, one in found.items():
        plain = PLAINS[one["row"].get("format", "lance")]
        differs = " ".join(f"{key}={value}" for key, value in one["row"].items() if value != plain[key])
        yield f"{name:44} {one['kind']:44} {one['seconds']:6.2f} s  {differs}"


if __name__ == "__main__":
    sys.exit(main())
