"""How many object-store requests a command makes: ``python -m benchmarks.requests``.

Counted at the server, so pylance's own are among them; unlike seconds, they do not depend on the
machine. Prints Markdown.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from benchmarks.markdown import head, row
from benchmarks.server import BUCKET, counting_server
from benchmarks.workload import Shape, make
from memwal_ops.core.run import run_job
from memwal_ops.formats.lance.jobs import merge, snapshot
from memwal_ops.formats.lance.jobs.catchup import job as catchup
from memwal_ops.formats.lance.jobs.inspect import job as inspect
from memwal_ops.formats.lance.table import open_lance_table

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Iterator

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


def measured(options: dict[str, str], counts: Counter[str]) -> Iterator[tuple[str, str]]:
    """Run each command on each table; yields their names, while ``counts`` has the requests."""
    for regions, generations in ((1, 1), (1, 5), (1, 20), (4, 5)):
        uri = f"s3://{BUCKET}/{regions}-{generations}.lance"
        make(uri, Shape(base=20_000, regions=regions, generations=generations, rows=500), storage_options=options)
        for name, job in _COMMANDS:
            counts.clear()
            job(open_lance_table(uri, options))
            yield name, f"{regions} regions x {generations} generations"


def main() -> None:
    """Start a server, run the commands, print the table."""
    head("command", "table", *_METHODS, "all")
    with counting_server() as (options, counts):
        for command, table in measured(options, counts):
            row(command, table, *(counts[method] for method in _METHODS), f"**{counts.total()}**")


if __name__ == "__main__":
    main()
