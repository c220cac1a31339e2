"""The why job: of one thing, every reason that it is kept or may go. Reads only."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING
from uuid import UUID

from memwal_ops.core.layout import MEM_WAL_FOLDER, region_folder
from memwal_ops.core.regions import is_beginning
from memwal_ops.core.versions import VERSIONS_FOLDER
from memwal_ops.errors import GenerationMissingError, InvalidUsageError, ObjectNotFoundError
from memwal_ops.format.names import parse_version_manifest_name
from memwal_ops.jobs import expire, gc
from memwal_ops.jobs.collectables import Gate, Item, Kind, Verdict

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from memwal_ops.core.table import Table
    from memwal_ops.jobs.gc_rules import GcOptions

_GENERATION = re.compile(r"[0-9]{1,20}")
_GROUPED = {Kind.WAL_ENTRY, Kind.REGION_MANIFEST}


@dataclass(frozen=True, slots=True)
class Reason:
    """One thing, or some that are alike: ``items`` of them, all with the same reasons."""

    item: Item
    items: int
    bytes: int

    def to_json(self) -> dict[str, object]:
        """The entry of ``why --json``; ``gates`` is the whole chain."""
        return {
            **self.item.to_json(),
            "verdict": self.item.verdict.value,
            "items": self.items,
            "bytes": self.bytes,
            "gates": [{"met": gate.met, "text": gate.text} for gate in self.item.gates],
        }


@dataclass(frozen=True, slots=True)
class Explanation:
    """All that stands at the target."""

    target: str
    reasons: tuple[Reason, ...]

    def to_json(self) -> dict[str, object]:
        """The document of ``why --json``."""
        return {"target": self.target, "reasons": [one.to_json() for one in self.reasons]}


def explain(table: Table, target: str, options: GcOptions) -> Explanation:
    """Why a region, a generation, or a file is still here.

    Args:
        table: the newest version of it.
        target: a region id, or the beginning of one (8 characters or more); ``region/generation``; a path below
            the table, or its whole URI.
        options: as for gc; they decide what is old enough.

    Raises:
        InvalidUsageError: the target is none of this.
        ObjectNotFoundError: nothing stands there.
    """
    path = _whole(table, target.removeprefix(table.location.uri).strip("/"))
    region_id, wanted = _wanted(path)
    if path.startswith(f"{VERSIONS_FOLDER}/"):
        found = _version(table, path, options)
    else:
        found = []
        regions = None if region_id is None else [region_id]

        def collected(item: Item) -> None:
            if wanted(item):
                found.append(item)

        gc.plan(table, options, on_item=collected, regions=regions, limit=0)
    if not found and region_id is not None and region_id in table.regions.region_ids:
        _refuse_missing(table, region_id, path)
    if not found:
        if next(iter(table.store.list(path)), None) is None and table.store.head(path) is None:
            raise ObjectNotFoundError(
                f"Nothing stands at {target} in {table.location.uri}.",
                remedy="Give a region id (memwal-ops inspect lists them), REGION/GENERATION, or a path in it.",
            )
        found = [_of_the_base(table, path)]
    # A folder of a region was asked for to see what stands in it, one by one.
    whole = region_id is None or path.removeprefix(f"{MEM_WAL_FOLDER}/") == str(region_id)
    return Explanation(target, _grouped(found, group=whole))


def _whole(table: Table, path: str) -> str:
    """The path, with the whole id of a region where it begins with a part of one."""
    first, slash, rest = path.partition("/")
    found = table.regions.beginning(first.lower()) if is_beginning(first.lower()) else None
    return path if found is None else f"{found}{slash}{rest}"


def _refuse_missing(table: Table, region_id: UUID, path: str) -> None:
    """Say so where a generation is listed, and gone: that is the one absence that loses rows."""
    name = path.rsplit("/", 1)[-1]
    for listed in table.region(region_id).latest(checked=True).flushed_generations:
        if name in {str(listed.generation), listed.path}:
            raise GenerationMissingError(
                f"Generation {listed.generation} of region {region_id} is listed by the region manifest, but its "
                f"directory {listed.path} is not there.",
                remedy="See runbooks/merge-blocked.md, generation_missing; delete nothing of this region.",
            )


def _wanted(path: str) -> tuple[UUID | None, Callable[[Item], bool]]:
    """The region that must be looked at, and what of it is meant."""
    parts = path.removeprefix(f"{MEM_WAL_FOLDER}/").split("/")
    try:
        region_id = UUID(parts[0])
    except ValueError:
        if not path:
            raise InvalidUsageError("Say what: a region id, REGION/GENERATION, or a path below the table.") from None
        return None, lambda item: _covers(item, path)
    if len(parts) == 1:
        return region_id, lambda _: True
    if _GENERATION.fullmatch(parts[1]):
        return region_id, lambda item: item.generation == int(parts[1])
    full = f"{region_folder(region_id)}/{'/'.join(parts[1:])}"
    return region_id, lambda item: _covers(item, full)


def _covers(item: Item, path: str) -> bool:
    return item.path == path or path.startswith(f"{item.path}/") or item.path.startswith(f"{path}/")


def _version(table: Table, path: str, options: GcOptions) -> list[Item]:
    name = parse_version_manifest_name(path.rsplit("/", 1)[-1])
    if name is None or name.detached:
        found: list[Item] = []
        gc.plan(table, options, on_item=lambda item: found.append(item) if item.path == path else None, limit=0)
        return found
    plan = expire.plan(table, expire.ExpireOptions())
    kept: Mapping[int, str] = {one.version: one.because for one in plan.kept}
    state = table.store.head(path)
    if state is None:
        return []
    gate = Gate(
        met=name.version not in kept, text=kept.get(name.version, "older than 7 d; memwal-ops expire lets it go")
    )
    return [Item(Kind.BASE, path, None, None, state.size, 1, (gate,))]


def _of_the_base(table: Table, path: str) -> Item:
    text = "not of MemWAL: pylance removes it with the last version that names it, and nobody does if none names it"
    objects = list(table.store.list(path))
    one = table.store.head(path) if not objects else None
    size = sum(meta.size for meta in objects) if one is None else one.size
    return Item(Kind.BASE, path, None, None, size, max(1, len(objects)), (Gate(met=False, text=text),))


def _grouped(items: list[Item], *, group: bool) -> tuple[Reason, ...]:
    """Log entries and manifests of whole regions, told by their reasons and not one by one; generations ascend."""
    kinds = list(dict.fromkeys(item.kind for item in items))
    items.sort(key=lambda item: (str(item.region_id or ""), kinds.index(item.kind), item.generation or 0))
    found: dict[object, list[Item]] = {}
    for at, item in enumerate(items):
        key: object = at
        if group and item.kind in _GROUPED:
            key = (item.kind, item.region_id, item.verdict, tuple(gate.met for gate in item.gates), _plain(item))
        found.setdefault(key, []).append(item)
    return tuple(Reason(same[0], len(same), sum(one.bytes for one in same)) for same in found.values())


def _plain(item: Item) -> str:
    return item.why if item.verdict is Verdict.HELD else ""
