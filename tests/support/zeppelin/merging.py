"""Merge a namespace under test: without long waits, under another's lease."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memwal_ops import open_table
from memwal_ops.formats.zeppelin.lease import LeaseRecord, encode_lease, read_lease
from memwal_ops.formats.zeppelin.specs import ZeppelinMergeOptions
from tests.support.zeppelin.namespace import NamespaceUnderTest

if TYPE_CHECKING:
    from memwal_ops.formats.zeppelin.namespace import Namespace

FAST = ZeppelinMergeOptions(lease_ttl=timedelta(minutes=5), wait=timedelta(seconds=20))


def opened(made: NamespaceUnderTest) -> Namespace:
    found: Any = open_table(made.uri)
    return found


def expire(made: NamespaceUnderTest) -> None:
    """Let time pass: the lease's, not ours."""
    table = opened(made)
    standing = read_lease(table)
    if standing is not None:
        past = datetime.now(UTC) - timedelta(seconds=1)
        record = LeaseRecord(standing[0].holder, standing[0].token, past, past)
        Path(made.uri, "lease.json").write_bytes(encode_lease(record, table.manifest.dialect))
