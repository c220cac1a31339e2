"""How many object-store requests a command makes: ``python -m benchmarks.requests``.

Counted at the server, so pylance's own are among them; unlike seconds, they do not depend on the
machine. Prints Markdown.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from benchmarks.server import BUCKET, counting_server
from benchmarks.workload import Shape, make
from memwal_ops.core.run import run_job
from memwal_ops.formats.lance.jobs.catchup import job as catchup
from memwal_ops.formats.lance.jobs.inspect import job as inspect
from memwal_ops.formats.lance.jobs.merge import job as merge
from memwal_ops.formats.lance.jobs.snapshot import job as snapshot
from memwal_ops.formats.lance.table import open_lance_table

if TYPE_CHECKING:
    from collections import Counter

_COMMANDS = (
    ("inspect", inspect.inspect),
    ("merge", lambda table: merge.apply(table, merge.MergeOptions())),
    ("merge (nothing waits)", lambda table: merge.apply(table, merge.MergeOptions())),
    ("catchup", lambda table: catchup.apply(table, catchup.CatchupOptions())),
    ("catchup (nothing waits)", lambda table: catchup.apply(table, catchup.CatchupOptions())),
    ("snapshot", lambda table: snapshot.apply(table, snapshot.SnapshotOptions())),
    ("snapshot (unchanged)", lambda table: snapshot.apply(table, snapshot.SnapshotOptions())),
    ("maintain --apply", lambda table: run_job(table, "maintain", apply=True)),
    ("maintain --apply (again)", lambda table: run_job(table, "maintain", apply=True)),
)
_METHODS = ("GET", "HEAD", "PUT", "POST", "DELETE")


def main() -> None:
    """Start a server, run the commands, print the table."""
    with counting_server() as (options, counts):
        print("| command | table | " + " | ".join(_METHODS) + " | all |\n|---|---|" + "---|" * (len(_METHODS) + 1))
        for regions, generations in ((1, 1), (1, 5), (1, 20), (4, 5)):
            uri = f"s3://{BUCKET}/{regions}-{generations}.lance"
            make(uri, Shape(base=20_000, regions=regions, generations=generations, rows=500), storage_options=options)
            table = f"{regions} regions x {generations} generations"
            for name, job in _COMMANDS:
                counts.clear()
                job(open_lance_table(uri, options))
                _row(name, table, counts)


def _row(command: str, table: str, counts: Counter[str]) -> None:
    cells = [command, table, *(str(counts[method]) for method in _METHODS), f"**{counts.total()}**"]
    print("| " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
