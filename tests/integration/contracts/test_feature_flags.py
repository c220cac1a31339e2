"""Which feature flags pylance opens, and what sets them: `wire/feature_flags.py` has its releases from here."""

from __future__ import annotations

from pathlib import Path

import lance
import pyarrow as pa
import pytest

from memwal_ops.formats.lance.wire.version_manifest import (
    FEATURES,
    Feature,
    decode_version_manifest,
    encode_version_manifest,
)

NEVER_REUSED_IDS = 1 << 15  # needs a field of the manifest beside the flag
UNUSED = {1 << bit for bit in range(17, 64)}


def flagged(folder: Path, reader: int, writer: int) -> str:
    """A table whose manifest has these flags, and nothing to which they refer."""
    uri = str(folder / "t.lance")
    lance.write_dataset(pa.table({"k": [1, 2]}), uri)
    (path,) = Path(uri, "_versions").glob("*.manifest")
    version = decode_version_manifest(path.read_bytes())
    version.manifest.reader_feature_flags |= reader
    version.manifest.writer_feature_flags |= writer
    path.write_bytes(encode_version_manifest(version))
    return uri


@pytest.mark.parametrize("feature", [one for one in FEATURES if one.flag not in {2, NEVER_REUSED_IDS}], ids=str)
def test_what_is_opened(tmp_path: Path, feature: Feature) -> None:
    """For us: a flag that a later release opens gets its release there, and is supported or stays refused by name."""
    uri = flagged(tmp_path, feature.flag, feature.flag)
    if feature.since:
        assert lance.dataset(uri).count_rows() == 2
    else:
        with pytest.raises((OSError, ValueError, NotImplementedError), match=f"Flags: {feature.flag}"):
            lance.dataset(uri)


@pytest.mark.parametrize("feature", [one for one in FEATURES if one.paired], ids=str)
@pytest.mark.parametrize("reader", [True, False])
def test_half_of_a_pair_is_refused(tmp_path: Path, feature: Feature, reader: bool) -> None:
    uri = flagged(tmp_path, feature.flag * reader, feature.flag * (not reader))
    with pytest.raises((OSError, ValueError), match="feature"):
        lance.dataset(uri)


def test_a_new_flag_of_pylance_is_noticed(tmp_path: Path) -> None:
    uri = flagged(tmp_path, sum(UNUSED), 0)
    with pytest.raises((OSError, ValueError, NotImplementedError)) as refused:
        lance.dataset(uri)
    assert f"Flags: {sum(UNUSED)}" in str(refused.value)
