"""Whatever a table's files hold: verify never calls missing rows healthy, and repair loses no row that was readable."""

from __future__ import annotations

import random
import shutil
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lance
import pytest

from memwal_ops import open_table, run_job
from memwal_ops.errors import MemwalOpsError
from tests.support.seeds import CAMPAIGN_SEED, env_number
from tests.support.tables import damage, wire
from tests.support.tables.files import Files
from tests.support.tables.layouts import LAYOUTS
from tests.support.tables.model import assert_same
from tests.support.tables.reading import read_base

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.support.tables.lsm_table import LsmTable

ENOUGH = 100
DAMAGES = env_number("RANDOM_DAMAGES", ENOUGH)


@pytest.fixture(scope="module", params=LAYOUTS)
def whole(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LsmTable]:
    """Merged and waiting generations, an index, a snapshot, a log."""
    table = request.param(7, regions=2, base_rows=40).create(str(tmp_path_factory.mktemp("whole") / "t.lance"))
    for _ in range(3):
        table.step(12)
        for at in range(2):
            table.put([at])
        table.flush()
    run_job(table.uri, "maintain")
    for at in range(2):
        table.put([at])
    table.flush()
    yield table
    table.close()


def harm(uri: str, random_: random.Random, below: str = "**/*") -> str:
    """Damage one file. Returns how."""
    files = sorted(path for path in Path(uri).glob(below) if path.is_file())
    path = random_.choice(files)
    data = path.read_bytes()
    kind = random_.choice(("unlink", "empty", "cut", "flip", "grow", "swap"))
    if kind == "unlink":
        path.unlink()
    elif kind == "empty":
        path.write_bytes(b"")
    elif kind == "cut":
        path.write_bytes(data[: random_.randrange(len(data) + 1)])
    elif kind == "flip" and data:
        at = random_.randrange(len(data))
        path.write_bytes(data[:at] + bytes([data[at] ^ 1 << random_.randrange(8)]) + data[at + 1 :])
    elif kind == "grow":
        path.write_bytes(data + random_.randbytes(64))
    else:
        other = random_.choice(files)
        path.write_bytes(other.read_bytes())
    return f"{kind} {path.relative_to(uri)}"


def test_verify_ends_well(whole: LsmTable, tmp_path: Path) -> None:
    told: set[str] = set()
    for number in range(DAMAGES):
        random_ = random.Random(CAMPAIGN_SEED * 10_000 + number)
        uri = damage.copy_table(whole.uri, str(tmp_path / "t.lance"))
        how = " and ".join(harm(uri, random_) for _ in range(random_.randint(1, 3)))
        try:
            document = run_job(uri, "verify", deep=True).to_json()
        except MemwalOpsError as error:
            assert str(error), how
            assert error.remedy, how
            told.add(error.reason)
        except BaseException as error:
            error.add_note(f"damage {number}: {how}")
            raise
        else:
            told |= {one["check"] for one in document["findings"]}
            # Lance has no checksums: other bytes in their place may be other values.
            visible = "flip" not in how and "swap" not in how
            if visible and not any(one["severity"] == "error" for one in document["findings"]):
                rows_are_there(uri, whole, how)
        shutil.rmtree(uri)
    if DAMAGES >= ENOUGH:
        assert len(told) >= 5, f"so few kinds of findings prove little: {told}"


def rows_are_there(uri: str, whole: LsmTable, how: str) -> None:
    """Where verify found no error, a merge gives every row."""
    try:
        if open_table(uri).version < open_table(whole.uri).version:
            return  # the newest version's manifest is gone as a whole: what is left is the table as it was
        run_job(uri, "merge")
        assert_same(read_base(uri), whole.expected(), seed=how)
    except BaseException as error:
        error.add_note(f"verify found no error after: {how}")
        raise


# What repair may change, and what it has to keep away from.
PLACES = (
    "**/*", "_mem_wal/*/manifest/*", "_mem_wal/*/manifest/version_hint.json", "_transactions/*", "_indices/**/*",
    "_versions/*", "_mem_wal/*/*_gen_*/**/*",
)  # fmt: skip


def test_repair_loses_no_row(whole: LsmTable, tmp_path: Path) -> None:
    """Every version and every generation that reads right before a repair does so after it, and after its undoing.

    Rightly: a generation whose manifest is that of another one reads, with the rows of the other; a repair corrects it.
    """
    fixed: Counter[str] = Counter()
    right = readable(whole.uri)
    for number in range(DAMAGES):
        random_ = random.Random(CAMPAIGN_SEED * 10_000 + number)
        uri = damage.copy_table(whole.uri, str(tmp_path / "t.lance"))
        how = " and ".join(harm(uri, random_, random_.choice(PLACES)) for _ in range(random_.randint(1, 3)))
        before = {name: rows for name, rows in readable(uri).items() if rows == right.get(name)}
        try:
            document = run_job(uri, "repair", apply=True).to_json()
            assert kept_in(before, readable(uri)), how
            for fix in reversed(document["fixes"]):
                made = fix["outcome"] == "repaired"
                fixed[fix["fix"].split()[1]] += made
                if fix["quarantine"] is not None:
                    undone = run_job(uri, "repair", apply=True, undo=fix["quarantine"])
                    # One that failed behind its record replaced nothing.
                    assert undone.decision in ({"undone"} if made else {"undone", "nothing_to_undo"}), how
        except MemwalOpsError as error:
            assert error.remedy, how
        except BaseException as error:
            error.add_note(f"damage {number}: {how}")
            raise
        assert kept_in(before, readable(uri)), how
        shutil.rmtree(uri)
    if DAMAGES >= ENOUGH:
        assert fixed, "nothing was ever repaired"


def readable(uri: str) -> dict[str, Any]:
    """The rows of each version, and of each generation that a region's newest manifest lists, as far as they read."""
    files = Files(uri)
    rows = {
        f"version {version}": tried(lambda version=version: read_base(uri, version=version))
        for version in tried(lambda: wire.manifest_names(files)) or {}
    }
    rows["newest"] = tried(lambda: read_base(uri))
    for region in wire.regions(files):
        listed = tried(lambda region=region: wire.region_manifest(files, region).generations) or {}
        for generation, path in listed.items():
            folder = f"{uri}/_mem_wal/{region}/{path}"
            rows[f"{region}/{generation}"] = tried(lambda folder=folder: lance.dataset(folder).to_table().to_pylist())
    return {name: found for name, found in rows.items() if found is not None}


def kept_in(before: dict[str, Any], after: dict[str, Any]) -> bool:
    return all(after.get(name) == rows for name, rows in before.items())


def tried(read: Callable[[], Any]) -> Any:
    """What is read; None where it cannot be read: pylance raises, or panics."""
    try:
        return read()
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException:
        return None
