"""Look for a row that finds each planted bug, and is right without it; ``ONLY=NAME``: for this one."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from tests.campaigns.pairs.dimensions import PLAINS
from tests.campaigns.pairs.planted import BUGS
from tests.campaigns.pairs.walk import Process

MOST = 12
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
    return int(bool(missing))


if __name__ == "__main__":
    sys.exit(main())
