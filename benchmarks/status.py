"""Measure what the status of many tables costs: of a service, and of ``memwal-ops status`` without reading the tables.

Run: ``python -m benchmarks.status --tables 10000``. The tables exist in a scheduler alone; times are of the processor.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from benchmarks.markdown import head, row
from memwal_ops.cli.status import describe
from memwal_ops.supervisor.config.loader import load_settings
from memwal_ops.supervisor.http.connections import long_json_response
from memwal_ops.supervisor.observe.findings import DEFAULT_LIMITS, OK, WORDS, findings_of
from memwal_ops.supervisor.observe.heartbeat import Heartbeat
from memwal_ops.supervisor.observe.metrics import Metrics
from memwal_ops.supervisor.observe.status import status_of
from memwal_ops.supervisor.scheduling.discovery import FoundTable
from memwal_ops.supervisor.scheduling.scheduler import Scheduler
from memwal_ops.supervisor.state.history import History
from memwal_ops.supervisor.workers.pools import Pools

if TYPE_CHECKING:
    from collections.abc import Callable

_Found = TypeVar("_Found")
_BACKLOG = {
    "generations": 2.0, "rows": 1e3, "bytes": 2e6, "oldest_age": 40.0, "regions": 2.0, "blocked_regions": 0.0,
    "fragments": 40.0, "small_fragments": 12.0, "table_rows": 2.6e6, "table_bytes": 8.4e8, "versions": 41.0,
    "indexes": 2.0, "uncovered_rows": 1e3,
}  # fmt: skip


class NoErrors:
    """A history without failures."""

    def last_error(self, _: str, __: str) -> None:
        """None."""

    def part_of(self, _: str, __: object) -> tuple[str, str]:
        """No part."""
        return "", ""


def _no_status() -> Any:
    """No process reads the metrics."""


def measured(name: str, work: Callable[[], _Found]) -> _Found:
    """Do something, and print what that took."""
    began = time.process_time()
    found = work()
    row(name, f"{(time.process_time() - began) * 1000:,.0f} ms")
    return found


def scheduler_of(file: Path, folder: Path) -> Scheduler:
    """A scheduler with the tables of a configuration, as polled a moment ago."""
    settings = load_settings(str(file), {})
    history = History.open(str(folder / "history.sqlite"))
    pools = Pools(lambda *_: None)
    pools.configure(dict(settings.config.pools))
    made = Scheduler(
        settings,
        history=history,
        pools=pools,
        leases=None,
        metrics=Metrics(_no_status),
        heartbeat=Heartbeat(lambda _: None),
        supervisor="us@here",
    )
    made.set_tables(FoundTable(one.name, str(one.uri), one) for one in settings.tables)
    for state in made.tables.values():
        state.figures, state.version, state.polled = dict(_BACKLOG), 41, datetime.now(UTC)
    return made


def shown(tables: list[dict[str, Any]]) -> str:
    """What ``memwal-ops status`` makes of it."""
    for table in tables:
        table.update(error=None, blocked=[])
        table["findings"] = [*findings_of(table, NoErrors(), DEFAULT_LIMITS, "memwal.yaml")]
        table["level"] = WORDS[OK]
    summary: dict[str, Any] = {**dict.fromkeys(WORDS.values(), 0), "generations": 0, "rows": 0, "tables": len(tables)}
    summary |= {"oldest_table": None, "oldest_age": 0, "unreadable": 0}
    document = {"service": None, "service_error": "none", "history_error": None, "tables": tables}
    return describe({**document, "findings": [], "summary": summary}, in_full=False)


def main() -> None:
    """Print what each part takes."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--tables", type=int, default=10_000)
    number = parser.parse_args().tables
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        file = folder / "memwal.yaml"
        file.write_text("tables:\n" + "".join(f"- {{uri: s3://lake/t{one}.lance}}\n" for one in range(number)))
        head(f"{number:,} tables", "processor")
        measured("configuration that names each", lambda: load_settings(str(file), {}))
        scheduler = scheduler_of(file, folder)
        tables = measured("status of the service: document", lambda: [*status_of(scheduler)[0]])
        body = measured("as JSON", lambda: long_json_response({"tables": iter(tables)})).body
        measured("`memwal-ops status`: findings and text", lambda: shown([{**one} for one in tables]))
        print(f"\n{len(body) / 2**20:.1f} MiB of JSON.")


if __name__ == "__main__":
    main()
