"""Feature flags: what is supported passes, and anything else is refused by name."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from memwal_ops.errors import TableCorruptError, UnsupportedFeatureError
from memwal_ops.formats.lance.wire._pb import table_pb2
from memwal_ops.formats.lance.wire.version_manifest import (
    FEATURES,
    MIXED_FILE_VERSIONS,
    check_readable,
    check_writable,
)

BY_FLAG = {feature.flag: feature for feature in FEATURES}
SUPPORTED = sum(flag for flag, feature in BY_FLAG.items() if feature.supported)
PAIRED = sum(flag for flag, feature in BY_FLAG.items() if feature.paired)


def manifest(reader: int, writer: int) -> table_pb2.Manifest:
    return table_pb2.Manifest(version=7, reader_feature_flags=reader, writer_feature_flags=writer)


def test_each_flag_is_one_bit_and_named_once() -> None:
    assert [*BY_FLAG] == [1 << bit for bit in range(17)]
    assert len({feature.name for feature in FEATURES}) == len(FEATURES)


@pytest.mark.parametrize("feature", FEATURES, ids=str)
def test_a_feature_is_supported_or_refused_by_its_name(feature: object) -> None:
    assert feature in FEATURES
    found = manifest(feature.flag, feature.flag)  # type: ignore[attr-defined]  # one of FEATURES
    if feature.supported:  # type: ignore[attr-defined]
        check_writable(found)
        return
    with pytest.raises(UnsupportedFeatureError, match="must not be read") as refused:
        check_writable(found)
    assert str(feature) in str(refused.value)


@pytest.mark.req("S3-012", "S3-013")
@given(st.integers(0, 2**64 - 1), st.integers(0, 2**64 - 1))
def test_only_supported_flags_pass(reader: int, writer: int) -> None:
    paired = reader & PAIRED
    found = manifest(reader, writer & ~PAIRED | paired)
    for check, flags in ((check_readable, reader), (check_writable, reader | found.writer_feature_flags)):
        if flags & ~SUPPORTED:
            with pytest.raises(UnsupportedFeatureError) as refused:
                check(found)
            assert any(str(1 << bit) in str(refused.value) for bit in range(64) if flags & ~SUPPORTED & 1 << bit)
        else:
            check(found)


@pytest.mark.parametrize(("reader", "writer"), [(MIXED_FILE_VERSIONS, 0), (0, MIXED_FILE_VERSIONS)])
def test_half_of_a_pair_is_damage(reader: int, writer: int) -> None:
    for check in (check_readable, check_writable):
        with pytest.raises(TableCorruptError, match="mixed data file versions"):
            check(manifest(reader, writer))


def test_the_documentation_lists_them() -> None:
    text = Path(__file__).parents[5].joinpath("docs/jobs.md").read_text(encoding="utf-8")
    for feature in FEATURES:
        since, supported = feature.since or "no release up to 14.0.2", "yes" if feature.supported else "no"
        assert f"| {feature.flag} | {feature.name} | {since} | {supported} |" in text
