"""The builders themselves: every kind of table equals its dictionary, every damage does damage."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import lance
import pyarrow as pa
import pytest

from tests.support.tables import damage, wire
from tests.support.tables.files import Files
from tests.support.tables.layouts import LAYOUTS
from tests.support.tables.lsm_table import LsmTable
from tests.support.tables.model import Key
from tests.support.tables.region_layout import RegionLayout
from tests.support.tables.schemas import ALL_COLUMNS, ALL_KEYS, WRITER_KEYS, KeyKind, table_schema
from tests.support.tables.workload import Workload, assert_same, read_base, read_lsm, read_spec


def flushed(table: LsmTable) -> dict[str, int]:
    files = Files(table.uri, table.storage_options)
    return {r: max(wire.region_manifest(files, r).generations, default=0) for r in wire.regions(files)}


@pytest.mark.long
@pytest.mark.parametrize(
    ("layout", "key"), [(Workload, k) for k in WRITER_KEYS] + [(RegionLayout, k) for k in ALL_KEYS]
)
def test_every_key_type_equals_its_dictionary(tmp_path: Path, layout: type[LsmTable], key: KeyKind) -> None:
    seed = 11
    columns = ALL_COLUMNS[ALL_KEYS.index(key) % len(ALL_COLUMNS)]
    table = layout(seed, key=key, columns=columns, base_rows=300).create(f"{tmp_path}/t.lance").step(40)
    table.close()
    assert min(flushed(table).values()) >= 2
    assert_same(table.read_spec(), table.expected(), seed=seed)
    assert_same(table.expected(flushed(table)), table.expected(), seed=seed)
    assert_same(read_base(table.uri), table.expected({}), seed=seed)


def test_pylance_sees_what_the_dictionary_holds(tmp_path: Path) -> None:
    seed = 5
    table = Workload(seed, regions=3, max_memtable_rows=60).create(f"{tmp_path}/t.lance").step(120)
    open_region = table.regions[0]
    table.put([0])
    for region in table.regions[1:]:
        # An open writer flushes in the background: only a closed one's generations are all listed.
        table.flush(region)
        table.writer(region)  # left open, with nothing in it
    got = table.read_open(open_region)
    upto = {**flushed(table), open_region: 10**9}
    assert_same(got, table.expected(upto), seed=seed)
    table.close()
    assert_same(read_lsm(table.uri), table.expected(), seed=seed)


def test_a_workload_meets_every_situation(tmp_path: Path) -> None:
    """Guards against a random script that stops to cover what merge tests rely on."""
    table = Workload(3).create(f"{tmp_path}/t.lance").step(150)
    table.close()
    by_generation: dict[tuple[str, int], list] = {}
    for op in table.model.log:
        by_generation.setdefault((op.region, op.generation), []).append(op)
    assert any(all(op.row is None for op in ops) for ops in by_generation.values()), "only tombstones"
    assert any(len({op.key for op in ops}) < len(ops) for ops in by_generation.values()), "repeats"
    dead: set[Key] = set()
    absent = back = 0
    seen = set(table.model.base)
    for op in table.model.log:
        absent += op.row is None and op.key not in seen
        back += op.row is not None and op.key in dead
        (dead.discard if op.row is not None else dead.add)(op.key)
        seen.add(op.key)
    assert absent > 0
    assert back > 0


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_same_seed_makes_the_same_rows(tmp_path: Path, layout: type[LsmTable]) -> None:
    a, b = (layout(9, base_rows=50).create(f"{tmp_path}/{n}.lance").step(30) for n in "ab")
    assert a.regions == b.regions
    assert_same(a.expected(), b.expected())


def test_region_layout_is_the_specifications(tmp_path: Path) -> None:
    table = RegionLayout(1, tombstones=False, base_rows=10, regions=1).create(f"{tmp_path}/t.lance")
    table.put([1, 1, 20])
    table.flush()
    (region,) = table.regions
    files = Files(table.uri)
    assert f"_mem_wal/{region}/wal/1{'0' * 63}.lance" in files.listing("_mem_wal/")
    assert files.get(f"_mem_wal/{region}/manifest/version_hint.json") == b'{"version": 2}'
    folder = damage.generation_path(table.uri, region, 1)
    generation = lance.dataset(str(folder))
    assert generation.schema.names == table.schema.names
    assert generation.count_rows() == 3, "duplicates stand, nothing hides them"
    assert not (folder / "data").exists(), "zero copy"
    assert table.flush_generation(region).endswith("_gen_2")
    assert lance.dataset(str(damage.generation_path(table.uri, region, 2))).count_rows() == 0
    assert_same(read_spec(table.uri), table.expected())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_builders_work_on_s3(bucket: tuple[str, dict[str, str]], layout: type[LsmTable]) -> None:
    uri, options = bucket
    table = layout(2, base_rows=60, regions=1).create(f"{uri}/{layout.__name__}.lance", options).step(8)
    table.close()
    assert_same(table.read_spec(), table.expected(), seed=2)


def test_the_difference_is_readable() -> None:
    want = {(1,): {"id": 1, "v": "a"}, (2,): {"id": 2, "v": "b"}}
    with pytest.raises(AssertionError, match=r"(?s)seed 77.*1 missing, 1 extra, 1 differ.*got v='x' / expected v='a'"):
        assert_same({(1,): {"id": 1, "v": "x"}, (3,): {"id": 3, "v": "c"}}, want, seed=77)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_copy_is_independent(tmp_path: Path, layout: type[LsmTable]) -> None:
    table = layout(4, base_rows=50, regions=1).create(f"{tmp_path}/t.lance").step(15)
    table.close()
    copy = damage.copy_table(table.uri, f"{tmp_path}/copy.lance")
    damage.remove_generation_data(table.uri, table.regions[0], 1)
    assert_same(read_spec(copy), table.expected())
    with pytest.raises((OSError, ValueError), match=r"(?i)not found"):
        read_spec(table.uri)


@pytest.fixture
def made(tmp_path: Path) -> Workload:
    table = Workload(6, base_rows=30, regions=1).create(f"{tmp_path}/t.lance")
    for numbers in ([1, 2], [3], [4, 40]):
        table.put(numbers)
        table.flush()
    return table


def test_damage_to_region_manifests(made: Workload, tmp_path: Path) -> None:
    (region,) = made.regions
    for hurt in (damage.truncate_region_manifest, damage.flip_region_manifest):
        copy = damage.copy_table(made.uri, f"{tmp_path}/{hurt.__name__}.lance")
        hurt(copy, region)
        with pytest.raises((ValueError, IndexError, KeyError, AssertionError, StopIteration)):
            read_spec(copy)
    before = wire.region_manifest(Files(made.uri), region).version
    damage.remove_region_manifest_version(made.uri, region, before - 1)
    assert wire.region_manifest(Files(made.uri), region).version == before - 2


def test_damage_to_generations(made: Workload, tmp_path: Path) -> None:
    for hurt in (damage.remove_generation, damage.truncate_generation_manifest, damage.remove_generation_data):
        copy = damage.copy_table(made.uri, f"{tmp_path}/{hurt.__name__}.lance")
        hurt(copy, made.regions[0], 2)
        with pytest.raises((OSError, ValueError)):
            read_spec(copy)


def test_an_unknown_feature_flag_is_refused_by_pylance_too(made: Workload) -> None:
    damage.set_feature_flag(made.uri)
    with pytest.raises((OSError, ValueError), match=r"(?i)feature|upgrade|support"):
        lance.dataset(made.uri).to_table()


def test_rewriting_a_manifest_loses_nothing(made: Workload) -> None:
    files = Files(made.uri)
    path, manifest = wire.newest_manifest(files)
    Path(made.uri, path).write_bytes(wire.build_manifest(manifest))
    assert_same(read_base(made.uri), made.model.base)
    lance.dataset(made.uri).delete("id = 0")


def test_legacy_details(made: Workload) -> None:
    damage.put_legacy_details(made.uri)
    assert wire.mem_wal_details(wire.newest_manifest(Files(made.uri))[1])[0] == 0x0A
    assert lance.dataset(made.uri).count_rows() == 30
    with pytest.raises((OSError, ValueError), match="snapshot_ts_millis"):
        lance.dataset(made.uri).delete("id = 0")


def test_manifest_names(made: Workload, tmp_path: Path) -> None:
    rows = pa.Table.from_pylist([{"id": 1}], schema=pa.schema([table_schema("int64", "plain").field("id")]))
    damage.make_v1_named_table(f"{tmp_path}/v1.lance", rows)
    assert [p.name for p in Path(tmp_path, "v1.lance", "_versions").glob("*.manifest")] == ["1.manifest"]
    assert damage.mix_manifest_names(made.uri).name == "1.manifest"
    stems = {len(p.stem) for p in Path(made.uri, "_versions").glob("*.manifest")}
    assert stems == {1, 20}


def test_a_read_only_table_refuses_writes_also_of_root(made: Workload) -> None:
    script = f"import lance; lance.dataset({made.uri!r}).delete('id = 0')"
    damage.make_read_only(made.uri)
    try:
        command = damage.held_by_permissions([sys.executable, "-c", script])
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    finally:
        damage.make_writable(made.uri)
    assert done.returncode != 0
    assert "ermission denied" in done.stderr
    assert_same(read_base(made.uri), made.model.base)
