"""Why `compact` does not copy pages as they are (`compaction_mode="try_binary_copy"`), although the rows are the same.

What is joined stays in the pages of its appends: the file is larger, and a scan reads a page of each column for each
append that the file is made of.
"""

from __future__ import annotations

from pathlib import Path

import lance
import pyarrow as pa
import pytest
from lance.file import LanceFileReader

APPENDS, ROWS = 20, 25


def compacted(uri: str, mode: str, version: str) -> tuple[int, list[int], list[object]]:
    """The size of the one file, its pages by column, and all rows."""
    for first in range(0, APPENDS * ROWS, ROWS):
        rows = pa.table({"id": range(first, first + ROWS), "text": [f"word{at % 7} of {at}" for at in range(ROWS)]})
        lance.write_dataset(rows, uri, mode="append" if first else "create", data_storage_version=version)
    lance.dataset(uri).optimize.compact_files(compaction_mode=mode)
    [fragment] = lance.dataset(uri).get_fragments()
    [file] = fragment.data_files()
    path = Path(uri, "data", file.path)
    pages = [len(column.pages) for column in LanceFileReader(str(path)).metadata().columns]
    return path.stat().st_size, pages, lance.dataset(uri).to_table().to_pylist()


@pytest.mark.sampled(1)
@pytest.mark.parametrize("version", ["2.0", "2.1", "2.2"])
def test_what_is_copied_keeps_the_pages_of_each_append(tmp_path: Path, version: str) -> None:
    size, pages, rows = compacted(str(tmp_path / "encoded.lance"), "reencode", version)
    copied_size, copied_pages, copied_rows = compacted(str(tmp_path / "copied.lance"), "force_binary_copy", version)
    assert copied_rows == rows
    assert (pages, copied_pages) == ([1, 1], [APPENDS, APPENDS])
    assert copied_size > 1.1 * size


def test_nothing_is_copied_where_rows_are_deleted(tmp_path: Path) -> None:
    uri = str(tmp_path / "t.lance")
    for first in (0, ROWS):
        rows = pa.table({"id": range(first, first + ROWS)})
        lance.write_dataset(rows, uri, mode="append" if first else "create")
    lance.dataset(uri).delete("id = 7")
    with pytest.raises(OSError, match="binary copy is not supported"):
        lance.dataset(uri).optimize.compact_files(compaction_mode="force_binary_copy")
