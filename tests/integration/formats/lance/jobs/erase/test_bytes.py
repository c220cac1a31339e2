"""erase says erased only if no byte that stays has a value of the rows: in dictionaries, regions, settings, names."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import lance
import pyarrow as pa
import pytest
from lance.file import LanceFileReader

from memwal_ops import run_job
from memwal_ops.errors import UnsupportedFeatureError
from memwal_ops.memwal import RegionField, RegionRouter, RegionSpec, create_mem_wal
from tests.support.run_cli import contents
from tests.support.tables.schemas import PRIMARY_KEY

NOW = {"older_than": "0s", "allow_unsafe": True, "apply": True}
SECRET = "Secret-Person-8431"


def erase(uri: str, where: str, **options: Any) -> Any:
    return run_job(uri, "erase", where=where, **NOW, **options)


def left(uri: str) -> set[str]:
    """The folders of files that have the secret, as they are or decoded."""
    found = set()
    for path in (one for one in Path(uri).rglob("*") if one.is_file()):
        data = path.read_bytes()
        if path.suffix == ".lance":
            for column in LanceFileReader(str(path)).read_all().to_table().columns:
                data += b"".join(bytes(buffer) for chunk in column.chunks for buffer in _buffers(chunk))
        if SECRET.encode() in data:
            found.add(str(path.relative_to(uri).parent))
    return found


def _buffers(array: pa.Array) -> list[pa.Buffer]:
    if pa.types.is_dictionary(array.type):
        return _buffers(array.dictionary)
    if pa.types.is_struct(array.type):
        return [one for at in range(array.type.num_fields) for one in _buffers(array.field(at))]
    if pa.types.is_list(array.type):
        return _buffers(array.values)
    return [one for one in array.buffers() if one is not None]


def categories(rows: range, secret: int | None = None) -> pa.Table:
    """Rows in which every fragment has all categories in its dictionaries, as pandas writes them."""
    names = pa.array([f"person{number}" for number in range(40)] + [SECRET])
    picked = pa.array([40 if number == secret else number for number in rows], pa.int8())
    encoded = pa.DictionaryArray.from_arrays(picked, names)
    return pa.table({
        "id": pa.array([*rows]),
        "name": encoded,
        "nested": pa.StructArray.from_arrays([encoded], ["name"]),
        "tags": pa.ListArray.from_arrays(pa.array(range(len(rows) + 1), pa.int32()), encoded),
    })  # fmt: skip


@pytest.mark.parametrize("version", ["2.0", "2.1", "2.2"])
@pytest.mark.parametrize("stable", [False, True], ids=["addresses", "stable ids"])
def test_dictionaries_keep_no_value_of_an_erased_row(tmp_path: Path, version: str, *, stable: bool) -> None:
    """Neither where the row was, nor in the files of other fragments. The index answers as before."""
    uri, proof = str(tmp_path / "t.lance"), tmp_path / "proof.json"
    lance.write_dataset(categories(range(20), 7), uri, data_storage_version=version, enable_stable_row_ids=stable)
    lance.write_dataset(categories(range(20, 40)), uri, mode="append")
    lance.dataset(uri).create_scalar_index("id", "BTREE")
    rows = [row for row in lance.dataset(uri).to_table().to_pylist() if row["id"] != 7]
    assert left(uri) >= {"data"}
    report = erase(uri, "id = 7", certificate=str(proof))
    assert (report.decision, left(uri)) == ("erased", set())
    assert report.done["fragments_rewritten"] == 2
    assert lance.dataset(uri).to_table().to_pylist() == rows
    assert lance.dataset(uri).scanner(filter="id = 33").to_table()["name"].to_pylist() == ["person33"]
    scan = json.loads(proof.read_text())["byte_scan"]
    assert scan["values"] >= 2, "the name, and its lower case"
    assert scan["objects"] == sum(one.is_file() for one in Path(uri).rglob("*"))
    assert scan["decoded"] >= 2
    assert run_job(uri, "erase", where="id = 7").decision == "erased", "a second run has nothing to rewrite"


@pytest.mark.parametrize("value", ["common", "rare"])
def test_a_dictionary_inside_manifests_is_not_written_anew(tmp_path: Path, value: str) -> None:
    """It is fixed since the table was created: a value that rows share stays in use, of another one nothing is done."""
    uri = str(tmp_path / "t.lance")
    words = pa.array(["first", "common", "first", "common", value, "common"]).dictionary_encode()
    lance.write_dataset(
        pa.table({"id": range(6), "word": words}), uri, data_storage_version="legacy", max_rows_per_file=3
    )
    before = contents(uri)
    for apply in (False, True):
        if value == "rare":
            with pytest.raises(UnsupportedFeatureError, match="dictionary columns word"):
                run_job(uri, "erase", where="id = 4", apply=apply, older_than="0s", allow_unsafe=True)
            assert contents(uri) == before
        else:
            run_job(uri, "erase", where="id = 4", apply=apply, older_than="0s", allow_unsafe=True)
    found = lance.dataset(uri).to_table().sort_by("id")["word"].to_pylist()
    assert found == ["first", "common", "first", "common", *(["rare"] if value == "rare" else []), "common"]


def test_a_dictionary_of_values_in_use_is_left(tmp_path: Path) -> None:
    """What a fragment does not use, and another one does, is no trace of an erased row."""
    uri = str(tmp_path / "t.lance")
    for part in (range(20), range(20, 41)):
        lance.write_dataset(categories(part), uri, mode="append" if part.start else "create")
    lance.write_dataset(categories(range(3, 4)).set_column(0, "id", pa.array([100])), uri, mode="append")
    report = erase(uri, "id = 3")
    assert (report.decision, report.done["fragments_rewritten"]) == ("erased", 1)


def people(*emails: str) -> pa.Table:
    schema = pa.schema(
        [pa.field("email", pa.string(), nullable=False, metadata=PRIMARY_KEY), pa.field("v", pa.string())]
    )
    return pa.table({"email": [*emails], "v": ["a common text"] * len(emails)}, schema=schema)


@pytest.mark.parametrize(("spec", "kind"), [("identity(email)", "region"), ("truncate(email, 9)", "region manifest")])
def test_values_by_which_regions_are_named_are_not_called_erased(tmp_path: Path, spec: str, kind: str) -> None:
    uri, proof = str(tmp_path / "t.lance"), tmp_path / "proof.json"
    lance.write_dataset(people("base@example.org"), uri)
    create_mem_wal(uri, [RegionSpec((RegionField.parse(spec),))])
    with RegionRouter(uri) as router:
        router.put(people(SECRET, "other@example.org"))
    run_job(uri, "merge")
    run_job(uri, "snapshot")
    for _ in range(2):  # in the second run no row is left, and the expression alone has the value
        report = erase(uri, f"email = '{SECRET}'", certificate=str(proof))
        assert (report.decision, report.exit_code) == ("held", 63), report.describe()
        assert kind in {one.kind for one in report.holders if one.blocks}
        assert not proof.exists()
    assert SECRET not in report.describe()
    assert erase(uri, "email = 'base@example.org'").decision == "erased", "of its region none was made"


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("kind", "other", "base", "condition", "of_base"),
    [
        (pa.int32(), 18, 1, "id IN (16, 17)", "id = 1"),
        (pa.date32(), 18, 1, "id = date '1970-01-18'", "id = date '1970-01-02'"),
        (pa.date32(), 2**31 - 1, 1, "id < date '1970-02-01' AND id > date '1970-01-02'", "id = date '1970-01-02'"),
        (pa.timestamp("ns"), 18, 1, "id = cast('1970-01-01 00:00:00.000000017' as timestamp(9))", "id = NULL"),
        (pa.decimal128(20, 0), 18, 1, "id = 17", "id = 1"),
        (pa.float64(), 18, 1, "id = 17.0", "id = 1.0"),
        (pa.bool_(), 0, 0, "id", "NOT id"),
    ],
    ids=str,
)
def test_short_values_by_which_regions_are_named(
    tmp_path: Path, kind: pa.DataType, other: int, base: int, condition: str, of_base: str
) -> None:
    """Too short to be found in bytes. In the second run no row is left, and the expression alone has the value."""
    uri = str(tmp_path / "t.lance")
    schema = pa.schema([pa.field("id", kind, nullable=False, metadata=PRIMARY_KEY)])

    def rows(*numbers: int) -> pa.Table:
        whole = pa.int32() if pa.types.is_date32(kind) else pa.int64()
        return pa.table([pa.array([*numbers], whole).cast(kind)], schema=schema)

    lance.write_dataset(rows(base), uri)
    create_mem_wal(uri, [RegionSpec((RegionField.parse("identity(id)"),))])
    with RegionRouter(uri) as router:
        router.put(rows(17, other))
    run_job(uri, "merge")
    run_job(uri, "snapshot")
    assert run_job(uri, "verify", deep=True).exit_code == 0
    for _ in range(2):
        assert [one.kind for one in erase(uri, condition).holders] == ["region"]
    if kind != pa.bool_():
        assert erase(uri, of_base).decision == "erased"


def test_what_the_survey_does_not_know_is_found_in_bytes(tmp_path: Path) -> None:
    """A setting of the table, the name of a tag: each is named, and nothing is certified."""
    uri, proof = str(tmp_path / "t.lance"), tmp_path / "proof.json"
    lance.write_dataset(
        pa.table({"id": range(20), "name": [f"person {number}" for number in range(19)] + [SECRET]}), uri
    )
    lance.dataset(uri).update_config({"note": f"asked for by {SECRET}"})
    report = erase(uri, "id = 19", certificate=str(proof))
    assert (report.decision, [one.kind for one in report.holders]) == ("held", ["version manifest"]), report.describe()
    assert "have name of such a row" in report.holders[0].why
    assert SECRET not in report.describe() + json.dumps(report.to_json())
    lance.write_dataset(pa.table({"id": [19], "name": [SECRET]}), uri, mode="append")
    report = erase(uri, "id = 19", ignore_columns="name", certificate=str(proof))
    assert (report.decision, report.byte_scan.to_json()["ignored_columns"]) == ("erased", ["name"])
    assert json.loads(proof.read_text())["byte_scan"]["too_short"], "as the id"
    proof.unlink()
    lance.dataset(uri).update_config({"note": None})
    lance.dataset(uri).tags.create(SECRET, lance.dataset(uri).version)
    report = erase(uri, f"name = '{SECRET}'", certificate=str(proof))
    assert ({one.kind for one in report.holders}, proof.exists()) == ({"reference", "version manifest"}, False)
    lance.dataset(uri).tags.delete(SECRET)
    run_job(uri, "expire", older_than="0s", allow_unsafe=True, apply=True)
    assert erase(uri, f"name = '{SECRET}'").decision == "erased", "once what the holders say was done"


def test_what_rows_that_stay_have_is_no_trace(tmp_path: Path) -> None:
    """Words that other rows have, also inside of longer ones; names of columns; and settings of indexes."""
    uri = str(tmp_path / "t.lance")
    texts = ["base_tokenizer", "Berlin-Mitte", "deleted_fragments", "language"] * 2
    texts[4:6] = ["I live in Berlin-Mitte, and nowhere else", "nothing"]
    lance.write_dataset(pa.table({"id": range(8), "language": texts}), uri)
    lance.dataset(uri).create_scalar_index("language", "INVERTED")
    report = erase(uri, "id < 4")
    assert (report.decision, report.done["rows_deleted"]) == ("erased", 4), report.describe()
    assert report.byte_scan.staying >= 3


def test_a_short_value_that_other_rows_have_is_no_trace(tmp_path: Path) -> None:
    """The first format writes the end of a list's offsets, 6, before its first word: chance has a length beside it."""
    uri = str(tmp_path / "t.lance")
    for numbers in ([48, 5, 6, 9], [3, 14, 71]):
        tenants = pa.array([123456789] * len(numbers), pa.int32())
        columns = {"id": numbers, "name": [f"name {k:04d}" for k in numbers], "tenant": tenants}
        words = {"words": [[f"label{k % 5}", f"own{k}"] for k in numbers]}
        mode = "append" if Path(uri).exists() else "create"
        lance.write_dataset(pa.table(columns | words), uri, mode=mode, data_storage_version="legacy")
    lance.dataset(uri).update_config({"tenant": "123456789"})  # in the rows, it has four bytes
    assert any(b"\6\0\0\0label3" in path.read_bytes() for path in Path(uri, "data").iterdir())
    report = erase(uri, "id = 48")
    assert report.decision == "erased", report.describe()
    assert not any(b"own48" in path.read_bytes() for path in Path(uri).rglob("*") if path.is_file())


def test_deleted_rows_of_a_time_are_looked_for_where_it_is_certified(tmp_path: Path) -> None:
    uri, proof = str(tmp_path / "t.lance"), tmp_path / "proof.json"
    lance.write_dataset(
        pa.table({"id": range(20), "name": [f"person {number}" for number in range(19)] + [SECRET]}), uri
    )
    lance.dataset(uri).update_config({"note": f"asked for by {SECRET}"})
    lance.dataset(uri).delete("id = 19")
    report = run_job(uri, "erase", deleted_before=datetime.now(UTC).isoformat(), certificate=str(proof), **NOW)
    assert (report.decision, proof.exists()) == ("held", False), report.describe()
