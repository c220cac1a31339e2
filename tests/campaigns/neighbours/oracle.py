"""Compare what pylance alone reads of a table with a dictionary of what was written; the project is not imported."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import lance
import pyarrow as pa
from lance.file import LanceFileReader

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from tests.campaigns.neighbours.program import Rows


def differences(found: Iterable[Sequence[str]], rows: Rows, where: str) -> list[str]:
    """How rows that were read differ from those that were written: lost, doubled, come back, or with another text."""
    rows, seen, wrong = dict(rows), set[str](), []
    for key, text in found:
        if key in seen:
            wrong.append(f"{key} twice")
        elif key not in rows:
            wrong.append(f"{key} is there")
        elif text != rows[key]:
            wrong.append(f"{key} has {text!r}, not {rows[key]!r}")
        seen.add(key)
    wrong += [f"{key} is lost" for key in rows if key not in seen]
    return [f"{where}: {len(wrong)} wrong, {', '.join(wrong[:3])}"] if wrong else []


def of_the_base(
    uri: str, columns: tuple[str, str], rows: Rows, sample: list[str], vectors: dict[str, list[float]]
) -> list[str]:
    """What the newest version has wrong: rows by a scan, a sample by the index of keys, and by that of vectors."""
    opened, (key, text) = lance.dataset(uri), columns

    def pairs(table: pa.Table) -> list[list[str]]:
        return [list(row) for row in zip(table[key].to_pylist(), table[text].to_pylist(), strict=True)]

    scanned = opened.scanner(columns=[key, text], use_scalar_index=False).to_table()
    wrong = differences(pairs(scanned), rows, "a scan by pylance")
    where = f"{key} IN ({', '.join(repr(one) for one in sample)})"
    indexed = opened.to_table(columns=[key, text], filter=where)
    wrong += differences(pairs(indexed), {one: rows[one] for one in sample if one in rows}, "pylance by keys")
    for one, vector in vectors.items():
        query = {"column": "vector", "q": pa.array(vector, pa.float32()), "k": 1, "nprobes": 2}
        nearest = opened.to_table(columns=[key], nearest=query)[key].to_pylist()
        wrong += [f"pylance by vectors: {nearest} for {one}"] if nearest != [one] else []
    return wrong


def key_indexes_with_rows_twice(uri: str) -> list[str]:
    """Key indexes of generations that Lance up to 12 cannot read; our jobs write none."""
    paths = map(str, Path(uri).glob("_mem_wal/*/*_gen_*/_pk_index/page_data.lance"))
    read = ((path, LanceFileReader(path).read_all().to_table()["ids"]) for path in paths)
    return [path for path, ids in read if len(ids.unique()) < len(ids)]
