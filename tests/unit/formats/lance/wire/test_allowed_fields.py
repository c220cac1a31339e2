"""Only what is allowed is copied, at every depth, and hostile bytes end in one error."""

from __future__ import annotations

import random

import pytest

from memwal_ops.errors import InvalidFormatError
from memwal_ops.formats.lance.wire._pb import memwal_pb2, table_pb2
from memwal_ops.formats.lance.wire.without_values import Allow, allowed_fields

MESSAGE = memwal_pb2.RegionManifest(version=7, writer_epoch=1 << 63, region_spec_id=300)
MESSAGE.flushed_generations.add(generation=3, path="x_gen_3")
MESSAGE.region_field_entries.add(field_id="a", value=b"secret" * 40)


def test_messages_are_copied_by_their_fields() -> None:
    rules = {
        1: Allow.NUMBER,
        2: Allow.NUMBER,
        8: {1: Allow.NUMBER},
        14: {1: Allow.ANY, 2: lambda value: value[:1] * 200},
    }
    copied = memwal_pb2.RegionManifest.FromString(allowed_fields(MESSAGE.SerializeToString(), rules))
    expected = memwal_pb2.RegionManifest(version=7, writer_epoch=1 << 63)
    expected.flushed_generations.add(generation=3)
    expected.region_field_entries.add(field_id="a", value=b"s" * 200)
    assert copied == expected


def test_a_text_is_no_number_and_unknown_fields_are_left_out() -> None:
    text = table_pb2.WriterVersion(library="secret").SerializeToString()
    assert allowed_fields(text, {1: Allow.NUMBER}) == b""
    assert allowed_fields(text, {1: lambda _: None}) == b""
    assert allowed_fields(text, {2: Allow.ANY}) == b""
    assert allowed_fields(text, {1: Allow.ANY}) == text
    fixed = b"\x09" + bytes(8) + b"\x15" + bytes(4)
    assert allowed_fields(fixed, {1: Allow.NUMBER, 2: Allow.NUMBER}) == fixed


def test_hostile_bytes() -> None:
    data = MESSAGE.SerializeToString()
    for cut in range(1, len(data)):
        try:
            allowed_fields(data[:cut], {})
        except InvalidFormatError:
            continue
        memwal_pb2.RegionManifest.FromString(data[:cut])  # cut between two fields
    for broken in (b"\x0b", b"\x80" * 20, b"\x0a\x05abc", b"\x09abc", b"\x0a"):
        with pytest.raises(InvalidFormatError):
            allowed_fields(broken, {})
    rng = random.Random(1)
    for _ in range(2000):
        try:
            allowed_fields(rng.randbytes(rng.randrange(40)), {1: {1: Allow.ANY}, 2: Allow.NUMBER})
        except InvalidFormatError:
            continue
