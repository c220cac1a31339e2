"""The report of a migration of a namespace, as JSON and as text."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from memwal_ops.formats.zeppelin.attribute_columns import is_json
from memwal_ops.text import counted, grid, paragraph

if TYPE_CHECKING:
    from memwal_ops.formats.zeppelin.attribute_columns import Columns


class MigrateDecision(enum.StrEnum):
    """How a migration ended."""

    PLANNED = "planned"
    MIGRATED = "migrated"
    NOTHING_TO_MIGRATE = "nothing_to_migrate"


@dataclass
class MigrateReport:
    """Report of a migration.

    Attributes:
        uri: of the namespace.
        target: URI of the table.
        version: revision of the namespace that the table has.
        engine: where rows were read and compared, ``local`` or ``spark``.
        target_version: the table's version.
        rows: live rows of the namespace; None where they were not counted.
        upserts: rows that were written, or would be.
        deletes: rows that were deleted, or would be.
        rounds: how often the namespace was read until no changes were left.
        columns: of the table.
        not_carried: parts of the namespace that are not migrated.
        compared: rows that were compared at the end; None: none were.
    """

    uri: str
    target: str
    version: int
    engine: str = "local"
    decision: MigrateDecision = MigrateDecision.NOTHING_TO_MIGRATE
    target_version: int = 0
    rows: int | None = None
    upserts: int = 0
    deletes: int = 0
    rounds: int = 0
    columns: Columns | None = None
    not_carried: list[str] = field(default_factory=list)
    compared: int | None = None
    seconds: float = 0.0

    exit_code = 0

    def to_json(self) -> dict[str, Any]:
        """The document of ``migrate --json``."""
        columns = {} if self.columns is None else self.columns.by_attribute
        return {
            "decision": self.decision.value,
            "engine": self.engine,
            "target": self.target,
            "version": self.version,
            "target_version": self.target_version,
            "rows": self.rows,
            "upserts": self.upserts,
            "deletes": self.deletes,
            "rounds": self.rounds,
            "columns": [
                {"attribute": name, "column": one.name, "type": str(one.type), "json": is_json(one)}
                for name, one in columns.items()
            ],
            "not_carried": self.not_carried,
            "compared_rows": self.compared,
            "seconds": round(self.seconds, 6),
        }

    def describe(self) -> str:
        """The report as text for people."""
        rows = counted(self.rows or 0, "row")
        work = f"{counted(self.upserts, 'row')} to write, {self.deletes:,} to delete"
        texts = {
            "planned": f"would migrate {self.uri} into {self.target}: {work}.",
            "migrated": f"{self.target} has the {rows} of {self.uri} in version "
            f"{self.target_version}; all of them were compared.",
            "nothing_to_migrate": f"{self.uri} has no rows."
            if self.compared is None
            else f"{self.target} has the {rows} of {self.uri} already; all of them were compared.",
        }
        parts = [paragraph(f"{self.decision}: {texts[self.decision]}")]
        if self.columns is not None and self.columns.by_attribute:
            columns = [
                (name, one.name, "JSON text, as its values are of several types" if is_json(one) else str(one.type))
                for name, one in self.columns.by_attribute.items()
            ]
            parts.append(grid(("attribute", "column", "type"), columns, words=("attribute", "column", "type")))
        parts += [paragraph(f"Not carried over: {one}.") for one in self.not_carried]
        if self.decision is MigrateDecision.PLANNED:
            parts.append("Nothing was changed; add --apply to do it.")
        return "\n\n".join(parts)
