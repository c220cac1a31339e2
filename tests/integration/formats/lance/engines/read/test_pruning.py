"""Regions that cannot have the rows that are asked for are not read, and no row is missed for it (S0-200)."""

from __future__ import annotations

from dataclasses import replace
from datetime import date, datetime, timedelta
from typing import TYPE_CHECKING, Any

import lance
import pyarrow as pa
import pytest

from memwal_ops import open_table, run_job
from memwal_ops.errors import GenerationMissingError
from memwal_ops.formats.lance.engines.read.pruning import WantedRows
from memwal_ops.formats.lance.generations.region_identity import RegionValues
from memwal_ops.formats.lance.regions.specs import region_values
from memwal_ops.memwal import RegionField, RegionRouter, RegionSpec, create_mem_wal, read
from tests.support.tables.schemas import PRIMARY_KEY

if TYPE_CHECKING:
    from pathlib import Path

    from memwal_ops.formats.lance.engines.read.reader import Reader


def key(name: str, kind: pa.DataType, place: int) -> pa.Field:
    metadata = {**PRIMARY_KEY, b"lance-schema:unenforced-primary-key:position": str(place).encode()}
    return pa.field(name, kind, nullable=False, metadata=metadata)


SCHEMA = pa.schema(
    [
        key("user", pa.int64(), 1),
        key("day", pa.date32(), 2),
        key("name", pa.string(), 3),
        key("at", pa.timestamp("us"), 4),
        pa.field("n", pa.int32()),
    ]
)
START = datetime(2024, 11, 20, 5)


def rows(numbers: range, stamp: int = 0) -> pa.Table:
    made = [
        {
            "user": number % 40 - 10,
            "day": date(2024, 11, 20) + timedelta(days=9 * number),
            "name": f"{chr(97 + number % 7)}{number % 3}ä",
            "at": START + timedelta(hours=13 * number),
            "n": number * 10 + stamp,
        }
        for number in numbers
    ]
    return pa.Table.from_pylist(made, SCHEMA)


SPECS = [
    "bucket(user, 10)",
    "identity(user)",
    "truncate(user, 10)",
    "multi_bucket(user, name, 8)",
    "truncate(name, 1)",
    "year(day)",
    "month(day)",
    "day(day)",
    "year(at)",
    "month(at)",
    "hour(at)",
    "identity(name)",
    "identity(day)",
    "truncate(name, 2)",
]
FILTERS = [
    "user = 7",
    "user = -3",
    "user IN (1, 2, 30)",
    "user BETWEEN -7 AND -2",
    "user > 12",
    "user < 4 AND n > 100",
    "user = 7 AND name = 'd1ä'",
    "user = 7 OR user = 8",
    "user = 7 OR n = 0",
    "NOT user = 7",
    "user IS NULL",
    "name >= 'c' AND name < 'e'",
    "name = 'b0ä'",
    "name > 'f2ä'",
    "day = date '2024-12-17'",
    "day >= date '2025-01-01'",
    "day >= date '2025-03-01' AND day < date '2025-05-10'",
    "day >= date '2024-12-01' AND day < date '2025-02-10'",
    "at < timestamp '2024-12-25 00:00:00'",
    "at >= timestamp '2024-11-22 03:00:00' AND at <= timestamp '2024-11-22 20:00:00'",
    "at >= timestamp '2024-11-22 20:00:00' AND at <= timestamp '2024-11-23 02:00:00'",
    "user = 5 AND user = 6",
    "user = 1000000",
]
# For each spec a filter that leaves regions out, and one that must not.
USEFUL = {
    "bucket(user, 10)": ("user = 7", "user > 12"),
    "identity(user)": ("user > 12", "n > 12"),
    "truncate(user, 10)": ("user BETWEEN -7 AND -2", "NOT user = 7"),
    "multi_bucket(user, name, 8)": ("user = 7 AND name = 'd1ä'", "user = 7"),
    "truncate(name, 1)": ("name > 'f2ä'", "user = 7"),
    "year(day)": ("day >= date '2025-01-01'", "at < timestamp '2024-12-25 00:00:00'"),
    "month(day)": ("day >= date '2025-03-01' AND day < date '2025-05-10'", "day >= date '2025-01-01'"),
    "day(day)": ("day = date '2024-12-17'", "day >= date '2025-03-01' AND day < date '2025-05-10'"),
    "year(at)": ("at < timestamp '2024-12-25 00:00:00'", "user = 7"),
    "month(at)": ("at < timestamp '2024-12-25 00:00:00' AND at > timestamp '2024-12-05 00:00:00'", "user = 7"),
    "hour(at)": (
        "at >= timestamp '2024-11-22 03:00:00' AND at <= timestamp '2024-11-22 20:00:00'",
        "at >= timestamp '2024-11-22 20:00:00' AND at <= timestamp '2024-11-23 02:00:00'",
    ),
    "identity(name)": ("name >= 'c' AND name < 'e'", "user = 7"),
    "identity(day)": ("day = date '2024-12-17'", "user = 7"),
    "truncate(name, 2)": ("name = 'b0ä'", "name IS NOT NULL"),
}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> str:
    uri = str(tmp_path_factory.mktemp("base") / "t.lance")
    lance.write_dataset(rows(range(20)), uri)
    create_mem_wal(uri, [RegionSpec((RegionField.parse(one),)) for one in SPECS])
    return uri


@pytest.mark.sampled(5)
@pytest.mark.req("S0-200")
@pytest.mark.parametrize("text", SPECS)
def test_no_region_that_has_a_row_is_left_out(base: str, text: str) -> None:
    """Per spec and filter: every region value of a row that Lance lets through may be in, and others are out."""
    table, everything = read(base).table, rows(range(160))
    one = RegionField.parse(text)
    one = RegionField(one.field_id, one.sources, one.transform, None, _result_type(base, one.field_id), one.parameters)
    spec = RegionSpec((one,), 1)
    values = {value for (value,) in zip(region_values(spec, everything).column(0).to_pylist(), strict=True)}
    whole = lance.write_dataset(everything, "memory://")
    for condition in [*FILTERS, *USEFUL[text]]:
        wanted = WantedRows(table, condition)
        kept = {value for value in values if wanted.may_be_in(RegionValues(spec, (value,)))}
        matching = whole.to_table(filter=condition).cast(SCHEMA)
        assert kept >= {*region_values(spec, matching).column(0).to_pylist()}, condition
        assert wanted.may_be_in(RegionValues(spec, (None,))) or not matching.num_rows or kept != values, (
            "NULL: in doubt, in"
        )
        if condition == USEFUL[text][0]:
            assert len(kept) < len(values), condition
        if condition == USEFUL[text][1]:
            assert kept == values, condition


def _result_type(uri: str, name: str) -> str:
    (found,) = {
        one.result_type for spec in read(uri).table.index.region_specs for one in spec.fields if one.field_id == name
    }
    return str(found)


@pytest.fixture(scope="module")
def routed(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[tuple[Any, ...], int]]:
    """Ten regions by bucket, with generations and a log; and the live rows."""
    uri = str(tmp_path_factory.mktemp("routed") / "t.lance")
    lance.write_dataset(rows(range(60)), uri)
    create_mem_wal(uri, [RegionSpec((RegionField.parse("bucket(user, 10)"),))])
    with RegionRouter(uri) as router:
        router.put(rows(range(40, 100), 1))
        router.flush()
        router.delete(rows(range(90, 95)).drop_columns(["n"]))
    with RegionRouter(uri) as router:
        router.put(rows(range(95, 105), 2))
        for writer in router.writers.values():
            writer._closed = True  # what is in the log stays there
    live = [*rows(range(40)).to_pylist(), *rows(range(40, 90), 1).to_pylist(), *rows(range(95, 105), 2).to_pylist()]
    return uri, {(row["user"], row["day"], row["name"], row["at"]): row["n"] for row in live}


def scanned(reader: Reader, condition: str) -> dict[tuple[Any, ...], int]:
    found = reader.scan(filter=condition).to_table().to_pylist()
    return {(row["user"], row["day"], row["name"], row["at"]): row["n"] for row in found}


@pytest.mark.sampled(1)
@pytest.mark.req("S0-200", "S0-004", "S0-109")
@pytest.mark.parametrize("consistency", ["strong", "snapshot"])
def test_a_scan_reads_the_regions_of_a_filter(routed: tuple[str, dict[tuple[Any, ...], int]], consistency: str) -> None:
    uri, live = routed
    if consistency == "snapshot":
        run_job(uri, "snapshot")
    reader = read(uri, consistency)  # type: ignore[arg-type]  # from the parameters
    whole = scanned(reader, "n >= 0")
    assert consistency == "snapshot" or whole == live
    for condition, check in {
        "user = 7": lambda row: row[0] == 7,
        "user IN (7, 8) AND day > date '2024-12-01'": lambda row: row[0] in {7, 8} and row[1] > date(2024, 12, 1),
        "user = 7 OR n = 1000": lambda row: row[0] == 7 or whole[row] == 1000,
    }.items():
        assert scanned(reader, condition) == {row: n for row, n in whole.items() if check(row)}
    first = reader.scan(filter="user = 7").explain().splitlines()[1]
    everything = reader.scan(filter="user = 7 OR n = 1000").explain().splitlines()[1]
    assert first == "  UnionExec: regions=1, pruned=9"
    assert everything == "  UnionExec"


@pytest.mark.req("S0-204", "S0-200")
def test_a_look_up_asks_the_region_of_a_key(routed: tuple[str, dict[tuple[Any, ...], int]]) -> None:
    uri, live = routed
    reader, names = read(uri), SCHEMA.names[:4]
    asked = rows(range(110)).select(names)
    found = reader.get(asked).to_pylist()
    assert {tuple(row[name] for name in names): row["n"] for row in found} == live
    assert "regions=1, pruned=9" in reader.explain_get(asked.slice(50, 1))
    assert "pruned" not in reader.explain_get(asked)


def test_a_spec_of_other_columns_leaves_nothing_out(base: str) -> None:
    """Its rows may change their region: the row that replaced one of the base may be in another one."""
    table = read(base).table
    spec = RegionSpec((RegionField("n_year", ("n",), "identity", None, "int32"),), 1)
    assert WantedRows(table, "n = 5").may_be_in(RegionValues(spec, (6,)))


def test_a_fault_of_one_region_stops_only_reads_of_its_rows(tmp_path: Path) -> None:
    uri = str(tmp_path / "t.lance")
    schema = pa.schema([key("id", pa.int64(), 1), pa.field("n", pa.int64())])
    lance.write_dataset(schema.empty_table(), uri)
    create_mem_wal(uri, [RegionSpec((RegionField.parse("bucket(id, 4)"),))])
    with RegionRouter(uri) as router:
        router.put(pa.table({"id": range(20), "n": range(20)}, schema=schema))
    (values, writer), *_ = router.writers.items()
    own = RegionValues(router._spec, values)
    of_fault = [number for number in range(20) if not own.other_values(pa.table({"id": [number]}))]
    others = sorted({*range(20)} - {*of_fault})
    region = open_table(uri).region(writer.region_id)
    assert region.commit(replace(region.latest().next(), flushed_generations=())), "a generation is off the list"
    reader = read(uri)
    assert sorted(reader.get(others)["id"].to_pylist()) == others
    assert reader.scan(filter=f"id = {others[0]}").to_table()["n"].to_pylist() == [others[0]]
    for lost in (lambda: reader.get(of_fault), lambda: reader.scan().to_table()):
        with pytest.raises(GenerationMissingError):
            lost()
