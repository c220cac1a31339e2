"""``memwal-ops config init``: write a commented configuration for the tables that there are."""

from __future__ import annotations

import json
import os
import re
import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import click

from memwal_ops.cli import printing
from memwal_ops.cli.options import TABLE, json_output, storage_options
from memwal_ops.cli.process import open_table
from memwal_ops.core.maintain import tables_of_database
from memwal_ops.core.registry import format_of_folder, short_name
from memwal_ops.errors import InvalidUsageError, TableNotFoundError
from memwal_ops.storage import catalogs
from memwal_ops.storage.locations import split_query
from memwal_ops.storage.options import is_secret_key
from memwal_ops.text import counted, printable


def namespace_entry(catalog: catalogs.Catalog) -> str:
    """The entry of a catalog; a secret is left to an environment variable."""
    properties = [f"{quoted(key)}: {_property(key, value)}" for key, value in catalog.properties.items()]
    path = f", path: [{', '.join(map(quoted, catalog.path))}]" if catalog.path else ""
    return f"namespace: {{impl: {catalog.impl}, properties: {{{', '.join(properties)}}}{path}}}"


def _property(key: str, value: str) -> str:
    if catalogs.is_secret_property(key, value):
        return f'"${{{variable_name(key)}}}"'
    return quoted(absolute(value) if key == "root" else value)


def absolute(place: str) -> str:
    """Return a URI, or the absolute path of a local one: a service has no working directory of its own."""
    return place.rstrip("/") if "://" in place else os.path.abspath(os.path.expanduser(place))


def quoted(text: str) -> str:
    """A YAML string; ``$`` is doubled, since a configuration file substitutes variables."""
    return json.dumps(text.replace("$", "$$"), ensure_ascii=False)


def variable_name(key: str) -> str:
    """Return the name of the environment variable that a secret of this key is left to."""
    return re.sub("[^A-Z0-9]+", "_", key.upper())


_MAX_NAMED = 30
_UNNAMED, _LONGEST = re.compile(r"[^A-Za-z0-9._-]+"), 200
_WILDCARD, _PATTERN = re.compile(r"[*?]"), re.compile(r"[*?\[]")
_EXAMPLE = "uri: /data/orders.lance        # an example: write the URI of your table"
_DEFAULT_MAX_TABLES, _MOST_TABLES = 1000, 10_000

_TEXT = """\
# The configuration of a service that maintains Lance tables. docs/configuration.md explains every key.
#
#   memwal-ops config check {file}   # explains every error, shows every value that holds
#   memwal-ops run --config {file}
{secrets}
# The history of runs, and the lock of this service; one folder for each service on a machine.
# Left out: $STATE_DIRECTORY (systemd sets it), else ~/.local/state/memwal-ops.
# state_dir: /var/lib/memwal-ops

# The pages, /metrics and the API. In a container: 0.0.0.0, so that probes and Prometheus reach it.
http:
  host: ${{MEMWAL_OPS_HOST:-127.0.0.1}}
  port: 9464

pools:                              # worker processes, and the memory of each; no pool can starve another
  merge: {{workers: 1, memory: 2GiB}}
  build: {{workers: 1, memory: 2GiB}}
  collect: {{workers: 1, memory: 1GiB}}

defaults:                           # for all tables; an entry below may have keys of its own
  timezone: UTC                     # of cron lines and windows
  poll: 30s                         # how often what waits in a table is read
{storage}  jobs:
    # merge, catchup, compact and snapshot run when there is work: nothing needs to be given.
    expire:
      apply: true                   # without this, expire and gc only plan, and no space is freed
      options: {{older_than: 7d}}     # versions that are older, and that no hold keeps
    gc:
      apply: true
    # compact:
    #   windows: ["22:00-06:00"]    # when it may run
    # verify:
    #   enabled: true               # reads each table completely, once a day

tables:
{tables}"""


@dataclass(frozen=True, slots=True)
class _Found:
    """The tables to be configured.

    Attributes:
        entries: what the file has below ``tables``.
        secrets: environment variables that the entries need.
        by_uri: each table has an entry of its own.
    """

    entries: tuple[str, ...]
    names: tuple[str, ...] = ()
    secrets: tuple[str, ...] = ()
    by_uri: bool = False


@click.command(short_help="Write a commented configuration for tables.")
@click.argument("uris", type=TABLE, metavar="[URI]...", nargs=-1)
@click.option("--database", type=TABLE, metavar="DIR", help="The tables of this LanceDB folder, also later ones.")
@click.option(
    "--namespace",
    metavar="URI",
    help="The tables of this catalog, also later ones: lance+namespace://IMPL/PATH?PROPERTY=VALUE.",
)
@click.option("-o", "--output", metavar="FILE", help="Write it to FILE instead of stdout.")
@click.option("--force", is_flag=True, help="Replace FILE if it exists.")
@storage_options
@json_output
def init(
    uris: tuple[str, ...],
    database: str | None,
    namespace: str | None,
    output: str | None,
    storage_options: dict[str, str],
    *,
    force: bool,
    as_json: bool,
) -> int:
    """Write a configuration with comments for memwal-ops run.

    Tables are looked up, and named in a comment; none is changed. Secrets of storage options are not written: the file
    names the environment variables that must have them. Without any table it has one as an example.

    \b
    Examples:
      memwal-ops config init --database /data/lancedb --output memwal.yaml
      memwal-ops config init s3://bucket/orders.lance s3://bucket/users.lance
      memwal-ops config init --namespace 'lance+namespace://rest/prod?uri=https://catalog.example.com'

    Exit codes: 0 written; 2 FILE exists; 3 there is no such table, or the folder has none.
    """  # noqa: D301 - click keeps the lines of a block that begins so
    if sum((bool(uris), database is not None, namespace is not None)) > 1:
        raise InvalidUsageError("Give URIs of tables, or --database DIR, or --namespace URI.")
    if output is not None and not force and os.path.lexists(output):
        raise InvalidUsageError(
            f"{output} exists; it was not changed.", remedy="Give another --output, or --force to replace it."
        )
    names = _found(uris, database, namespace, storage_options)
    text = _text(names, storage_options, output)
    if output is not None:
        with printing.written_file(output) as file:
            file.write(text.encode())
    if as_json:
        printing.echo_json(
            {"decision": "written", "file": output, "tables": len(names.names or uris), "configuration": text}
        )
    elif output is None:
        printing.echo(text.rstrip("\n"))
    else:
        printing.echo(f"{output} is written, for {counted(len(names.names or uris) or 1, 'table')}. Read it, then:")
        printing.echo(f"  memwal-ops config check {shlex.quote(output)}")
    return 0


def _found(uris: tuple[str, ...], database: str | None, namespace: str | None, options: Mapping[str, str]) -> _Found:
    """Find the tables. Raises ``TableNotFoundError``: there is none; ``InvalidUsageError``: a name has a wildcard."""
    if namespace is not None:
        catalog = catalogs.Catalog.from_uri(namespace, dict(options))
        names = [*catalog.tables()]
        if not names:
            below = next((location.uri() for location in catalog.nested()), None)
            remedy = None if below is None else f"Give one of its namespaces: --namespace {shlex.quote(below)}"
            raise TableNotFoundError(f"No table found in {catalog.uri()}: its list is empty.", remedy=remedy)
        secrets = (
            variable_name(key) for key, value in catalog.properties.items() if catalogs.is_secret_property(key, value)
        )
        return _Found((namespace_entry(catalog) + _limit(names),), tuple(names), tuple(secrets))
    for place, wild in ((database, _PATTERN), *((uri, _WILDCARD) for uri in uris)):
        if place is not None and wild.search(split_query(place)[0]):
            raise InvalidUsageError(
                f"{place!r} has a wildcard, which a configuration takes for a pattern.",
                remedy="Rename the folder, or write an entry with pattern: yourself (docs/configuration.md).",
            )
    if database is not None:
        tables, _ = tables_of_database(database, options)
        if not tables:
            is_table = format_of_folder(database) is not None
            remedy = f"It is a table itself: memwal-ops config init {shlex.quote(database)}" if is_table else None
            raise TableNotFoundError(f"No table found in {database}: it has no folder NAME.lance.", remedy=remedy)
        names = [uri.rstrip("/").rsplit("/", 1)[-1] for uri in tables]
        return _Found((f"database: {quoted(absolute(database))}{_limit(names)}",), tuple(names))
    places = [*dict.fromkeys(absolute(uri) for uri in uris)]
    for place in places:
        open_table(place, options)
    return _Found(_named(places) or (_EXAMPLE,), by_uri=True)


def _named(places: Sequence[str]) -> tuple[str, ...]:
    """An entry for each table; tables of the same name in several folders get names of their own."""
    short = [short_name(place.rsplit("/", 1)[-1]) or place for place in places]
    again = {name for name, count in Counter(short).items() if count > 1}
    return tuple(
        f"uri: {quoted(place)}" + (f"\n    name: {_UNNAMED.sub('-', place)[-_LONGEST:]}" if name in again else "")
        for place, name in zip(places, short, strict=True)
    )


def _limit(names: Sequence[str]) -> str:
    """The key of an entry that finds more tables than the default allows."""
    if len(names) <= _DEFAULT_MAX_TABLES:
        return ""
    return f"\n    max_tables: {min(2 * len(names), _MOST_TABLES)}"


def _text(found: _Found, options: Mapping[str, str], output: str | None) -> str:
    secrets = [*found.secrets, *(variable_name(key) for key in options if is_secret_key(key))]
    told = [
        f"# Set in the environment of the service (systemd: EnvironmentFile=): {', '.join(sorted(set(secrets)))}."
    ] if secrets else []  # fmt: skip
    stored = {key: value for key, value in options.items() if not key.startswith(catalogs.PROPERTY)}
    shown = {
        key: f'"${{{variable_name(key)}}}"' if is_secret_key(key) else quoted(value) for key, value in stored.items()
    }
    storage = ["  storage_options:", *(f"    {quoted(key)}: {value}" for key, value in shown.items())]
    return _TEXT.format(
        file=shlex.quote(output or "FILE"),
        secrets="".join(f"{line}\n" for line in ("#", *told) if told),
        storage="".join(f"{line}\n" for line in storage) if stored else "",
        tables="".join(f"{line}\n" for line in _entries(found)),
    )


def _entries(found: _Found) -> list[str]:
    entries = [f"  - {entry}" for entry in found.entries]
    if found.by_uri:
        return entries
    named = [f"  #   {printable(name)}" for name in found.names[:_MAX_NAMED]]
    more = len(found.names) - _MAX_NAMED
    rest = [f"  #   and {more:,} more"] if more > 0 else []
    head = f"  # Finds {counted(len(found.names), 'table')} now, and those that are made later:"
    return [head, *named, *rest, *entries]
