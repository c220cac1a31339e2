"""Resolve a table's URI and storage options to a :class:`Location`, once.

pylance gets ``uri`` and ``lance_options`` from the location, and obstore is opened from it
(:mod:`memwal_ops.storage.objects`), so both always use the same endpoint and credentials. No requests to a store
are made here.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl, quote, unquote, urlsplit

from memwal_ops.errors import InvalidUsageError
from memwal_ops.storage.options import RedactedOptions, canonical, redact, remember, remember_options

if TYPE_CHECKING:
    from collections.abc import Mapping

    from memwal_ops.storage.aws import AwsAccess

CATALOG = "lance+namespace"
"""The scheme of the URIs of catalogs, and of tables in them."""
_SCHEMES = {
    "s3": "s3",
    "s3a": "s3",
    "s3+ddb": "s3+ddb",
    "gs": "gs",
    "az": "az",
    "azure": "az",
    "abfs": "az",
    "abfss": "az",
    "memory": "memory",
    "file": "file",
}
S3 = frozenset({"s3", "s3+ddb"})
"""The schemes of tables whose files are in S3."""
DYNAMODB = "s3+ddb"
"""The scheme of tables in S3 whose versions are recorded in DynamoDB: ``s3+ddb://bucket/path?ddbTableName=NAME``."""
_TABLE_NAME = "ddbTableName"
_VALID_TABLE_NAME = re.compile(r"[A-Za-z0-9_.-]{1,255}")
SCHEMES = frozenset(_SCHEMES)
"""The valid URI schemes."""
LOCAL = frozenset({"file", "memory"})
"""The schemes of tables that are not in an object store."""
LOCAL_STORE = "file"
"""What :func:`store_key` returns for them."""
DATABASE_TABLES = "*.lance"
"""The pattern of the tables' folders in a LanceDB folder; :func:`is_database_table` knows those of namespaces, too."""
BRANCHES_FOLDER = "tree"
"""The folder of a table's branches below its root: ``tree/NAME``."""
_CATALOG_TABLE = "__manifest"
_IN_NAMESPACE = re.compile(r"[0-9a-f]{8}_.+")
# abfss://CONTAINER@ACCOUNT.dfs.core.windows.net, the Azure URI of Hadoop, Spark and Databricks.
_ABFSS_HOST = re.compile(
    r"(?P<container>[^@:/]+)@(?P<account>[a-z0-9]+)\.(?:dfs|blob)\.core\.windows\.net", re.IGNORECASE
)
_ACCOUNT_KEYS = ("azure_storage_account_name", "account_name")
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")
_SHORT = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*):(?!//)")
# Secrets that the client libraries read from the environment by themselves.
_SECRET_VARIABLES = (
    "AWS_ACCESS_KEY_ID",
    "AWS_SECRET_ACCESS_KEY",
    "AWS_SESSION_TOKEN",
    "AZURE_STORAGE_ACCOUNT_KEY",
    "AZURE_STORAGE_ACCESS_KEY",
    "AZURE_STORAGE_SAS_KEY",
    "AZURE_STORAGE_SAS_TOKEN",
    "AZURE_STORAGE_TOKEN",
    "AZURE_STORAGE_CLIENT_SECRET",
    "AZURE_CLIENT_SECRET",
    "GOOGLE_SERVICE_ACCOUNT_KEY",
)


@dataclass(frozen=True)
class Location:
    """The resolved location of a table.

    Attributes:
        uri: the URI for pylance: an absolute path, ``s3://bucket/prefix``, ``s3+ddb://bucket/prefix?ddbTableName=NAME``,
            ``gs://``, ``az://`` or ``memory://``, without a trailing ``/`` and without credentials.
        scheme: ``file``, ``s3``, ``s3+ddb``, ``gs``, ``az`` or ``memory``.
        lance_options: pylance's ``storage_options``, with the current credentials.
        aws: the resolved access to S3; None for other schemes, and after unpickling.
        files: of a table that is read from an export: the local folder in which pylance opens its manifests.
        catalog: of a table in a catalog: its URI there, by which another process opens it.

    Temporary credentials: obstore renews them through boto3 by itself; pylance keeps those that it was given,
    so callers that open a dataset use ``location.refreshed()`` right before, and open it again
    after work of unknown length. That is cheap: STS gets a request only when renewal is due.

    Pickling (to Spark executors) keeps the current credentials and drops their renewal:
    a profile or an SSO session of the driver does not exist there.
    """

    uri: str
    scheme: str
    lance_options: Mapping[str, str] = field(default_factory=RedactedOptions)
    aws: AwsAccess | None = field(default=None, repr=False, compare=False)
    files: str | None = None
    catalog: str | None = None

    @property
    def address(self) -> str:
        """The URI by which commands and other processes open the table."""
        return self.catalog or self.uri

    @property
    def folder(self) -> str:
        """The URI of the table's files, without what records its versions."""
        return f"s3{self.uri[len(DYNAMODB) :].partition('?')[0]}" if self.scheme == DYNAMODB else self.uri

    @property
    def plain(self) -> Location:
        """The same files, to be read only past what records the versions."""
        return replace(self, uri=self.folder, scheme="s3") if self.scheme == DYNAMODB else self

    @property
    def dynamodb_table(self) -> str | None:
        """The name of the table in DynamoDB that records the versions; None: the store itself does."""
        return self.uri.rpartition("=")[2] if self.scheme == DYNAMODB else None

    @property
    def expires(self) -> bool:
        """Whether ``lance_options`` carry temporary credentials."""
        return self.aws is not None and self.aws.expires

    def refreshed(self) -> Location:
        """The same location with renewed credentials; itself if they do not expire.

        Raises ``StorageCredentialsError``: they cannot be renewed.
        """
        if self.aws is None or not self.aws.expires:
            return self
        return replace(self, lance_options=RedactedOptions({**self.aws.place(), **self.aws.frozen()}))

    def __str__(self) -> str:
        """The URI."""
        return self.uri

    def __getstate__(self) -> dict[str, Any]:
        """Everything except the renewal of credentials."""
        return {**self.__dict__, "aws": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore, and register the secrets in this process too."""
        self.__dict__.update(state)
        remember_options(self.lance_options)


def resolve_folder(uri: str | os.PathLike[str], storage_options: Mapping[str, str] | None = None) -> Location:
    """Resolve the URI and the options of a folder in a store; explicit options win over the environment.

    A local path may start with ``~``. In ``s3://``, ``gs://`` and ``az://`` percent escapes are
    decoded, as pylance does. ``memory://`` exists in this process and in obstore only: pylance's memory
    tables are not visible there, so it is useful for storage alone. ``azure://`` and ``abfss://`` become
    ``az://``; the account in an ``abfss://`` URI becomes an option.

    Raises:
        InvalidUsageError: an invalid URI or option.
        StorageCredentialsError: S3 without usable credentials.
    """
    text = os.fspath(uri)
    given = dict(storage_options or {})
    remember_options({str(key): str(value) for key, value in given.items()})
    remember(os.environ.get(name) for name in _SECRET_VARIABLES)
    text = _with_slashes(text)
    match = _SCHEME.match(text)
    if match is None:
        return Location(_local(text), "file", RedactedOptions(canonical(given, "file")))
    written = match.group(1).lower()
    scheme = _SCHEMES.get(written)
    if scheme is None:
        raise InvalidUsageError(
            f"The URI scheme {written!r} is not known; use a path, file://, s3://, gs://, az://CONTAINER/PATH "
            "(or azure://, or abfss://CONTAINER@ACCOUNT.dfs.core.windows.net/PATH), memory:// or "
            f"{DYNAMODB}://BUCKET/PATH?{_TABLE_NAME}=NAME."
        )
    options = canonical(given, scheme)
    if scheme == "file":
        try:
            parts = urlsplit(text, allow_fragments=False)
        except ValueError as error:
            raise InvalidUsageError(f"The file:// URI cannot be read: {error}.") from error
        if parts.netloc not in {"", "localhost"}:
            raise InvalidUsageError("A file:// URI must have an absolute path: file:///path.")
        return Location(_local(unquote(parts.path)), scheme, RedactedOptions(options))
    rest = text[match.end() :]
    if scheme == "memory":
        return Location(f"memory://{rest.rstrip('/')}", scheme, RedactedOptions(options))
    if scheme == "az":
        rest, options = _azure(written, rest, options)
    query = ""
    if scheme == DYNAMODB:
        rest, query = _dynamodb(rest)
    normalised = f"{scheme}://{_remote(rest)}{query}"
    if scheme not in S3:
        return Location(normalised, scheme, RedactedOptions(options))
    from memwal_ops.storage.aws import resolve_aws, with_dynamodb  # noqa: PLC0415 - imports boto3: for S3 only

    aws = resolve_aws(with_dynamodb(options) if query else options)
    return Location(normalised, scheme, RedactedOptions({**aws.place(), **aws.frozen()}), aws)


def is_database_table(folder: str) -> bool:
    """Whether LanceDB stores a table in a folder of that name.

    That is ``NAME.lance``; of a table in a child namespace ``b7669c02_team$orders``, with a hash before its id; and
    ``__manifest``, the list of both, which is a table itself.
    """
    suffix = DATABASE_TABLES.removeprefix("*")
    return folder.endswith(suffix) or folder == _CATALOG_TABLE or _IN_NAMESPACE.fullmatch(folder) is not None


def decoded_name(folder: str) -> str | None:
    """The name of the folder that pylance writes marks for under the encoded name ``folder``, in a child namespace.

    It encodes a name that is not ASCII, also twice. The hash before both is that of one table's id.
    """
    name = folder
    while _IN_NAMESPACE.fullmatch(name) is not None and (decoded := unquote(name)) != name:
        name = decoded
    return None if name == folder else name


def has_scheme(uri: str) -> bool:
    """Whether it is a URI, and not a path."""
    return _SCHEME.match(_with_slashes(uri)) is not None


def scheme_of(uri: str) -> str:
    """The scheme that :func:`resolve_folder` gives a URI, without looking for credentials; an unknown one as it is."""
    match = _SCHEME.match(_with_slashes(uri))
    return "file" if match is None else _SCHEMES.get(match.group(1).lower(), match.group(1))


def store_key(uri: str, storage_options: Mapping[str, str]) -> str:
    """What tells the store of a URI from others, without a request: endpoint or bucket; ``file`` if it is local."""
    scheme = scheme_of(uri)
    if scheme in LOCAL:
        return LOCAL_STORE
    endpoint = next((value for name, value in sorted(storage_options.items()) if "endpoint" in name.lower()), None)
    return f"{scheme} {endpoint}" if endpoint else f"{scheme}://{uri.partition('://')[2].partition('/')[0]}"


def _with_slashes(text: str) -> str:
    """``file:/abs`` (RFC 8089) as ``file:///abs``; refuses ``s3:/bucket``, which would be read as a relative path."""
    match = _SHORT.match(text)
    if match is None or match[1].lower() not in _SCHEMES:
        return text
    if match[1].lower() == "file" and text[match.end() :].startswith("/"):
        return f"file://{text[match.end() :]}"
    form = "file:///path" if match[1].lower() == "file" else f"{match[1]}://"
    raise InvalidUsageError(f"{redact(text)!r} is not a valid URI; write {form}, or ./{match[0]}... for such a path.")


def bucket_and_prefix(location: Location) -> tuple[str, str]:
    """Bucket (container) and decoded key prefix of a remote location; the prefix may be empty."""
    bucket, _, prefix = location.folder.split("://", 1)[1].partition("/")
    return bucket, unquote(prefix)


def below(uri: str, folder: str) -> str:
    """The URI of a folder below another one; what records the versions stays the last part."""
    base, query = split_query(uri)
    return f"{base.rstrip('/')}/{folder}{query}"


def split_query(uri: str) -> tuple[str, str]:
    """A URI, and the query that names the table in DynamoDB; of other schemes the query is empty."""
    base, mark, query = uri.partition(f"?{_TABLE_NAME}=") if scheme_of(uri) == DYNAMODB else (uri, "", "")
    return base, f"{mark}{query}"


def _local(path: str) -> str:
    if not path:
        raise InvalidUsageError("The table's URI is empty.")
    if "\0" in path:
        raise InvalidUsageError("The table's path contains a zero byte.")
    return os.path.abspath(os.path.expanduser(path))


def _azure(written: str, rest: str, options: dict[str, str]) -> tuple[str, dict[str, str]]:
    """Container and path, and the options including the account of the URI."""
    if "\\" in unquote(rest):
        raise InvalidUsageError("The URI has a backslash, which Azure treats as a slash; write the slash.")
    host, slash, path = rest.partition("/")
    match = _ABFSS_HOST.fullmatch(host) if written.startswith("abfs") else None
    if match is None:
        if "@" in host or "." in host:
            raise InvalidUsageError(
                "The URI's container cannot be read.",
                remedy="Write az://CONTAINER/PATH and give the account by --storage-option "
                "azure_storage_account_name=ACCOUNT (and azure_storage_endpoint=URL if it is not "
                "ACCOUNT.blob.core.windows.net), or abfss://CONTAINER@ACCOUNT.dfs.core.windows.net/PATH.",
            )
        return rest, options
    account = match["account"].lower()
    for key in _ACCOUNT_KEYS:
        if options.get(key, account) != account:
            raise InvalidUsageError(f"The URI names the account {account!r}, and the storage option {key} another one.")
    if not any(key in options for key in _ACCOUNT_KEYS):
        options = {**options, _ACCOUNT_KEYS[0]: account}
    return f"{match['container']}{slash}{path}", options


def _dynamodb(rest: str) -> tuple[str, str]:
    """Bucket and path, and the query with the name of the table in DynamoDB."""
    path, _, query = rest.partition("?")
    given = parse_qsl(query, keep_blank_values=True)
    if [key for key, _ in given] != [_TABLE_NAME] or not _VALID_TABLE_NAME.fullmatch(given[0][1]):
        raise InvalidUsageError(
            f"The URI does not name the table in DynamoDB that records the versions: {redact(query)!r}.",
            remedy=f"Write {DYNAMODB}://BUCKET/PATH?{_TABLE_NAME}=NAME, as the table's writers do.",
        )
    if not path.rstrip("/").partition("/")[2]:
        raise InvalidUsageError("The URI has no path: DynamoDB knows a table by its path in the bucket.")
    return path, f"?{_TABLE_NAME}={quote(given[0][1], safe='')}"


def _remote(rest: str) -> str:
    bucket, _, prefix = rest.partition("/")
    if "@" in bucket or ":" in bucket:
        raise InvalidUsageError("The URI carries credentials or a port; give them as storage options.")
    if not bucket:
        raise InvalidUsageError("The URI has no bucket.")
    if "?" in rest or "#" in rest:
        # pylance drops the rest of the URI and would open another folder.
        raise InvalidUsageError("The URI contains '?' or '#', which stores drop with the rest; write %3F or %23.")
    prefix = prefix.rstrip("/")
    segments = unquote(prefix).split("/") if prefix else []
    if any(segment in {"", ".", ".."} for segment in segments):
        raise InvalidUsageError(f"The URI's path has an empty, '.' or '..' segment: {redact(prefix)}.")
    return f"{bucket}/{prefix}" if prefix else bucket


def is_catalog(uri: str) -> bool:
    """Whether a URI is that of a catalog, or of a table in one."""
    return uri.lower().startswith(f"{CATALOG}://")
