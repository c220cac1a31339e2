"""Expand the table entries of a configuration into tables: by name, or by listing the store for a pattern."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from memwal_ops import errors
from memwal_ops.core import registry
from memwal_ops.storage import catalogs, locations
from memwal_ops.storage.api import Store, results_of
from memwal_ops.storage.errors import RetryPolicy
from memwal_ops.storage.object_store import checked_path
from memwal_ops.storage.objects import open_store
from memwal_ops.storage.options import redact

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, MutableMapping

    from memwal_ops.supervisor.config.effective import TableSettings

_THREADS = 8
_WILD = re.compile(r"[*?\[]")


@dataclass(frozen=True, slots=True)
class FoundTable:
    """One table: its name in metrics and history, its URI, and its settings."""

    name: str
    uri: str
    settings: TableSettings

    @property
    def store(self) -> str:
        """The key of its store (:func:`locations.store_key`)."""
        return locations.store_key(self.uri, self.settings.storage_options)


@dataclass(frozen=True, slots=True)
class Fault:
    """Why a pattern could not be expanded. Or only in part; with the exit code of ``run --once``."""

    pattern: str
    why: str
    exit_code: int
    remedy: str = "Fix the entry, or its store."


@dataclass(frozen=True, slots=True)
class Discovery:
    """All tables, and the faults of patterns."""

    tables: tuple[FoundTable, ...]
    faults: tuple[Fault, ...] = ()


def _with_branches(discovery: Discovery) -> Discovery:
    """Add the branches of each table that its entry names; a branch has the settings and the name of its table."""
    tables: list[FoundTable] = []
    faults = list(discovery.faults)
    for table in discovery.tables:
        tables.append(table)
        wanted = table.settings.branches
        if wanted == ():
            continue
        try:
            known = [one.name for one in registry.branches(table.uri, table.settings.storage_options)]
        except errors.MemwalOpsError as error:
            why = redact(f"The branches of {table.name} cannot be listed: {error} {error.remedy}")
            faults.append(Fault(table.settings.pattern or table.uri, why, error.exit_code, redact(error.remedy)))
            continue
        tables += (
            FoundTable(
                f"{table.name}/{locations.BRANCHES_FOLDER}/{name}", catalogs.branch_uri(table.uri, name), table.settings
            )
            for name in known
            if wanted is None or name in wanted
        )
        if missing := sorted({*(wanted or ())} - {*known}):
            why = f"{table.name} has no branch {', '.join(missing)}; it has {', '.join(('main', *known))}."
            faults.append(Fault(table.settings.pattern or table.uri, why, errors.InvalidUsageError.exit_code))
    return Discovery(tuple(tables), tuple(faults))


def discover(entries: Iterable[TableSettings], formats: MutableMapping[str, str] | None = None) -> Discovery:
    """Return every table of every entry, each with the jobs of its format; all stores are asked at once.

    A table with an entry of its own is not taken from a pattern. ``formats``: see :func:`discover_in_store`.
    """
    return merged(discover_stores(by_store(entries), formats).values())


def discover_stores(
    stores: Mapping[str, list[TableSettings]], formats: MutableMapping[str, str] | None = None
) -> dict[str, Discovery]:
    """Return the tables of each store, in the order of the stores."""
    found = results_of(lambda entries: discover_in_store(entries, formats), stores.values(), threads=len(stores) or 1)
    return dict(zip(stores, found, strict=True))


def by_store(entries: Iterable[TableSettings]) -> dict[str, list[TableSettings]]:
    """Return the entries of each store, see :func:`memwal_ops.storage.locations.store_key`."""
    stores: dict[str, list[TableSettings]] = {}
    for entry in entries:
        stores.setdefault(locations.store_key(str(entry.pattern or entry.uri), entry.storage_options), []).append(entry)
    return stores


def merged(parts: Iterable[Discovery]) -> Discovery:
    """Return the tables of several stores; of two with one name, one that an entry names comes before a pattern's."""
    parts = tuple(parts)
    tables = sorted((table for part in parts for table in part.tables), key=lambda table: table.settings.uri is None)
    known: dict[str, FoundTable] = {}
    duplicates: dict[str, list[FoundTable]] = {}
    for table in tables:
        if known.setdefault(table.name, table) is not table:
            duplicates.setdefault(str(table.settings.pattern or table.uri), []).append(table)
    faults = [_duplicate_names(pattern, same, known[same[0].name]) for pattern, same in duplicates.items()]
    return Discovery(tuple(known.values()), (*(fault for part in parts for fault in part.faults), *faults))


def discover_in_store(entries: Iterable[TableSettings], formats: MutableMapping[str, str] | None = None) -> Discovery:
    """Return every table of the entries of one store, each with the jobs of its format.

    Args:
        formats: known formats of tables, by URI; what is detected now is added. A format is detected, by one listing,
            only if several formats are installed. A table that cannot be read gets the jobs of the first format: its
            poll reports what is wrong.
    """
    discovery = _with_branches(_expand(entries))
    known = {} if formats is None else formats
    unknown = [table for table in discovery.tables if table.settings.format is None and table.uri not in known]
    if unknown:
        detected = results_of(_detect_format, unknown, threads=_THREADS)
        known.update((uri, name) for uri, name in detected if name is not None)
    return replace(discovery, tables=tuple(_with_format(table, known.get(table.uri)) for table in discovery.tables))


def _detect_format(table: FoundTable) -> tuple[str, str | None]:
    try:
        return table.uri, registry.locate(table.uri, table.settings.storage_options)[0].name
    except errors.MemwalOpsError:
        return table.uri, None


def _with_format(table: FoundTable, name: str | None) -> FoundTable:
    if table.settings.format is not None:
        return table
    name = next(iter(table.settings.by_format)) if name is None else name
    return replace(table, settings=replace(table.settings, format=name))


def _expand(entries: Iterable[TableSettings]) -> Discovery:
    entries = tuple(entries)
    named = [FoundTable(entry.name, entry.uri, entry) for entry in entries if entry.uri is not None]
    found = {table.name: table for table in named}
    uris = {_normalized(table.uri) for table in named}
    faults = []
    for entry in entries:
        if entry.pattern is None:
            continue
        duplicates: list[FoundTable] = []
        try:
            taken = 0
            for table in _matches(entry):
                if _normalized(table.uri) in uris:
                    continue
                if (fault := _unusable(entry.pattern, table)) is not None:
                    faults.append(fault)
                    continue
                if taken == entry.max_tables:
                    why = f"It matches more than max_tables = {entry.max_tables} tables."
                    faults.append(Fault(entry.pattern, why, errors.InvalidConfigError.exit_code))
                    break
                taken += 1
                uris.add(_normalized(table.uri))
                if found.setdefault(table.name, table) is not table:
                    duplicates.append(table)
            if duplicates:
                faults.append(_duplicate_names(entry.pattern, duplicates, found[duplicates[0].name]))
        except errors.MemwalOpsError as error:
            why = redact(f"{error} {error.remedy}")
            faults.append(Fault(entry.pattern, why, error.exit_code, redact(error.remedy)))
    return Discovery(tuple(found.values()), tuple(faults))


def _unusable(pattern: str | None, table: FoundTable) -> Fault | None:
    """Return why a table cannot be opened or recorded by its name: it must not stop the maintenance of the others."""
    try:
        checked_path(table.name)
    except errors.InvalidUsageError as error:
        return Fault(str(pattern), f"{error} It is not maintained; rename the folder.", error.exit_code)
    return None


def _duplicate_names(pattern: str, tables: list[FoundTable], first: FoundTable) -> Fault:
    why = (
        f"{tables[0].uri} has the name {first.name!r} of {first.uri}, and is not maintained"
        f"{f' ({len(tables)} such tables)' if len(tables) > 1 else ''}. Give one of the two entries a name."
    )
    return Fault(pattern, why, errors.InvalidConfigError.exit_code)


def _matches(entry: TableSettings) -> Iterator[FoundTable]:
    """Yield the tables that match a pattern, by name: the part of the URI from the first wildcard on."""
    if locations.is_catalog(str(entry.pattern)):
        yield from _catalog_tables(entry)
        return
    pattern, query = locations.split_query(str(entry.pattern))
    pattern = pattern.rstrip("/")
    scheme, separator, rest = pattern.rpartition("://")
    parts = rest.split("/")
    fixed = next(number for number, part in enumerate(parts) if _WILD.search(part))
    root = f"{scheme}{separator}{'/'.join(parts[:fixed])}"
    store = open_store(
        catalogs.resolve(f"{root}{query}" or "/", entry.storage_options), retry=RetryPolicy(deadline=30.0)
    )
    prefix = "" if entry.name == entry.pattern else f"{entry.name}/"
    found = _walk(store, "", parts[fixed:])
    if entry.database:
        names = [*_walk(store, "", ["*"])]
        found = (
            name for name in names if locations.is_database_table(name) and locations.decoded_name(name) not in names
        )
    for path in found:
        name = registry.short_name(path)
        uri = f"{root}/{path}{query}"
        if is_wanted(entry, name, uri):
            yield FoundTable(f"{prefix}{name}", uri, entry)


def _catalog_tables(entry: TableSettings) -> Iterator[FoundTable]:
    """Yield the tables that a catalog lists. Whether a listed table exists is known only once it is opened."""
    catalog = catalogs.Catalog.from_uri(str(entry.pattern), entry.storage_options)
    prefix = "" if entry.name == entry.pattern else f"{entry.name}/"
    for name in catalog.tables():
        uri = catalog.uri(name)
        if is_wanted(entry, name, uri):
            yield FoundTable(f"{prefix}{name}", uri, entry)


def is_wanted(entry: TableSettings, name: str, uri: str) -> bool:
    """Whether ``include`` and ``exclude`` of an entry leave a table that its pattern matches."""
    return (not entry.include or _any(entry.include, name, uri)) and not _any(entry.exclude, name, uri)


def _walk(store: Store, folder: str, parts: list[str]) -> Iterator[str]:
    """Yield the paths below the store's root that match; a link to a folder counts as a folder, as in a shell."""
    first, *rest = parts
    level = store.list_level(folder)
    linked = {path for path in level.links if os.path.isdir(f"{store.root}/{path}")}
    for path in sorted({*level.directories, *linked}):
        if not fnmatchcase(path.rsplit("/", 1)[-1], first):
            continue
        if not rest:
            yield path
        elif path in linked:
            target = open_store(catalogs.resolve(f"{store.root}/{path}"))  # a root may be a link, and nothing below it
            yield from (f"{path}/{below}" for below in _walk(target, "", rest))
        else:
            yield from _walk(store, path, rest)


def _any(patterns: Iterable[str], name: str, uri: str) -> bool:
    return any(
        fnmatchcase(uri if "://" in pattern or pattern.startswith("/") else name, pattern) for pattern in patterns
    )


def _normalized(uri: str) -> str:
    return uri.removeprefix("file://").rstrip("/")
