"""A strong read of a table that pylance's own writers write: it includes the log, also of writers that are gone."""

from __future__ import annotations

import uuid
from pathlib import Path
from typing import Any

import lance
import pyarrow as pa
import pytest

from memwal_ops.errors import WalCorruptError
from memwal_ops.memwal import read

SCHEMA = pa.schema(
    [
        pa.field("id", pa.int64(), nullable=False, metadata={"lance-schema:unenforced-primary-key": "true"}),
        pa.field("text", pa.string()),
        pa.field("nested", pa.struct([("number", pa.int32()), ("words", pa.list_(pa.string()))])),
        pa.field("vector", pa.list_(pa.float32(), 2)),
    ]
)
REGION = str(uuid.UUID(int=7))


def rows(keys: range, text: str) -> pa.Table:
    return pa.Table.from_pylist(
        [{"id": key, "text": text, "nested": {"number": key, "words": [text]}, "vector": [key, 0.5]} for key in keys],
        SCHEMA,
    )


@pytest.fixture
def uri(tmp_path: Path) -> str:
    made = str(tmp_path / "t.lance")
    lance.write_dataset(rows(range(10), "base"), made).initialize_mem_wal(unsharded=True)
    return made


def writer(uri: str) -> Any:
    return lance.dataset(uri).mem_wal_writer(REGION)


def texts(uri: str) -> dict[int, str]:
    found = read(uri).scan().to_table()
    assert found.num_rows == len({*found["id"].to_pylist()}), "each key once"
    return dict(zip(found["id"].to_pylist(), found["text"].to_pylist(), strict=True))


def entries(uri: str) -> list[Path]:
    return sorted(Path(uri, "_mem_wal", REGION, "wal").glob("*.arrow"))


def test_claims_without_rows_are_nothing_to_read(uri: str) -> None:
    for _ in range(3):
        writer(uri).close()
    assert entries(uri), "entries that no generation has"
    assert texts(uri) == dict.fromkeys(range(10), "base")


def test_rows_of_the_log_are_read(uri: str) -> None:
    """Put and deleted, flushed and put again, by writers that were never closed; the last write of a key counts."""
    first = writer(uri)
    first.put(rows(range(5, 15), "first"))
    first.delete(pa.table({"id": pa.array([0, 6])}))
    expected = dict.fromkeys(range(1, 5), "base") | dict.fromkeys([5, *range(7, 15)], "first")
    assert texts(uri) == expected
    second = writer(uri)
    second.put(rows(range(6, 8), "second"))
    expected |= {6: "second", 7: "second"}
    assert texts(uri) == expected
    whole = read(uri).get([7]).to_pylist()
    assert whole == rows(range(7, 8), "second").to_pylist()
    second.close()
    assert texts(uri) == expected
    third = writer(uri)
    third.delete(pa.table({"id": pa.array([7])}))
    assert texts(uri) == {key: text for key, text in expected.items() if key != 7}
    assert read(uri, consistency="manifests").scan().to_table().num_rows == len(expected)


def test_rows_of_before_a_column_was_added_have_null(uri: str) -> None:
    one = writer(uri)
    one.put(rows(range(3), "logged"))
    lance.dataset(uri).add_columns(pa.field("more", pa.int64()))
    assert texts(uri) == dict.fromkeys(range(3), "logged") | dict.fromkeys(range(3, 10), "base")
    writer(uri).close()
    assert texts(uri) == dict.fromkeys(range(3), "logged") | dict.fromkeys(range(3, 10), "base")


@pytest.mark.parametrize("data", [b"", b"ARROW", None])
def test_a_damaged_entry_is_an_error_and_no_missing_row(uri: str, data: bytes | None) -> None:
    one = writer(uri)
    one.put(rows(range(3), "logged"))
    one.put(rows(range(3), "again"))
    path = Path(uri, "_mem_wal", REGION, "wal", f"{1 << 63:064b}.arrow")
    assert path in entries(uri)
    if data is None:
        path.unlink()
    else:
        path.write_bytes(data)
    with pytest.raises(WalCorruptError):
        texts(uri)
