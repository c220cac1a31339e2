"""Where a table is and how to get there: one URI and its options, resolved once.

A :class:`Location` is what everything else passes around. pylance gets ``uri`` and
``lance_options`` from it, obstore is opened from it (:mod:`memwal_ops.storage.objects`), and
so both always talk to the same place. May not enter: requests to a store.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

from memwal_ops.errors import InvalidUsageError, UnsupportedFeatureError
from memwal_ops.storage.aws import AwsAccess, resolve_aws
from memwal_ops.storage.options import canonical
from memwal_ops.storage.redaction import RedactedOptions, redact, remember, remember_options

if TYPE_CHECKING:
    from collections.abc import Mapping

_SCHEMES = {"s3": "s3", "s3a": "s3", "gs": "gs", "az": "az", "memory": "memory", "file": "file"}
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")
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
    """A resolved place.

    Attributes:
        uri: what pylance opens: an absolute path, ``s3://bucket/prefix``, ``gs://``, ``az://``
            or ``memory://``, without a trailing ``/`` and without credentials.
        scheme: ``file``, ``s3``, ``gs``, ``az`` or ``memory``.
        lance_options: pylance's ``storage_options``, with the credentials of this moment.
        aws: what S3 was resolved to; None for other schemes, and after unpickling.

    Credentials that expire: obstore asks boto3 again by itself; pylance keeps what it was given,
    so whoever opens a dataset takes ``location.refreshed()`` right before, and opens it again
    after work of unknown length. That is cheap: STS is asked only when renewal is due.

    Pickling (to Spark executors) keeps the credentials of the moment and drops their renewal:
    a profile or an SSO session of the driver does not exist there.
    """

    uri: str
    scheme: str
    lance_options: Mapping[str, str] = field(default_factory=RedactedOptions)
    aws: AwsAccess | None = field(default=None, repr=False, compare=False)

    @property
    def expires(self) -> bool:
        """Whether ``lance_options`` carry temporary credentials."""
        return self.aws is not None and self.aws.expires

    def refreshed(self) -> Location:
        """The same place with credentials that are valid now; itself where none expire.

        Raises:
            StorageCredentialsError: they cannot be renewed.
        """
        if self.aws is None or not self.aws.expires:
            return self
        return replace(self, lance_options=RedactedOptions({**self.aws.place(), **self.aws.frozen()}))

    def __str__(self) -> str:
        """The URI."""
        return self.uri

    def __getstate__(self) -> dict[str, Any]:
        """All but the renewal of credentials."""
        return {**self.__dict__, "aws": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore, and register the secrets in this process too."""
        self.__dict__.update(state)
        remember_options(self.lance_options)


def resolve(uri: str | os.PathLike[str], storage_options: Mapping[str, str] | None = None) -> Location:
    """Resolve a table's URI and options; explicit options win over the environment.

    A local path may start with ``~``. In ``s3://``, ``gs://`` and ``az://`` percent escapes are
    decoded, as pylance does. ``memory://`` is this process's and obstore's own: pylance's memory
    tables are not visible there, so it serves for storage alone.

    Raises:
        InvalidUsageError: a URI or option that cannot be honoured.
        UnsupportedFeatureError: ``s3+ddb://``: commits of such a table go through DynamoDB.
        StorageCredentialsError: S3 without usable credentials.
    """
    text = os.fspath(uri)
    given = dict(storage_options or {})
    remember_options({str(key): str(value) for key, value in given.items()})
    remember(os.environ.get(name) for name in _SECRET_VARIABLES)
    match = _SCHEME.match(text)
    if match is None:
        return Location(_local(text), "file", RedactedOptions(canonical(given, "file")))
    written = match.group(1).lower()
    if written.startswith("s3+ddb"):
        raise UnsupportedFeatureError(
            "The table's versions are kept in DynamoDB (s3+ddb://); commits that bypass it would be lost.",
            remedy="Move the table to s3:// with conditional writes; this release has no DynamoDB manifest store.",
        )
    scheme = _SCHEMES.get(written)
    if scheme is None:
        raise InvalidUsageError(
            f"The URI scheme {written!r} is not known; use a path, file://, s3://, gs://, az:// or memory://."
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
    normalised = f"{scheme}://{_remote(rest)}"
    if scheme != "s3":
        return Location(normalised, scheme, RedactedOptions(options))
    aws = resolve_aws(options)
    return Location(normalised, scheme, RedactedOptions({**aws.place(), **aws.frozen()}), aws)


def bucket_and_prefix(location: Location) -> tuple[str, str]:
    """Bucket (container) and decoded key prefix of a remote location; the prefix may be empty."""
    bucket, _, prefix = location.uri.split("://", 1)[1].partition("/")
    return bucket, unquote(prefix)


def _local(path: str) -> str:
    if not path:
        raise InvalidUsageError("The table's URI is empty.")
    if "\0" in path:
        raise InvalidUsageError("The table's path contains a zero byte.")
    return os.path.abspath(os.path.expanduser(path))


def _remote(rest: str) -> str:
    bucket, _, prefix = rest.partition("/")
    if "@" in bucket or ":" in bucket:
        raise InvalidUsageError("The URI carries credentials or a port; give them as storage options.")
    if not bucket:
        raise InvalidUsageError("The URI has no bucket.")
    if "?" in rest or "#" in rest:
        # pylance drops everything from there on and would open another folder.
        raise InvalidUsageError("The URI contains '?' or '#', which stores cut off; write %3F or %23.")
    prefix = prefix.rstrip("/")
    segments = unquote(prefix).split("/") if prefix else []
    if any(segment in {"", ".", ".."} for segment in segments):
        raise InvalidUsageError(f"The URI's path has an empty, '.' or '..' segment: {redact(prefix)}.")
    return f"{bucket}/{prefix}" if prefix else bucket
