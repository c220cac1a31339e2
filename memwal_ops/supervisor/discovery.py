"""From the entries of a file to tables: what an entry names, and what its pattern finds on the store."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from memwal_ops.errors import InvalidConfigError, MemwalOpsError
from memwal_ops.storage.locations import resolve
from memwal_ops.storage.objects import open_store
from memwal_ops.storage.redaction import redact
from memwal_ops.storage.retries import RetryPolicy

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from memwal_ops.storage.api import Store
    from memwal_ops.supervisor.settings import TableSettings

_WILD = re.compile(r"[*?\[]")


@dataclass(frozen=True, slots=True)
class FoundTable:
    """One table: its name in metrics and history, its URI, and what holds for it."""

    name: str
    uri: str
    settings: TableSettings


@dataclass(frozen=True, slots=True)
class Fault:
    """Why a pattern could not be looked at, or was cut short; with the exit code of ``run --once``."""

    pattern: str
    why: str
    exit_code: int


@dataclass(frozen=True, slots=True)
class Discovery:
    """All tables, and what is wrong with patterns."""

    tables: tuple[FoundTable, ...]
    faults: tuple[Fault, ...] = ()


def discover(entries: Iterable[TableSettings]) -> Discovery:
    """Every table of every entry. One that has an entry of its own is none of a pattern's."""
    entries = tuple(entries)
    named = [FoundTable(entry.name, entry.uri, entry) for entry in entries if entry.uri is not None]
    found = {table.name: table for table in named}
    uris = {_same(table.uri) for table in named}
    faults = []
    for entry in entries:
        if entry.pattern is None:
            continue
        same: list[FoundTable] = []
        try:
            taken = 0
            for table in _matches(entry):
                if _same(table.uri) in uris:
                    continue
                if taken == entry.max_tables:
                    why = f"It finds more than max_tables = {entry.max_tables} tables."
                    faults.append(Fault(entry.pattern, why, InvalidConfigError.exit_code))
                    break
                taken += 1
                uris.add(_same(table.uri))
                if found.setdefault(table.name, table) is not table:
                    same.append(table)
            if same:
                faults.append(_nameless(entry.pattern, same, found[same[0].name]))
        except MemwalOpsError as error:
            faults.append(Fault(entry.pattern, redact(f"{error} {error.remedy}"), error.exit_code))
    return Discovery(tuple(found.values()), tuple(faults))


def _nameless(pattern: str, tables: list[FoundTable], first: FoundTable) -> Fault:
    """Tables of one name share a history and metrics: only the first is maintained, and somebody must be told."""
    why = (
        f"{tables[0].uri} has the name {first.name!r} of {first.uri}, and is not maintained"
        f"{f' ({len(tables)} such tables)' if len(tables) > 1 else ''}. Give one of the two entries a name."
    )
    return Fault(pattern, why, InvalidConfigError.exit_code)


def _matches(entry: TableSettings) -> Iterator[FoundTable]:
    """What a pattern finds, in the order of names; ``name`` is the part of the URI that begins with a wildcard."""
    pattern = str(entry.pattern).rstrip("/")
    scheme, separator, rest = pattern.rpartition("://")
    parts = rest.split("/")
    fixed = next(number for number, part in enumerate(parts) if _WILD.search(part))
    root = f"{scheme}{separator}{'/'.join(parts[:fixed])}"
    store = open_store(resolve(root or "/", entry.storage_options), retry=RetryPolicy(deadline=30.0))
    prefix = "" if entry.name == entry.pattern else f"{entry.name}/"
    for path in _walk(store, "", parts[fixed:]):
        name = path.removesuffix(".lance")
        uri = f"{root}/{path}"
        if entry.include and not _any(entry.include, name, uri):
            continue
        if _any(entry.exclude, name, uri):
            continue
        yield FoundTable(f"{prefix}{name}", uri, entry)


def _walk(store: Store, folder: str, parts: list[str]) -> Iterator[str]:
    first, *rest = parts
    for path in sorted(store.list_level(folder).directories):
        if fnmatchcase(path.rsplit("/", 1)[-1], first):
            if rest:
                yield from _walk(store, path, rest)
            else:
                yield path


def _any(patterns: Iterable[str], name: str, uri: str) -> bool:
    """Whether a name, or a whole URI where the pattern is one, matches any of them."""
    return any(fnmatchcase(uri if "://" in one or one.startswith("/") else name, one) for one in patterns)


def _same(uri: str) -> str:
    return uri.removeprefix("file://").rstrip("/")
