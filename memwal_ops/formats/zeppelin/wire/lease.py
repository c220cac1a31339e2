"""Decode and encode ``lease.json`` of both dialects."""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import UTC, datetime

from memwal_ops.errors import InvalidFormatError
from memwal_ops.formats.zeppelin.wire.fragment import NATIVE, WIKI
from memwal_ops.formats.zeppelin.wire.manifest import timestamp

LEASE = "lease.json"
MAX_TOKEN = 2**64 - 1
_HOLDER = {WIKI: "holder", NATIVE: "holder_id"}


@dataclass(frozen=True)
class LeaseRecord:
    """A stored lease: times are by its holder's clock."""

    holder: str
    token: int
    acquired: datetime
    expires: datetime


def encode_lease(lease: LeaseRecord, dialect: str) -> bytes:
    """The bytes of ``lease.json``."""
    document = {
        _HOLDER[dialect]: lease.holder,
        "fencing_token": lease.token,
        "acquired_at": timestamp(lease.acquired),
        "expires_at": timestamp(lease.expires),
    }
    return json.dumps(document, indent=2).encode()


def decode_lease(data: bytes) -> LeaseRecord:
    """A lease of either dialect.

    Raises:
        InvalidFormatError: it is not a lease.
    """
    try:
        found = json.loads(data)
        holder = found[_HOLDER[WIKI]] if _HOLDER[WIKI] in found else found[_HOLDER[NATIVE]]
        token = found["fencing_token"]
        times = [_moment(found[name]) for name in ("acquired_at", "expires_at")]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise InvalidFormatError(f"It is not a lease: {error!r:.120}.") from error
    if not isinstance(holder, str) or type(token) is not int or not 0 <= token <= MAX_TOKEN:
        raise InvalidFormatError(f"It is not a lease: holder {holder!r:.40}, token {token!r:.40}.")
    return LeaseRecord(holder, token, times[0], times[1])


def _moment(text: str) -> datetime:
    found = datetime.fromisoformat(text)
    return found if found.tzinfo is not None else found.replace(tzinfo=UTC)
