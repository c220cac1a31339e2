"""What earlier releases of memwal-ops wrote (make_fleet.py) is read and maintained; what later ones write, refused."""

from __future__ import annotations

import json
import shutil
import sqlite3
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lance
import pytest
import xxhash

from memwal_ops import open_table, run_job
from memwal_ops.core.holds import holds
from memwal_ops.core.registry import formats
from memwal_ops.errors import InvalidUsageError
from memwal_ops.formats.lance.wire.version_manifest import RECORDS
from memwal_ops.supervisor.state.directory import StateDir
from tests.support.run_cli import contents, run_here
from tests.system.releases import make_fleet

pytestmark = pytest.mark.long

ARCHIVES = sorted(Path(__file__).parent.glob("fleet-of-*.tar.gz"))
LANCE = ("orders.lance", "events.lance")


@pytest.fixture(params=ARCHIVES, ids=lambda path: path.name.removesuffix(".tar.gz"))
def fleet(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    with tarfile.open(request.param) as packed:
        packed.extractall(tmp_path, filter="data")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FLEET", str(tmp_path))
    return tmp_path


@pytest.fixture
def expected(fleet: Path) -> dict[str, Any]:
    return dict(json.loads((fleet / "expected.json").read_text()))


def rows(name: str) -> Any:
    """As expected.json has them."""
    return json.loads(json.dumps(make_fleet.rows_of(name)))


def test_the_first_release_is_there() -> None:
    assert "fleet-of-0.1.0.tar.gz" in [path.name for path in ARCHIVES]


def test_its_records_and_rows_are_read(fleet: Path, expected: dict[str, Any]) -> None:
    for name in make_fleet.TABLES:
        assert rows(name) == expected["rows"][name], name
        assert_covers(expected["records"][name], make_fleet.records_of(name), name)
    assert_covers(expected["history"], make_fleet.history(), "history")


def test_its_json_its_exit_codes_and_its_metrics_are_there(expected: dict[str, Any]) -> None:
    """Keys, types, codes and names may be added, and none may go or change."""
    assert expected["exit_codes"].items() <= make_fleet.exit_codes().items()
    assert {*expected["metrics"]} <= {*make_fleet.metrics()}
    assert expected.get("labels", {}).items() <= make_fleet.labels().items(), "archives before had no labels"
    assert {*expected.get("alerts", ())} <= {*make_fleet.alerts()}
    now = make_fleet.documents()
    for words, then in expected["documents"].items():
        assert now[words]["exit_code"] == then["exit_code"], words
        assert_shape(then["shape"], now[words]["shape"], words)


def test_its_tables_are_maintained(fleet: Path, expected: dict[str, Any]) -> None:
    for name in (*LANCE, "wiki", "native", "index"):
        assert run_job(name, "maintain", apply=True).exit_code == 0, name
        assert run_job(name, "verify").exit_code == 0, name
        assert rows(name) == expected["rows"][name], name
    (hold,) = holds(open_table("orders.lance"))
    assert open_table("orders.lance").has_revision(hold.versions[0])
    assert run_job("copy", "snapshot", destination=str(fleet / "back")).decision == "copied"
    shutil.rmtree("index")
    shutil.move("back", "index")
    assert rows("index") == expected["rows"]["index"]


def test_its_migration_and_its_repair_are_undone(fleet: Path) -> None:
    assert run_job("legacy.lance", "migrate", rollback=True, apply=True).decision == "rolled_back"
    (repair,) = Path("orders.lance/_mem_wal_ops/quarantine").iterdir()
    with pytest.raises(InvalidUsageError, match=f"changed since repair {repair.name} wrote it"):
        run_job("orders.lance", "repair", undo=repair.name, apply=True)


def test_its_service_goes_on(fleet: Path, expected: dict[str, Any], capfd: pytest.CaptureFixture[str]) -> None:
    before = (fleet / "state/instance").read_text()
    assert run_here(capfd, "config", "check", "memwal.yaml").code == 0
    assert run_here(capfd, "run", "--once", "--config", "memwal.yaml").code == 0
    state = StateDir(str(fleet / "state"))
    assert state.instance == before.strip() == expected["records"]["orders.lance"]["leases"][0]["instance"]
    state.close()
    merged = [run for run in make_fleet.history() if run["job"] == "merge" and run["table"] == "orders"]
    assert [run["outcome"] for run in merged] == ["succeeded"] * 2
    assert rows("orders.lance") == expected["rows"]["orders.lance"]


def test_its_export_is_read(fleet: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for job in ("inspect", "verify"):
        assert run_here(capfd, job, "--from", "orders.support").code == 0


# -- what a later release writes


def later_record(pattern: str, key: str = "format") -> Callable[[], None]:
    def change() -> None:
        found = sorted(Path().glob(pattern))
        assert found, pattern
        for path in found:
            path.write_text(json.dumps({**json.loads(path.read_text()), key: 2}))

    return change


def later_manifest() -> None:
    lance.dataset("orders.lance").update_config({RECORDS: "2"})


def later_index() -> None:
    path = Path("index/metadata.lmd")
    data = path.read_bytes()
    body = data[:8] + (2).to_bytes(4, "little") + data[12:-8]
    path.write_bytes(body + xxhash.xxh3_64_intdigest(body).to_bytes(8, "little"))


def later_history() -> None:
    connection = sqlite3.connect("state/history.sqlite")
    connection.execute("PRAGMA user_version=2")
    connection.close()


def later_config() -> None:
    path = Path("memwal.yaml")
    path.write_text(path.read_text().replace("version: 1", "version: 2"))


def later_export() -> None:
    with zipfile.ZipFile("orders.support") as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    about = json.loads(members["export.json"])
    members["export.json"] = json.dumps({**about, "memwal_ops_export": 2}).encode()
    with zipfile.ZipFile("orders.support", "w") as archive:
        for name, content in members.items():
            archive.writestr(name, content)


NEWER = "newer release"
OPS = "orders.lance/_mem_wal_ops"
LATER: list[tuple[str, Callable[[], None], str, int, str]] = [
    ("lease", later_record(f"{OPS}/leases/*/*.json"), "lease list orders.lance", 8, NEWER),
    ("hold", later_record(f"{OPS}/holds/*.json"), "expire orders.lance --apply", 8, NEWER),
    ("progress", later_record(f"{OPS}/progress/*.json"), "gc orders.lance --apply", 8, NEWER),
    ("repair", later_record(f"{OPS}/quarantine/*/record.json"), "repair orders.lance --undo {id}", 8, NEWER),
    ("manifest", later_manifest, "merge orders.lance", 8, NEWER),
    ("migration", later_record("legacy.lance/_mem_wal_ops/legacy/*.json"), "migrate legacy.lance --rollback", 8, NEWER),
    ("wiki history", later_record("wiki/_mem_wal_ops/history/*.json"), "gc wiki --apply", 8, NEWER),
    ("ledger", later_record("native/_gc/candidates.json", "version"), "gc native --apply", 8, NEWER),
    ("index", later_index, "merge index", 8, "format release 2; the latest supported is 1"),
    ("history", later_history, "run --once --config memwal.yaml", 56, NEWER),
    ("history read", later_history, "history --config memwal.yaml", 56, NEWER),
    ("config", later_config, "config check memwal.yaml", 50, "version"),
    ("export", later_export, "inspect --from orders.support", 8, "later release"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("change", "command", "code", "says"), [one[1:] for one in LATER], ids=[one[0] for one in LATER]
)
def test_what_a_later_release_wrote_is_refused(
    fleet: Path, capfd: pytest.CaptureFixture[str], change: Callable[[], None], command: str, code: int, says: str
) -> None:
    change()
    before = contents(str(fleet))
    repairs = [path.name for path in Path("orders.lance/_mem_wal_ops/quarantine").iterdir()]
    refused = run_here(capfd, *command.format(id=repairs[0]).split())
    assert refused.code == code, refused
    assert says in refused.err + refused.out
    after = contents(str(fleet))
    assert {name for name in before if after.get(name) != before[name]} <= {"state/lock", "state/history.sqlite-shm"}


def assert_covers(then: Any, now: Any, where: str) -> None:
    """Every value of ``then`` is in ``now``, which may have more keys."""
    if isinstance(then, dict):
        assert isinstance(now, dict), where
        for key, value in then.items():
            assert key in now, f"{where}: {key} is gone"
            assert_covers(value, now[key], f"{where}.{key}")
    elif isinstance(then, list):
        assert len(then) == len(now), where
        for number, (one, other) in enumerate(zip(then, now, strict=True)):
            assert_covers(one, other, f"{where}[{number}]")
    else:
        assert now == then, where


def assert_shape(then: Any, now: Any, where: str) -> None:
    """Every key of ``then`` is in ``now`` with a value of the same type, or with none."""
    if "NoneType" in (then, now):
        return
    if isinstance(then, dict):
        assert isinstance(now, dict), f"{where} is {now}, and was an object"
        for key, value in then.items():
            assert key in now, f"{where}: {key} is gone"
            assert_shape(value, now[key], f"{where}.{key}")
    elif isinstance(then, list):
        assert isinstance(now, list), f"{where} is {now}, and was a list"
        if then and now:
            assert_shape(then[0], now[0], f"{where}[]")
    else:
        assert now == then, f"{where} is {now}, and was {then}"


def test_a_key_that_goes_or_changes_is_found() -> None:
    then = make_fleet.shape_of({"a": 1, "b": [{"c": "x"}], "d": None})
    assert_shape(then, make_fleet.shape_of({"a": 2.5, "b": [], "d": 4, "e": 1}), "same")
    for change in ({"a": "1"}, {"b": [{"x": 1}]}, {"b": {}}):
        with pytest.raises(AssertionError, match=r"gone|was"):
            assert_shape(then, make_fleet.shape_of({"a": 1, "b": [], "d": 1, **change}), "changed")
    with pytest.raises(AssertionError, match="a is gone"):
        assert_shape(then, make_fleet.shape_of({"b": [], "d": 1}), "changed")


def test_each_format_has_a_table_in_the_fleet() -> None:
    assert {*formats()} == {"lance", "zeppelin", "lm_diskann"}, "make_fleet.py makes a table of each"
