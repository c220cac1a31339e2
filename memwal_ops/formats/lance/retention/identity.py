"""Anchor deletion plans to the manifest of a Lance table's version, or of a region.

A manifest is never rewritten, and is removed only with its table or by an expiry; so a plan is tied to the manifest of
the version or region that it was made from (:mod:`memwal_ops.core.anchors`). New versions do not invalidate it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from memwal_ops import errors
from memwal_ops.core.anchors import Anchor, anchor_at
from memwal_ops.formats.lance.files.version_files import is_same_file, read_version_manifest, version_path

if TYPE_CHECKING:
    from memwal_ops.formats.lance.table import Table
    from memwal_ops.formats.lance.wire.region_manifest import RegionManifest


def table_anchor(table: Table) -> Anchor:
    """The anchor of plans that are made from ``table``. One request, two without entity tags.

    The manifest is read again, unless it is the same object that was listed before it was read. Raises
    ``TableReplacedError``: the manifest that ``table`` was read from does not exist any more.
    """
    path = version_path(table.version, table.naming)
    anchor = anchor_at(table.store, path, f"Version {table.version} of {table.location.uri}")
    if is_same_file(table.file, anchor.meta):
        return anchor
    try:
        same = read_version_manifest(table.store, table.version, table.naming) == table.manifest
    except (errors.ObjectNotFoundError, errors.InvalidFormatError):
        same = False
    return _checked(anchor, same=same)


def anchored(table: Table) -> tuple[Table, Anchor]:
    """The given table, or its newest version if the given one is expired, and its anchor."""
    try:
        return table, table_anchor(table)
    except errors.TableReplacedError:
        newest = table.newest()
        return newest, table_anchor(newest)


def region_anchor(table: Table, manifest: RegionManifest) -> Anchor:
    """The anchor of plans that are made from a region with the newest manifest ``manifest``. Two requests.

    Raises ``TableReplacedError``: that manifest does not exist any more.
    """
    region = table.region(manifest.region_id)
    what = f"Manifest version {manifest.version} of region {manifest.region_id}"
    anchor = anchor_at(table.store, region.path(manifest.version), what)
    try:
        same = region.read(manifest.version) == manifest
    except errors.RegionManifestCorruptError:
        same = False
    return _checked(anchor, same=same)


def _checked(anchor: Anchor, *, same: bool) -> Anchor:
    """Return the anchor if the content, read after the HEAD request, is the one that the plan was made from."""
    if not same:
        raise errors.TableReplacedError(
            f"{anchor.what} has changed since it was read: the table was recreated or restored."
        )
    return anchor
