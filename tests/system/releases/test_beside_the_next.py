"""Services of this release and of the next maintain the same tables: a fleet is upgraded one after the other."""

from __future__ import annotations

import sqlite3
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import lance
import pytest

import memwal_ops
from memwal_ops import open_table
from memwal_ops.core.holds import holds
from memwal_ops.formats.lance.generations.backlog import read_backlog
from tests.support.run_cli import run_process
from tests.support.service import Running, service
from tests.support.tables.region_layout import RegionLayout
from tests.support.tables.workload import Workload, assert_same, read_base
from tests.support.waiting import until
from tests.support.zeppelin.namespace import NamespaceUnderTest
from tests.system.releases.next_release import KEY, RELEASE, make_next

pytestmark = pytest.mark.long

THIS: dict[str, str] = {}


class Fleet:
    """Tables of three kinds that are written to, and two services that maintain them, of any release."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self.folder = folder
        self.tables = [
            made(7, regions=1, base_rows=20).create(f"{folder}/{made.__name__}.lance")
            for made in (Workload, RegionLayout)
        ]
        self.spaces = [NamespaceUnderTest(f"{folder}/{dialect}", dialect) for dialect in ("wiki", "native")]
        self._round = 0
        self._running: dict[str, Running] = {}
        self._stack = ExitStack()

    def __enter__(self) -> Fleet:
        return self

    def __exit__(self, *ended: object) -> None:
        self._stack.close()

    @property
    def uris(self) -> list[str]:
        return [one.uri for one in (*self.tables, *self.spaces)]

    def write(self) -> None:
        """A generation to each table, and a fragment to each namespace: new rows, replaced ones, deletions."""
        self._round += 1
        for table in self.tables:
            table.put([1, 2, 30 + self._round])
            table.flush()
        for space in self.spaces:
            space.put("a", f"new{self._round}", deletes=(f"new{self._round - 1}",))

    def config(self, name: str) -> Path:
        path = self.folder / f"{name}.yaml"
        waits = dict.fromkeys([table.uri for table in self.tables], "generations")
        waits |= dict.fromkeys([space.uri for space in self.spaces], "fragments")
        merges = {uri: f"{{merge: {{schedule: 1h, when: {what} >= 1}}}}" for uri, what in waits.items()}
        uris = ", ".join(f"{{uri: {uri}, jobs: {merge}}}" for uri, merge in merges.items())
        off = ", ".join(
            f"{job}: {{enabled: false}}" for job in ("catchup", "compact", "snapshot", "expire", "gc", "verify")
        )
        path.write_text(
            f"version: 1\nstate_dir: {self.folder}/state-{name}\nhttp: {{port: 0}}\nleases: {{ttl: 3s}}\n"
            f"backoff: {{first: 1s, longest: 2s}}\n"
            f"defaults: {{poll: 1s, idle_poll: 1s, jobs: {{{off}}}}}\ntables: [{uris}]\n"
        )
        return path

    def start(self, name: str, release: dict[str, str]) -> Running:
        """Start a service, with the state that it has, by a release."""
        begun = self._stack.enter_context(service(self.config(name), release))
        self._running[name] = begun
        assert until(lambda: self._version(begun)) == (RELEASE if release else memwal_ops.__version__)
        return begun

    def _version(self, running: Running) -> Any:
        """Of the process that runs now; None until it is ready."""
        assert running.process.poll() is None, running.log_path.read_text()[-3000:]
        if not running.events("ready"):
            return None
        with suppress(OSError):
            about = running.get("/api/v1/status")["service"]
            return about["version"] if about["pid"] == running.process.pid and about["ready"] else None
        return None

    def kill(self, name: str) -> None:
        """End it by kill -9, if it can be while a merge runs.

        Of a Lance table: the lease by which Zeppelin's own rules keep others away lasts five minutes.
        """
        running = self._running.pop(name)
        begun = len(running.events("run_started"))
        self.write()
        until(lambda: self._starts(running, begun) or self.merged())
        running.kill()

    def _starts(self, running: Running, begun: int) -> list[str]:
        lances = {Path(table.uri).stem for table in self.tables}
        return [one["table"] for one in running.events("run_started")[begun:] if one["table"] in lances]

    def merged(self) -> bool:
        lances = all(not read_backlog(open_table(table.uri)).pending for table in self.tables)
        return lances and all(not open_table(space.uri).manifest.fragments for space in self.spaces)

    def check(self) -> None:
        """Each row is there, as it was last written."""
        until(self.merged)
        for table in self.tables:
            assert_same(read_base(table.uri), table.expected())
        for space in self.spaces:
            assert space.read() == space.expected()


@pytest.fixture
def fleet(tmp_path: Path):
    with Fleet(tmp_path / "fleet") as made:
        yield made


def releases_of(uri: str) -> dict[str, bool]:
    """The releases that committed to a table, and whether with a property that this one does not know."""
    found = {}
    for version in lance.dataset(uri).versions():
        transaction = lance.dataset(uri).read_transaction(version["version"])
        properties = transaction.transaction_properties if transaction else {}
        if release := properties.get("memwal-ops.version"):
            found[release] = f"memwal-ops.{KEY}" in properties
    return found


def test_a_fleet_is_upgraded_one_service_after_the_other(fleet: Fleet, tmp_path: Path) -> None:
    """Each is killed with a job on, and comes back in the next release; then one goes back to this one."""
    following = make_next(tmp_path / "next")
    for name in ("one", "two"):
        fleet.start(name, THIS)
    fleet.write()
    fleet.check()
    for name, release in (("one", following), ("two", following), ("one", THIS), ("two", THIS), ("one", following)):
        fleet.kill(name)
        fleet.check()  # the other one went on
        fleet.start(name, release)
        fleet.write()
        fleet.check()
    # until each of the two releases had the table alone for a while, both committed to it
    for table in fleet.tables:
        assert releases_of(table.uri) == {memwal_ops.__version__: False, RELEASE: True}
    records = [path.read_text() for path in fleet.folder.rglob("_mem_wal_ops/**/*.json")]
    assert {KEY in text for text in records} == {True, False}
    for uri in fleet.uris:
        for release in (THIS, following):
            verified = run_process("verify", uri, **release)
            assert verified.code == 0, verified
    # both read the history that the other one wrote
    for name in ("one", "two"):
        with sqlite3.connect(fleet.folder / f"state-{name}/history.sqlite") as history:
            assert KEY in {row[1] for row in history.execute("PRAGMA table_info(runs)")}
        for release in (THIS, following):
            shown = run_process("history", "--config", str(fleet.folder / f"{name}.yaml"), "--json", **release)
            assert shown.code == 0, shown
            assert {run["outcome"] for run in shown.document["runs"]} >= {"succeeded"}


def test_each_obeys_the_holds_of_the_other(fleet: Fleet, tmp_path: Path) -> None:
    following = make_next(tmp_path / "next")
    table = fleet.tables[0]
    for holder, other in ((following, THIS), (THIS, following)):
        fleet.write()
        assert run_process("merge", table.uri, **holder).code == 0
        held = open_table(table.uri).revision
        assert run_process("hold", table.uri, "--version", str(held), "--ttl", "1h", **holder).code == 0
        fleet.write()
        assert run_process("merge", table.uri, **other).code == 0
        assert held in [version for one in holds(open_table(table.uri)) for version in one.versions]
        words = ("expire", table.uri, "--older-than", "0s", "--allow-unsafe", "--apply", "--json")
        expired = run_process(*words, **other)
        assert expired.code == 0, expired
        assert open_table(table.uri).has_revision(held), expired.document
        assert not open_table(table.uri).has_revision(held - 1), expired.document


def test_a_later_format_is_refused_by_name_and_the_next_release_goes_on(fleet: Fleet, tmp_path: Path) -> None:
    """The next release writes leases that would be misread here: this one works on none of its tables, and says so."""
    later = make_next(tmp_path / "later", leases=2)
    fleet.start("two", later)
    fleet.write()
    fleet.check()
    one = fleet.start("one", THIS)
    refused = until(lambda: [run for run in one.runs() if run["error"]])
    assert {run["error"]["reason"] for run in refused} == {"unsupported_feature"}
    assert "newer release of memwal-ops" in refused[0]["error"]["message"]
    before = {uri: open_table(uri).revision for uri in fleet.uris}
    fleet.write()
    fleet.check()
    assert all(open_table(uri).revision > before[uri] for uri in fleet.uris)
    assert {run["outcome"] for run in one.runs()} <= {"failed", "running"}
