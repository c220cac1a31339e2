"""Parse storage options, and normalize each key to one canonical spelling.

The stores' client libraries accept several spellings of one option (``region``,
``aws_region``) and differ in which of them wins. Here each key gets one spelling, so that
all other code can compare keys as strings. Neither I/O nor the environment is used.
"""

from __future__ import annotations

import difflib
from types import MappingProxyType
from typing import TYPE_CHECKING

from memwal_ops.errors import InvalidUsageError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

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

    Raises:
        InvalidUsageError: an item has no ``=`` or no key, or a key is given twice. The
            message never quotes the item's value.
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

    Raises:
        InvalidUsageError: a key or value is not a string, a key is empty, or two spellings of
            one key have different values.
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
