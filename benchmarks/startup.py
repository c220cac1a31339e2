"""How long a command takes before it has anything to do, beside an empty Python and beside ``import lance``.

Run: ``python -m benchmarks.startup``. Each figure is the median of RUNS processes, all in turn, as a ratio to
``python -c pass`` of the same run.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time

RUNS = 7
BARE = "python -c pass"
WAYS = {
    BARE: ["-c", "pass"],
    'python -c "import lance"': ["-c", "import lance"],
    "memwal-ops --version": ["-m", "memwal_ops", "--version"],
    "memwal-ops --help": ["-m", "memwal_ops", "--help"],
    "memwal-ops merge --help": ["-m", "memwal_ops", "merge", "--help"],
    "memwal-ops config check --help": ["-m", "memwal_ops", "config", "check", "--help"],
    "memwal-ops history --help": ["-m", "memwal_ops", "history", "--help"],
    "memwal-ops lease --help": ["-m", "memwal_ops", "lease", "--help"],
}


def main() -> None:
    """Print the table."""
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    for _ in range(RUNS):
        for way, arguments in WAYS.items():
            started = time.monotonic()
            subprocess.run(
                [sys.executable, *arguments], check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
            )
            seconds[way].append(time.monotonic() - started)
    bare = statistics.median(seconds[BARE])
    print("| command | seconds | times an empty Python |\n|---|---|---|")
    for way, found in seconds.items():
        print(f"| `{way}` | {statistics.median(found):.2f} | {statistics.median(found) / bare:.1f} |")


if __name__ == "__main__":
    main()
