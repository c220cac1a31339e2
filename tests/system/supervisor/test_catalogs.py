"""A service of a catalog's tables, as a process: its workers ask the catalog by themselves, and no secret is kept."""

from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from memwal_ops.core.leases import Holder
from memwal_ops.errors import MemwalOpsError
from memwal_ops.storage.catalogs import resolve
from memwal_ops.storage.objects import open_store
from memwal_ops.supervisor.config.loader import load_settings
from memwal_ops.supervisor.scheduling.discovery import discover
from memwal_ops.supervisor.workers.leasing import LeaseClient
from tests.support.catalog_server import TOKEN, catalog_server
from tests.support.run_cli import run_process
from tests.support.tables.plain import PlainTable

pytest_plugins = ["tests.support.s3_server"]


@pytest.mark.long
def test_all_tables_of_a_catalog_are_maintained(tmp_path: Path) -> None:
    """One of them is listed, and gone when it is opened: the others are maintained, and the run says so."""
    made = [PlainTable(str(tmp_path / f"files/{number}.lance")).create(fragments=12) for number in range(3)]
    config = tmp_path / "memwal.yaml"
    with catalog_server() as catalog:
        catalog.tables = {f"t{number}": table.uri for number, table in enumerate(made)}
        config.write_text(f"""
state_dir: {tmp_path}/state
http: {{enabled: false}}
tables:
  - name: prod
    namespace: {{impl: rest, path: [prod],
                properties: {{uri: "{catalog.url}", header.Authorization: "Bearer ${{TOKEN}}"}}}}
""")
        ran = run_process("run", "--once", "--config", str(config), TOKEN=TOKEN)
        assert ran.code == 0, ran.err
        status = run_process("status", "--config", str(config), "--json", TOKEN=TOKEN)
        assert [table["name"] for table in status.document["tables"]] == ["prod/t0", "prod/t1", "prod/t2"]
        for table in made:
            assert table.read() == table.model
            assert len(table.dataset.get_fragments()) <= 2
        catalog.before = lambda path: catalog.tables.pop("t2", None) if "/prod%24t2/" in path else None
        again = run_process("run", "--once", "--config", str(config), TOKEN=TOKEN)
    assert again.code == 3, again.err
    shown = [one.out + one.err for one in (ran, status, again)]
    kept = [path.read_bytes().decode(errors="replace") for path in (tmp_path / "state").rglob("*") if path.is_file()]
    assert any("prod/t1" in text for text in kept)
    assert not [text for text in (*shown, *kept) if TOKEN in text]


def test_a_lease_is_where_the_table_is_now(
    bucket: tuple[str, dict[str, str]], no_aws_environment: None, tmp_path: Path
) -> None:
    """Dropped, and created again elsewhere under its name, with credentials for the new location alone."""
    root, options = bucket
    for number in (1, 2):
        open_store(resolve(f"{root}/t-{number}.lance", options)).put("_versions/1.manifest", b"")
    answers: list[tuple[Any, MemwalOpsError | None]] = []
    with catalog_server() as catalog:
        ends = datetime.now(UTC) + timedelta(hours=1)
        catalog.vend = lambda: {**options, "expires_at_millis": str(int(ends.timestamp() * 1000))}
        config = tmp_path / "memwal.yaml"
        config.write_text(f"""
tables:
  - namespace: {{impl: rest, path: [prod],
                properties: {{uri: "{catalog.url}", header.Authorization: "Bearer ${{TOKEN}}"}}}}
""")
        leases = LeaseClient(Holder("us", "us@here"), timedelta(minutes=5), lambda then: then())
        for number in (1, 2):
            catalog.tables = {"t": f"{root}/t-{number}.lance"}
            (found,) = discover(load_settings(str(config), {"TOKEN": TOKEN}).tables).tables
            leases.acquire(found, f"job{number}", lambda taken, error: answers.append((taken, error)))
            while len(answers) < number:
                time.sleep(0.01)
        leases.close(60.0)
    assert [error for _, error in answers] == [None, None]
    written = [
        [*open_store(resolve(f"{root}/t-{number}.lance", options)).list("_mem_wal_ops/leases")] for number in (1, 2)
    ]
    assert [["job1" in one.path for one in place] for place in written] == [[True], [False]]
