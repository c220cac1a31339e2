"""Find installed formats and jobs by entry point, and open tables.

Loading a registration imports light modules only: the code of a job is imported when it runs.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import UTC, datetime
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import cast

from memwal_ops import errors
from memwal_ops.core import plugins, protocols
from memwal_ops.core.anchors import CommitGuard
from memwal_ops.core.job import JobSpec
from memwal_ops.core.row_sink import RowSink
from memwal_ops.storage.api import Listing, Store
from memwal_ops.storage.locations import Location
from memwal_ops.text import counted

FORMATS = "memwal_ops.formats"
JOBS = "memwal_ops.jobs"
MAIN = "main"
"""The name of what is no branch."""
_REPAIR = "repair"
_INSPECT = "inspect"
ANY = "any"


@cache
def formats() -> Mapping[str, protocols.TableFormat]:
    """Every installed format by name, built-in ones first. One that cannot be used is logged, and left out.

    Raises ``JobPluginError``: none is installed, or a built-in one cannot be imported.
    """
    installed: dict[str, protocols.TableFormat] = {}
    for entry in _entries(FORMATS):
        try:
            installed.setdefault(entry.name, load_format(entry))
        except errors.JobPluginError as error:
            if is_built_in(entry):
                raise
            from memwal_ops.log import get_logger  # noqa: PLC0415 - not needed for help

            get_logger(__name__).warning("format_left_out", format=entry.name, error=str(error))
    if not installed:
        raise errors.JobPluginError(
            "No table format is registered: memwal-ops runs from its sources and was not installed since they changed.",
            remedy="Install it: pip install -e . (or make demo).",
        )
    return installed


def short_name(folder: str) -> str:
    """A folder's name without the conventional suffix of its format, and without a query of ``s3+ddb://``."""
    folder = folder.partition("?ddbTableName=")[0]
    suffixes = (table_format.suffix for table_format in formats().values())
    return folder.removesuffix(next((suffix for suffix in suffixes if suffix and folder.endswith(suffix)), ""))


@cache
def job_specs(format_name: str) -> Mapping[str, JobSpec]:
    """Every job that is registered for a format, or for any, by name. ``Table.jobs`` has those that apply.

    A job of another package that cannot be used is left out: it must not stop the other jobs.
    :func:`all_job_specs` reports it.
    """
    return _specs(format_name, strict=False)


@cache
def all_job_specs() -> Mapping[str, Mapping[str, JobSpec]]:
    """The specs of each job by format, by job name.

    Raises ``JobPluginError``: one of them cannot be used, or two packages register the same name.
    """
    specs: dict[str, dict[str, JobSpec]] = {}
    for name in formats():
        for spec in _specs(name, strict=True).values():
            specs.setdefault(spec.name, {})[name] = spec
    return specs


def load_format(entry: EntryPoint) -> protocols.TableFormat:
    """Import a format. Raises ``JobPluginError``: it cannot be imported, or lacks a member."""
    try:
        loaded: protocols.TableFormat = entry.load()
    except (Exception, SystemExit) as error:
        raise errors.JobPluginError(
            f"The table format {entry.name!r} ({entry.value}) cannot be imported: {error!r}."
        ) from error
    if not is_built_in(entry):
        plugins.check_format(loaded, entry)
    return loaded


def clear_caches() -> None:
    """Clear the caches: installed packages are searched again at the next use."""
    for cached in (_installed, formats, job_specs, all_job_specs, _foreign_jobs):
        cached.cache_clear()


def job_entries() -> list[EntryPoint]:
    """The entry points of all jobs, built-in ones first; nothing is imported."""
    return _entries(JOBS)


def load_spec(entry: EntryPoint) -> JobSpec:
    """Import the spec of a job, and check that of another package.

    Raises ``JobPluginError``: it cannot be imported, or is invalid.
    """
    try:
        spec = entry.load()
    except (Exception, SystemExit) as error:
        raise errors.JobPluginError(f"The job {entry.name!r} ({entry.value}) cannot be imported: {error!r}") from error
    defect = None if is_built_in(entry) else plugins.defect_of(spec, entry)
    if defect is not None:
        raise errors.JobPluginError(f"The job {entry.name!r} ({entry.value}) cannot be used: {defect}.")
    assert isinstance(spec, JobSpec)  # noqa: S101 - for the type checker: defect_of checked it
    if spec.pages:
        errors.add_pages(spec.pages)
    return spec


def is_built_in(entry: EntryPoint) -> bool:
    """Whether an entry point belongs to this package."""
    return entry.value.startswith("memwal_ops.")


def package_of(spec: JobSpec) -> str | None:
    """The name and release of the package that registers a job; None for a built-in job.

    Another package may have a job of the same name for a format of its own: that is a different spec.
    """
    for entry in _foreign_jobs():
        if entry.name.rpartition(".")[2] != spec.name:
            continue
        loaded = getattr(sys.modules.get(entry.module), entry.attr, None)  # of a module that is imported already
        if isinstance(loaded, JobSpec) and loaded == replace(spec, load=loaded.load):  # of any layout
            return plugins.distribution(entry)
    return None


@cache
def _foreign_jobs() -> tuple[EntryPoint, ...]:
    return tuple(entry for entry in job_entries() if not is_built_in(entry))


def open_table(
    uri: str | os.PathLike[str],
    storage_options: Mapping[str, str] | None = None,
    *,
    branch: str | None = None,
    job: str | None = None,
) -> protocols.Table:
    """Open the newest revision of a table of any installed format.

    Args:
        uri: a path, ``file://``, ``s3://``, ``gs://``, ``az://`` or ``memory://``; or of a table in a catalog.
        storage_options: as pylance takes them; for S3, options that are not given are resolved by boto3
            (session, profile, role, endpoint, region).
        branch: a branch of the table; None: the table at the URI, which may itself be that of a branch,
            ``TABLE/tree/NAME``.
        job: the only job that it is opened for, if that is known: ``inspect`` shows tables that others refuse, and
            ``repair`` what an interrupted drop left, see :func:`find_stub`.

    Raises:
        InvalidUsageError: there is no such branch.
        TableNotFoundError: the prefix is empty.
        NotALanceTableError: no installed format recognizes the objects.
        MemwalOpsError: the format's own errors; the store refused or failed, by kind.
    """
    if branch is not None:
        uri = uri_of_branch(uri, branch, storage_options)
    try:
        located = locate(uri, storage_options)
    except (errors.NotALanceTableError, errors.TableNotFoundError):
        if job != _REPAIR or (stub := find_stub(uri, storage_options)) is None:
            raise
        return cast("protocols.Table", stub)
    return open_for(job, *located)


def open_for(job: str | None, table_format: protocols.TableFormat, location: Location, store: Store) -> protocols.Table:
    """Open a table of a known format; see :func:`open_table`."""
    with format_errors(table_format):
        if job == _INSPECT and isinstance(table_format, protocols.InspectsRefused):
            return table_format.open_to_inspect(location, store)
        table = table_format.open(location, store)
        if (package := _package_of_format(table_format)) is not None:
            plugins.check_table(table, f"A table of the format {table_format.name!r} of {package}")
        return table


def _package_of_format(table_format: protocols.TableFormat) -> str | None:
    """The name and release of the package that registers a format; None for a built-in one."""
    if type(table_format).__module__.startswith("memwal_ops."):
        return None
    entries = (entry for entry in _entries(FORMATS) if entry.name == table_format.name)
    return next((plugins.distribution(entry) for entry in entries if not is_built_in(entry)), table_format.name)


@contextmanager
def format_errors(table_format: protocols.TableFormat) -> Iterator[None]:
    """Turn an unexpected exception of another package's format into an error that names the package.

    Raises ``JobPluginError``: with the format and its package. An exception of a built-in format is a bug, and passes.
    """
    try:
        yield
    except errors.MemwalOpsError:
        raise
    except (Exception, SystemExit) as error:
        if (package := _package_of_format(table_format)) is None:
            raise
        from memwal_ops.log import get_logger  # noqa: PLC0415 - not needed for help
        from memwal_ops.storage.options import redact  # noqa: PLC0415 - as in locate

        get_logger(__name__).exception("unexpected_error", format=table_format.name)
        cause = redact(f"{type(error).__name__}: {error}")
        raise errors.JobPluginError(f"The table format {table_format.name!r} of {package} raised {cause}") from error


def format_with_catalog(uri: str | os.PathLike[str]) -> protocols.LocatesByCatalog | None:
    """The format whose catalog locates the table at a URI, by the URI's scheme; None: the URI is that of a folder."""
    from memwal_ops.storage.locations import SCHEMES  # noqa: PLC0415 - as in locate

    scheme, separator, _ = os.fspath(uri).partition("://")
    if not separator or scheme.lower() in SCHEMES:
        return None
    by_catalog = (format_ for format_ in formats().values() if isinstance(format_, protocols.LocatesByCatalog))
    return next((format_ for format_ in by_catalog if scheme.lower() in format_.schemes), None)


def location_of(uri: str | os.PathLike[str], storage_options: Mapping[str, str] | None = None) -> Location:
    """The location of the table at a URI of any kind: a folder, or a table in a catalog.

    Raises ``MemwalOpsError``: the URI or an option is invalid, or the catalog has no such table, refused or failed.
    """
    from memwal_ops.storage.locations import is_catalog, resolve_folder  # noqa: PLC0415 - as in locate
    from memwal_ops.storage.options import remember_options  # noqa: PLC0415 - as in locate

    catalog = format_with_catalog(uri)
    if catalog is None and is_catalog(os.fspath(uri)):
        from memwal_ops.storage.catalogs import resolve  # noqa: PLC0415 - few tables are in one

        return resolve(uri, storage_options)
    if catalog is None:
        return resolve_folder(os.fspath(uri), storage_options)
    given = {str(key): str(value) for key, value in (storage_options or {}).items()}
    remember_options(given)
    with format_errors(catalog):
        return replace(catalog.locate(os.fspath(uri), given), catalog=os.fspath(uri))


def branches(
    uri: str | os.PathLike[str], storage_options: Mapping[str, str] | None = None
) -> tuple[protocols.TableBranch, ...]:
    """The branches of the table at a URI, ascending by name, without main; none if its format has no branches.

    Raises ``MemwalOpsError``: as :func:`locate`; a record cannot be read.
    """
    table_format, _, store = locate(uri, storage_options)
    return table_format.branches(store) if isinstance(table_format, protocols.HasBranches) else ()


def uri_of_branch(uri: str | os.PathLike[str], branch: str, storage_options: Mapping[str, str] | None = None) -> str:
    """The URI of an existing branch of the table at a URI; of ``main`` that of the table itself.

    Raises:
        InvalidUsageError: there is no such branch; the message has those that there are.
        MemwalOpsError: as :func:`branches`.
    """
    from memwal_ops.storage.catalogs import branch_uri  # noqa: PLC0415 - as in locate

    if branch == MAIN:
        return os.fspath(uri)
    known = [branch.name for branch in branches(uri, storage_options)]
    if branch not in known:
        raise _no_branch(os.fspath(uri), branch, known)
    return branch_uri(uri, branch)


def _no_branch(uri: str, branch: str, known: Sequence[str]) -> errors.InvalidUsageError:
    return errors.InvalidUsageError(
        f"{uri} has no branch {branch!r}; it has {', '.join((MAIN, *known))}.",
        remedy="Give one of these, and as URI that of the table's root.",
    )


def _unknown_branch(location: Location, storage_options: Mapping[str, str] | None) -> errors.InvalidUsageError | None:
    """The error of a path ``TABLE/tree/NAME`` where the table has no such branch; None: it is none."""
    from memwal_ops.storage.locations import BRANCHES_FOLDER  # noqa: PLC0415 - as in locate

    root, separator, name = location.uri.partition(f"/{BRANCHES_FOLDER}/")
    if not separator:
        return None
    with suppress(errors.MemwalOpsError):
        known = [branch.name for branch in branches(root, storage_options)]
        return _no_branch(root, name, known) if name not in known else None
    return None


def find_stub(uri: str | os.PathLike[str], storage_options: Mapping[str, str] | None = None) -> protocols.Stub | None:
    """What an interrupted drop or creation left in a folder with the name of a LanceDB table; None: nothing."""
    from memwal_ops.storage.locations import is_database_table  # noqa: PLC0415 - as in locate
    from memwal_ops.storage.objects import open_store  # noqa: PLC0415

    location = location_of(uri, storage_options)
    if not is_database_table(location.uri.rsplit("/", 1)[-1]):
        return None
    return _stub_at(location, open_store(location))


def _stub_at(location: Location, store: Store) -> protocols.Stub | None:
    finders = (format_ for format_ in formats().values() if isinstance(format_, protocols.FindsStubs))
    return next((stub for finder in finders if (stub := finder.find_stub(location, store)) is not None), None)


def locate(
    uri: str | os.PathLike[str], storage_options: Mapping[str, str] | None = None
) -> tuple[protocols.TableFormat, Location, Store]:
    """Find the format of the table at a URI: by the URI's scheme, or from one listing; the table is not opened.

    Returns:
        The format, the location and its store.

    Raises:
        TableNotFoundError: the prefix is empty.
        NotALanceTableError: no installed format recognizes the objects.
        LinkError: a folder by which a format is recognized is a symbolic link.
        StorageError: the store refused or failed, by kind.
    """
    # Imports the clients of stores, which a command that only shows its help does not need.
    from memwal_ops.storage.locations import DATABASE_TABLES, is_database_table  # noqa: PLC0415
    from memwal_ops.storage.objects import open_store  # noqa: PLC0415

    location = location_of(uri, storage_options)
    store = open_store(location)
    if (catalog := format_with_catalog(uri)) is not None:
        return catalog, location, store
    root = store.list_level("")
    detected, fault = detect(root)
    if detected is not None:
        return detected, location, store
    for name in root.links:
        # A folder that a format is detected by: it would be detected if the link were the folder.
        followed = replace(root, directories=(*root.directories, name), links=())
        if detect(followed)[0] is not None:
            store.head(f"{name}/.memwal-ops")  # raises
    if fault is not None and (root.objects or root.directories):
        raise fault  # it may be a table of that format
    if not root.objects and not root.directories and not os.path.isfile(location.uri):
        if (refused := _unknown_branch(location, storage_options)) is not None:
            raise refused
        near = _with_suffix(location.uri, storage_options)
        remedy = None if near is None else f"Did you mean {near}?"
        raise errors.TableNotFoundError(f"No table found at {location.uri}: the prefix is empty.", remedy=remedy)
    suffix = DATABASE_TABLES.removeprefix("*")
    if tables := sum(map(is_database_table, root.directories)):
        raise errors.NotALanceTableError(
            f"{location.uri} is not a table, but a folder with {counted(tables, 'table')} NAME{suffix}.",
            remedy=f"Give one of them; memwal-ops scan --database {shlex.quote(location.uri)} lists what they need.",
        )
    stub = _stub_at(location, store) if is_database_table(location.uri.rsplit("/", 1)[-1]) else None
    if stub is not None and stub.with_data:
        remedy = f"memwal-ops repair {shlex.quote(location.uri)} shows what can be done: it may have been a table."
        raise errors.NotALanceTableError(stub.evidence, remedy=remedy)
    known = ", ".join(formats())
    raise errors.NotALanceTableError(
        f"No table found at {location.uri}: the objects there are of no known format ({known})."
    )


def detect(root: Listing) -> tuple[protocols.TableFormat | None, errors.JobPluginError | None]:
    """The format that a listing of a root shows; and the error of one whose ``detect`` raised, which is left out."""
    fault: errors.JobPluginError | None = None
    for table_format in formats().values():
        try:
            with format_errors(table_format):
                if table_format.detect(root):
                    return table_format, fault
        except errors.JobPluginError as error:
            fault = error
    return None, fault


def _with_suffix(uri: str, storage_options: Mapping[str, str] | None) -> str | None:
    """The URI with the conventional suffix of a format, if there is something; None also if the store fails."""
    from memwal_ops.storage.catalogs import resolve  # noqa: PLC0415
    from memwal_ops.storage.objects import is_empty, open_store  # noqa: PLC0415

    for suffix in (table_format.suffix for table_format in formats().values()):
        with suppress(errors.MemwalOpsError):
            if suffix and not is_empty(open_store(resolve(f"{uri}{suffix}", storage_options))):
                return f"{uri}{suffix}"
    return None


def open_sink(uri: str, source_location: Location, guard: CommitGuard, *, source: str) -> tuple[Location, RowSink]:
    """Open the table that a migration fills, in the first installed format that implements ``ReceivesRows``.

    ``source_location``: of the source; its storage options are used for a target at the same kind of store. ``source``:
    identity of what is migrated; the table of another migration is refused.

    Raises:
        InvalidUsageError: no such format is installed, or something else is there.
        StorageError: the store refused or failed, by kind.
    """
    from memwal_ops.core.row_sink import ReceivesRows  # noqa: PLC0415
    from memwal_ops.storage.catalogs import resolve  # noqa: PLC0415
    from memwal_ops.storage.locations import scheme_of  # noqa: PLC0415
    from memwal_ops.storage.objects import open_store  # noqa: PLC0415

    for table_format in formats().values():
        if isinstance(table_format, ReceivesRows):
            location = resolve(uri, source_location.lance_options if scheme_of(uri) == source_location.scheme else None)
            return location, table_format.open_sink(location, open_store(location), guard, source)
    raise errors.InvalidUsageError(
        "No installed table format can be the target of a migration.", remedy="Install pylance."
    )


def format_of_folder(path: str) -> str | None:
    """The name of the format of a table in a local folder; None where there is none, or the folder cannot be read.

    From one listing of the file system alone: no client of a store is imported.
    """
    # Imported here: a process that only needs the names of jobs starts faster without it.
    from memwal_ops.storage.api import Listing, ObjectMeta  # noqa: PLC0415

    full: list[str] = []
    empty: list[str] = []
    objects: list[ObjectMeta] = []
    try:
        with os.scandir(path) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    (full if os.listdir(entry.path) else empty).append(entry.name)
                else:
                    objects.append(ObjectMeta(entry.name, 0, datetime.fromtimestamp(0, UTC), None))
    except (OSError, ValueError):  # or a path that cannot be encoded
        return None
    root = Listing(tuple(sorted(full)), tuple(objects), tuple(sorted(empty)))
    detected, _ = detect(root)
    return None if detected is None else detected.name


def _specs(format_name: str, *, strict: bool) -> Mapping[str, JobSpec]:
    specs: dict[str, JobSpec] = {}
    for entry in _entries(JOBS):
        scope, _, name = entry.name.partition(".")
        if scope not in {ANY, format_name}:
            continue
        try:
            if name in specs:
                raise errors.JobPluginError(f"Two packages register the job {entry.name!r}; one is {entry.value}.")
            specs[name] = load_spec(entry)
        except errors.JobPluginError:
            if strict or is_built_in(entry):
                raise
    table_format = formats().get(format_name)
    if table_format is not None and _package_of_format(table_format) is not None:
        specs |= {spec.name: spec for spec in plugins.GIVEN_JOBS if spec.name not in specs}
    return specs


def _entries(group: str) -> list[EntryPoint]:
    installed = _installed(*sys.path).select(group=group)
    return sorted(installed, key=lambda entry: (not is_built_in(entry), entry.name))


# By the module path: to find entry points reads the metadata of all packages on it.
_installed = cache(lambda *_: entry_points())
