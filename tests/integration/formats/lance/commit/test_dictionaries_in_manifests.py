"""Tables with files of Lance's first format have the values of dictionary columns inside the manifest's file.

Whoever writes a manifest and leaves them out publishes a table whose column reads as other values, or not at all.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lance
import pyarrow as pa
import pytest

from memwal_ops import errors, open_table, run_job
from memwal_ops.formats.lance.commit.commit import (
    CommitNote,
    IndexChange,
    commit_details,
    commit_indexes,
    commit_strict,
    opened_with,
)
from memwal_ops.formats.lance.commit.publication import publish
from memwal_ops.formats.lance.files.version_files import version_path
from memwal_ops.formats.lance.wire.version_manifest import encode_version_manifest
from memwal_ops.memwal import create_mem_wal

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from memwal_ops.formats.lance.table import Table

NOTE = CommitNote("merge", "a run", "0.0")
_KEY = {"lance-schema:unenforced-primary-key": "true"}
SCHEMA = pa.schema(
    [
        pa.field("id", pa.int64(), nullable=False, metadata=_KEY),
        pa.field("word", pa.dictionary(pa.int32(), pa.string())),
        pa.field("number", pa.dictionary(pa.int8(), pa.int64())),
        pa.field("nested", pa.struct([pa.field("tag", pa.dictionary(pa.int8(), pa.binary()))])),
    ]
)


def rows(first: int) -> pa.Table:
    ids = range(first, first + 40)
    words = pa.array([("a", "an", "ünï", "d" * 300)[one % 4] for one in ids]).dictionary_encode()
    tags = pa.array([b"\0\xff"[: one % 2 + 1] for one in ids]).dictionary_encode().cast(SCHEMA[3].type[0].type)
    numbers = pa.array([one % 3 - 1 for one in ids]).dictionary_encode().cast(SCHEMA[2].type)
    nested = pa.StructArray.from_arrays([tags], fields=[SCHEMA[3].type[0]])
    return pa.table([pa.array(ids, pa.int64()), words.cast(SCHEMA[1].type), numbers, nested], schema=SCHEMA)


def create(uri: str, options: Mapping[str, str] | None = None, *, log: bool = True) -> str:
    for first in (0, 60):  # 60: the values are in the same order
        mode = "append" if first else "create"
        lance.write_dataset(
            rows(first), uri, mode=mode, data_storage_version="legacy", enable_v2_manifest_paths=True,
            storage_options=dict(options or {}),
        )  # fmt: skip
    lance.dataset(uri, storage_options=dict(options or {})).create_scalar_index("id", "BTREE")
    if log:
        lance.dataset(uri, storage_options=dict(options or {})).initialize_mem_wal()
    return uri


def read(uri: str, options: Mapping[str, str] | None = None, version: int | None = None) -> list[dict[str, Any]]:
    dataset = lance.dataset(uri, version=version, storage_options=dict(options or {}))
    return sorted(dataset.to_table().to_pylist(), key=lambda row: row["id"])


@pytest.fixture
def uri(tmp_path: Path) -> str:
    return create(str(tmp_path / "t.lance"))


def indexes_alone(table: Table) -> int:
    return commit_indexes(table, IndexChange(table.index.details, config={"note": "x" * 5000}), NOTE)


def other_details(table: Table) -> int:
    details = table.index.details.SerializeToString()
    return commit_details(table, table.manifest.manifest, details, NOTE)


def deletion(table: Table) -> int:
    fragment = table.dataset.get_fragments()[0].delete_rows([0])
    operation = lance.LanceOperation.Update(updated_fragments=[fragment], fields_modified=[])
    return commit_strict(table, operation, {}, NOTE)


@pytest.mark.parametrize("commit", [indexes_alone, other_details, deletion])
@pytest.mark.parametrize("store", ["file", "s3"])
def test_each_commit_keeps_the_values(
    tmp_path: Path, bucket: tuple[str, dict[str, str]], store: str, commit: Callable[[Table], int]
) -> None:
    root, options = bucket if store == "s3" else (str(tmp_path), {})
    uri = create(f"{root}/t.lance", options)
    before = read(uri, options)
    for _ in range(2):
        version = commit(open_table(uri, options))
    deleted = 1 if commit is deletion else 0
    assert read(uri, options) == before[deleted:]
    assert read(uri, options, version - 2) == before


def test_a_version_that_is_opened_to_ask_an_index_has_the_values(uri: str) -> None:
    table = open_table(uri)
    entries = [one for one in table.manifest.index_entries if one.name == "id_idx"]
    with opened_with(table, entries, NOTE) as dataset:
        assert sorted(dataset.to_table().to_pylist(), key=lambda row: row["id"]) == read(uri)


def test_plain_tables_are_maintained(tmp_path: Path) -> None:
    uri = create(str(tmp_path / "t.lance"), log=False)
    lance.write_dataset(rows(120), uri, mode="append")
    before = read(uri)
    assert run_job(uri, "maintain", apply=True, expire={"older_than": "0s", "allow_unsafe": True}).exit_code == 0
    table = open_table(uri)
    assert len(table.dataset.get_fragments()) == 1
    assert list(table.listed.versions) == [table.version], "all older ones are deleted"
    assert read(uri) == before


def test_no_log_is_created_that_cannot_be_merged(tmp_path: Path) -> None:
    uri = create(str(tmp_path / "t.lance"), log=False)
    version = lance.dataset(uri).version
    with pytest.raises(errors.UnsupportedFeatureError, match="word, number, tag"):
        create_mem_wal(uri)
    assert lance.dataset(uri).version == version


def test_a_log_that_another_program_created_is_not_merged_but_read(uri: str) -> None:
    before = read(uri)
    with lance.dataset(uri).mem_wal_writer("00000000-0000-4000-8000-00000000000a") as writer:
        writer.put(rows(0).slice(0, 1))
    for apply in (False, True):
        with pytest.raises(errors.UnsupportedFeatureError, match=r"memwal_ops\.memwal\.read|first format"):
            run_job(uri, "merge", apply=apply)
    assert read(uri) == before


def test_a_manifest_without_the_values_is_not_published(uri: str) -> None:
    table = open_table(uri)
    manifest = type(table.manifest.manifest)()
    manifest.CopyFrom(table.manifest.manifest)
    manifest.version += 1
    for column in manifest.fields:
        column.ClearField("dictionary")
    data = encode_version_manifest(replace(table.manifest, manifest=manifest, dictionaries=b""))
    with pytest.raises(errors.InvariantViolatedError, match="dictionary"):
        publish(table, data, table.version + 1)
    shifted = bytearray(encode_version_manifest(table.manifest))
    shifted[table.manifest.dictionaries.index("ünï".encode())] ^= 1
    with pytest.raises(errors.InvariantViolatedError, match="dictionary"):
        publish(table, bytes(shifted), table.version + 1)
    assert lance.dataset(uri).version == table.version


def without_values(table: Table) -> Path:
    """The newest version's manifest, without the values that it says to have, as earlier releases wrote it."""
    place = Path(table.location.uri, version_path(table.version, table.naming))
    data, cut = place.read_bytes(), len(table.manifest.dictionaries)
    manifest = table.manifest.manifest
    for section in ("index_section", "transaction_section"):
        setattr(manifest, section, getattr(manifest, section) - cut)
    at = int.from_bytes(data[-16:-8], "little")
    message = manifest.SerializeToString()
    place.write_bytes(
        data[cut:at] + len(message).to_bytes(4, "little") + message + (at - cut).to_bytes(8, "little") + data[-8:]
    )
    return place


def test_lost_values_are_named_and_no_older_version_is_deleted(uri: str) -> None:
    before, place = read(uri), without_values(open_table(uri))
    report = run_job(uri, "verify")
    assert report.exit_code == 9
    assert [(one["place"], one["check"]) for one in report.to_json()["findings"]] == [
        (f"_versions/{place.name}", "base_file")
    ]
    table = open_table(uri)
    with pytest.raises(errors.TableCorruptError, match="dictionary column word"):
        indexes_alone(table)
    with pytest.raises(errors.TableCorruptError, match="dictionary column word"):
        run_job(uri, "expire", apply=True, allow_unsafe=True, older_than="0s")
    rescued = lance.write_dataset(
        lance.dataset(uri, version=table.version - 1), f"{uri}.new", data_storage_version="2.1"
    )
    assert sorted(rescued.to_table().to_pylist(), key=lambda row: row["id"]) == before


def test_lost_values_of_an_older_version_are_named(uri: str) -> None:
    table = open_table(uri)
    indexes_alone(table)
    place = without_values(table)
    findings = run_job(uri, "verify").to_json()["findings"]
    assert [(one["place"], one["check"]) for one in findings] == [(f"_versions/{place.name}", "version_unreadable")]
