"""``memwal-ops doctor``, ``probe``, ``export-support``: check machine, store and table; write metadata for support."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import resource
import shutil
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

import click
from packaging.requirements import Requirement
from packaging.version import Version

from memwal_ops import errors
from memwal_ops.cli import printing
from memwal_ops.cli.options import TABLE, IntRange, branch_option, json_output, storage_options
from memwal_ops.core import registry
from memwal_ops.core.export import ExportsMetadata, export_table
from memwal_ops.core.protocols import CompilesCode, TableFormat
from memwal_ops.core.spark.session import MIN_JAVA_VERSION, find_java
from memwal_ops.core.table_history import history_document
from memwal_ops.storage.api import Store
from memwal_ops.storage.clock import store_clock
from memwal_ops.storage.external_manifests import manifest_entries
from memwal_ops.storage.locations import Location
from memwal_ops.storage.objects import open_store
from memwal_ops.storage.probe import probe_compare_and_swap, probe_conditional_writes
from memwal_ops.text import counted, grid, size_text
from memwal_ops.version import OLDEST_PYLANCE

# Stores report whole seconds.
_RESOLUTION = timedelta(seconds=1)
_SWAP = {
    "enforced": "Compare-and-swap is enforced.",
    "unsupported": "Compare-and-swap is not supported; Lance tables do not need it.",
}


@click.command(short_help="Test a store's conditional writes and its clock.")
@click.argument("uri", type=TABLE)
@branch_option
@storage_options
@json_output
def probe(uri: str, storage_options: dict[str, str], as_json: bool) -> int:
    """Try put-if-absent at URI, as every job does before its first commit, and compare the clocks.

    The store's clock is compared with this machine's. Jobs cache for a day that a store passed, in
    $XDG_CACHE_HOME/memwal-ops or the folder $MEMWAL_OPS_CACHE (empty: nothing is cached); this command always tries.
    Compare-and-swap is tried too; Lance tables do not need it, and local files have none. There need not be a table
    yet, but a local folder must exist: it is not created. Some small objects are written below _mem_wal_ops/ and
    deleted again.

    \b
    Examples:
      memwal-ops probe s3://bucket/orders.lance
      memwal-ops probe s3://bucket/new --storage-option aws_endpoint=http://minio:9000

    Exit codes: 0 put-if-absent is enforced; 23 it is not; others: runbooks/README.md.
    """  # noqa: D301 - click keeps the lines of a block that begins so
    location = registry.location_of(uri, storage_options)
    if location.scheme == "file" and not os.path.isdir(location.uri):
        raise errors.TableNotFoundError(f"There is no folder {location.uri}.")
    store = open_store(location)
    probe_conditional_writes(store, again=True)
    if (recorded := manifest_entries(store)) is not None:
        recorded.probe_commits()
    try:
        probe_compare_and_swap(store)
        swap = "enforced"
    except errors.ConditionalWriteUnsupportedError:
        swap = "unsupported"
    skew = clock_skew(store)
    document = {
        "uri": location.uri,
        "conditional_writes": "enforced",
        "compare_and_swap": swap,
        "clock_skew_seconds": round(skew, 3),
    }
    text = f"{location.uri}: put-if-absent is enforced. {_SWAP[swap]} {_clocks(skew)}"
    printing.echo_result(document, text, as_json=as_json)
    return 0


def clock_skew(store: Store) -> float:
    """Return the seconds that this machine's clock is ahead of the store's; 0 if the difference is not measurable."""
    before = datetime.now(UTC)
    store_time = store_clock(store)
    after = datetime.now(UTC)
    if before - _RESOLUTION <= store_time <= after + _RESOLUTION:
        return 0.0
    return (before + (after - before) / 2 - store_time).total_seconds()


def _clocks(skew: float) -> str:
    if not skew:
        return "Its clock agrees with this machine's."
    return f"This machine's clock is {abs(skew):,.0f} s {'ahead of' if skew > 0 else 'behind'} its clock."


_HISTORY = 100
_SUFFIX = "-support.zip"


@click.command(short_help="Write a table's metadata, without values, into a file.")
@click.argument("uri", type=TABLE)
@click.option("-o", "--output", metavar="FILE", help=f"The file to write.  [default: NAME{_SUFFIX}]")
@click.option("--force", is_flag=True, help="Replace FILE even if it is not an earlier export.")
@click.option("--versions", type=IntRange(min=1), default=1000, show_default=True, help="At most N versions.")
@branch_option
@storage_options
@json_output
def export_support(
    uri: str, output: str | None, force: bool, versions: int, storage_options: dict[str, str], as_json: bool
) -> int:
    """Write the metadata of the table at URI into one file, from which others can reproduce a problem.

    It has manifests, tags, leases and holds, a listing with sizes and times, the history, and this machine's packages.
    It has no rows, keys, region values, filters, notes or credentials: settings that are not Lance's, and everything
    that this release does not know, are left out. inspect --from FILE and verify --from FILE read it.

    \b
    Examples:
      memwal-ops export-support s3://bucket/orders.lance
      memwal-ops export-support orders.lance -o /tmp/orders.zip

    Exit codes: 0; 2 FILE is not an export, or the format cannot be exported; others: runbooks/README.md.
    """  # noqa: D301 - click keeps the lines of a block that begins so
    format_, location, store = registry.locate(uri, storage_options)
    if not isinstance(format_, ExportsMetadata):
        raise errors.InvalidUsageError(
            f"{location.uri} is a table of the format {format_.name}, which this command does not export.",
            remedy="Send the output of memwal-ops inspect URI --json and verify URI --json instead; check it for "
            "confidential values first.",
        )
    file = output or f"{registry.short_name(os.path.basename(location.uri))}{_SUFFIX}"
    if not force:
        printing.check_replaceable(file, lambda head: b"export.json" in head, "an export")
    more = {
        "checks": [check.to_json() for check in environment_checks()],
        "history": _history(format_, location, store),
    }
    with printing.written_file(file) as handle:
        objects, contents = export_table(handle, format_, location, store, versions, **more)
    size = os.path.getsize(file)
    document = {"decision": "exported", "file": file, "bytes": size, "objects": objects, "contents": contents}
    text = f"exported: {file} ({size:,} bytes): {objects:,} objects listed, {contents:,} of them with contents."
    printing.echo_result(document, f"{text}\nRead it: memwal-ops verify --from {file}", as_json=as_json)
    return 0


def _history(table_format: TableFormat, location: Location, store: Store) -> Any:
    """The history of the table; or the reason why it cannot be read, which may be the reported problem."""
    try:
        return history_document(table_format.open(location, store), _HISTORY)
    except errors.MemwalOpsError as error:
        return {"error": error.reason}


OK, WARNING, ERROR = "ok", "warning", "error"
_MIN_PYTHON = (3, 11)
_MIN_DISK_BYTES, _MIN_MEMORY_BYTES, _MIN_DESCRIPTORS = 5 << 30, 2 << 30, 1024
_MAX_SKEW_SECONDS = 5
_UNSUPPORTED = errors.UnsupportedFeatureError.exit_code
_EXTRAS = ("spark", "lm-diskann", "zeppelin", "reader", "expressions", "airflow")


@dataclass(frozen=True)
class Diagnosis:
    """One thing that was checked. ``do``: what to do; empty if nothing."""

    name: str
    level: str
    found: str
    do: str = ""
    exit_code: int = 0

    def to_json(self) -> dict[str, str]:
        """The entry of ``checks``."""
        return {"name": self.name, "level": self.level, "found": self.found, "do": self.do}


@click.command(short_help="Check this machine, and a store, before a job fails.")
@click.argument("uri", type=TABLE, required=False)
@click.option("--warm", is_flag=True, help="Compile what jobs would compile on first use.")
@branch_option
@storage_options
@json_output
def doctor(uri: str | None, warm: bool, storage_options: dict[str, str], as_json: bool) -> int:
    """Check this machine: Python, packages and their tested ranges, Java, memory, disk, file descriptors.

    With URI also the store: listing, reading, writing and deleting, each tried; conditional writes; its clock against
    this machine's; versioning and lifecycle rules of an S3 bucket; and whether the table there can be opened. Small
    objects are written below _mem_wal_ops/ and deleted again.

    \b
    Examples:
      memwal-ops doctor
      memwal-ops doctor s3://bucket/orders.lance --json
      memwal-ops doctor --warm

    Exit codes: 0 nothing worse than a warning; else that of the first error, as a job would end: runbooks/README.md.
    """  # noqa: D301 - click keeps the lines of a block that begins so
    checks = [
        *environment_checks(),
        *(_warmed() if warm else ()),
        *(() if uri is None else _remote(uri, storage_options)),
    ]
    worst = next((level for level in (ERROR, WARNING) if any(check.level == level for check in checks)), OK)
    if as_json:
        printing.echo_json({"decision": worst, "checks": [check.to_json() for check in checks]})
    else:
        headings = ("check", "level", "found")
        printing.echo(grid(headings, [(check.name, check.level, check.found) for check in checks], words=headings))
        for check in checks:
            if check.do:
                printing.echo(f"\n{check.level.upper()} {check.name}: {check.found}\n  {check.do}")
    return next((check.exit_code for check in checks if check.level == ERROR), 0)


def environment_checks() -> Iterator[Diagnosis]:
    """Check the machine itself; sends no request to a store."""
    version = platform.python_version()
    python = tuple(map(int, platform.python_version_tuple()[:2]))
    yield _judged("Python", python >= _MIN_PYTHON, version, "Install Python 3.11 or later.", ERROR)
    yield from _packages()
    yield _java()
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    more = "Lower --max-bytes of merges, and the supervisor's pools."
    yield _judged("memory", memory >= _MIN_MEMORY_BYTES, size_text(memory), more)
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    many = "Raise it (ulimit -n, LimitNOFILE=): the supervisor holds one for each connection and worker."
    yield _judged("file descriptors", soft < 0 or soft >= _MIN_DESCRIPTORS, str(soft), many)
    free = shutil.disk_usage(os.environ.get("TMPDIR") or "/tmp").free  # noqa: S108 - Python's own default
    yield _judged(
        "temporary folder", free >= _MIN_DISK_BYTES, f"{size_text(free)} free", "Set TMPDIR to a larger disk."
    )


def _packages() -> Iterator[Diagnosis]:
    """Compare required packages, and those of installed extras, with the ranges that were tested."""
    known: set[str] = set()
    for wanted in map(Requirement, importlib.metadata.requires("memwal-ops") or ()):
        needed_by = [
            extra for extra in ("", *_EXTRAS) if wanted.marker is None or wanted.marker.evaluate({"extra": extra})
        ]
        if wanted.name in known or not needed_by:
            continue
        known.add(wanted.name)
        try:
            version = importlib.metadata.version(wanted.name)
        except importlib.metadata.PackageNotFoundError:
            if "" in needed_by:
                yield Diagnosis(wanted.name, ERROR, "not installed", "pip install memwal-ops", _UNSUPPORTED)
            continue
        within = wanted.specifier.contains(version, prereleases=True)
        do = f"pip install '{wanted.name}{wanted.specifier}': other releases were not tried."
        versions = version if within else f"{version}, tested: {wanted.specifier}"
        older = wanted.name == "pylance" and Version(version) < Version(OLDEST_PYLANCE)
        yield _judged(wanted.name, within, versions, do, ERROR if older else WARNING)


def _java() -> Diagnosis:
    only = "Merges on Spark need Java 17 or later; everything else works without it."
    java = find_java()
    if java is None:
        return Diagnosis("Java", OK, "none; only merges on Spark need it")
    return _judged("Java", java.version is not None and java.version >= MIN_JAVA_VERSION, java.output, only)


def _warmed() -> Iterator[Diagnosis]:
    for table_format in registry.formats().values():
        if not isinstance(table_format, CompilesCode):
            continue
        name, started = f"code of {table_format.name}", time.monotonic()
        try:
            count = table_format.warm()
        except errors.MemwalOpsError as error:
            yield Diagnosis(name, ERROR, f"{error.reason}: {error}", error.remedy, error.exit_code)
            continue
        seconds = time.monotonic() - started
        compiled = f"{counted(count, 'function')} compiled in {seconds:.0f} s" if count else "compiled already"
        yield Diagnosis(name, OK, compiled)


def _remote(uri: str, options: dict[str, str]) -> Iterator[Diagnosis]:
    """Check the store, then the table; stop after an error that makes the rest meaningless."""
    location = registry.location_of(uri, options)
    if location.scheme == "file":
        if not os.path.isdir(location.uri):
            raise errors.TableNotFoundError(f"There is no folder {location.uri}.")
        free = shutil.disk_usage(location.uri).free
        yield _judged(
            "disk",
            free >= _MIN_DISK_BYTES,
            f"{size_text(free)} free",
            "A merge needs space for the files that it writes.",
        )
    store = open_store(location)
    permitted = [*_permissions(store)]
    yield from permitted
    if all(check.level == OK for check in permitted):
        yield from _guarantees(store)
    if location.aws is not None:
        yield from _bucket(location)
    yield _table(uri, options)


def _permissions(store: Store) -> Iterator[Diagnosis]:
    name = f"_mem_wal_ops/probe/{uuid.uuid4().hex}-doctor"
    tries: tuple[tuple[str, Callable[[], object], str], ...] = (
        ("list", lambda: next(iter(store.list("_mem_wal_ops/probe")), None), "Every job lists."),
        ("write", lambda: store.put(name, b"doctor"), "All jobs but inspect, why and verify write."),
        ("read", lambda: store.get(name), "Every job reads."),
        ("delete", lambda: _deleted(store, name), "gc and expire delete, and each job its own unpublished files."),
    )
    for what, attempt, why in tries:
        try:
            attempt()
        except errors.MemwalOpsError as error:
            yield Diagnosis(what, ERROR, str(error), f"{why} {error.remedy}", error.exit_code)
            if what == "write":
                return  # nothing is there to be read or deleted
        else:
            yield Diagnosis(what, OK, "permitted")


def _deleted(store: Store, name: str) -> None:
    for message in store.delete_many([name]).failed.values():
        raise errors.DeletesFailedError(message)


def _guarantees(store: Store) -> Iterator[Diagnosis]:

    try:
        probe_conditional_writes(store, again=True)
        yield Diagnosis("put-if-absent", OK, "enforced")
    except errors.MemwalOpsError as error:
        yield Diagnosis("put-if-absent", ERROR, str(error), error.remedy, error.exit_code)
    if (recorded := manifest_entries(store)) is not None:
        try:
            recorded.probe_commits()
            yield Diagnosis("DynamoDB", OK, f"table {recorded.entries.table}: one entry a version is enforced")
        except errors.MemwalOpsError as error:
            yield Diagnosis("DynamoDB", ERROR, str(error), error.remedy, error.exit_code)
    try:
        probe_compare_and_swap(store)
        yield Diagnosis("compare-and-swap", OK, "enforced")
    except errors.ConditionalWriteUnsupportedError:
        yield Diagnosis(
            "compare-and-swap", OK, "not supported; Lance tables do not need it, Zeppelin namespaces on S3 do"
        )
    except errors.MemwalOpsError as error:
        yield Diagnosis("compare-and-swap", WARNING, str(error), error.remedy)
    skew = clock_skew(store)
    do = "Set this machine's clock by NTP: leases and grace periods go by the store's."
    yield _judged("clock", abs(skew) <= _MAX_SKEW_SECONDS, f"{skew:+.0f} s against the store's", do)


def _bucket(location: Location) -> Iterator[Diagnosis]:
    """Check the bucket's settings that delete objects, or keep deleted ones, without gc's knowledge."""
    from memwal_ops.storage.aws import bucket_settings  # noqa: PLC0415 - boto3, only for S3
    from memwal_ops.storage.locations import bucket_and_prefix  # noqa: PLC0415

    bucket, prefix = bucket_and_prefix(location)
    if location.aws is None:
        return
    settings = bucket_settings(location.aws, bucket)
    if settings.versioning is None:
        yield Diagnosis("bucket versioning", OK, f"not known: {settings.why}")
    else:
        what = "gc deletes" if settings.versioning == "Enabled" else "was deleted before that"
        kept = f"what {what} stays as noncurrent versions, which are billed, and which erase does not see"
        do = "A lifecycle rule for noncurrent versions deletes them."
        freed = settings.versioning == "off" or settings.expires_noncurrent
        yield _judged("bucket versioning", freed, settings.versioning + ("" if freed else f": {kept}"), do)
    rules = [rule for rule in settings.expiring if rule.startswith(prefix) or prefix.startswith(rule)]
    do = "Remove the rule for this prefix: it deletes by age, and old files of a table are needed."
    rules_found = (
        "no rule deletes objects here" if not rules else f"a rule deletes objects below {rules[0] or 'the bucket'!r}"
    )
    yield _judged("lifecycle rules", not rules, rules_found, do, ERROR)


def _table(uri: str, options: dict[str, str]) -> Diagnosis:
    from memwal_ops.cli.process import open_table  # noqa: PLC0415 - formats

    try:
        table = open_table(uri, options)
        parts = table.format.summarize(table).parts
    except errors.TableNotFoundError:
        return Diagnosis("table", OK, "none there yet")
    except errors.MemwalOpsError as error:
        return Diagnosis("table", ERROR, f"{error.reason}: {error}", error.remedy, error.exit_code)
    return Diagnosis("table", OK, f"{table.format.name}, revision {table.revision}, {parts} parts")


def _judged(name: str, good: bool, found: str, do: str, otherwise: str = WARNING) -> Diagnosis:
    if good:
        return Diagnosis(name, OK, found)
    return Diagnosis(name, otherwise, found, do, _UNSUPPORTED if otherwise == ERROR else 0)
