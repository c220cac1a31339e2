"""Region manifests and their version hints."""

from __future__ import annotations

from dataclasses import replace
from uuid import UUID

import pytest
from hypothesis import given, strategies as st

from memwal_ops.errors import RegionManifestCorruptError
from memwal_ops.formats.lance.wire import region_manifest as manifests
from memwal_ops.formats.lance.wire._pb import memwal_pb2

REGION = UUID("00000000-0000-4000-8000-00000000000a")
UNKNOWN = b"\xc2\x0c\x03new"


def message(**changes: object) -> memwal_pb2.RegionManifest:
    made = memwal_pb2.RegionManifest(version=3, writer_epoch=2, current_generation=9, region_spec_id=1)
    made.region_id.uuid = REGION.bytes
    made.flushed_generations.add(generation=7, path="0a1b2c3d_gen_7")
    made.flushed_generations.add(generation=8, path="0a1b2c3e_gen_8", in_memory_bytes=10, primary_key_bytes=5)
    for name, value in changes.items():
        setattr(made, name, value)
    return made


def decode(made: memwal_pb2.RegionManifest | bytes, version: int = 3) -> manifests.RegionManifest:
    data = made if isinstance(made, bytes) else made.SerializeToString()
    return manifests.decode_region_manifest(data, region_id=REGION, version=version)


@pytest.mark.req("S0-049")
def test_what_it_says() -> None:
    found = decode(message(replay_after_wal_id=0))
    assert (found.version, found.writer_epoch, found.current_generation, found.region_spec_id) == (3, 2, 9, 1)
    assert (found.replay_after_wal_id, found.wal_id_last_seen) == (0, None), "0 is a number, absent is not"
    assert [one.generation for one in found.flushed_generations] == [7, 8]
    assert [one.accounted_bytes for one in found.flushed_generations] == [None, 15]
    assert not found.sealed
    assert decode(message(status=1)).sealed


def test_unknown_fields_survive_a_change() -> None:
    made = message()
    made.flushed_generations[1].ParseFromString(made.flushed_generations[1].SerializeToString() + UNKNOWN)
    found = decode(made.SerializeToString() + UNKNOWN)
    drained = replace(found.next(), flushed_generations=found.flushed_generations[1:], wal_id_last_seen=4)
    encoded = manifests.encode_region_manifest(drained)
    assert encoded.count(UNKNOWN) == 2
    again = manifests.decode_region_manifest(encoded, region_id=REGION, version=4)
    assert again == drained


@pytest.mark.parametrize(
    ("made", "part"),
    [
        (b"", "version 0"),
        (message(version=4), "version 4"),
        (message().SerializeToString()[:-3], "truncated"),
        (memwal_pb2.RegionManifest(version=3).SerializeToString(), "is truncated"),
        (b"\xff" * 40, "not a protobuf"),
        (message(status=2), "status"),
        (message(current_generation=8), "generation 8"),
    ],
)
def test_what_it_must_not_say(made: memwal_pb2.RegionManifest | bytes, part: str) -> None:
    with pytest.raises(RegionManifestCorruptError, match=part):
        decode(made)


def test_generations_that_must_not_be_listed() -> None:
    for generation, path in ((7, "x_gen_7"), (0, "x_gen_0"), (5, ""), (5, ".."), (5, "../other/a_gen_5"), (5, "a\\b")):
        made = message()
        made.flushed_generations.add(generation=generation, path=path)
        with pytest.raises(RegionManifestCorruptError):
            decode(made)


def test_the_same_entry_twice_is_one() -> None:
    made = message()
    made.flushed_generations.append(made.flushed_generations[0])
    found = decode(made)
    assert [one.generation for one in found.flushed_generations] == [7, 8]
    assert decode(manifests.encode_region_manifest(found)) == replace(found, source=made.SerializeToString())


def test_of_another_region() -> None:
    made = message()
    made.region_id.uuid = UUID(int=1).bytes
    with pytest.raises(RegionManifestCorruptError, match="another region"):
        decode(made)


@given(st.binary(max_size=200))
def test_any_bytes_are_a_manifest_or_named(data: bytes) -> None:
    try:
        decode(data)
    except RegionManifestCorruptError as error:
        assert str(REGION) in str(error)


@pytest.mark.req("S0-052")
@given(st.one_of(st.binary(), st.text().map(str.encode), st.integers().map(lambda n: b'{"version": %d}' % n)))
def test_a_hint_is_only_a_hint(data: bytes) -> None:
    version = manifests.decode_version_hint(data)
    assert version is None or version > 0


def test_hints() -> None:
    assert manifests.decode_version_hint(manifests.encode_version_hint(17)) == 17
    for text in ("", "{}", "[1]", "3", '{"version": "3"}', '{"version": true}', '{"version": 0}', '{"version": 1.5}'):
        assert manifests.decode_version_hint(text.encode()) is None
