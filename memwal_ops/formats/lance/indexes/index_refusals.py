"""Decide which indexes pylance must not update, although they are behind."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memwal_ops.errors import IndexesBehindError
from memwal_ops.formats.lance.indexes.codebook import read_codebook
from memwal_ops.formats.lance.indexes.index_faults import refused_by

if TYPE_CHECKING:
    from memwal_ops.formats.lance.indexes.base_indexes import BaseIndex
    from memwal_ops.formats.lance.table import Table


class IndexUpgradeRefusedError(IndexesBehindError):
    """An update would upgrade an index. Releases that write the table do not maintain its new version."""

    reason = "index_upgrade_refused"
    remedy = (
        "Update it with the release that writes the table: dataset.optimize.optimize_indices(), in LanceDB "
        "table.optimize(). Once no older release writes it any more, run memwal-ops catchup URI --allow-upgrade, with "
        "--rebuild --index NAME if it answers wrongly."
    )


class DotProductIndexError(IndexesBehindError):
    """An update would make an index useless. It has product quantization and the metric dot."""

    reason = "dot_product_index"


def refusal(
    table: Table, index: BaseIndex, *, allow_upgrade: bool = False, anew: bool = False
) -> IndexesBehindError | None:
    """Why an index must not be updated, or with ``anew`` not built anew; None: it may be.

    Requests: those of its codebook, if it is a vector index; else those of
    :func:`memwal_ops.formats.lance.indexes.index_faults.known_faults`, if pylance would write another version of it.

    Raises:
        UnsupportedFeatureError, StorageError: see :func:`memwal_ops.formats.lance.indexes.codebook.read_codebook`.
    """
    older = None if allow_upgrade else refused_by(table, index)
    if older is not None:
        return IndexUpgradeRefusedError(
            f"Index {index.name} would get a version that releases before 14.0 do not maintain: they ignore it, drop "
            f"it, or make it lose rows. {older.release[:1].upper()}{older.release[1:]} wrote version {older.version} "
            "of the table."
        )
    emptied = index.covered.isdisjoint(fragment.id for fragment in table.manifest.manifest.fragments)
    return None if anew or emptied else dot_product_error(table, index)  # where all rows get new codes, it is right


def dot_product_error(table: Table, index: BaseIndex) -> DotProductIndexError | None:
    """The error for an index with product quantization and the metric dot; None for others. Raises: as above."""
    if not index.is_vector or not any(read_codebook(table, entry).is_dot_product for entry in index.segments):
        return None
    return DotProductIndexError(
        f"Index {index.name} is {index.type} with the metric dot: rows that pylance adds to it hide all others.",
        remedy=f"Build it anew: memwal-ops catchup URI --index {index.name} --rebuild",
    )
