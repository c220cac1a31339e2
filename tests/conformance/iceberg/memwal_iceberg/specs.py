"""The jobs and their options, as they are registered. Imports nothing heavy."""

from __future__ import annotations

from dataclasses import dataclass

from memwal_ops.core.job import read_only_job
from memwal_ops.core.options import Options, VerificationOptions, count


@dataclass(frozen=True, kw_only=True)
class InspectOptions(Options):
    """Options of inspect."""

    limit: int = count(100, minimum=1, metavar="N", help="List at most N snapshots, the newest.")


INSPECT = read_only_job(
    name="inspect",
    summary="Show an Iceberg table and its snapshots.",
    help="""Show the Iceberg table at URI: its catalog, its snapshots, the number of files and rows, and their size.

\b
Examples:
  memwal-ops inspect 'iceberg+sql:///data/catalog.db#sales.orders'
  memwal-ops inspect 'iceberg+sql:///data/catalog.db#sales.orders' --json

Exit codes: 0 inspected; 9 a file of the metadata is damaged; others: runbooks/README.md.""",
    options=InspectOptions,
    load="memwal_iceberg.inspect",
)
VERIFY = read_only_job(
    name="verify",
    summary="Check that the files of all snapshots exist, and their counts.",
    help="""Check the Iceberg table at URI: every file that a retained snapshot names exists with its size, and
manifests and summaries count alike. With --deep, all rows of Parquet files are read. Changes nothing.

\b
Examples:
  memwal-ops verify 'iceberg+sql:///data/catalog.db#sales.orders'
  memwal-ops verify 'iceberg+sql:///data/catalog.db#sales.orders' --deep

Exit codes: 0 healthy, or warnings only; 9 an error was found; others: runbooks/README.md.""",
    options=VerificationOptions,
    load="memwal_iceberg.verify",
)
