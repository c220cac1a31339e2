"""Resolve the URI of a table: in a store, or in a catalog, which is read by ``lance-namespace``.

A table is ``lance+namespace://IMPL/PATH/TABLE?PROPERTY=VALUE``, a catalog the same without the table; the property
``branch`` is that of the table, and not the catalog's. The catalog has the location and vends credentials. A URI is
logged and stored, so a property with a secret is not part of it: it is given as the storage option
``namespace.PROPERTY``.
"""

from __future__ import annotations

import os
import queue
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from typing import Any
from urllib.parse import parse_qsl, quote, unquote, urlsplit

from memwal_ops import errors
from memwal_ops.storage import locations
from memwal_ops.storage.errors import RetryPolicy, retried
from memwal_ops.storage.options import (
    RedactedOptions,
    canonical,
    is_secret_key,
    looks_secret,
    redact,
    remember,
    remember_options,
)

PROPERTY = "namespace."
"""The prefix of storage options that are properties of the catalog."""
BRANCH = "branch"
"""The property of a table's URI with its branch."""
_PAGE = 1000
_TIMEOUT = 60.0
# No longer than requests for leases: a catalog that is down must not occupy a slot of a pool.
_RETRY = RetryPolicy(deadline=10.0, max_wait=2.0)
# The REST client's message for a response that violates the specification, for example that of a proxy.
_STATUS = re.compile(r"Failed to parse error response: status=(\d{3})")
_AGAIN = ("429", "500", "502", "503", "504")
_FORBIDDEN = ("401", "403")
_BROKEN = (
    "Internal error: Failed to execute request: reqwest::Error { kind: Request",
    "Internal error: Failed to read",
)
_EXPIRES = ("expires_at_millis", "refresh_offset_millis")
_DECLARED = ".lance-reserved"


def is_secret_property(key: str, value: str) -> bool:
    """Whether a property must not be part of a URI: by its name, every HTTP header, and an address with a password."""
    return is_secret_key(key) or key.lower().startswith(("header.", "headers.")) or looks_secret(value)


@dataclass(frozen=True, slots=True)
class Vended:
    """Where a table is, the storage options that came with it, and when they expire."""

    location: str
    options: Mapping[str, str]
    expires: datetime | None


@dataclass(frozen=True, slots=True)
class Catalog:
    """A namespace of a catalog. ``storage_options`` are those of its tables, for what the catalog does not vend."""

    impl: str
    path: tuple[str, ...] = ()
    properties: Mapping[str, str] = field(default_factory=RedactedOptions)
    storage_options: Mapping[str, str] = field(default_factory=RedactedOptions)
    branch: str | None = None

    @classmethod
    def from_uri(cls, uri: str, options: Mapping[str, str]) -> Catalog:
        """The catalog at a URI, with further properties among the storage options.

        Raises ``InvalidUsageError``: the URI is not that of a catalog, or has a secret.
        """
        parts = urlsplit(uri, allow_fragments=False)
        if not locations.is_catalog(uri) or not parts.netloc:
            raise errors.InvalidUsageError(
                f"Not a catalog; write {locations.CATALOG}://dir?root=/data or {locations.CATALOG}://rest/PATH?uri=URL."
            )
        written = dict(parse_qsl(parts.query, keep_blank_values=True))
        branch = written.pop(BRANCH, None)
        named = {key.removeprefix(PROPERTY): value for key, value in options.items() if key.startswith(PROPERTY)}
        remember(value for key, value in {**written, **named}.items() if is_secret_property(key, value))
        if secret := [key for key, value in written.items() if is_secret_property(key, value)]:
            raise errors.InvalidUsageError(
                f"The URI has the property {secret[0]}, which may be or have a secret; URIs are logged.",
                remedy=f"Give it as --storage-option {PROPERTY}{secret[0]}=VALUE.",
            )
        rest = {key: value for key, value in options.items() if not key.startswith(PROPERTY)}
        path = tuple(unquote(part) for part in parts.path.split("/") if part)
        return cls(parts.netloc, path, RedactedOptions({**written, **named}), RedactedOptions(rest), branch)

    def uri(self, *table: str) -> str:
        """The URI of the catalog, or of a table in it; without secrets."""
        path = "".join(f"/{quote(part, safe='')}" for part in (*self.path, *table))
        properties = {**self.properties, **({} if self.branch is None else {BRANCH: self.branch})}
        shown = sorted((key, value) for key, value in properties.items() if not is_secret_property(key, value))
        query = "&".join(f"{quote(key, safe='')}={quote(value, safe='')}" for key, value in shown)
        return f"{locations.CATALOG}://{self.impl}{path}{'?' * bool(query)}{query}"

    def tables(self) -> Iterator[str]:
        """The names of its tables that have data, ascending. One request for a page.

        Raises ``MemwalOpsError``: the catalog is unreachable, refuses, or has no such path.
        """
        names = self._listed("tables", include_declared=False)
        if self.impl == "dir":
            # pylance looks for a table's files under the encoded name of its folder, and takes it for declared alone.
            names |= {name for name in self._listed("tables", include_declared=True) - names if self._is_written(name)}
        yield from sorted(names)

    def nested(self) -> Iterator[Catalog]:
        """The namespaces below it, each before those below it. Raises as :meth:`tables`."""
        for name in sorted(self._listed("namespaces")):
            nested = replace(self, path=(*self.path, name))
            yield nested
            yield from nested.nested()

    def _listed(self, what: str, **options: Any) -> set[str]:
        namespaces, client = self._connect()
        asked = {"tables": namespaces.ListTablesRequest, "namespaces": namespaces.ListNamespacesRequest}[what]
        names: set[str] = set()
        seen: set[str] = set()
        token: str | None = None
        while token is None or token:
            request = asked(id=[*self.path], limit=_PAGE, page_token=token, **options)
            page = self._ask(namespaces, partial(getattr(client, f"list_{what}"), request))
            names.update(getattr(page, what))
            token = page.page_token or ""
            if token in seen:
                raise errors.StorageError(f"The catalog {self.uri()} repeats a page of its list of {what}.")
            seen.add(token)
        return names

    def _is_written(self, name: str) -> bool:
        from memwal_ops.storage.objects import open_store  # noqa: PLC0415 - it imports this module

        try:
            description = replace(self, path=(*self.path, name)).describe()
        except errors.TableNotFoundError:
            return False
        store = open_store(
            locations.resolve_folder(description.location, {**self.storage_options, **description.options})
        )
        return any(meta.path != _DECLARED for meta in store.list())

    def describe(self) -> Vended:
        """Return the location of the table with this URI, with new credentials.

        Raises ``MemwalOpsError``: there is no such table, or as for :meth:`tables`.
        """
        if not self.path:
            raise errors.InvalidUsageError(
                f"{self.uri()} is a catalog, not a table.",
                remedy="Name a table in it; memwal-ops scan --namespace lists.",
            )
        namespaces, client = self._connect()
        request = namespaces.DescribeTableRequest(id=[*self.path], vend_credentials=True)
        description = self._ask(namespaces, partial(client.describe_table, request))
        options = dict(description.storage_options or {})
        remember(value for key, value in options.items() if is_secret_key(key))
        if not description.location or description.is_only_declared:
            raise errors.TableNotFoundError(f"No table found at {self.uri()}: it is declared, and was never written.")
        if description.managed_versioning:
            raise errors.UnsupportedFeatureError(
                f"The catalog {self.uri()} keeps the table's versions; commits that bypass it would be lost.",
                remedy="This release maintains tables whose versions are in the table's own folder.",
            )
        millis, _ = (options.pop(key, None) for key in _EXPIRES)
        try:
            expires = None if millis is None else datetime.fromtimestamp(int(millis) / 1000, UTC)
        except (ValueError, OverflowError, OSError) as error:
            raise errors.StorageError(
                f"The catalog {self.uri()} vends credentials with an unreadable expiry."
            ) from error
        return Vended(description.location, RedactedOptions(options), expires)

    def _connect(self) -> tuple[Any, Any]:
        import lance_namespace  # noqa: PLC0415 - loads pylance: for tables in catalogs only

        properties = dict(self.properties)
        if self.impl == "dir" and "root" in properties:
            root = locations.resolve_folder(properties["root"], self.storage_options)
            properties |= {"root": root.uri, **{f"storage.{key}": value for key, value in root.lance_options.items()}}
        return lance_namespace, self._ask(lance_namespace, lambda: lance_namespace.connect(self.impl, properties))

    def _ask(self, namespaces: Any, work: Callable[[], Any]) -> Any:
        """The response; retried for some seconds while the catalog is overloaded or cannot be reached."""
        attempt = partial(self._ask_once, namespaces, work)
        return retried(attempt, lambda error: isinstance(error, errors.StoreUnavailableError), _RETRY)

    def _ask_once(self, namespaces: Any, work: Callable[[], Any]) -> Any:
        """The response; an error after a minute, since the clients have no timeout of their own."""
        results: queue.SimpleQueue[tuple[Any, Exception | None]] = queue.SimpleQueue()

        def ask() -> None:
            try:
                results.put((work(), None))
            except Exception as error:  # noqa: BLE001 - raised below
                results.put((None, error))

        threading.Thread(target=ask, name="catalog", daemon=True).start()
        try:
            result, error = results.get(timeout=_TIMEOUT)
        except queue.Empty:
            raise errors.StoreUnavailableError(
                f"The catalog {self.uri()} did not respond within {_TIMEOUT:.0f} s."
            ) from None
        if error is None:
            return result
        if isinstance(error, errors.MemwalOpsError):
            raise error
        raise self._translated(namespaces, error) from None  # the cause quotes the request, with its headers

    def _translated(self, namespaces: Any, error: Exception) -> errors.MemwalOpsError:
        kinds: tuple[tuple[Any, type[errors.MemwalOpsError]], ...] = (
            ((namespaces.TableNotFoundError, namespaces.NamespaceNotFoundError), errors.TableNotFoundError),
            ((namespaces.PermissionDeniedError, namespaces.UnauthenticatedError), errors.StorageCredentialsError),
            ((namespaces.ServiceUnavailableError, namespaces.ThrottlingError), errors.StoreUnavailableError),
            ((namespaces.UnsupportedOperationError, NotImplementedError), errors.UnsupportedFeatureError),
            ((namespaces.InvalidInputError, ValueError, TypeError), errors.InvalidUsageError),
        )
        kind = next((ours for theirs, ours in kinds if isinstance(error, theirs)), errors.StorageError)
        text = " ".join(str(error).split())
        status = _STATUS.search(text)
        if kind is errors.StorageError and (text.startswith(_BROKEN) or (status and status[1] in _AGAIN)):
            kind = errors.StoreUnavailableError
        elif kind is errors.StorageError and status and status[1] in _FORBIDDEN:
            kind = errors.StorageCredentialsError
        return kind(redact(f"The catalog {self.uri()} failed: {text}."))


# Options that choose an identity, and do not carry it.
_IDENTITY = frozenset({"aws_profile", "aws_role_arn", "aws_web_identity_token_file", "aws_skip_signature"})


def resolve(uri: str | os.PathLike[str], storage_options: Mapping[str, str] | None = None) -> locations.Location:
    """Resolve a table's URI and options: see :func:`memwal_ops.storage.locations.resolve_folder`.

    Raises ``MemwalOpsError``: as ``resolve_folder``; of a table in a catalog, as
    :meth:`memwal_ops.storage.catalogs.Catalog.describe`.
    """
    text = os.fspath(uri)
    if not locations.is_catalog(text):
        return locations.resolve_folder(text, storage_options)
    given = dict(storage_options or {})
    remember_options({str(key): str(value) for key, value in given.items()})
    return _in_catalog(text, given)


def branch_uri(uri: str | os.PathLike[str], branch: str) -> str:
    """The URI of a branch of the table at a URI, which need not exist: ``TABLE/tree/NAME``.

    Of a table in a catalog, the branch is a property of the URI: other processes ask the catalog again.
    """
    text = os.fspath(uri)
    if locations.is_catalog(text):
        return f"{text}{'&' if '?' in text else '?'}{BRANCH}={quote(branch, safe='')}"
    return locations.below(text, f"{locations.BRANCHES_FOLDER}/{branch}")


def _in_catalog(uri: str, given: Mapping[str, str]) -> locations.Location:
    """The location of a table in a catalog, with what the catalog vends before what was given.

    On S3, credentials that expire are vended again in time. Of other stores, each opening gets new ones.
    """
    table = Catalog.from_uri(uri, given)

    def vend() -> tuple[Mapping[str, str], datetime | None]:
        vended = table.describe()
        if vended.location != described.location:  # credentials of another table, perhaps of the same name
            raise errors.StorageError(
                f"The catalog now has {table.uri()} at another location than when this run began.",
                remedy="Run it again; what was published before stays where it is.",
            )
        return canonical(vended.options, "s3"), vended.expires

    described = table.describe()
    try:
        return _at(described, table, uri, vend)
    except errors.InvalidUsageError as error:
        raise errors.InvalidUsageError(
            f"What the catalog has about {table.uri()} cannot be used: {error}",
            remedy="Correct its location and storage options there, or the storage options given here.",
        ) from error


def _at(
    found: Vended, table: Catalog, uri: str, vend: Callable[[], tuple[Mapping[str, str], datetime | None]]
) -> locations.Location:
    if locations.is_catalog(found.location):
        raise errors.UnsupportedFeatureError(
            f"The catalog locates {table.uri()} in another catalog, which is not supported."
        )
    if not locations.has_scheme(found.location) and not os.path.isabs(found.location):
        raise errors.InvalidUsageError(f"Its location {redact(found.location)!r} is a relative path.")
    scheme = locations.scheme_of(found.location)
    own, vended = canonical(table.storage_options, scheme), canonical(found.options, scheme)
    if any(map(is_secret_key, vended)):
        own = {key: value for key, value in own.items() if not is_secret_key(key) and key not in _IDENTITY}
    folder = found.location if table.branch is None else branch_uri(found.location, table.branch)
    location = replace(locations.resolve_folder(folder, {**own, **vended}), catalog=uri)
    if location.aws is None or found.expires is None:
        return location
    return replace(location, aws=location.aws.renewed_by(vend, found.expires))
