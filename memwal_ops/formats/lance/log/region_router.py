"""``RegionRouter``: route each row to the writer of its region, so that no key is written to two (S0-010)."""

from __future__ import annotations

import threading
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING, Any, Self

from memwal_ops.core.options import boolean
from memwal_ops.errors import InvalidUsageError, RegionManifestCorruptError, RegionManifestGapError
from memwal_ops.formats.lance.generations.region_identity import RegionValues, region_values_of, table_spec
from memwal_ops.formats.lance.generations.wal import has_unflushed_rows
from memwal_ops.formats.lance.log.memtable import WriterLimits
from memwal_ops.formats.lance.log.region_columns import region_columns
from memwal_ops.formats.lance.log.region_writer import RegionWriter
from memwal_ops.formats.lance.regions.manifests import NoRegionManifestError, list_regions
from memwal_ops.formats.lance.regions.specs import by_region, region_values
from memwal_ops.formats.lance.table import Table, open_lance_table

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping
    from types import TracebackType
    from uuid import UUID

    import pyarrow as pa

    from memwal_ops.formats.lance.wire.region_manifest import RegionManifest

_DEFAULT_LIMITS = WriterLimits()


class RegionRouter:
    """Write rows and deletes to the regions of a table's spec. A context manager: flushes and closes on exit.

    A region is claimed when its first row arrives. A region has one writer: a second router takes its regions over,
    and the first router is fenced at its next write.
    """

    def __init__(
        self,
        table: Table | str | os.PathLike[str],
        *,
        spec_id: int | None = None,
        durable: bool = True,
        limits: WriterLimits = _DEFAULT_LIMITS,
        storage_options: Mapping[str, str] | None = None,
        branch: str | None = None,
    ) -> None:
        """Find the regions of a spec (S0-018, S0-081), by default of the newest one, with the highest id.

        The table is given at any version, or by its URI, with ``storage_options`` and ``branch`` as
        :func:`memwal_ops.open_table` takes them. Columns added later are seen by the next router. ``durable`` and
        ``limits`` are those of each :class:`RegionWriter`.

        Raises ``InvalidUsageError``: the table has no such spec; or a region outside of the spec may hold or accept
        rows whose keys the spec routes to other regions.
        """
        boolean("durable", durable)
        table = table if isinstance(table, Table) else open_lance_table(table, storage_options, branch)
        table.require_memwal("A writer")
        specs = [spec.spec_id for spec in table.index.region_specs]
        if not specs and spec_id is None:
            raise InvalidUsageError(
                f"{table.location.uri} has no region specs, so rows cannot be routed to regions.",
                remedy="Write to one region with RegionWriter(URI); or add specs to a new table with memwal-ops init. "
                "If the MemWAL index was removed and made again, memwal-ops init URI restores the specs that it had.",
            )
        self._table = table
        self._spec = table_spec(table, max(specs) if spec_id is None else spec_id)
        self._columns = region_columns(table)
        self._durable, self._limits = durable, limits
        self._regions: dict[tuple[Any, ...], UUID] = {}
        self._sealed: set[UUID] = set()
        self._writers: dict[tuple[Any, ...], RegionWriter] = {}
        self._lock = threading.Lock()
        self._checked = {*table.regions.region_ids}
        for region_id in table.regions.region_ids:
            self._register(self._manifest_of(region_id))

    def _manifest_of(self, region_id: UUID) -> RegionManifest:
        """The newest manifest of a region; of one that is damaged, an older one, if that shows where rows are routed.

        Spec and values of a region never change. No writer of it can claim it, so that only rows that are routed there
        are refused. Of a region of another spec, or one that was sealed, its rows would have to be known.
        """
        manifests = self._table.region(region_id)
        try:
            return manifests.latest(checked=True)
        except (RegionManifestCorruptError, RegionManifestGapError):
            for version in reversed(manifests.versions()):
                with suppress(RegionManifestCorruptError):
                    older = manifests.read(version)
                    if older.region_spec_id == self._spec.spec_id and not older.sealed:
                        return older
                    break
            raise

    @property
    def writers(self) -> dict[tuple[Any, ...], RegionWriter]:
        """Writers opened so far, by region values."""
        with self._lock:
            return dict(self._writers)

    def put(self, rows: pa.Table) -> None:
        """Upsert rows of any regions. The rows of a region are written atomically; those of several regions are not.

        Raises:
            InvalidUsageError: as :meth:`RegionWriter.put`; nothing was written.
            WriterFencedError: another router or writer has one of the regions. Rows of other regions may be written.
            StorageError: it is not known which rows were written; put them again.
        """
        self._write(self._columns.put_rows(rows))

    def delete(self, keys: pa.Table) -> None:
        """Delete by key; raises as :meth:`put`."""
        self._write(self._columns.delete_rows(keys))

    def flush(self) -> None:
        """Flush every writer that has rows; raises as :meth:`RegionWriter.flush`."""
        for writer in self.writers.values():
            writer.flush()

    def close(self) -> None:
        """Close all writers, even if one of them fails."""
        self.__exit__(None, None, None)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Exit all writers, as their own ``with`` blocks would."""
        with ExitStack() as closing:
            for writer in self.writers.values():
                closing.callback(writer.__exit__, kind, error, trace)

    def _write(self, rows: pa.Table) -> None:
        for values, numbers in by_region(region_values(self._spec, rows)):
            part = rows if len(numbers) == rows.num_rows else rows.take(numbers)
            self._writer(values).put_routed(part)

    def _writer(self, values: tuple[Any, ...]) -> RegionWriter:
        with self._lock:
            if values not in self._writers:
                known, is_new = RegionValues(self._spec, values), values not in self._regions
                writer = RegionWriter(
                    self._table, self._region_of(known), durable=self._durable, limits=self._limits, values=known
                )
                if is_new:
                    self._refuse_other_specs(writer)
                self._writers[values] = writer
            return self._writers[values]

    def _region_of(self, values: RegionValues) -> UUID:
        """The region with these values. The id of a new one is derived from its values, not random.

        Timeline with random ids: two routers see no region for bucket 3; each creates one, and both accept rows of the
        same keys. With a derived id the second claim finds the first one's region, and fences its writer.
        """
        number = 0
        while values.values not in self._regions:
            derived = values.region_id(number)
            if derived not in self._sealed:
                self._regions[values.values] = derived
            number += 1
        return self._regions[values.values]

    def _refuse_other_specs(self, writer: RegionWriter) -> None:
        """Seal a region that was just created, and raise, if regions of another spec now accept rows.

        Timeline otherwise: this router begins with spec 1; spec 2 is added, all regions are sealed and merged, and a
        router of spec 2 begins; this one creates another region of spec 1: a key is in two regions, and which of its
        rows stays depends on the order of merges. The region is claimed first and others are listed then, as every
        router does: at least one of two sees the other.
        """
        for region_id in list_regions(self._table.store).region_ids:
            if region_id in self._checked or region_id == writer.region_id:
                continue
            try:
                manifest = self._table.region(region_id).latest(checked=True)
            except NoRegionManifestError:
                continue  # being created: its router lists this one
            if manifest.region_spec_id != self._spec.spec_id and not manifest.sealed:
                writer.seal()
                raise InvalidUsageError(
                    f"Region {region_id} of spec {manifest.region_spec_id} accepts rows since this router of spec "
                    f"{self._spec.spec_id} was opened, so it cannot create another region.",
                    remedy="Open a new RegionRouter, and write the rows again.",
                )
            self._checked.add(region_id)
        self._checked.add(writer.region_id)

    def _register(self, manifest: RegionManifest) -> None:
        is_own_spec = manifest.region_spec_id == self._spec.spec_id
        waits = (manifest.sealed or not is_own_spec) and self._has_unmerged(manifest)
        if manifest.sealed and not waits:
            self._sealed.add(manifest.region_id)
            return
        if manifest.sealed or not is_own_spec:
            raise InvalidUsageError(
                f"Region {manifest.region_id} is {'sealed' if manifest.sealed else 'of another spec'}, and "
                f"{'has rows that are not merged' if waits else 'may still accept rows'}: spec {self._spec.spec_id} "
                "routes rows of the same keys to other regions, and the older ones could be merged last.",
                remedy="Merge, and try again."
                if manifest.sealed
                else "Write to that region: RegionWriter(URI, REGION); or seal() it with that writer, and merge.",
            )
        region_values = region_values_of(self._table, manifest)
        values = () if region_values is None else region_values.values
        if values in self._regions:
            raise InvalidUsageError(
                f"The regions {self._regions[values]} and {manifest.region_id} have the same values {values}, and rows "
                "of one key may be in both.",
                remedy="Find out which program created them, and write no more before they are merged.",
            )
        self._regions[values] = manifest.region_id

    def _has_unmerged(self, manifest: RegionManifest) -> bool:
        merged = self._table.index.merged_generations.get(manifest.region_id, 0)
        return bool(manifest.unmerged(merged)) or has_unflushed_rows(self._table, manifest)
