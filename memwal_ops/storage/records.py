"""Encode and decode the JSON records that memwal-ops keeps beside a table, each with the number of its format.

A release reads every earlier format, and ignores keys that it does not know. It refuses a later format: a record that
it would read in part could hold a revision, or prove a deletion. Format 1 is that of release 0.1, and of records
without a number.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from memwal_ops.errors import UnsupportedFeatureError

FORMAT = "format"


def encode_record(document: Mapping[str, object], newest: int = 1, *, indent: int | None = None) -> bytes:
    """Return the stored form of a document, with its format."""
    return json.dumps({FORMAT: newest, **document}, indent=indent).encode()


def decode_record(data: bytes, path: str, newest: int = 1) -> Any:
    """Return the document that is stored in ``data``, without the number of its format.

    ``newest``: the latest format that this release reads.

    Raises:
        UnsupportedFeatureError: a later release wrote it.
        ValueError: it is not JSON, or its format is not a number.
    """
    document = json.loads(data)
    if isinstance(document, dict):
        check_format(document.pop(FORMAT, 1), newest, path)
    return document


def check_format(found: object, newest: int, path: str) -> None:
    """Refuse a format that this release does not read; raises as :func:`decode_record`."""
    if type(found) is not int or found < 1:
        raise ValueError(f"its format is {found!r:.40}")
    if found > newest:
        raise UnsupportedFeatureError(
            f"{path} was written by a newer release of memwal-ops: it has format {found}, and this one reads up to "
            f"{newest}.",
            remedy="Upgrade memwal-ops here to the release that runs elsewhere on this table; do not delete the file.",
        )
