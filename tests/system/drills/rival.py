"""A writer that answers being fenced by opening the region again.

``python -m tests.system.drills.rival URI REGION FIRST FOLDER``

It puts keys FIRST, FIRST + 1, and so on, each with its own value, and says in files of FOLDER what it tried, what was
acknowledged, and how often it was fenced. It closes the region, and ends, when FOLDER has a file ``stop``.
"""

from __future__ import annotations

import sys
import time
from itertools import count
from pathlib import Path

import lance
import pyarrow as pa

_PAUSE = 0.02
_BEFORE_OPENING_AGAIN = 0.2


def main() -> None:
    uri, region, first, folder = sys.argv[1:]
    files = {name: (Path(folder) / f"{first}.{name}").open("a") for name in ("tried", "acknowledged", "fenced")}

    def note(name: str, what: object) -> None:
        files[name].write(f"{what}\n")
        files[name].flush()

    keys = count(int(first))
    key = next(keys)
    while True:
        dataset = lance.dataset(uri)
        try:
            writer = dataset.mem_wal_writer(region, max_wal_flush_interval_ms=20)
            while not (Path(folder) / "stop").exists():
                note("tried", key)
                row = {"id": key, "val": float(key), "txt": f"by {first}"}
                writer.put(pa.Table.from_pylist([row], schema=dataset.schema))
                note("acknowledged", key)
                key = next(keys)
                time.sleep(_PAUSE)
            writer.close()
        except OSError as error:
            if "fenced" not in str(error).lower():
                raise
            note("fenced", error)
            time.sleep(_BEFORE_OPENING_AGAIN)
        else:
            return


if __name__ == "__main__":
    main()
