"""Parse storage options to one spelling of each key, and mask secrets in every string that leaves the process.

The stores' client libraries accept several spellings of one option (``region``,
``aws_region``) and differ in which of them wins. Here each key gets one spelling, so that
all other code can compare keys as strings. Neither I/O nor the environment is used.

Masked are values that were registered as secrets when options were resolved (:func:`remember`),
and values that look like a secret by the name next to them. The latter is for messages of client
libraries, which quote whole requests and responses. The words of messages are kept.
"""

from __future__ import annotations

import difflib
import re
import threading
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from urllib.parse import quote

from memwal_ops.errors import InvalidUsageError

MASK = "***"

_SENSITIVE = (
    r"(?:secret|token|password|passwd|pwd|access[_-]?key|account[_-]?key|master[_-]?key|storage[_-]?key"
    r"|credential|signature|sas|api[_-]?key|authorization|private[_-]?key|service_account_key|customer_key)"
)
_SECRET_KEY = re.compile(_SENSITIVE, re.IGNORECASE)
# A file's name is not a secret, and a message needs it.
_NOT_SECRET_KEY = re.compile(r"(?:_file|_path|_uri|_url)$|^google_service_account$", re.IGNORECASE)

_VALUE = r"""(?:"[^"]*"|'[^']*'|[^\s,;&"'<>(){}\[\]]+)"""
# A limit on names: without it, a string of 5,000 letters takes a minute.
_SOME = "{0,128}"
# Not the first word of a sentence, as in "storage_options.aws_secret_access_key: The environment variable KEY is not
# set." It is a word of at most 12 letters with another one after it. Secrets that machines make are longer or have
# digits; others are registered when options are resolved, and masked by value.
_NO_SENTENCE = r"""(?!(?-i:[A-Za-z][a-z]{0,11}) \S)"""
_PATTERNS: tuple[tuple[re.Pattern[str], str], ...] = (
    # https://user:password@host; in abfss://CONTAINER@ACCOUNT there is no user name before the @
    (re.compile(r"(?<=://)(?:(?<!abfs://)(?<!abfss://)[^/\s@]+|[^/\s@:]*:[^/\s@]*)@"), f"{MASK}@"),
    # the parts of an S3 error response that repeat the request's credentials
    (
        re.compile(
            r"<(AWSAccessKeyId|StringToSign|StringToSignBytes|SignatureProvided|CanonicalRequest"
            r"|CanonicalRequestBytes|Token-0)>.*?</\1>",
            re.DOTALL,
        ),
        rf"<\1>{MASK}</\1>",
    ),
    (re.compile(r"\b(Bearer|Basic)\s+[A-Za-z0-9._~+/=-]{6,}"), rf"\1 {MASK}"),
    (re.compile(r"\b(?:AKIA|ASIA|AROA)[A-Z0-9]{12,}\b"), MASK),
    # the signature of an Azure SAS
    (re.compile(r"\b(sig=)[^\s&\"'<>,)]+", re.IGNORECASE), rf"\1{MASK}"),
    # KEY=value and KEY = 'value', also as part of a query string
    (re.compile(rf"({_SENSITIVE}[\w.%-]{_SOME}\s*=\s*){_VALUE}", re.IGNORECASE), rf"\1{MASK}"),
    # the same in JSON or in a dict's repr
    (re.compile(rf"""(["'][\w.-]{_SOME}{_SENSITIVE}[\w.-]{_SOME}["']\s*:\s*){_VALUE}""", re.IGNORECASE), rf"\1{MASK}"),
    # Authorization: SCHEME value
    (re.compile(rf"(\bauthorization:\s*)(?:[a-z][\w-]{_SOME} +)?{_VALUE}", re.IGNORECASE), rf"\1{MASK}"),
    # key_with_underscore: value, Header-Name: value. A plain word before a colon is not a key but prose.
    (
        re.compile(
            rf"(\b(?=[\w.-]{_SOME}[_-])[\w.-]{_SOME}{_SENSITIVE}[\w.-]{_SOME}:\s*){_NO_SENTENCE}{_VALUE}", re.IGNORECASE
        ),
        rf"\1{MASK}",
    ),
)

_MIN_LENGTH_ANYWHERE = 8
_MIN_LENGTH_AS_WORD = 4
_MAX_REMEMBERED = 512
_known: OrderedDict[str, re.Pattern[str]] = OrderedDict()
_lock = threading.Lock()


def is_secret_key(key: str) -> bool:
    """Whether an option of this name carries a secret."""
    return _SECRET_KEY.search(key) is not None and _NOT_SECRET_KEY.search(key) is None


def remember(values: Iterable[str | None]) -> None:
    """Register secret values; from now on :func:`redact` removes them from any text.

    Values shorter than 4 characters are not registered: masking every ``a`` would destroy the
    text and reveal the secret. Values of 4 to 7 characters are masked as whole words only. The 512
    most recently registered values are kept, so that refreshed credentials do not accumulate.
    """
    with _lock:
        for value in values:
            if value is None or len(value) < _MIN_LENGTH_AS_WORD:
                continue
            for form in {value, quote(value, safe=""), value.replace("/", "\\/")}:
                pattern = re.escape(form)
                if len(value) < _MIN_LENGTH_ANYWHERE:
                    pattern = rf"(?<![\w]){pattern}(?![\w])"
                _known[form] = re.compile(pattern)
                _known.move_to_end(form)
        while len(_known) > _MAX_REMEMBERED:
            _known.popitem(last=False)


def remember_options(options: Mapping[str, str]) -> None:
    """Register the values of all options with a secret key."""
    remember(value for key, value in options.items() if is_secret_key(key))


def redact(text: str) -> str:
    """The text with registered secret values, and everything that looks like a secret, masked."""
    with _lock:
        # Longest first: if a secret contains another one, no part of it must remain.
        patterns = sorted(_known.items(), key=lambda item: len(item[0]), reverse=True)
    for form, pattern in patterns:
        if form in text:
            text = pattern.sub(MASK, text)
    return _without_what_looks_secret(text)


def looks_secret(text: str) -> bool:
    """Whether a part of the text is a secret by the name next to it, or by its form, whatever is registered."""
    return _without_what_looks_secret(text) != text


def _without_what_looks_secret(text: str) -> str:
    for pattern, replacement in _PATTERNS:
        text = pattern.sub(replacement, text)
    return text


def redact_options(options: Mapping[str, str]) -> dict[str, str]:
    """The options with the values of secret keys masked and all others redacted."""
    return {key: MASK if is_secret_key(key) else redact(str(value)) for key, value in options.items()}


class RedactedOptions(dict[str, str]):
    """A dict for client libraries with a ``repr`` that masks secrets."""

    def __repr__(self) -> str:
        return repr(redact_options(self))

    __str__ = __repr__


_S3_SPELLINGS: Mapping[str, str] = MappingProxyType(
    {
        "access_key_id": "aws_access_key_id",
        "secret_access_key": "aws_secret_access_key",
        "session_token": "aws_session_token",
        "token": "aws_session_token",
        "aws_token": "aws_session_token",
        "aws_security_token": "aws_session_token",
        "region": "aws_region",
        "default_region": "aws_default_region",
        "endpoint": "aws_endpoint",
        "endpoint_url": "aws_endpoint",
        "aws_endpoint_url": "aws_endpoint",
        "endpoint_url_s3": "aws_endpoint_url_s3",
        "profile": "aws_profile",
        "role_arn": "aws_role_arn",
        "role_session_name": "aws_role_session_name",
        "external_id": "aws_external_id",
        "sts_endpoint": "aws_sts_endpoint",
        "endpoint_url_sts": "aws_sts_endpoint",
        "web_identity_token_file": "aws_web_identity_token_file",
        "skip_signature": "aws_skip_signature",
        "aws_allow_http": "allow_http",
    }
)

CLIENT_KEYS = frozenset(
    {
        "allow_http",
        "allow_invalid_certificates",
        "connect_timeout",
        "default_content_type",
        "http1_only",
        "http2_keep_alive_interval",
        "http2_keep_alive_timeout",
        "http2_keep_alive_while_idle",
        "http2_only",
        "pool_idle_timeout",
        "pool_max_idle_per_host",
        "proxy_ca_certificate",
        "proxy_excludes",
        "proxy_url",
        "randomize_addresses",
        "read_timeout",
        "root_certificate",
        "timeout",
        "user_agent",
    }
)
"""Options of the HTTP client, the same in obstore and in pylance."""

_BOOLEAN_CLIENT_KEYS = frozenset(
    {"allow_http", "allow_invalid_certificates", "http1_only", "http2_only", "randomize_addresses"}
)

_LANCE_KEYS = frozenset(
    {
        "client_max_retries",
        "client_retry_timeout",
        "download_retry_count",
        "dynamodb_endpoint",
        "expires_at_millis",
        "io_parallelism",
        "refresh_offset_millis",
    }
)
_LANCE_PREFIXES = ("base_", "headers.", "lance.", "new_table_")


def parse_options(items: Iterable[str]) -> dict[str, str]:
    """``KEY=VALUE`` strings as a dict; a value may itself contain ``=`` and may be empty.

    Raises ``InvalidUsageError``: an item has no ``=`` or no key, or a key is given twice. The message never quotes the
    item's value.
    """
    options: dict[str, str] = {}
    for item in items:
        key, separator, value = item.partition("=")
        key = key.strip()
        if not separator:
            # Not quoted: the text may be a pasted secret.
            raise InvalidUsageError("A storage option has no '='; it must read KEY=VALUE.")
        if not key:
            raise InvalidUsageError("A storage option has no key before '='; it must read KEY=VALUE.")
        if key in options:
            raise InvalidUsageError(f"The storage option {key!r} is given twice.")
        options[key] = value
    return options


def canonical(options: Mapping[str, str], scheme: str) -> dict[str, str]:
    """The options with lower-case keys, for S3 in their ``aws_*`` spelling.

    Raises ``InvalidUsageError``: a key or value is not a string, a key is empty, or two spellings of one key have
    different values.
    """
    spellings = _S3_SPELLINGS if scheme.startswith("s3") else {}
    result: dict[str, str] = {}
    for key, value in options.items():
        if not isinstance(key, str) or not isinstance(value, str):
            raise InvalidUsageError(f"The storage option {key!r} must be a string with a string value.")
        name = key.strip().lower()
        if not name:
            raise InvalidUsageError("A storage option has an empty key.")
        name = spellings.get(name, name)
        if result.get(name, value) != value:
            raise InvalidUsageError(f"The storage option {name!r} is given in two spellings with different values.")
        result[name] = value
    return result


def is_true(key: str, value: str) -> bool:
    """A boolean option's value. Raises ``InvalidUsageError`` if it is not a boolean."""
    text = value.strip().lower()
    if text in {"true", "1", "yes", "on", "y"}:
        return True
    if text in {"false", "0", "no", "off", "n", ""}:
        return False
    raise InvalidUsageError(f"The storage option {key!r} must be true or false.")


def is_lance_only(key: str) -> bool:
    """Whether only pylance supports this key, so that it must not be passed to obstore."""
    return key in _LANCE_KEYS or key.startswith(_LANCE_PREFIXES)


def is_ours(key: str) -> bool:
    """Whether this package itself handles a canonical key (``aws_profile``)."""
    return key in _S3_SPELLINGS.values()


def known_options(key: str = "") -> str:
    """The options to suggest in place of an unknown one."""
    known = sorted({*_S3_SPELLINGS.values(), *CLIENT_KEYS})
    close = difflib.get_close_matches(key, {*known, *_S3_SPELLINGS}, 1)
    begin = f"Did you mean {close[0]}? " if close else ""
    return f"{begin}The options are {', '.join(known)}; those of Azure begin with azure_, those of Google with google_."


def split_for_obstore(options: Mapping[str, str]) -> tuple[dict[str, str], dict[str, str | bool]]:
    """Split canonical options into the two arguments of obstore: (store config, HTTP client options)."""
    config: dict[str, str] = {}
    client: dict[str, str | bool] = {}
    for key, value in options.items():
        if key in _BOOLEAN_CLIENT_KEYS:
            client[key] = is_true(key, value)
        elif key in CLIENT_KEYS:
            client[key] = value
        elif not is_lance_only(key):
            config[key] = value
    return config, client
