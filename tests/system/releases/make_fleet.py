"""Make ``fleet-of-RELEASE.tar.gz``, once for each release, by its own code, and keep it in this folder:

    python -m tests.system.releases.make_fleet /srv/fleet tests/system/releases

It has a table of each format and layout with all records that memwal-ops keeps beside it, the state folder of a service
that maintained them, its configuration, an export, and ``expected.json``: the rows, what this release reads in its own
records, its exit codes, and the keys of its JSON documents. test_earlier.py reads it by today's code. Until its release
is tagged, it may be made anew; after that, never.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import shutil
import socket
import sys
import tarfile
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np

from memwal_ops import errors, open_table, run_job
from memwal_ops.cli import main
from memwal_ops.core.holds import holds, take_hold
from memwal_ops.core.leases import list_leases
from memwal_ops.supervisor.state.history import History
from memwal_ops.version import __version__
from tests.support.legacy_migrations import filled, scanned
from tests.support.lm_diskann.folders import partly_merged
from tests.support.tables.model import Rows
from tests.support.tables.reading import read_spec
from tests.support.tables.region_layout import RegionLayout
from tests.support.tables.workload import Workload
from tests.support.zeppelin.independent import Reader
from tests.support.zeppelin.namespace import NamespaceUnderTest

ROOT = Path(__file__).parents[3]
TABLES = ("orders.lance", "events.lance", "legacy.lance", "wiki", "native", "index")
CONFIG = """version: 1
state_dir: ${FLEET}/state
http: {port: 0}
defaults: {poll: 1s, jobs: {gc: {apply: true}, expire: {apply: true}}}
tables:
  - uri: ${FLEET}/orders.lance
  - uri: ${FLEET}/events.lance
  - uri: ${FLEET}/wiki
  - uri: ${FLEET}/native
"""
# JSON documents of the command line: the words, without --json.
DOCUMENTS = (
    "inspect orders.lance", "merge orders.lance --dry-run", "catchup orders.lance --dry-run", "gc orders.lance",
    "expire orders.lance", "verify orders.lance", "hold orders.lance --list", "lease list orders.lance", "inspect wiki",
    "merge wiki --dry-run", "gc wiki", "verify wiki", "inspect index", "merge index --dry-run", "gc index",
    "verify index", "inspect events.lance", "verify events.lance", "config check memwal.yaml",
    "history --config memwal.yaml", "scan .", "inspect no-table", "compact orders.lance --dry-run",
    "snapshot orders.lance --dry-run", "maintain orders.lance --dry-run", "repair orders.lance",
    "erase orders.lance --where id=1", "cost --config memwal.yaml", "plan --config memwal.yaml",
)  # fmt: skip


def call(words: str) -> tuple[int, str]:
    """Run a command in this process; returns its exit code and stdout."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(io.StringIO()):
        try:
            main.main(words.split())
        except SystemExit as ended:
            return int(ended.code or 0), out.getvalue()
    raise AssertionError(words)


def shape_of(value: Any) -> Any:
    """The keys of a document, the types of its values; of a list the shapes of its entries, as one."""
    if isinstance(value, dict):
        return {str(key): shape_of(one) for key, one in value.items()}
    if isinstance(value, list):
        entries = [shape_of(one) for one in value]
        if entries and all(isinstance(one, dict) for one in entries):
            return [{key: one for entry in entries for key, one in entry.items()}]
        return entries[:1]
    if isinstance(value, bool) or value is None:
        return type(value).__name__
    return "number" if isinstance(value, int | float) else type(value).__name__


def documents() -> dict[str, Any]:
    """The exit code and the shape of each document."""
    found = {}
    for words in DOCUMENTS:
        code, out = call(f"{words} --json")
        found[words] = {"exit_code": code, "shape": shape_of(json.loads(out))}
    return found


def rows_of(name: str) -> list[Any]:
    """All rows of a table, by a reader of the specification, in a form that JSON keeps."""
    if name == "legacy.lance":
        return sorted([key, value] for key, value in scanned(name).items())
    if name in {"wiki", "native"}:
        return sorted([key, [*values], more] for key, (values, more) in Reader(name).read().items())
    if name == "index":
        from memwal_ops.formats.lm_diskann.library import Index
        from tests.support.lm_diskann.decoder import View

        with Index(name) as index:
            counted = len(index.search(np.zeros((1, 16), np.float32), k=400)[0][0])
        return [counted, *sorted([int(row), [*vector]] for row, vector in View(name).live_rows().items())]
    found: Rows = read_spec(name)
    return sorted([[*map(str, key)], json.loads(json.dumps(row, default=str))] for key, row in found.items())


def records_of(name: str) -> dict[str, Any]:
    """The leases and holds of a table, as this release reads them; times are the files' own."""
    table = open_table(name)
    leases = [{**one.to_json(), "renewed": None, "expires": None} for one in list_leases(table.store)]
    found = [{**one.to_json(), "until": None} for one in holds(table)]
    return {"leases": leases, "holds": found}


def history() -> list[dict[str, Any]]:
    opened = History.open_to_read("state/history.sqlite")
    try:
        return opened.runs(limit=1000)
    finally:
        opened.close()


def metrics() -> list[str]:
    return sorted(set(re.findall(r"^\| `(memwal_ops_\w+)`", (ROOT / "docs/http.md").read_text(), re.MULTILINE)))


def labels() -> dict[str, str]:
    """The type and the labels of each metric."""
    return dict(re.findall(r"^\| `(memwal_ops_\w+)` \| ([^|]+) \|", (ROOT / "docs/http.md").read_text(), re.MULTILINE))


def alerts() -> list[str]:
    rules = (ROOT / "configs/prometheus/memwal-ops.rules.yaml").read_text()
    return sorted(re.findall(r"^ *- alert: (\w+)$", rules, re.MULTILINE))


def exit_codes() -> dict[str, str]:
    found = [one for one in vars(errors).values() if isinstance(one, type) and issubclass(one, errors.MemwalOpsError)]
    return {str(one.exit_code): one.reason for one in found}


def make() -> None:
    """Make all tables, records and files in the current folder."""
    orders = Workload(7, regions=2, base_rows=60).create("orders.lance")
    events = RegionLayout(8, regions=2, base_rows=20).create("events.lance")
    for table in (orders, events):
        for _ in range(2):
            table.step(4)
            table.flush()
    spaces = [NamespaceUnderTest("wiki", "wiki"), NamespaceUnderTest("native", "native", seed=8)]
    for space in spaces:
        space.write()
    Path("memwal.yaml").write_text(CONFIG)
    assert call("run --once --config memwal.yaml")[0] == 0
    take_hold(open_table("orders.lance"), open_table("orders.lance").revision, timedelta(days=3650), note="an export")
    for space in spaces:
        first = next(Path(space.uri, "wal").iterdir())
        shutil.copy(first, first.with_name(f"{'0' * 26}{first.suffix}"))  # an orphan, which gc records
        assert call(f"gc {space.uri} --apply")[0] == 0
        space.put("late")
    hint = next(Path("orders.lance/_mem_wal").glob("*/manifest/version_hint.json"))
    hint.write_text('{"version":1}')
    assert run_job("orders.lance", "repair", apply=True).exit_code == 0
    filled(os.path.abspath("legacy.lance"))
    assert run_job("legacy.lance", "migrate", apply=True).decision == "migrated"
    partly_merged("index", np.random.default_rng(7).standard_normal((340, 16)).astype(np.float32))
    assert run_job("index", "snapshot", destination=os.path.abspath("copy")).decision == "copied"
    for table in (orders, events):
        table.step(4)
        table.flush()
        table.close()
    # Its generations point into their log by an absolute path: what moves must be merged (runbooks/move-a-table.md).
    assert run_job("events.lance", "merge").decision == "merged"
    assert call("export-support orders.lance -o orders.support")[0] == 0


def main_of_release() -> None:
    """Make the archive."""
    place, out = Path(sys.argv[1]), Path(sys.argv[2]).resolve()
    os.environ |= {"LOGNAME": "operator", "MEMWAL_OPS_CACHE": "", "FLEET": str(place)}
    socket.gethostname = lambda: "host"
    place.mkdir(parents=True)
    os.chdir(place)
    make()
    expected = {
        "release": __version__,
        "rows": {name: rows_of(name) for name in TABLES},
        "records": {name: records_of(name) for name in TABLES},
        "history": history(),
        "documents": documents(),
        "metrics": metrics(),
        "labels": labels(),
        "alerts": alerts(),
        "exit_codes": exit_codes(),
    }
    Path("expected.json").write_text(json.dumps(expected, indent=1, sort_keys=True))
    with tarfile.open(out / f"fleet-of-{__version__}.tar.gz", "w:gz", compresslevel=9) as archive:
        archive.add(".", ".", filter=lambda one: one.replace(uid=0, gid=0, uname="", gname="", deep=False))


if __name__ == "__main__":
    main_of_release()
