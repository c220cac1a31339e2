"""``memwal_ops.memwal.read``: base, generations and logs as one table, in each state of the rows."""

from __future__ import annotations

from pathlib import Path

import lance
import pytest

from memwal_ops import run_job
from memwal_ops.errors import InvalidFormatError, InvalidUsageError
from memwal_ops.formats.lance.log.region_files import entry_path
from memwal_ops.memwal import RegionWriter, read
from tests.integration.formats.lance.log.test_region_writer import REGION, keys, made, rows
from tests.support.tables.reading import read_base


@pytest.fixture
def uri(tmp_path: Path) -> str:
    return made(tmp_path)


def stamps(uri: str, consistency: str = "strong", **options: str) -> dict[int, int]:
    found = read(uri, consistency).scan(**options).to_table()
    assert found.num_rows == len({*found["id"].to_pylist()}), "each key once"
    return {row["id"]: row["n"] - row["id"] * 10 for row in found.to_pylist()}


@pytest.mark.req("S0-019", "S0-191", "S0-192", "S0-193", "S0-195", "S0-196", "S0-198")
def test_every_state_of_a_row(uri: str) -> None:
    assert stamps(uri) == {1: 0, 2: 0, 3: 0}
    one = RegionWriter(uri, REGION)
    one.put(rows(1, 4, 1, stamp=1))
    assert stamps(uri) == {1: 1, 2: 0, 3: 0, 4: 1}, "in the log"
    assert stamps(uri, "snapshot") == {1: 0, 2: 0, 3: 0}
    one.delete(keys(2))
    one.flush()
    one.put(rows(5, 4, stamp=2))
    one.delete(keys(1))
    expected = {3: 0, 4: 2, 5: 2}
    assert stamps(uri) == expected, "in a generation, and over it in the log"
    run_job(uri, "snapshot")
    assert stamps(uri, "snapshot") == {1: 1, 3: 0, 4: 1}
    one.flush()
    assert stamps(uri) == expected, "two generations"
    assert stamps(uri, "snapshot") == {1: 1, 3: 0, 4: 1}, "the snapshot's moment"
    run_job(uri, "merge")
    assert stamps(uri) == stamps(uri, "snapshot") == expected, "merged, and still listed"
    assert read(uri).scan().to_table().sort_by("id").to_pylist() == [
        row for _, row in sorted(read_base(uri).items())
    ], "all columns"
    one.put(rows(4, stamp=3))
    one.close()
    assert stamps(uri) == {**expected, 4: 3}


def test_columns_and_filters(uri: str) -> None:
    one = RegionWriter(uri, REGION)
    one.put(rows(2, stamp=5))
    one.flush()
    one.put(rows(4, stamp=5))
    found = read(uri).scan(["n"], "n % 10 = 5").to_table()
    assert sorted(found["n"].to_pylist()) == [25, 45]
    assert found.column_names == ["n"]
    assert stamps(uri, filter="n = 20") == {}, "the row that was replaced does not come back"
    assert sorted(stamps(uri, filter="s.a = '1/0' OR id = 4")) == [1, 4]
    with pytest.raises(InvalidUsageError, match="no column gone"):
        read(uri).scan(["gone"]).to_table()
    with pytest.raises(InvalidUsageError, match="Unknown consistency"):
        read(uri, "some")  # type: ignore[arg-type]


def test_what_cannot_be_read_is_refused(uri: str) -> None:
    one = RegionWriter(uri, REGION)
    one.put(rows(4))
    lance.dataset(uri).drop_columns(["n"])
    assert sorted(read(uri).scan(["id"]).to_table()["id"].to_pylist()) == [1, 2, 3, 4]
    one.flush()
    assert sorted(read(uri).scan(["id"]).to_table()["id"].to_pylist()) == [1, 2, 3, 4]
    with RegionWriter(uri, REGION) as two:
        two.put(rows(5).drop_columns(["n"]))
        path = Path(uri, entry_path(REGION, 2))
        data = path.read_bytes()
        path.write_bytes(data[:-40])
        assert sorted(read(uri).scan(["id"]).to_table()["id"].to_pylist()) == [1, 2, 3, 4], "never acknowledged"
        two.put(rows(6).drop_columns(["n"]))
        with pytest.raises(InvalidFormatError, match="WAL entry"):
            read(uri).scan(["id"]).to_table()
        path.write_bytes(data)
    assert sorted(read(uri).scan(["id"]).to_table()["id"].to_pylist()) == [1, 2, 3, 4, 5, 6]
