"""The error of a full disk: a fault of storage with a reason and a page of its own. Imports nothing heavy."""

from __future__ import annotations

from memwal_ops.errors import StorageError


class DiskFullError(StorageError):
    """There is no space left: on the disk, in a quota, or in the store."""

    reason = "disk_full"
    remedy = "Free space as runbooks/disk-full.md explains, then run the command again; nothing was half-written."
