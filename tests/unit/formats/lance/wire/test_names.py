"""File names of regions, generations and versions."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from memwal_ops.errors import TableCorruptError
from memwal_ops.formats.lance.wire import names
from memwal_ops.formats.lance.wire.names import NamingScheme

U64 = st.integers(0, 2**64 - 1)


@pytest.mark.req("S0-034")
@given(U64)
def test_bit_reversal_round_trips(number: int) -> None:
    text = names.bit_reversed(number)
    assert len(text) == 64
    assert names.parse_bit_reversed(text) == number
    assert sum(int(bit) << place for place, bit in enumerate(text)) == number


def test_bit_reversal_is_the_specifications() -> None:
    assert names.bit_reversed(5) == "101" + "0" * 61
    assert names.bit_reversed(2**63) == "0" * 63 + "1"
    for outside in (-1, 2**64):
        with pytest.raises(ValueError, match="64-bit"):
            names.bit_reversed(outside)


@given(st.text())
def test_any_text_is_a_name_or_none(text: str) -> None:
    for parse in (
        names.parse_bit_reversed,
        names.parse_region_manifest_name,
        names.parse_wal_entry_name,
        names.parse_generation_dir,
        names.parse_version_manifest_name,
    ):
        assert parse(text) is None or text.isascii()


@given(st.integers(1, 2**64 - 1))
def test_region_manifests_and_wal_entries(number: int) -> None:
    assert names.parse_region_manifest_name(names.region_manifest_name(number)) == number
    for suffix in ("lance", "arrow"):
        entry = names.parse_wal_entry_name(names.wal_entry_name(number, suffix))
        assert entry == names.WalEntryName(number, suffix)


def test_what_is_no_region_manifest() -> None:
    for name in ("version_hint.json", "1.binpb", names.region_manifest_name(0), "0" * 64 + ".binpb.tmp"):
        assert names.parse_region_manifest_name(name) is None


@pytest.mark.req("S0-037")
def test_generation_directories() -> None:
    assert names.parse_generation_dir("0a1b2c3d_gen_17") == names.GenerationDir("0a1b2c3d", 17)
    for name in ("0a1b2c3d_gen_0", "0a1b2c3d_gen_01", "0A1B2C3D_gen_1", "0a1b2c3_gen_1", "gen_1", "wal"):
        assert names.parse_generation_dir(name) is None


@pytest.mark.req("S3-046")
@given(st.integers(1, 2**63 - 1), st.sampled_from(NamingScheme))
def test_version_names_round_trip(version: int, scheme: NamingScheme) -> None:
    parsed = names.parse_version_manifest_name(names.version_manifest_name(version, scheme))
    assert parsed == names.VersionName(version, scheme)
    assert not parsed.detached
    detached = names.parse_version_manifest_name(names.detached_manifest_name(version))
    assert detached is not None
    assert detached.detached


@given(st.lists(st.integers(1, 10**6), min_size=2, unique=True))
def test_newer_versions_sort_first_in_v2(versions: list[int]) -> None:
    listed = sorted(names.version_manifest_name(version, NamingScheme.V2) for version in versions)
    assert listed[0] == names.version_manifest_name(max(versions), NamingScheme.V2)


@pytest.mark.req("S3-047")
def test_mixed_schemes_are_an_error() -> None:
    first, second = (names.version_manifest_name(3, scheme) for scheme in NamingScheme)
    assert names.naming_scheme([]) is None
    assert names.naming_scheme([first, "d12.manifest", "x.txn"]) is NamingScheme.V1
    assert names.naming_scheme([second, "latest_version_hint.json"]) is NamingScheme.V2
    with pytest.raises(TableCorruptError, match="both schemes"):
        names.naming_scheme([first, second])
