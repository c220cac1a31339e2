"""Open Lance datasets below a table's location, with caches that a job's memory budget can bear."""

from __future__ import annotations

from typing import TYPE_CHECKING

import lance

if TYPE_CHECKING:
    from memwal_ops.storage.locations import Location

# Decoded file footers and index pages that one dataset may keep. Lance's own limits are gigabytes,
# and a job's memory is to follow its budget, not the size of an index (design, invariant 6).
CACHE_BYTES = 32 << 20


def open_dataset(location: Location, folder: str = "", *, version: int | None = None) -> lance.LanceDataset:
    """The dataset at ``folder`` below the location (the table itself by default).

    Raises whatever pylance raises; callers wrap it with :func:`memwal_ops.core.lance_errors.lance_errors`,
    which knows what they were about to do.
    """
    return lance.dataset(
        f"{location.uri}/{folder}" if folder else location.uri,
        version=version,
        storage_options=lance_options(location),
        index_cache_size_bytes=CACHE_BYTES,
        metadata_cache_size_bytes=CACHE_BYTES,
    )


def lance_options(location: Location) -> dict[str, str] | None:
    """The location's storage options in the form that every pylance call takes."""
    return dict(location.lance_options) or None
