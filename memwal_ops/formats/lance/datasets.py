"""Open Lance datasets below a table's location, with caches that fit into a job's memory budget."""

from __future__ import annotations

from typing import TYPE_CHECKING

import lance

if TYPE_CHECKING:
    from memwal_ops.storage.locations import Location

ROW_ADDRESS = "_rowaddr"
# Decoded file footers and index pages that a dataset may cache. Lance's own limits are gigabytes,
# but a job's memory must depend on its budget, not on the size of an index (docs/architecture.md, "Invariants").
CACHE_BYTES = 32 << 20


def open_dataset(location: Location, folder: str = "", *, version: int | None = None) -> lance.LanceDataset:
    """Open the dataset at ``folder`` below the location (by default the table itself).

    Raises pylance's own errors; callers translate them with
    :func:`memwal_ops.formats.lance.lance_errors.lance_errors`, giving the action for the message.
    """
    root = location.files or location.uri
    return lance.dataset(
        f"{root}/{folder}" if folder else root,
        version=version,
        storage_options=lance_options(location),
        index_cache_size_bytes=CACHE_BYTES,
        metadata_cache_size_bytes=CACHE_BYTES,
    )


def lance_options(location: Location) -> dict[str, str] | None:
    """The location's storage options as an argument for pylance."""
    return dict(location.lance_options) or None
