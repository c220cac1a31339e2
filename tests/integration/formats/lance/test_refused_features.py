"""Each feature that is refused: every command that writes refuses it before any write, by name."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import lance
import pyarrow as pa
import pytest

from memwal_ops.formats.lance.wire.version_manifest import (
    FEATURES,
    Feature,
    decode_version_manifest,
    encode_version_manifest,
)
from tests.support.run_cli import contents, run_here
from tests.support.tables.workload import Workload

if TYPE_CHECKING:
    from collections.abc import Mapping

REFUSED = [one for one in FEATURES if not one.supported]
_AT_ONCE = ("--older-than", "0s", "--allow-unsafe")
_BOTH = (
    ("catchup",), ("compact",), ("maintain", "--apply"), ("expire", "--apply", *_AT_ONCE),
    ("gc", "--apply"),
)  # fmt: skip
_NO_VERSION = (("repair", "--apply"), ("hold", "--ttl", "1h"))
"""They change no version, and are refused where the table cannot be read."""
COMMANDS = {
    "plain": (*_BOTH, ("init", "--primary-key", "k")),
    "log": (
        *_BOTH, ("merge",), ("snapshot",), ("migrate", "--to", "region", "--apply"),
        ("adopt", "--same-columns", "--apply"),
    ),
}  # fmt: skip


@pytest.fixture(scope="session")
def originals(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, str]:
    """A plain table with something to do for each job, and one with a log."""
    folder = tmp_path_factory.mktemp("originals")
    plain = str(folder / "plain.lance")
    lance.write_dataset(pa.table({"k": range(40)}), plain, max_rows_per_file=10)
    lance.dataset(plain).create_scalar_index("k", "BTREE")
    lance.write_dataset(pa.table({"k": range(40, 50)}), plain, mode="append")
    made = Workload(3, regions=1, base_rows=20).create(str(folder / "log.lance"))
    made.step(6)
    made.close()
    return {"plain": plain, "log": made.uri}


def with_flags(uri: str, reader: int, writer: int) -> None:
    newest = min(Path(uri, "_versions").glob("*.manifest"))
    version = decode_version_manifest(newest.read_bytes())
    version.manifest.reader_feature_flags |= reader
    version.manifest.writer_feature_flags |= writer
    newest.write_bytes(encode_version_manifest(version))


@pytest.mark.sampled(5)
@pytest.mark.parametrize("kind", COMMANDS)
@pytest.mark.parametrize("feature", REFUSED, ids=lambda feature: str(feature.flag))
def test_it_is_refused_before_any_write(
    originals: Mapping[str, str], tmp_path: Path, capfd: pytest.CaptureFixture[str], feature: Feature, kind: str
) -> None:
    for readers in (True,) if feature.paired else (True, False):
        uri = str(tmp_path / f"{readers}.lance")
        shutil.copytree(originals[kind], uri)
        with_flags(uri, feature.flag * readers, feature.flag)
        before = contents(uri)
        for command, *options in (*COMMANDS[kind], *(_NO_VERSION if readers else ())):
            outcome = run_here(capfd, command, uri, *options)
            assert outcome.code == 8, (command, readers, outcome)
            assert str(feature) in " ".join((outcome.err + outcome.out).split()), (command, readers, outcome)
            assert contents(uri) == before, (command, readers)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", COMMANDS)
def test_without_it_each_command_works(
    originals: Mapping[str, str], tmp_path: Path, capfd: pytest.CaptureFixture[str], kind: str
) -> None:
    """Else nothing would have been refused above."""
    for command, *options in (*COMMANDS[kind], *_NO_VERSION):
        uri = str(tmp_path / f"{command}.lance")
        shutil.copytree(originals[kind], uri)
        outcome = run_here(capfd, command, uri, *options)
        assert outcome.code == 0, (command, outcome)
