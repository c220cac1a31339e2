"""Refusals that are right on a table to which nothing happened, each with its reason."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from tests.campaigns.pairs.dimensions import HASHED, SPECS

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    Values = Mapping[str, str]


def _old(row: Values) -> bool:
    return row["writer"] != "pylance 14"


def _modelled(row: Values) -> bool:
    return row["layout"] not in {"none", "legacy"} and row["vector_index"] not in {"none", "IVF_PQ", "IVF_HNSW_PQ"}


#: The job or writer, the reason of the error or the decision, words of its text, of which rows, and why that is right.
REFUSALS: tuple[tuple[str, str, str, Callable[[Values], bool], str], ...] = (
    (".*", "no_memwal_index", "does not apply", lambda row: row["layout"] == "none", "there is no log"),
    (".*", "legacy_layout|invalid_usage", "", lambda row: row["layout"] == "legacy", "not of a legacy table"),
    (
        "writer legacy_log", "not_a_lance_table", "", lambda row: row["layout"] == "legacy",
        "it was migrated, or a commit of pylance dropped the legacy index",
    ),
    (
        "catchup.*|maintain.*|erase", "incomplete", "index_upgrade_refused", _old,
        "older releases write it: docs/upstream.md",
    ),
    (
        "catchup_rebuild|maintain.*|erase", "incomplete|held", "cannot be built anew with its codebook", _modelled,
        "pylance takes no such model; the remedy makes another index",
    ),
    (
        "catchup.*|maintain.*|erase", "incomplete", "dot_product_index",
        lambda row: row["vector"] == "float32_dot" and row["vector_index"].endswith("PQ"),
        "pylance's updates hide rows: docs/upstream.md",
    ),
    (
        "erase", "held|waiting|partial", "", lambda row: row["holder"] != "none" or row["place"] != "root",
        "a holder keeps such a row, or versions are young",
    ),
    (
        ".*", "unsupported_feature|incomplete", "dictionary columns|stable row ids",
        lambda row: row["layout"] == "legacy",
        "no rows are merged into such a table as it is",
    ),
    ("erase", "held", "HELD BY MemTable", lambda row: row["layout"] == "legacy", "no job of Lance deletes one"),
    ("erase", "held", "not flushed: a writer replays", lambda row: row["layout"] in SPECS, "its row is in the log"),
    (
        "catchup|maintain.*|erase", "incomplete|held", "codebook",
        lambda row: row["writer"] == "pylance 7" and row["vector_index"] == "IVF_RQ",
        "its index has no query_estimator, and pylance 14 would add segments that have one; the remedy helps",
    ),
    ("erase", "held", "HELD BY hold", lambda _: True, "a step of the history took a hold"),
    (
        "erase", "unsupported_feature", "dictionary columns",
        lambda row: row["file"] == "legacy" and row["column"].startswith("dictionary"),
        "the values are inside of manifests, for good",
    ),
    (
        "migrate", "unsupported_feature", "pylance hashes no key of the type", lambda row: row["key"] not in HASHED,
        "no writer of the shard layout takes it",
    ),
    (
        "writer log", "unsupported_feature|invalid_usage", "layout|migrat", lambda row: row["job"] == "migrate",
        "of the other layout",
    ),
)  # fmt: skip


def why_refused(row: Values, name: str, reason: str, text: str) -> str | None:
    """Why a refusal is right; None if it is not."""
    for names, reasons, words, applies, why in REFUSALS:
        if re.fullmatch(names, name) and re.fullmatch(reasons, reason) and re.search(words, text) and applies(row):
            return why
    return None
