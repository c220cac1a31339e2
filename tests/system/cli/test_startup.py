"""What a command imports before it has anything to do: help and the supervisor's commands wait for no pylance."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

from memwal_ops.core.leases import Holder, acquire
from memwal_ops.core.registry import all_job_specs, open_table
from memwal_ops.errors import ExtraMissingError
from tests.support.tables.plain import PlainTable
from tests.support.tables.workload import Workload

HEAVY = ("lance", "pyarrow", "pyspark", "pandas", "numpy", "boto3", "botocore")
NOT_FOR_A_LOCAL_MERGE = (
    "pyspark", "boto3", "botocore", "apscheduler", "pydantic", "yaml", "prometheus_client", "rich.console",
    "rich.traceback", "pygments", "memwal_ops.supervisor", "memwal_ops.formats.lance.engines.spark.engine",
    "memwal_ops.core.spark.session", "lance_namespace", "sqlglot", "msgpack", "memwal_ops.core.repair",
    "memwal_ops.core.erasure", "memwal_ops.core.collector", "memwal_ops.core.verification",
)  # fmt: skip
NOT_FOR_A_LOOK = (
    "memwal_ops.formats.lance.answers.check", "memwal_ops.formats.lance.answers.vector", "memwal_ops.core.verification",
    "memwal_ops.formats.lance.jobs.drained", "memwal_ops.formats.lance.legacy", "memwal_ops.storage.catalogs",
)  # fmt: skip
# Where a service runs on this machine, a run is recorded in its history, which takes its configuration. An empty path:
# other tests' processes find no pandas.
NO_SERVICE = {"XDG_STATE_HOME": "/nonexistent", "MEMWAL_OPS_CONFIG": "/nonexistent/config.yaml", "PYTHONPATH": ""}
PROGRAM = """
import json, sys
from memwal_ops.cli.main import main
codes = set()
for arguments in json.loads(sys.argv[1]):
    try:
        main(arguments)
    except SystemExit as ended:
        codes.add(ended.code)
loaded = [name for name in json.loads(sys.argv[2]) if name in sys.modules]
sys.stderr.write("\\n" + json.dumps([*codes, loaded]))
"""


def ran(*arguments: str, heavy: tuple[str, ...] = HEAVY) -> tuple[int, list[str]]:
    """The exit code of a command, and which heavy modules its process imported."""
    return ran_all([arguments], heavy)


def ran_all(commands: Iterable[tuple[str, ...]], heavy: tuple[str, ...] = HEAVY) -> tuple[int, list[str]]:
    """The exit code that all of these commands have, and which heavy modules the process of all of them imported."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, json.dumps([*commands]), json.dumps(heavy)],
        capture_output=True, text=True, check=True, env={**os.environ, **NO_SERVICE},
    )  # fmt: skip
    code, loaded = json.loads(done.stderr.splitlines()[-1])
    return code, loaded


# They open tables or stores, and may import the clients of those; never PySpark.
OPENING = ("demo", "hold", "probe", "run", "scan", "status")
OTHERS = ("check", "config", "doctor", "history", "lease", "service")


def test_help_imports_no_pylance() -> None:
    commands = [("--version",), ("--help",), *((name, "--help") for name in (*OTHERS, *sorted(all_job_specs())))]
    assert ran_all(commands) == (0, [])


def test_help_of_what_opens_tables_imports_no_spark() -> None:
    assert ran_all(((name, "--help") for name in OPENING), ("pyspark",)) == (0, [])


def test_what_reads_no_table_imports_no_pylance(tmp_path: Path) -> None:
    table = Workload(1, regions=1, base_rows=5).create(str(tmp_path / "t.lance"))
    table.close()
    lease, _ = acquire(open_table(table.uri).store, "merge", Holder("0", "test"))
    assert lease is not None
    file = tmp_path / "c.yaml"
    file.write_text(f"state_dir: {tmp_path}/state\nhttp: {{port: 1}}\ntables: [{{uri: {table.uri}}}]\n")
    assert ran("config", "check", str(file)) == (0, [])
    assert ran("history", "--config", str(file))[1] == []
    code, loaded = ran("lease", "list", table.uri)
    assert (code, set(loaded) & {"lance", "pyarrow", "pyspark"}) == (0, set())
    assert ran("check", "--nagios", "--config", str(file))[1] == []


def test_jobs_on_a_plain_table_import_no_catalog_client_and_no_extra(tmp_path: Path) -> None:
    """Those of catalogs take a second; that of the reader and that of Zeppelin need not be installed."""
    table = PlainTable(uri := str(tmp_path / "t.lance")).create(rows=30)
    table.dataset.create_scalar_index("id", "BTREE")
    for _ in range(3):
        table.append(10)
    heavy = ("lance_namespace", "lance_namespace_urllib3_client", "sqlglot", "msgpack")
    commands = [(job, uri) for job in ("scan", "inspect", "compact", "catchup")]
    assert ran_all([*commands, ("maintain", uri, "--apply")], heavy) == (0, [])
    assert open_table(uri).revision > 5, "a compaction and an index were published"
    assert ran("inspect", uri, heavy=NOT_FOR_A_LOOK) == (0, [])


def test_without_the_extra_of_a_format_its_commands_name_it() -> None:
    program = "import sys; sys.modules['msgpack'] = None\nfrom memwal_ops.cli.main import main\nmain(sys.argv[1:])"
    command = [sys.executable, "-c", program, "demo", "--format", "zeppelin"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == ExtraMissingError.exit_code, done.stderr
    assert "memwal-ops[zeppelin]" in done.stderr


def test_a_local_merge_imports_what_it_needs(tmp_path: Path) -> None:
    """No client of S3, no scheduler, no consoles, no Spark: pylance is most of its time."""
    table = Workload(1, regions=1, base_rows=5).create(str(tmp_path / "t.lance"))
    table.put([1, 2, 3])
    table.flush()
    before = open_table(table.uri).revision
    table.close()
    assert ran("merge", table.uri, heavy=NOT_FOR_A_LOCAL_MERGE) == (0, [])
    assert open_table(table.uri).revision > before
