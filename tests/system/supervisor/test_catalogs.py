"""A service of a catalog's tables, as a process: its workers ask the catalog by themselves, and no secret is kept."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.catalog_server import TOKEN, catalog_server
from tests.support.run_cli import run_process
from tests.support.tables.plain import PlainTable


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
