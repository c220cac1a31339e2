"""Format the plans of a reader, with the specification's names of nodes (S0-202 to S0-206)."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from memwal_ops.formats.lance.engines.read.unmerged import RegionRead, Unmerged

BASE = "base_table[gen=-1]"


def scan_plan(unmerged: Unmerged, condition: str | None) -> str:
    """The plan of a scan."""
    return "\n".join(deduplicated(unmerged, condition))


def deduplicated(unmerged: Unmerged, condition: str | None) -> Iterator[str]:
    """The lines of a scan's plan."""
    pushed = "" if condition is None else f", filter=[{condition}]"
    key = ", ".join(unmerged.table.primary_key)
    yield f"DeduplicateExec: partition_by=[{key}], order_by=[_gen DESC, _rowaddr DESC]"
    yield f"  UnionExec{pruned(unmerged)}"
    yield f"    ScanExec: {BASE}, version={unmerged.table.version}{pushed}"
    for region in unmerged.regions:
        if region.memory is not None:
            yield f"    ScanExec: {in_memory(region)}{pushed}"
        yield from (f"    ScanExec: {region.region_id}[gen={ref.generation}]{pushed}" for ref in region.flushed[::-1])


def look_up_plan(unmerged: Unmerged, keys: str, index: bool) -> str:  # noqa: FBT001 - of one caller
    """The plan of a look-up; ``keys`` describes the keys, ``index`` is whether the base's key is indexed."""
    by = ", index=btree" if index else ""
    lines = [f"CoalesceFirstExec: return_first_non_null{pruned(unmerged).replace(':', ',', 1)}"]
    for region in unmerged.regions:
        if region.memory is not None:
            lines.append(f"  TakeLastExec: {in_memory(region)}, filter=[{keys}]")
        for ref in region.flushed[::-1]:
            place = f"[{region.region_id}][gen={ref.generation}]"
            lines += [
                f"  BloomFilterGuardExec: bf{place}",
                f"    TakeLastExec: {region.region_id}[gen={ref.generation}], filter=[{keys}]",
            ]
    return "\n".join([*lines, f"  TakeLastExec: {BASE}, filter=[{keys}]{by}"])


def in_memory(region: RegionRead) -> str:
    """The name of a region's rows in memory, by the generation that they will become."""
    source = "log" if region.writer is None else "memtable"
    rows = 0 if region.memory is None else region.memory.num_rows
    return f"{region.region_id}[gen={region.current}], {source}, rows={rows}"


def pruned(unmerged: Unmerged) -> str:
    """The number of regions that were pruned; empty if none was."""
    return f": regions={len(unmerged.regions)}, pruned={len(unmerged.pruned)}" if unmerged.pruned else ""


def indented(lines: Iterable[str], by: int) -> list[str]:
    """Lines below a node."""
    return [" " * by + line for line in lines]
