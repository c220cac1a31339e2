"""The Zeppelin format: detect and open namespaces. Imports nothing heavy."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from memwal_ops.formats.zeppelin.wire import MANIFEST, META

if TYPE_CHECKING:
    from collections.abc import Mapping

    from memwal_ops.core.demo import DemoSpec
    from memwal_ops.core.protocols import TableSummary
    from memwal_ops.formats.zeppelin.namespace import Namespace
    from memwal_ops.storage.api import Listing, Store
    from memwal_ops.storage.locations import Location

_OTHERS = "_versions"
_SIGNS = {"wal", "segments", "manifests", "input-wal", "late"}
_OURS = "_mem_wal_ops"


class ZeppelinFormat:
    """Namespaces with a WAL of fragments and IVF segments, which one manifest object lists."""

    name = "zeppelin"
    suffix = ""
    init = None
    beside = "This is safe beside writers and readers: none of them has to stop, and it can be stopped at any time."

    @property
    def demo(self) -> DemoSpec:
        """Its demo."""
        from memwal_ops.formats.zeppelin.specs import DEMO  # noqa: PLC0415 - tables of other formats need no specs

        return DEMO

    def part_of(self, blocked: Mapping[str, Any]) -> tuple[str, str]:
        """The names of the blocked part in messages: the one log, which a fragment blocks, a segment, or the lease."""
        if "lease" in blocked:
            return "The lease of compactors", ""
        if "segment" in blocked:
            return f"Segment {blocked['segment']}", ""
        return "The log", f"fragment {blocked['fragment']}" if "fragment" in blocked else ""

    def detect(self, root: Listing) -> bool:
        """Whether the listing has a manifest object, and only files of namespaces; no request is made.

        ``manifest.json`` alone is not sufficient: web applications have one.
        """
        names = {meta.path for meta in root.objects}
        if _OTHERS in root.directories or not names & {MANIFEST, META}:
            return False
        if _SIGNS & {*root.directories}:
            return True
        return MANIFEST in names and names <= {MANIFEST, META, "lease.json"} and {*root.directories} <= {_OURS}

    def open(self, location: Location, store: Store) -> Namespace:
        """The newest manifest. Raises: see :func:`memwal_ops.formats.zeppelin.namespace.load`."""
        from memwal_ops.formats.zeppelin.namespace import load, swappable  # noqa: PLC0415 - see the module

        return load(location, swappable(store))

    def summarize(self, table: Namespace) -> TableSummary:
        """See :func:`memwal_ops.formats.zeppelin.backlog.summarize`."""
        from memwal_ops.formats.zeppelin.backlog import summarize  # noqa: PLC0415 - see the module

        return summarize(table)

    def missing_of(self, table: Namespace, revision: int) -> str | None:
        """See :func:`memwal_ops.formats.zeppelin.backlog.missing_of`."""
        from memwal_ops.formats.zeppelin.backlog import missing_of  # noqa: PLC0415 - see the module

        return missing_of(table, revision)

    def fingerprint(self, table: Namespace) -> str | None:
        """The entity tag of the manifest: each write of a namespace replaces it. No request."""
        return table.tag

    def is_unchanged(self, store: Store, fingerprint: str) -> bool:
        """Whether the manifest has that entity tag. One request."""
        from memwal_ops.formats.zeppelin.namespace import swappable  # noqa: PLC0415 - see the module

        return swappable(store).get_with_tag(MANIFEST)[1] == fingerprint

    def announces_commit(self, path: str) -> bool:
        """Whether it is the manifest: each write of a namespace replaces it."""
        return path in {MANIFEST, META}


FORMAT = ZeppelinFormat()
