"""Check that every file that a retained snapshot names exists with its size, and that all counts agree.

A manifest or data file that several snapshots share is checked once. The listing is of the table's folder, and a file
that it lacks is asked for again: it may have been written during the listing. Files elsewhere are asked for one by one.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
from pyiceberg.manifest import FileFormat, ManifestEntryStatus

from memwal_iceberg.files import Contents, Missing, entries_of, live, manifests_of
from memwal_ops.core.options import VerificationOptions
from memwal_ops.core.verification import Inconsistencies, Inconsistency, RowsRead, Severity, VerifyReport

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pyiceberg.manifest import DataFile, ManifestEntry, ManifestFile
    from pyiceberg.table.snapshots import Snapshot

    from memwal_iceberg.table import Table
    from memwal_ops.core.context import RunContext

_LOST = "Readers of the snapshots that name it fail."
_RESTORE = "Restore it from a backup, or expire the snapshots that name it if none is current."
_WRONG = "Engines plan and prune by these counts, and may skip rows or plan badly."
_REWRITE = "Rewrite the manifests (rewrite_manifests), after the rows were compared with a backup."


@dataclass
class Verification:
    """A run on one table."""

    table: Table
    findings: Inconsistencies
    deep: bool
    context: RunContext
    sizes: Mapping[str, int]
    entries: dict[str, list[ManifestEntry] | None] = field(default_factory=dict)
    checked: Counter[str] = field(default_factory=Counter)
    seen: set[str] = field(default_factory=set)

    def snapshot(self, snapshot: Snapshot) -> None:
        """Check a manifest list, the manifests of it, and their files."""
        self.checked["snapshots"] += 1
        try:
            manifests = manifests_of(self.table, snapshot)
        except Missing as error:
            self._error("manifest_list", f"snapshot {snapshot.snapshot_id}", str(error), _LOST, _RESTORE)
            return
        found = [self._manifest(one) for one in manifests]
        if all(entries is not None for entries in found):
            files = [one.data_file for entries in found for one in live(entries or [])]
            self._summary(snapshot, Contents.of(files))

    def _manifest(self, manifest: ManifestFile) -> list[ManifestEntry] | None:
        """Check a manifest, once, and each file that it names; its entries, or None if it cannot be read."""
        path = manifest.manifest_path
        if path not in self.entries:
            self.context.checkpoint()
            self.checked["manifests"] += 1
            self.entries[path] = None
            if self._exists("manifest", path, manifest.manifest_length):
                try:
                    self.entries[path] = entries_of(self.table, manifest)
                except Missing as error:
                    self._error("manifest", path, str(error), _LOST, _RESTORE)
            self._counts(manifest, self.entries[path] or [])
            for entry in live(self.entries[path] or []):
                self._file(entry.data_file)
        return self.entries[path]

    def _counts(self, manifest: ManifestFile, entries: list[ManifestEntry]) -> None:
        """Compare the counts in a manifest list with the entries of the manifest."""
        if self.entries[manifest.manifest_path] is None:
            return
        files, rows = Counter[Any](), Counter[Any]()
        for entry in entries:
            files[entry.status] += 1
            rows[entry.status] += entry.data_file.record_count
        for status, name in (
            (ManifestEntryStatus.ADDED, "added"),
            (ManifestEntryStatus.EXISTING, "existing"),
            (ManifestEntryStatus.DELETED, "deleted"),
        ):
            said = (getattr(manifest, f"{name}_files_count"), getattr(manifest, f"{name}_rows_count"))
            if None not in said and said != (files[status], rows[status]):
                evidence = f"the list counts {said} {name} files and rows, it has {(files[status], rows[status])}"
                self._error("counts", manifest.manifest_path, evidence, _WRONG, _REWRITE)

    def _file(self, file: DataFile) -> None:
        if file.file_path in self.seen:
            return
        self.seen.add(file.file_path)
        self.checked["files"] += 1
        if self._exists("file", file.file_path, file.file_size_in_bytes) and self.deep:
            self._rows(file)

    def _exists(self, check: str, uri: str, size: int) -> bool:
        """Whether a file exists with its size; a finding if not."""
        found = self._size(uri)
        if found == size:
            return True
        evidence = "it is missing" if found is None else f"it has {found} bytes, not {size}"
        self._error(check, uri, evidence, _LOST, _RESTORE)
        return False

    def _size(self, uri: str) -> int | None:
        path = self.table.path_of(uri)
        if path is None:
            file = self.table.iceberg.io.new_input(uri)
            return len(file) if file.exists() else None
        if path in self.sizes:
            return self.sizes[path]
        meta = self.table.store.head(path)
        return None if meta is None else meta.size

    def _rows(self, file: DataFile) -> None:
        """Read all rows of a Parquet file."""
        if file.file_format != FileFormat.PARQUET:
            self.checked["files not read"] += 1
            return
        try:
            with self.table.iceberg.io.new_input(file.file_path).open() as stream, pq.ParquetFile(stream) as parquet:
                rows = 0
                for batch in parquet.iter_batches():
                    self.context.checkpoint()
                    rows += batch.num_rows
        except (OSError, pa.ArrowException) as error:
            self._error("rows", file.file_path, f"it cannot be read: {error}", _LOST, _RESTORE)
            return
        self.checked["rows"] += rows
        if rows != file.record_count:
            evidence = f"it has {rows} rows, not {file.record_count}"
            self._error("counts", file.file_path, evidence, _WRONG, _REWRITE)

    def _summary(self, snapshot: Snapshot, contents: Contents) -> None:
        """Compare the totals in a snapshot's summary with what its manifests name. A summary may have none."""
        summary = {} if snapshot.summary is None else snapshot.summary.additional_properties
        for key, counted in (
            ("total-data-files", contents.files),
            ("total-delete-files", contents.delete_files),
            ("total-records", contents.rows),
            ("total-files-size", contents.bytes),
        ):
            if key in summary and int(summary[key]) != counted:
                place, evidence = f"snapshot {snapshot.snapshot_id}", f"{key} is {summary[key]}, counted {counted}"
                remedy = "The next snapshot continues from these totals; correct what reports them."
                consequence = "Rows are read as before; engines and dashboards that use the totals are wrong."
                self.findings.add(Inconsistency(Severity.WARNING, "summary", place, evidence, consequence, remedy))

    def _error(self, check: str, place: str, evidence: str, consequence: str, remedy: str) -> None:
        self.findings.add(Inconsistency(Severity.ERROR, check, place, evidence, consequence, remedy))


def plan(table: Table, options: VerificationOptions, context: RunContext) -> VerifyReport:
    sizes = {meta.path: meta.size for meta in table.store.list()}
    run = Verification(table, Inconsistencies(options.max_findings), options.deep, context, sizes)
    for snapshot in table.iceberg.metadata.snapshots:
        run.snapshot(snapshot)
    read = RowsRead.ALL if options.deep else RowsRead.NONE
    return VerifyReport(table.revision, run.findings, dict(run.checked), rows_read=read)


apply = plan
