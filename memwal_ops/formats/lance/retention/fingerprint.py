"""Determine from a few listings whether anything was written to a table since its backlog figures were read.

The figures depend on the versions of the table, and on the manifests of its regions: every commit adds a version
manifest, and every flush, claim and collection of a region adds a region manifest. A listing shows these files with
their sizes, times and tags.
"""

from __future__ import annotations

import hashlib
import os
from itertools import islice
from typing import TYPE_CHECKING

from memwal_ops.formats.lance.files.versions import PAGE, VERSIONS_FOLDER, is_ascending
from memwal_ops.formats.lance.regions.manifests import list_regions
from memwal_ops.formats.lance.wire.names import (
    MEM_WAL_FOLDER,
    NamingScheme,
    VersionName,
    parse_version_manifest_name,
    region_folder,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from memwal_ops.formats.lance.table import Table
    from memwal_ops.storage.api import ObjectMeta, Store

_PLAIN, _WITH_LOG = "plain", "log"
# Stores on which a listing's start key saves no request: local files, and Azure, which lists from the beginning.
_WITHOUT_START_KEY = ("/", "az://")
# Sorts directly after the slash that ends a folder's name in a path.
_AFTER_FOLDER = "0"


def fingerprint(table: Table) -> str | None:
    """The fingerprint of a table that was just opened, to be taken before its backlog is read.

    Requests: see :func:`is_unchanged`.

    Returns:
        None: there is a newer version already.
    """
    kind = _WITH_LOG if table.log.exists else _PLAIN
    versions = _newest_versions(table.store)
    names = [name for meta in versions if (name := _version_name(meta)) is not None]
    newest = max((name.version for name in names if not name.detached), default=0)
    return _digest(kind, table.store, versions) if newest == table.version else None


def is_unchanged(store: Store, known: str) -> bool:
    """Whether the table has the fingerprint that it had: nothing was written that a backlog figure depends on.

    Not noticed: versions that were removed behind the newest 1,000, and generation directories that were removed
    without any commit.

    Requests: one, and with MemWAL one for each region, or fewer: regions of few objects share a page of a listing. One
    more for each region that has 1,000 files of generations, and one more in all on Azure, or if the last region has
    1,000 files.
    """
    return _digest(known.partition(":")[0], store, _newest_versions(store)) == known


def _digest(kind: str, store: Store, versions: Iterable[ObjectMeta]) -> str:
    digest = hashlib.sha256()
    for meta in [*versions, *(_log_objects(store) if kind == _WITH_LOG else ())]:
        digest.update(os.fsencode(f"{meta.path}\n{meta.size} {meta.last_modified.timestamp()} {meta.e_tag}\n"))
    return f"{kind}:{digest.hexdigest()}"


def _newest_versions(store: Store) -> Sequence[ObjectMeta]:
    """The first page of the versions if it begins with the newest one, else all versions."""
    listing = store.list(VERSIONS_FOLDER)
    page = list(islice(listing, PAGE))
    schemes = {name.scheme for meta in page if (name := _version_name(meta)) is not None}
    if len(page) == PAGE and schemes == {NamingScheme.V2} and is_ascending(page):
        return page
    return _by_path([*page, *listing])


def _log_objects(store: Store) -> Sequence[ObjectMeta]:
    """Objects of the log, the manifests of all regions among them."""
    if store.root.startswith(_WITHOUT_START_KEY):
        return _region_manifests(store)
    found: list[ObjectMeta] = []
    after: str | None = None
    while True:
        page = list(islice(store.list(MEM_WAL_FOLDER, after=after), PAGE))
        if not is_ascending(page):  # S3 Express
            return _region_manifests(store)
        found += page
        if len(page) < PAGE:
            return found
        after = _next_start(page[-1].path)


def _next_start(last: str) -> str:
    """Where a listing continues after a full page: it skips a region's other files, but not its manifests.

    In a region's folder, directories of generations sort before ``manifest/``, and ``wal/`` after it.
    """
    region, _, inside = last.removeprefix(f"{MEM_WAL_FOLDER}/").partition("/")
    folder = f"{MEM_WAL_FOLDER}/{region}"
    if not inside or inside.startswith("manifest/"):
        return last
    # Never back: a copy of the manifests, in ``manifest.bak/``, sorts between the two.
    return max(last, f"{folder}/manifest") if inside < "manifest/" else f"{folder}{_AFTER_FOLDER}"


def _region_manifests(store: Store) -> Sequence[ObjectMeta]:
    regions = list_regions(store).region_ids
    return _by_path(meta for region_id in regions for meta in store.list(f"{region_folder(region_id)}/manifest"))


def _by_path(objects: Iterable[ObjectMeta]) -> list[ObjectMeta]:
    return sorted(objects, key=lambda meta: meta.path)


def _version_name(meta: ObjectMeta) -> VersionName | None:
    return parse_version_manifest_name(meta.path.rsplit("/", 1)[-1])
