"""Resolve the URI of a table: in a store, or in a catalog that has its location and vends credentials."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import TYPE_CHECKING
from urllib.parse import quote

from memwal_ops.errors import InvalidUsageError, StorageError, UnsupportedFeatureError
from memwal_ops.storage.catalogs import BRANCH, Catalog, is_catalog
from memwal_ops.storage.locations import BRANCHES_FOLDER, below, has_scheme, resolve_folder, scheme_of
from memwal_ops.storage.options import canonical
from memwal_ops.storage.redaction import is_secret_key, redact, remember_options

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from datetime import datetime

    from memwal_ops.storage.catalogs import Vended
    from memwal_ops.storage.locations import Location

# Options that choose an identity, and do not carry it.
_IDENTITY = frozenset({"aws_profile", "aws_role_arn", "aws_web_identity_token_file", "aws_skip_signature"})


def resolve(uri: str | os.PathLike[str], storage_options: Mapping[str, str] | None = None) -> Location:
    """Resolve a table's URI and options: see :func:`memwal_ops.storage.locations.resolve_folder`.

    Raises:
        MemwalOpsError: as ``resolve_folder``; of a table in a catalog, as
            :meth:`memwal_ops.storage.catalogs.Catalog.describe`.
    """
    text = os.fspath(uri)
    if not is_catalog(text):
        return resolve_folder(text, storage_options)
    given = dict(storage_options or {})
    remember_options({str(key): str(value) for key, value in given.items()})
    return _in_catalog(text, given)


def branch_uri(uri: str | os.PathLike[str], branch: str) -> str:
    """The URI of a branch of the table at a URI, which need not exist: ``TABLE/tree/NAME``.

    Of a table in a catalog, the branch is a property of the URI: other processes ask the catalog again.
    """
    text = os.fspath(uri)
    if is_catalog(text):
        return f"{text}{'&' if '?' in text else '?'}{BRANCH}={quote(branch, safe='')}"
    return below(text, f"{BRANCHES_FOLDER}/{branch}")


def _in_catalog(uri: str, given: Mapping[str, str]) -> Location:
    """The location of a table in a catalog, with what the catalog vends before what was given.

    On S3, credentials that expire are vended again in time. Of other stores, each opening gets new ones.
    """
    table = Catalog.from_uri(uri, given)

    def vend() -> tuple[Mapping[str, str], datetime | None]:
        vended = table.describe()
        if vended.location != found.location:  # credentials of another table, perhaps of the same name
            raise StorageError(
                f"The catalog now has {table.uri()} at another location than when this run began.",
                remedy="Run it again; what was published before stays where it is.",
            )
        return canonical(vended.options, "s3"), vended.expires

    found = table.describe()
    try:
        return _at(found, table, uri, vend)
    except InvalidUsageError as error:
        raise InvalidUsageError(
            f"What the catalog has about {table.uri()} cannot be used: {error}",
            remedy="Correct its location and storage options there, or the storage options given here.",
        ) from error


def _at(
    found: Vended, table: Catalog, uri: str, vend: Callable[[], tuple[Mapping[str, str], datetime | None]]
) -> Location:
    if is_catalog(found.location):
        raise UnsupportedFeatureError(f"The catalog locates {table.uri()} in another catalog, which is not supported.")
    if not has_scheme(found.location) and not os.path.isabs(found.location):
        raise InvalidUsageError(f"Its location {redact(found.location)!r} is a relative path.")
    scheme = scheme_of(found.location)
    own, vended = canonical(table.storage_options, scheme), canonical(found.options, scheme)
    if any(map(is_secret_key, vended)):
        own = {key: value for key, value in own.items() if not is_secret_key(key) and key not in _IDENTITY}
    folder = found.location if table.branch is None else branch_uri(found.location, table.branch)
    location = replace(resolve_folder(folder, {**own, **vended}), catalog=uri)
    if location.aws is None or found.expires is None:
        return location
    return replace(location, aws=location.aws.renewed_by(vend, found.expires))
