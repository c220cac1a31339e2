"""Classify errors of obstore, boto3 and pylance by their messages, and retry those that are transient.

obstore has coarse error types and pylance hardly any (``OSError`` and ``ValueError`` with
a message), but both quote the store's response in the same words, since both use the same
Rust client. All code that depends on those messages is in this module. It does no I/O.

Retries have jittered backoff and a deadline, and are the only ones of requests: obstore's own is switched off
(:mod:`memwal_ops.storage.metering`), so that the two do not multiply, and no conditional write is repeated without
reading back.
"""

from __future__ import annotations

import errno
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import obstore.exceptions

from memwal_ops import errors
from memwal_ops.storage.api import DiskFullError
from memwal_ops.storage.options import redact

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """How long to retry: all times in seconds.

    ``deadline`` bounds the whole call from its first attempt; no attempt starts after it, and
    a running attempt is not interrupted (the HTTP client's ``timeout``, 30 s by default, bounds it).
    """

    deadline: float = 60.0
    first_wait: float = 0.1
    max_wait: float = 5.0


class _UndecidedError(Exception):
    """A write was refused, but the object was absent when it was read back: only another attempt can decide."""


def retried(attempt: Callable[[], T], again: Callable[[BaseException], bool], policy: RetryPolicy) -> T:
    """Run ``attempt`` again after each error for which ``again`` is true, until the deadline; raise the last error."""
    first: list[BaseException] = []
    try:
        return attempt()
    except BaseException as error:
        if not again(error):
            raise
        first.append(error)
    from tenacity import (  # noqa: PLC0415 - it loads asyncio, and most calls succeed at once
        Retrying,
        retry_if_exception,
        stop_before_delay,
        wait_random_exponential,
    )

    def attempt_again() -> T:
        if first:
            raise first.pop()
        return attempt()

    retrying = Retrying(
        retry=retry_if_exception(again),
        wait=wait_random_exponential(multiplier=policy.first_wait, max=policy.max_wait),
        stop=stop_before_delay(policy.deadline),
        reraise=True,
    )
    return retrying(attempt_again)


def call(attempt: Callable[[], T], *, path: str, action: str, policy: RetryPolicy) -> T:
    """Run a repeatable request until it succeeds, fails permanently, or reaches the deadline.

    Raises:
        StoreUnavailableError: transient errors continued until the deadline.
        MemwalOpsError: the error's own class, at once, if it is not transient.
    """
    try:
        return retried(attempt, lambda exc: isinstance(exc, _UndecidedError) or is_transient(exc), policy)
    except Exception as exc:
        raise translate(exc, path=path, action=action) from exc


def conditional_write(
    write: Callable[[], bool], read_back: Callable[[], bool | None], *, path: str, policy: RetryPolicy
) -> bool:
    """Make a conditional write; if the store's response is lost, read the object back to determine the outcome.

    Why reading back is needed: (1) version 7 is put if absent; (2) the store writes it and the
    connection breaks; (3) the put is repeated and refused with "already exists"; (4) taking that for a
    commit conflict, the caller would write version 8 with the same content.

    Args:
        write: one attempt; True if it was written, False if the store refused it.
        read_back: after a lost response: True if this write's content is stored, False if other content is, None
            if the condition still holds and nothing was decided.

    A refusal of the first attempt is final and not read back. Equal contents of two
    writers cannot be distinguished after a lost response: a caller for which that matters writes
    something unique into the content.

    Raises:
        StoreUnavailableError: no response before the deadline; whether the write succeeded is unknown.
    """
    response_lost = False

    def attempt() -> bool:
        nonlocal response_lost
        if response_lost:
            stored = read_back()
            if stored is not None:
                return stored
        try:
            written = write()
        except Exception as exc:
            response_lost = response_lost or is_transient(exc)
            raise
        if written or not response_lost:
            return written
        # Refused, but an earlier attempt may have arrived late.
        stored = read_back()
        if stored is None:
            raise _UndecidedError(f"{path} was refused and is absent")
        return stored

    return call(attempt, path=path, action="write", policy=policy)


class NotSupportedError(errors.UnsupportedFeatureError, errors.StorageError):
    """Pylance reports that it does not support what was asked of it."""

    exit_code = errors.UnsupportedFeatureError.exit_code
    reason = errors.UnsupportedFeatureError.reason
    remedy = "This release of pylance does not support it, and running the command again does not help."


_CHANGES = frozenset({"write", "delete", "create", "build", "commit", "publish", "put", "remove"})

# What builds, compacts or commits reads before it writes: the request that was refused says which of the two it was.
# A single request says it itself: its action is one word, and a local write, too, opens a file.
_READ_REQUEST = re.compile(r"Unable to open file|performing (?:GET|HEAD) ")
_STATUS = re.compile(r"status code: (\d{3})")
# The failure of one object in an Azure batch that was executed as a whole.
_STATUS_IN_BATCH = re.compile(r"Bulk delete request failed for key .*\(code: (\d{3})\)", re.DOTALL)
_CODE = re.compile(r"<Code>([^<]+)</Code>")
_OS_ERROR = re.compile(r"\(os error (\d+)\)")
_MESSAGE = re.compile(r"<Message>([^<]*)</Message>")
# The last lines of Azure's messages.
_AZURE_TAIL = re.compile(r"\s*RequestId:\S+\s*Time:\S+\s*")
_RUST_PLACE = re.compile(r",? ?/\S+\.rs:\d+:\d+")

_NO_TABLE_CODES = frozenset({"NoSuchBucket", "ContainerNotFound"})
_CREDENTIAL_CODES = frozenset({
    "AuthFailure", "AuthenticationFailed", "AuthenticationRequired", "ExpiredToken", "ExpiredTokenException",
    "InvalidAccessKeyId", "InvalidClientTokenId", "InvalidSecurity", "InvalidToken", "MissingSecurityHeader",
    "NoAuthenticationInformation", "NotSignedUp", "RequestExpired", "RequestTimeTooSkewed",
    "SignatureDoesNotMatch", "TokenRefreshRequired", "UnrecognizedClientException",
})  # fmt: skip
_DENIED_CODES = frozenset({"AccessDenied", "AccessDeniedException", "AllAccessDisabled", "AuthorizationFailure"})
_TRANSIENT_CODES = frozenset({
    "InternalError", "OperationAborted", "ProvisionedThroughputExceededException", "RequestLimitExceeded",
    "RequestTimeout", "ServerBusy", "ServiceUnavailable", "SlowDown", "Throttling", "ThrottlingException",
    "TooManyRequests", "ConditionalRequestConflict",
})  # fmt: skip
_REFUSED = frozenset({errno.EACCES, errno.EPERM, errno.EROFS})
_LOCAL_REMEDIES: dict[type[errors.MemwalOpsError], str] = {
    errors.StorageCredentialsError: "Give the user of this process read permission on the path, and let it enter the "
    "folders above (namei -l PATH shows whom they admit).",
    errors.ReadOnlyStoreError: "Give the user of this process write permission there (namei -l PATH shows whom the "
    "folders admit), on a file system that is not mounted read-only.",
}
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
_INSUFFICIENT_STORAGE = 507
_TRANSIENT_STATUS = frozenset({408, 429, 500, 502, 503, 504})
_UNSUPPORTED_CODES = frozenset({"NotImplemented", "XNotImplemented"})
# A SAS for objects only does not permit requests to the container, such as a batch.
_NO_BATCH_CODES = frozenset({"AuthorizationResourceTypeMismatch"})
_NO_BATCH_STATUS = frozenset({400, 405, 500, 501})
# Azurite rejects a wrong account key or an expired SAS with 403 AuthorizationFailure, as Azure does for its firewall.
_NOT_AUTHENTICATED = "Server failed to authenticate the request"
_BEGINS_BEYOND_EMPTY = re.compile(r'CONTENT_RANGE header: "bytes [^"/]*/0"')
_NO_CREDENTIALS = re.compile(
    r"no providers in chain provided credentials|CredentialsNotLoaded|NoCredentials"
    r"|Failed to get AWS credentials|CredentialsError|External AWS credential provider"
)
_BROKEN_CONNECTION = re.compile(
    r"HTTP error|error sending request|connection (?:reset|closed|error)|broken pipe|timed out"
    r"|operation timed out|unexpected end of file|error reading a body|error decoding response body",
    re.IGNORECASE,
)
# Retrying is useless: the name, the certificate or the option is wrong.
_WRONG_ADDRESS = re.compile(
    r"Name or service not known|nodename nor servname|No address associated|invalid peer certificate"
    r"|UnknownIssuer|builder error|URL scheme is not allowed",
    re.IGNORECASE,
)
_NOT_SUPPORTED = re.compile(r"(?:^|: )Not supported: |Misaligned buffers\[")  # docs/upstream.md
_NO_TABLE_TEXT = re.compile(r"Dataset at path .* was not found|Table not found|The specified bucket does not exist")
# The client's listing fails as a whole if one name is not UTF-8, or has a control character or an empty segment.
_INVALID_NAME = re.compile(r"Encountered object with invalid path")
_NO_OBJECT_TEXT = re.compile(r"Object at location .* not found|(?:^|: )Not found: ")
# Many messages of obstore do not name the store, but have REDACTED in place of a URL with a SAS.
_AZURE = re.compile(
    r"MicrosoftAzure|RequestId:\S+\s+Time:|\.core\.windows\.net|\.fabric\.microsoft\.com|/devstoreaccount1/"
    r"|performing [A-Z]+ REDACTED"
)
_AZURE_REMEDIES: dict[type[errors.MemwalOpsError], str] = {
    errors.StorageCredentialsError: "Check the account name, and the account key, SAS or identity (--storage-option "
    "azure_storage_account_key or azure_storage_sas_token, or AZURE_STORAGE_... in the environment), how long a SAS "
    "holds and what it permits, and the account's firewall; secrets are never printed.",
    errors.ReadOnlyStoreError: "Give this job read, write, delete and list permission on the container (a SAS with "
    "sp=racwdl, the role Storage Blob Data Contributor), and let the account's firewall pass.",
    errors.TableNotFoundError: "Check the container in the URI, and the account name and azure_storage_endpoint, "
    "for a typo.",
}
_BOTO_CREDENTIALS = (
    "NoCredentialsError", "PartialCredentialsError", "CredentialRetrievalError", "ProfileNotFound",
    "SSOError", "TokenRetrievalError", "InvalidConfigError", "ConfigParseError",
    "RefreshWithMFAUnsupportedError",
)  # fmt: skip
_BOTO_CLIENT = ("ClientError",)
_BOTO = ("BotoCoreError", *_BOTO_CLIENT)
_BOTO_UNREACHABLE = ("ConnectionError", "HTTPClientError", "MetadataRetrievalError")


# obstore's error where a catalog that vends credentials cannot be reached.
_CATALOG_DOWN = f"External AWS credential provider: {errors.StoreUnavailableError.__name__}"


def is_transient(exc: BaseException) -> bool:
    """Whether the same request may succeed a little later: timeouts, resets, 5xx, throttling.

    This includes 409 ``ConditionalRequestConflict``: S3's response to a conditional write that is concurrent with
    another one or with a delete; the object may not exist at all.
    """
    if isinstance(exc, (errors.MemwalOpsError, FileNotFoundError, obstore.exceptions.PreconditionError)):
        return False
    text = str(exc)
    if _code(exc, text) in _TRANSIENT_CODES:
        return True
    status = _status(exc, text)
    if status is not None:
        return status in _TRANSIENT_STATUS
    if isinstance(exc, obstore.exceptions.AlreadyExistsError) or _WRONG_ADDRESS.search(text):
        return False
    unreachable = isinstance(exc, (TimeoutError, ConnectionError)) or _is_boto(exc, _BOTO_UNREACHABLE)
    return unreachable or bool(_BROKEN_CONNECTION.search(text))


def is_absent(exc: BaseException) -> bool:
    """Whether the error means that one object does not exist (rather than its bucket or store)."""
    text = str(exc)
    if _code(exc, text) in _NO_TABLE_CODES:
        return False
    # A folder, or a path below a file: neither is an object.
    if _os_error(exc, text) in {errno.ENOENT, errno.ENOTDIR, errno.EISDIR}:
        return True
    return isinstance(exc, FileNotFoundError)


def is_no_table(exc: BaseException) -> bool:
    """Whether the error means that the bucket or container itself does not exist."""
    text = str(exc)
    return _code(exc, text) in _NO_TABLE_CODES or _NO_TABLE_TEXT.search(text) is not None


def starts_beyond_end(exc: BaseException) -> bool:
    """Whether a range was refused because it starts at or beyond the object's end."""
    text = str(exc)
    # Azurite responds with 206 with "bytes 0--1/0" for the first byte of an empty blob.
    return _status(exc, text) == 416 or "StartTooLarge" in text or _BEGINS_BEYOND_EMPTY.search(text) is not None


def has_no_swap(exc: BaseException) -> bool:
    """Whether the client has no compare-and-swap by entity tag for this store (GCS requires a generation)."""
    return "MissingVersion" in str(exc)


def refuses_batches(exc: BaseException) -> bool:
    """Whether a batch delete was refused as a whole for a reason that may not apply to single deletes.

    Azurite responds with 500 to a batch signed by an account SAS; Azure refuses one with a SAS for objects only.
    """
    text = str(exc)
    return is_whole_request(exc) and (_code(exc, text) in _NO_BATCH_CODES or _status(exc, text) in _NO_BATCH_STATUS)


def is_whole_request(exc: BaseException) -> bool:
    """Whether a failed batch delete failed as a whole, so that trying its parts is pointless."""
    text = str(exc)
    return _STATUS_IN_BATCH.search(text) is None and _status(exc, text) is not None


def translate(exc: BaseException, *, path: str, action: str) -> errors.MemwalOpsError:
    """The ``MemwalOpsError`` for an error of obstore, boto3 or pylance; raise it ``from exc``.

    Args:
        exc: the error; a ``MemwalOpsError`` is returned unchanged.
        path: the object, folder or table of the request.
        action: the request, as a verb or a phrase that begins with one: ``read``, ``list``,
            ``write``, ``delete``, ``read the rows of``. A refusal means a read-only store if
            the verb changes something and the request was no read, and wrong credentials otherwise.

    The message contains neither secrets nor the client's debugging text.
    """
    if isinstance(exc, errors.MemwalOpsError):
        return exc
    text = redact(_short_text(exc))
    message = f"Cannot {action} {redact(path)!r}: {text}"
    kind = _kind(exc, action)
    is_local = _os_error(exc, str(exc)) in _REFUSED
    is_azure = not _is_boto(exc, _BOTO) and _AZURE.search(str(exc)) is not None
    remedies = _LOCAL_REMEDIES if is_local else _AZURE_REMEDIES if is_azure else {}
    if kind in remedies:
        return kind(message, remedy=remedies[kind])
    if kind is errors.StorageCredentialsError and not _changes(action) and _status(exc, str(exc)) == 403:
        return errors.StorageCredentialsError(
            message,
            remedy="Check the profile, role or keys (AWS_PROFILE, --storage-option). S3 also responds with 403 for an "
            "absent object if the permission s3:ListBucket is missing.",
        )
    if kind is errors.StoreUnavailableError and _WRONG_ADDRESS.search(str(exc)):
        return errors.StoreUnavailableError(
            message, remedy="Check the endpoint's name, its certificate and allow_http."
        )
    if kind is errors.StorageError and _INVALID_NAME.search(str(exc)):
        return errors.StorageError(message, remedy="Rename or remove the named object: its name cannot be listed.")
    return kind(message)


def _kind(exc: BaseException, action: str) -> type[errors.MemwalOpsError]:  # noqa: PLR0911 (one return per reason)
    text = str(exc)
    code, status = _code(exc, text), _status(exc, text)
    if _os_error(exc, text) in _FULL or status == _INSUFFICIENT_STORAGE:
        return DiskFullError
    if is_no_table(exc):
        return errors.TableNotFoundError
    if _CATALOG_DOWN in text:
        return errors.StoreUnavailableError
    if code in _CREDENTIAL_CODES or _is_boto(exc, _BOTO_CREDENTIALS) or _NOT_AUTHENTICATED in text:
        return errors.StorageCredentialsError
    if code in _UNSUPPORTED_CODES or status == 501:
        return errors.ConditionalWriteUnsupportedError if _changes(action) else errors.StorageError
    if _denied(exc, code, status, text):
        is_write = _changes(action) and (" " not in action or _READ_REQUEST.search(text) is None)
        return errors.ReadOnlyStoreError if is_write else errors.StorageCredentialsError
    if status == 401 or isinstance(exc, obstore.exceptions.UnauthenticatedError) or _NO_CREDENTIALS.search(text):
        return errors.StorageCredentialsError
    if is_absent(exc) or status == 404 or _NO_OBJECT_TEXT.search(text):
        return errors.ObjectNotFoundError
    if isinstance(exc, obstore.exceptions.UnknownConfigurationKeyError):
        return errors.InvalidUsageError
    if isinstance(exc, NotImplementedError) or _NOT_SUPPORTED.search(text):
        return NotSupportedError
    if is_transient(exc) or (_WRONG_ADDRESS.search(text) and status is None):
        return errors.StoreUnavailableError
    return errors.StorageError


def _changes(action: str) -> bool:
    return action.split(" ", 1)[0] in _CHANGES


def _denied(exc: BaseException, code: str | None, status: int | None, text: str) -> bool:
    if code in _DENIED_CODES or isinstance(exc, obstore.exceptions.PermissionDeniedError) or status == 403:
        return True
    return _os_error(exc, text) in _REFUSED


def _is_boto(exc: BaseException, names: tuple[str, ...]) -> bool:
    """Whether it is one of these errors of botocore; a process that never imported that has none of them."""
    known = sys.modules.get("botocore.exceptions")
    return known is not None and isinstance(exc, tuple(getattr(known, name) for name in names))


def _response_part(exc: BaseException, part: str) -> dict[str, Any]:
    response: dict[str, dict[str, Any]] = getattr(exc, "response", {})
    return response.get(part, {})


def _short_text(exc: BaseException) -> str:
    """The first paragraph of the error; if the store responded in XML, its status, code and message."""
    text = str(exc)
    head = _RUST_PLACE.sub("", text.partition("\n\nDebug source:")[0]).strip()
    code, status, message = _CODE.search(text), _STATUS.search(text), _MESSAGE.search(text)
    if code is not None:
        summary = f"the store responded with {status.group(1)} {code.group(1)}" if status else code.group(1)
        # Ceph sends an empty message, Azure one of several lines.
        words = " ".join(_AZURE_TAIL.sub(" ", message.group(1)).split()) if message else ""
        return f"{summary}: {words}" if words else summary
    return " ".join(head.split()) or type(exc).__name__


def _status(exc: BaseException, text: str) -> int | None:
    if _is_boto(exc, _BOTO_CLIENT):
        return _response_part(exc, "ResponseMetadata").get("HTTPStatusCode")
    match = _STATUS.search(text) or _STATUS_IN_BATCH.search(text)
    return int(match.group(1)) if match else None


def _code(exc: BaseException, text: str) -> str | None:
    if _is_boto(exc, _BOTO_CLIENT):
        return _response_part(exc, "Error").get("Code")
    match = _CODE.search(text)
    return match.group(1) if match else None


def _os_error(exc: BaseException, text: str) -> int | None:
    if isinstance(exc, OSError) and exc.errno is not None:
        return exc.errno
    match = _OS_ERROR.search(text)
    return int(match.group(1)) if match else None
