"""``memwal-ops scan``: what tables need, and the configuration that does it."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Iterator, Sequence
from urllib.parse import quote

import click

from memwal_ops import errors, text
from memwal_ops.cli import config_init
from memwal_ops.cli.ledger import RunHistory
from memwal_ops.cli.options import TABLE, json_output, storage_options
from memwal_ops.cli.printing import echo_result
from memwal_ops.cli.process import open_table
from memwal_ops.core import maintain, registry
from memwal_ops.core.answers import PAGE, BadAnswers
from memwal_ops.core.outlook import describe_outlooks
from memwal_ops.storage.catalogs import Catalog, branch_uri
from memwal_ops.storage.locations import BRANCHES_FOLDER, is_catalog
from memwal_ops.supervisor.observe import findings

_MAX_BLOCKED, _MAX_WRITTEN = 3, 5
_MAX_SKIPPED = 10


@click.command(short_help="Show what tables need, and the configuration that does it.")
@click.argument("uris", type=TABLE, metavar="[URI]...", nargs=-1)
@click.option(
    "--database", type=TABLE, metavar="DIR", help="All tables of this LanceDB folder, those of its namespaces, too."
)
@click.option(
    "--namespace",
    metavar="URI",
    help="All tables of this catalog and the namespaces in it: lance+namespace://IMPL/PATH?PROPERTY=VALUE.",
)
@storage_options
@json_output
def scan(
    uris: tuple[str, ...], database: str | None, namespace: str | None, storage_options: dict[str, str], as_json: bool
) -> int:
    """Plan every job on each table, change nothing, and print the configuration of a service that runs them.

    Each job has its default options: expire counts versions older than a week. First come tables with indexes that
    answered wrongly when this machine's service last asked them.

    \b
    Examples:
      memwal-ops scan --database /data/lancedb
      memwal-ops scan --namespace 'lance+namespace://rest/prod?uri=https://catalog.example.com'
      memwal-ops scan s3://bucket/orders.lance s3://bucket/users.lance --json

    Exit codes: 0; 3 the folder has no table; else that of the first table that could not be scanned.
    """  # noqa: D301 - click keeps the lines of a block that begins so
    skipped: list[maintain.NotATable] = []
    if sum((bool(uris), database is not None, namespace is not None)) != 1:
        raise errors.InvalidUsageError("Give URIs of tables, or --database DIR, or --namespace URI.")
    if namespace is not None:
        top = Catalog.from_uri(namespace, storage_options)
        catalogs, unlisted = _with_nested(top)
        skipped += [] if unlisted is None else [unlisted]
        listed = [(catalog, [catalog.uri(name) for name in catalog.tables()]) for catalog in catalogs]
        tables = [uri for _, found_uris in listed for uri in found_uris]
        entries = [
            # Tables of two namespaces may have one name: those of a nested one have its path before it.
            f"name: {quote('/'.join(catalog.path)).replace('%', '_')}\n    " * (catalog is not top)
            + config_init.namespace_entry(catalog)
            for catalog, found_uris in listed
            if found_uris
        ]
        nothing = f"No table found in {top.uri()}: its list is empty, and so are those of its namespaces."
    elif database is not None:
        tables, skipped = maintain.tables_of_database(database, storage_options)
        entries = [f"database: {config_init.quoted(config_init.absolute(database))}"]
        nothing = f"No table found in {database}: it has no folder NAME.lance."
    else:
        tables, entries, nothing = list(uris), [], ""
    if not tables:
        is_table = database is not None and registry.format_of_folder(database) is not None
        remedy = f"It is a table itself: memwal-ops scan {shlex.quote(str(database))}" if is_table else None
        raise errors.TableNotFoundError(nothing, remedy=remedy)
    past = RunHistory()
    found = [result for uri in tables for result in _scanned(uri, storage_options, past, stubs=database is not None)]
    scanned = sorted(
        (result for result in found if isinstance(result, maintain.Scanned)), key=lambda result: not result.answers
    )
    skipped += [result for result in found if isinstance(result, maintain.NotATable)]
    opened = [table for table in scanned if table.revision is not None]
    entries = entries or [
        f"uri: {config_init.quoted(config_init.absolute(table.uri))}" for table in opened if not _branch_of(table.uri)
    ]
    branched = any(_branch_of(table.uri) for table in scanned)
    deletes = dict.fromkeys(job for table in opened for job in table.deletes)
    configuration = _configuration(entries, [*deletes], branched=branched) if entries else ""
    document = {
        "tables": [table.to_json() for table in scanned],
        "skipped": [folder.to_json() for folder in skipped],
        "configuration": configuration,
    }
    echo_result(document, _describe(scanned, skipped, configuration), as_json=as_json)
    return errors.worst_exit_code(error.exit_code for table in scanned for _, error in table.errors)


def _with_nested(catalog: Catalog) -> tuple[list[Catalog], maintain.NotATable | None]:
    """The catalog and the namespaces below it; and that they could not be listed."""
    try:
        return [catalog, *catalog.nested()], None
    except errors.MemwalOpsError as error:
        why = f"The namespaces below it could not be listed: {error}"
        return [catalog], maintain.NotATable(catalog.uri(), why, "Scan each of them by its URI.")


def _scanned(
    uri: str, options: dict[str, str], past: RunHistory, *, stubs: bool
) -> Iterator[maintain.Scanned | maintain.NotATable]:
    found = _scan(uri, options, past, stubs=stubs)
    yield found
    if not isinstance(found, maintain.Scanned) or found.revision is None:
        return
    try:
        names = [branch.name for branch in registry.branches(uri, options)]
    except errors.MemwalOpsError as error:
        yield maintain.Scanned(uri, errors=((None, error),))
        return
    for name in names:
        yield _scan(branch_uri(uri, name), options, past, stubs=False)


def _scan(uri: str, options: dict[str, str], past: RunHistory, *, stubs: bool) -> maintain.Scanned | maintain.NotATable:
    try:
        try:
            return maintain.scan_table(open_table(uri, options), past, past.answers)
        except (errors.NotALanceTableError, errors.TableNotFoundError):
            if not stubs or (stub := maintain.skipped_stub(uri, options)) is None:
                raise
            return stub
    except errors.MemwalOpsError as error:
        return maintain.Scanned(uri, errors=((None, error),))


def _describe(scanned: Sequence[maintain.Scanned], skipped: Sequence[maintain.NotATable], configuration: str) -> str:
    rows = [
        (
            _name(table.uri),
            need.job,
            need.what,
            "unknown" if need.rows is None else f"{need.rows:,}" if need.rows else "",
            _size(need.frees),
            _size(need.later),
            (need.by or "")[:10],
        )
        for table in scanned
        for need in table.needs
    ]
    opened = [table for table in scanned if table.revision is not None]
    parts = [_bad(table, bad) for table in opened for bad in table.answers]
    parts += [_summary(opened)] if opened else []
    if rows:
        headings = ("table", "job", "it would", "rows", "frees", "later", "by")
        parts.append(text.grid(headings, rows, words=headings[:3]))
    if told := describe_outlooks([table.outlook for table in opened]):
        parts.append(told)
    for table in scanned:
        for part in table.blocked[:_MAX_BLOCKED]:
            what = f"{_name(table.uri)}: {part.part or 'the table'}: {part.reason}: {part.detail}"
            parts.append(text.paragraph(f"BLOCKED: {what}", hanging="  "))
        if (more := len(table.blocked) - _MAX_BLOCKED) > 0:
            parts.append(f"BLOCKED: {_name(table.uri)}: {more:,} more (memwal-ops inspect URI).")
        for job, error in table.errors:
            what = f"{_name(table.uri)}, {job}" if job else _name(table.uri)
            parts.append(text.paragraph(f"NOT SCANNED: {what}: {error.reason}: {error} {error.remedy}", hanging="  "))
    parts += _writers(opened)
    parts += [
        text.paragraph(f"SKIPPED: {_name(folder.uri)}: {folder.why} {folder.remedy}", hanging="  ")
        for folder in skipped[:_MAX_SKIPPED]
    ]
    if (more := len(skipped) - _MAX_SKIPPED) > 0:
        parts.append(f"SKIPPED: {more:,} more (--json lists them).")
    if configuration:
        parts.append(f"This configuration does it (memwal-ops run --config FILE):\n\n{configuration}".rstrip())
    return "\n\n".join(parts)


def _bad(table: maintain.Scanned, bad: BadAnswers) -> str:
    head = f"{'WRONG' if bad.wrong else 'RECALL'}: {_name(table.uri)}: {bad.describe()}"
    remedy = text.paragraph(text.for_table(bad.remedy, table.uri), indent="  ", hanging="  ")
    return f"{text.paragraph(head, hanging='  ')}\n{remedy}\n  See {PAGE}"


def _writers(scanned: Sequence[maintain.Scanned]) -> list[str]:
    written: dict[str, list[str]] = {}
    for table in scanned:
        if table.last_writer is not None:
            written.setdefault(table.last_writer, []).append(_name(table.uri))
    shown = {writer: names[:_MAX_WRITTEN] for writer, names in written.items()}
    more = {writer: len(names) - _MAX_WRITTEN for writer, names in written.items()}
    return [
        text.paragraph(
            f"Last written by {writer}: {', '.join(names)}{f' and {more[writer]:,} more' if more[writer] > 0 else ''}.",
            hanging="  ",
        )
        for writer, names in sorted(shown.items())
    ]


def _summary(scanned: Sequence[maintain.Scanned]) -> str:
    """The levels of the tables, as ``status`` counts them, and what jobs would do whether it is urgent or not."""
    counts = Counter(findings.WORDS[_level(table)] for table in scanned)
    levels = ", ".join(f"{counts[word]:,} {word}" for word in findings.WORDS.values() if counts[word])
    needs = [need for table in scanned for need in table.needs]
    needy = sum(any(need.now for need in table.needs) for table in scanned)
    freed = f"{text.size_text(sum(need.frees for need in needs))} would be freed now"
    if last := max((need.by for need in needs if need.by is not None), default=None):
        freed += f", up to {text.size_text(sum(need.later for need in needs))} more by {last[:10]}"
    return f"{text.counted(len(scanned), 'table')}: {levels}; jobs have work on {needy:,}; {freed}."


def _level(table: maintain.Scanned) -> int:
    if table.errors or table.blocked or any(bad.wrong for bad in table.answers):
        return findings.CRITICAL
    return max(findings.WARNING if table.answers else 0, findings.DEFAULT_LIMITS.level(table.backlog))


def _name(uri: str) -> str:
    path = uri.partition("?")[0] if is_catalog(uri) else uri
    root, branch = path, _branch_of(uri)
    if branch is not None and not is_catalog(uri):
        root = path.removesuffix(f"/{BRANCHES_FOLDER}/{branch}")
    name = registry.short_name(root.rstrip("/").rsplit("/", 1)[-1])
    return text.printable(name if branch is None else f"{name}/{BRANCHES_FOLDER}/{branch}")


def _branch_of(uri: str) -> str | None:
    """The branch that a URI of a scanned table names; None: it is a table's own."""
    if is_catalog(uri):
        return Catalog.from_uri(uri, {}).branch
    root, separator, name = uri.partition(f"/{BRANCHES_FOLDER}/")
    return name if separator and registry.short_name(root) != root else None


def _size(count: int) -> str:
    return text.size_text(count) if count else ""


def _configuration(entries: Sequence[str], deletes: Sequence[str], *, branched: bool) -> str:
    """The YAML of a service. What deletes is off by default, and versions are kept for a week."""
    more = ["    branches: all"] if branched else []
    jobs = ["defaults:", "  jobs:", *(f"    {job}: {{apply: true}}" for job in deletes)] if deletes else []
    return "\n".join([*jobs, "tables:", *(line for entry in entries for line in (f"  - {entry}", *more)), ""])
