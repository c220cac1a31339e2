"""Errors specific to index folders: damage, a missing extra, a second writer, no node ids left."""

from __future__ import annotations

from memwal_ops.errors import BusyError, ExtraMissingError, TableCorruptError, UnsupportedFeatureError

__all__ = ["ExtraMissingError", "IdsExhaustedError", "IndexBusyError", "IndexCorruptError", "need_extra"]

COPY = "snapshot.lmd"
"""The manifest of a copy on an object store."""

RESTORE = (
    "Keep the folder aside. Restore a copy of it (memwal-ops snapshot COPY FOLDER), and write again what changed "
    "since, as catchup does for an index that follows a table; or build a new index from the rows."
)
PUBLISH_AGAIN = "Run memwal-ops merge on the folder: it publishes the view again from the store."
COPY_METADATA = (
    "Put metadata.lmd of any copy of this folder in its place: the file never changes. Without a copy, build a new "
    "index from the rows."
)
COPY_FOLLOW = "Put follow.json of any copy of this folder in its place, or build a new index of the table."
COPY_AGAIN = "Make another copy, or use an older one; no folder was created."
NOT_COPIED = f"Nothing was copied. memwal-ops verify shows what is damaged. {RESTORE}"


class IndexCorruptError(TableCorruptError):
    """A file of an index folder, or of a copy of one, is missing or damaged."""

    remedy = RESTORE


class IndexBusyError(BusyError):
    """Another writer or job has the index, and did not release it within the wait."""


class IdsExhaustedError(UnsupportedFeatureError):
    """All node ids are used up; they are never reused."""

    remedy = "Build a new index from the existing rows."


def need_extra() -> None:
    """Raise ``ExtraMissingError``, with their names, if packages of the extra are not installed."""
    from importlib.util import find_spec  # noqa: PLC0415 - only used here

    missing = [name for name in ("duckdb", "numba") if find_spec(name) is None]
    if missing:
        raise ExtraMissingError(
            f"LM-DiskANN index folders need packages that are not installed: {', '.join(missing)}.",
            remedy="Install memwal-ops[lm-diskann].",
        )
