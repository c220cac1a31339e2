"""Damaged files of a generation that waits: each command ends with the reason, and deletes nothing that is needed."""

from __future__ import annotations

import random
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from memwal_ops import MemwalOpsError
from memwal_ops.memwal import read
from tests.support.gc_options import AT_ONCE_FLAGS
from tests.support.run_cli import run_here
from tests.support.seeds import CAMPAIGN_SEED, env_number
from tests.support.tables import damage
from tests.support.tables.layouts import LAYOUTS

if TYPE_CHECKING:
    from tests.support.tables.lsm_table import LsmTable

COMMANDS = (
    ("inspect",), ("verify",), ("merge", "--dry-run"), ("merge",), ("gc", *AT_ONCE_FLAGS),
    ("gc", "--apply", *AT_ONCE_FLAGS), ("maintain", "--apply"),
)  # fmt: skip


def changed(data: bytes, seeded: random.Random) -> bytes:
    """A flipped bit, a cut, zeros, or other bytes, at a place of its own."""
    at = seeded.randrange(len(data))
    kinds = (
        data[:at] + bytes([data[at] ^ 1 << seeded.randrange(8)]) + data[at + 1 :],
        data[:at],
        data[:at] + bytes(len(data[at : at + 64])) + data[at + 64 :],
        data[:at] + seeded.randbytes(len(data[at : at + 16])) + data[at + 16 :],
    )
    return seeded.choice((kinds[0], *kinds))


@pytest.mark.parametrize("kind", LAYOUTS)
def test_damaged_generations(tmp_path: Path, kind: type[LsmTable], capfd: pytest.CaptureFixture[str]) -> None:
    table = kind(7, regions=1, base_rows=30).create(str(tmp_path / "t.lance"))
    for _ in range(3):
        table.step(12)
        table.flush()
    table.close()
    found = (path for path in Path(table.uri).glob("_mem_wal/*/*_gen_*/**/*") if path.is_file() and path.stat().st_size)
    files = sorted(found, key=lambda path: (path.parent.name, path.stat().st_mtime_ns))  # names are random
    for number in range(env_number("FUZZ_GENERATIONS", 12)):
        seeded = random.Random(f"{CAMPAIGN_SEED}-{number}")
        place = seeded.choice(files).relative_to(table.uri)
        uri = damage.copy_table(table.uri, str(tmp_path / f"{number}.lance"))
        path = Path(uri, place)
        path.write_bytes(changed(path.read_bytes(), seeded))
        kept = {one.relative_to(uri) for one in Path(uri).glob("_mem_wal/*/wal/*")}
        for command, *flags in COMMANDS:
            code = run_here(capfd, command, uri, *flags).code
            assert code not in {1, 20}, (CAMPAIGN_SEED, number, place, command)
        try:
            read(uri).scan().to_table()
        except MemwalOpsError:
            after = {one.relative_to(uri) for one in Path(uri).glob("_mem_wal/*/wal/*")}
            assert kept == after, (CAMPAIGN_SEED, number, place, "the log may have the rows")
        shutil.rmtree(uri)
