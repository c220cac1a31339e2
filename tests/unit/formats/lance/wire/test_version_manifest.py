"""Version manifests: what pylance wrote round-trips, and anything else is refused."""

from __future__ import annotations

import struct
from dataclasses import replace
from pathlib import Path
from uuid import UUID

import lance
import pyarrow as pa
import pytest
from hypothesis import given, settings, strategies as st

from memwal_ops.errors import (
    InvalidFormatError,
    InvariantViolatedError,
    LegacyLayoutError,
    TableCorruptError,
    UnsupportedFeatureError as Unsupported,
)
from memwal_ops.formats.lance.wire import memwal_index as index, version_manifest as files
from memwal_ops.formats.lance.wire._pb import memwal_pb2, table_pb2
from memwal_ops.formats.lance.wire.version_manifest import check_readable

REGION = UUID("00000000-0000-4000-8000-00000000000a")
OTHER = UUID("00000000-0000-4000-8000-00000000000b")
# Field 200, length-delimited: of a release that is still to come.
UNKNOWN = b"\xc2\x0c\x03new"


@pytest.fixture(scope="module")
def uri(tmp_path_factory: pytest.TempPathFactory) -> str:
    place = str(tmp_path_factory.mktemp("manifests") / "t.lance")
    key = pa.field("id", pa.int64(), nullable=False, metadata={"lance-schema:unenforced-primary-key": "true"})
    lance.write_dataset(pa.table({"id": range(100)}, schema=pa.schema([key])), place, max_rows_per_file=10)
    lance.dataset(place).create_scalar_index("id", "BTREE")
    lance.dataset(place).initialize_mem_wal()
    lance.dataset(place).delete("id % 11 = 0")
    return place


@pytest.fixture(scope="module")
def written(uri: str) -> list[bytes]:
    return [path.read_bytes() for path in sorted(Path(uri, "_versions").glob("*.manifest"))]


def newest(written: list[bytes]) -> files.VersionManifest:
    return files.decode_version_manifest(written[0])


def test_what_pylance_wrote_round_trips(written: list[bytes]) -> None:
    assert len(written) == 4
    for data in written:
        first = files.decode_version_manifest(data)
        encoded = files.encode_version_manifest(first)
        second = files.decode_version_manifest(encoded)
        assert (second.indexes, second.transaction) == (first.indexes, first.transaction)
        assert (second.major, second.minor) == (first.major, first.minor)
        for manifest in (first.manifest, second.manifest):
            for field in ("index_section", "transaction_section", "transaction_section_old"):
                manifest.ClearField(field)
        assert first.manifest == second.manifest
        assert files.encode_version_manifest(files.decode_version_manifest(encoded)) == encoded


def test_pylance_opens_what_was_encoded_here(uri: str) -> None:
    path = min(Path(uri, "_versions").glob("*.manifest"))
    before = path.read_bytes()
    path.write_bytes(files.encode_version_manifest(files.decode_version_manifest(before)))
    try:
        dataset = lance.dataset(uri)
        assert dataset.count_rows() == 90
        assert dataset.count_rows("id = 12") == 1
        assert {one.name for one in dataset.describe_indices()} == {"id_idx", "__lance_mem_wal"}
    finally:
        path.write_bytes(before)


@settings(deadline=None)
@given(st.data())
def test_damage_is_named_or_harmless(written: list[bytes], data: st.DataObject) -> None:
    original = written[0]
    if data.draw(st.booleans()):
        hurt = original[: data.draw(st.integers(0, len(original) - 1))]
    else:
        place = data.draw(st.integers(0, len(original) - 1))
        hurt = original[:place] + bytes([data.draw(st.integers(0, 255))]) + original[place + 1 :]
    try:
        files.decode_version_manifest(hurt)
    except InvalidFormatError as error:
        assert str(error)


def test_every_truncation_is_named(written: list[bytes]) -> None:
    for length in range(len(written[0])):
        with pytest.raises(InvalidFormatError):
            files.decode_version_manifest(written[0][:length])


def with_unknown(message: table_pb2.Manifest) -> table_pb2.Manifest:
    changed = table_pb2.Manifest()
    changed.ParseFromString(message.SerializeToString() + UNKNOWN)
    return changed


def test_a_field_that_may_be_a_position_is_read_but_not_rewritten(written: list[bytes]) -> None:
    version = newest(written)
    unknown = replace(version, manifest=with_unknown(version.manifest))
    check_readable(unknown.manifest)
    with pytest.raises(Unsupported, match="200"):
        files.encode_version_manifest(unknown)
    positioned = table_pb2.Manifest()
    positioned.CopyFrom(version.manifest)
    positioned.version_aux_data = 17
    with pytest.raises(Unsupported, match="4"):
        files.encode_version_manifest(replace(version, manifest=positioned))


def test_unknown_fields_inside_survive(written: list[bytes]) -> None:
    version = newest(written)
    fragment = version.manifest.fragments[0]
    fragment.ParseFromString(fragment.SerializeToString() + UNKNOWN)
    again = files.decode_version_manifest(files.encode_version_manifest(version))
    assert again.manifest.fragments[0].SerializeToString().endswith(UNKNOWN)


def test_the_older_position_of_the_transaction(written: list[bytes]) -> None:
    """Releases before pylance 14 keep it in field 21; it stays there."""
    version = newest(written)
    old = table_pb2.Manifest()
    old.CopyFrom(version.manifest)
    old.ClearField("transaction_section")
    old.transaction_section_old = 0
    again = files.decode_version_manifest(files.encode_version_manifest(replace(version, manifest=old)))
    assert again.manifest.HasField("transaction_section_old")
    assert not again.manifest.HasField("transaction_section")
    assert again.transaction == version.transaction


def test_a_position_outside_the_file() -> None:
    with pytest.raises(InvalidFormatError, match="999"):
        files.decode_version_manifest(b"\0" * 8 + struct.pack("<QHH4s", 999, 0, 0, b"LANC"))


def entry(details: memwal_pb2.MemWalIndexDetails | bytes) -> table_pb2.IndexMetadata:
    found = table_pb2.IndexMetadata(name=index.MEMWAL_INDEX_NAME)
    found.uuid.uuid = REGION.bytes
    found.index_details.value = details if isinstance(details, bytes) else details.SerializeToString()
    return found


def progress(**generations: int) -> memwal_pb2.MemWalIndexDetails:
    details = memwal_pb2.MemWalIndexDetails(num_regions=2)
    for name, generation in generations.items():
        one = details.merged_generations.add(generation=generation)
        one.region_id.uuid = {"a": REGION, "b": OTHER}[name].bytes
    return details


def test_the_legacy_layout_is_named() -> None:
    with pytest.raises(LegacyLayoutError, match="mem_wal_list"):
        index.decode_memwal_index(entry(b"\x0a\x02\x08\x01"))
    assert index.decode_memwal_index(entry(b"")).merged_generations == {}


@pytest.mark.req("S0-011")
def test_a_table_has_one_memwal_index() -> None:
    section = table_pb2.IndexSection(indices=[entry(b"")])
    assert index.find_memwal_entry(section) is not None
    section.indices.append(entry(b""))
    with pytest.raises(TableCorruptError):
        index.find_memwal_entry(section)


def test_details_that_make_no_sense() -> None:
    twice = progress(a=3)
    twice.merged_generations.add(generation=4).region_id.uuid = REGION.bytes
    short = progress(a=3)
    short.merged_generations[0].region_id.uuid = b"abc"
    for details in (twice, short, b"\xff\xff"):
        with pytest.raises(TableCorruptError):
            index.decode_memwal_index(entry(details))


@given(st.integers(0, 50), st.integers(0, 50))
def test_progress_only_rises(before: int, after: int) -> None:
    details = progress(a=before, b=7)
    if after <= before:
        with pytest.raises(InvariantViolatedError):
            index.with_progress(details, {REGION: after})
        return
    changed = index.decode_memwal_index(entry(index.with_progress(details, {REGION: after})))
    assert changed.merged_generations == {REGION: after, OTHER: 7}
    assert details.merged_generations[0].generation == before, "the argument is not changed"


def test_a_stamp_is_in_both_places_and_keeps_the_rest(written: list[bytes]) -> None:
    built = newest(written)
    assert built.indexes is not None
    memwal = index.find_memwal_entry(built.indexes)
    assert memwal is not None
    memwal.index_details.value = progress(b=2).SerializeToString() + UNKNOWN
    transaction = table_pb2.Transaction()
    transaction.update.removed_fragment_ids.append(3)
    stamped = index.stamp_progress(replace(built, transaction=transaction), built, {REGION: 5, OTHER: 4}, version=99)
    assert stamped.manifest.version == 99
    assert stamped.indexes is not None
    now = index.find_memwal_entry(stamped.indexes)
    assert now is not None
    assert now.dataset_version == 99
    assert index.decode_memwal_index(now).merged_generations == {REGION: 5, OTHER: 4}
    assert UNKNOWN in now.index_details.value
    assert stamped.transaction is not None
    marked = {UUID(bytes=one.region_id.uuid): one.generation for one in stamped.transaction.update.merged_generations}
    assert marked == {REGION: 5, OTHER: 4}
    assert list(stamped.transaction.update.removed_fragment_ids) == [3]
    assert [one.name for one in stamped.indexes.indices] == [one.name for one in built.indexes.indices]
