"""``export-support``: inspect and verify answer from its file as from the table, and it has no value and no secret."""

from __future__ import annotations

import json
import zipfile
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lance
import pyarrow as pa
import pytest

from memwal_ops import open_table, run_job
from memwal_ops.cli import main
from memwal_ops.core.export import open_export
from memwal_ops.core.holds import take_hold
from memwal_ops.formats.lance.wire._pb import memwal_pb2
from memwal_ops.formats.lance.wire.version_manifest import decode_version_manifest, encode_version_manifest
from memwal_ops.memwal import RegionRouter
from memwal_ops.storage.export_file import NotExportedError
from tests.integration.formats.lance.jobs.verify_tables import DAMAGES, build
from tests.support.run_cli import contents, run_here
from tests.support.s3_server import options_for
from tests.support.tables import damage, wire
from tests.support.tables.files import Files
from tests.support.tables.layouts import LAYOUTS
from tests.support.tables.stale_indexes import compact_and_leave
from tests.support.tables.workload import Workload

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.support.tables.lsm_table import LsmTable

# What an export has nothing to say about: the contents of log entries.
NEED_CONTENTS = {"wal_epoch", "wal_entry"}


@pytest.fixture(scope="module", params=LAYOUTS)
def whole(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LsmTable]:
    table: LsmTable = build(request.param, tmp_path_factory.mktemp("whole") / "t.lance")
    run_job(table.uri, "snapshot")
    yield table
    table.close()


def answers(capfd: pytest.CaptureFixture[str], command: str, *where: str) -> tuple[int, Any]:
    outcome = run_here(capfd, command, *where, "--json")
    document = outcome.document
    document.pop("skipped", None)
    if "findings" in document:
        document["findings"] = sorted(
            (one["check"], one["severity"], one["place"])
            for one in document["findings"]
            if one["check"] not in NEED_CONTENTS
        )
        document = {key: document[key] for key in ("version", "findings", "checked")}
    elif "error" in document:
        document = document["error"]["reason"]
    return outcome.code, document


def exported(capfd: pytest.CaptureFixture[str], uri: str, file: Path, *options: str) -> str:
    before = contents(uri)
    outcome = run_here(capfd, "export-support", uri, "-o", str(file), *options)
    assert outcome.code == 0, outcome.err
    assert contents(uri) == before
    return str(file)


@pytest.mark.long
def test_a_healthy_table(whole: LsmTable, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    file = exported(capfd, whole.uri, tmp_path / "t.zip")
    for command in ("inspect", "verify"):
        expected = answers(capfd, command, whole.uri)
        assert answers(capfd, command, "--from", file) == expected
        assert expected[0] == 0
        assert expected[1]["version"] == lance.dataset(whole.uri).version
    shown = run_here(capfd, "verify", "--from", file, "--deep").out
    assert "Not checked, as an export does not have it: " in shown
    assert "rows and keys" in shown
    skipped = run_here(capfd, "verify", "--from", file, "--json").document["skipped"]
    assert {"the ends of data files", "writer epochs of WAL entries"} <= {*skipped}
    assert run_here(capfd, "verify", whole.uri, "--json").document["skipped"] == []


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("whole", "harm", "check"),
    # All of one layout, then all of the other: each is built once.
    [pytest.param(LAYOUTS[at], *one[1:3], id=one[0]) for at in (0, 1) for one in DAMAGES[at::2]],
    indirect=["whole"],
    scope="module",
)
def test_a_damaged_table(
    whole: LsmTable,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    harm: Callable[[str, str], Any],
    check: str,
) -> None:
    uri = damage.copy_table(whole.uri, str(tmp_path / "t.lance"))
    harm(uri, whole.regions[0])
    file = exported(capfd, uri, tmp_path / "t.zip")
    verified = answers(capfd, "verify", uri)
    again = answers(capfd, "verify", "--from", file)
    assert again[1] == verified[1]
    assert check in NEED_CONTENTS or check in {one[0] for one in again[1]["findings"]}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("how", ["cut", "flag", "two_schemes"])
def test_a_table_that_does_not_open(
    whole: LsmTable, tmp_path: Path, capfd: pytest.CaptureFixture[str], how: str
) -> None:
    uri = damage.copy_table(whole.uri, str(tmp_path / "t.lance"))
    if how == "flag":
        damage.set_feature_flag(uri)
    elif how == "cut":
        Path(uri, wire.newest_manifest(Files(uri))[0]).write_bytes(b"cut short")
    else:
        damage.mix_manifest_names(uri)
    file = exported(capfd, uri, tmp_path / "t.zip")
    expected = answers(capfd, "verify", uri)
    assert expected[0] in {8, 9}
    assert answers(capfd, "verify", "--from", file) == expected
    assert answers(capfd, "inspect", "--from", file) == answers(capfd, "inspect", uri)


def test_older_versions_are_left_out_as_if_expired(
    whole: LsmTable, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    uri = damage.copy_table(whole.uri, str(tmp_path / "t.lance"))
    lance.dataset(uri).tags.create("first", 1)
    file = exported(capfd, uri, tmp_path / "t.zip", "--versions", "2")
    assert run_here(capfd, "verify", "--from", file, "--json").document["decision"] == "healthy"
    document = run_here(capfd, "inspect", "--from", file, "--json").document
    assert document["versions"]["listed"] == 3
    with open_export(file) as table:
        assert table.has_revision(2), "it is in the listing"
        with pytest.raises(NotExportedError):
            table.store.get(wire.manifest_names(Files(uri))[2])
        with pytest.raises(NotExportedError, match="is an export"):
            table.store.put("_mem_wal_ops/x", b"")
    assert not Path(table.location.files).exists()


# -- nothing that is a value, or a secret

KEY, ROW, REGION = "planted-key-00", "planted-row-value", "planted-region-value"
NOTE, SETTING, WORD = "planted-note", "planted-setting", "plantedword"
PLANTED = [KEY, ROW, REGION, NOTE, SETTING, WORD, "wJalrXUtnFEMI", "AKIAIOSFODNN7EXAMPLE", "plantedpassword", "\x1b]0;"]


def planted(tmp_path: Path) -> str:
    """Values at every place where Lance or memwal-ops may store one."""
    uri = str(tmp_path / "p.lance")
    key = pa.field("id", pa.string(), nullable=False, metadata={
        "lance-schema:unenforced-primary-key": "true", "owner": SETTING, "ARROW:extension:name": "mine.kind",
        "ARROW:extension:metadata": SETTING,
    })  # fmt: skip
    schema = pa.schema([key, pa.field("country", pa.string()), pa.field("text", pa.string())], {"made": SETTING})
    rows = [{"id": f"{KEY}{at}", "country": REGION, "text": f"{ROW} {WORD} {at}"} for at in range(600)]
    dataset = lance.write_dataset(pa.Table.from_pylist(rows, schema=schema), uri, max_rows_per_file=300)
    dataset.create_scalar_index("id", "BTREE")
    dataset.create_scalar_index("country", "BITMAP")
    dataset.create_scalar_index("text", "INVERTED", custom_stop_words=[WORD])
    dataset.delete(f"id = '{KEY}7'")
    dataset.update_config({"mine": SETTING})
    dataset.update_metadata({"mine": SETTING})
    with pytest.raises(SystemExit) as ended:
        main.main(["init", uri, "--region-field", "identity(id)"])
    assert not ended.value.code
    for at in range(3):
        rows = [{"id": REGION, "country": f"{KEY}{at}", "text": f"{ROW}{at}"}]
        with RegionRouter(uri) as router:
            router.put(pa.Table.from_pylist(rows, schema=lance.dataset(uri).schema))
        if at == 0:
            run_job(uri, "merge")
            run_job(uri, "snapshot")
    lance.dataset(uri).tags.create("keep", 2)
    tag = Path(uri, "_refs/tags/keep.json")
    tag.write_text(json.dumps({**json.loads(tag.read_text()), "metadata": {"note": NOTE}, "other": NOTE}))
    take_hold(open_table(uri), 2, timedelta(hours=1), note=f"\x1b]0;{NOTE}\x07")
    newest, _ = wire.newest_manifest(Files(uri))
    found = decode_version_manifest(Path(uri, newest).read_bytes())
    path = found.manifest.base_paths.add(id=77, path="s3://user:plantedpassword@bucket/x?AWSSecretKey=wJalrXUtnFEMI")
    assert path.id
    assert found.indexes is not None
    entry = next(one for one in found.indexes.indices if one.name == "__lance_mem_wal")
    details = memwal_pb2.MemWalIndexDetails.FromString(entry.index_details.value)
    details.writer_config_defaults["token"] = SETTING
    details.writer_config_defaults["max_rows"] = "12"
    details.region_specs[0].fields[0].parameters["default"] = REGION
    entry.index_details.value = details.SerializeToString()
    Path(uri, newest).write_bytes(encode_version_manifest(found))
    return uri


def unpacked(file: str) -> dict[str, bytes]:
    with zipfile.ZipFile(file) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


@pytest.mark.long
def test_no_value_and_no_secret(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIAIOSFODNN7EXAMPLE")
    uri = planted(tmp_path)
    stored = b"".join(data for _, data in contents(uri).values())
    planted_there = [one for one in PLANTED if one.encode() in stored]
    assert {KEY, ROW, REGION, NOTE, SETTING, WORD, "plantedpassword"} <= {*planted_there}
    file = exported(capfd, uri, tmp_path / "p.zip")
    for name, data in {**unpacked(file), "(file)": Path(file).read_bytes()}.items():
        for one in PLANTED:
            assert one not in name
            forms = (one.encode(), one.encode("utf-16-le"), json.dumps(one).strip('"').encode(), one[::-1].encode())
            assert not any(form in data for form in forms), (name, one)
    assert answers(capfd, "verify", "--from", file) == answers(capfd, "verify", uri)
    assert answers(capfd, "inspect", "--from", file) == answers(capfd, "inspect", uri)
    manifests = [data for name, data in unpacked(file).items() if "/manifest/" in name and name.endswith(".binpb")]
    (value,) = {
        entry.value for data in manifests for entry in memwal_pb2.RegionManifest.FromString(data).region_field_entries
    }
    assert value.startswith(b"redacted:"), "equal values are still equal"
    other = exported(capfd, uri, tmp_path / "q.zip")
    assert all(value not in data for data in unpacked(other).values()), "and cannot be compared between exports"


@pytest.mark.long
@pytest.mark.s3
def test_credentials_on_s3(
    s3_bucket: str, s3_options: dict[str, str], s3_endpoint: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    table = Workload(4, regions=2, base_rows=30).create(f"s3://{s3_bucket}/t.lance", s3_options).step(5)
    table.close()
    secrets = {"aws_access_key_id": "AKIAIOSFODNN7EXAMPLE", "aws_secret_access_key": "wJalrXUtnFEMI/K7MDENG"}
    options = {**options_for(s3_endpoint), **secrets}
    given = [word for key, value in options.items() for word in ("--storage-option", f"{key}={value}")]
    file = str(tmp_path / "t.zip")
    assert run_here(capfd, "export-support", table.uri, "-o", file, *given).code == 0
    assert all(one.encode() not in data for data in unpacked(file).values() for one in secrets.values())
    for command in ("inspect", "verify"):
        assert answers(capfd, command, "--from", file) == answers(capfd, command, table.uri, *given)


# -- bad input


def test_files_that_are_no_export(whole: LsmTable, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    good = Path(exported(capfd, whole.uri, tmp_path / "t.zip"))
    data, parts = good.read_bytes(), unpacked(str(good))

    def refused(content: bytes | None, code: int, *words: str) -> None:
        path = tmp_path / "bad.zip"
        path.unlink(missing_ok=True)
        if content is not None:
            path.write_bytes(content)
        for command in ("inspect", "verify"):
            outcome = run_here(capfd, command, "--from", str(path))
            assert outcome.code == code, outcome.err
            assert outcome.out == ""
            assert all(word in outcome.err for word in ("bad.zip", *words)), outcome.err

    def archive(**changed: bytes | None) -> bytes:
        path = tmp_path / "made.zip"
        with zipfile.ZipFile(path, "w") as made:
            for name, content in {**parts, **changed}.items():
                if content is not None:
                    made.writestr(name, content)
        return path.read_bytes()

    about = json.loads(parts["export.json"])
    refused(None, 2, "cannot be read")
    refused(b"", 17, "is not an export")
    refused(b"hello", 17, "is not an export")
    refused(data[: len(data) // 2], 17, "cut short")
    refused(data[:-3], 17, "cut short")
    refused(data[:200] + bytes(200) + data[400:], 17, "damaged")
    refused(archive(**{"export.json": None}), 17, "is not an export")
    refused(archive(**{"export.json": b"[]"}), 17, "damaged")
    refused(archive(**{"objects.jsonl": b'{"path": 1}\n'}), 17, "not an object")
    later = json.dumps({**about, "memwal_ops_export": 2, "release": "9.0"}).encode()
    refused(archive(**{"export.json": later}), 8, "later release (9.0)")
    refused(archive(**{"export.json": json.dumps({**about, "format": "iceberg"}).encode()}), 8, "'iceberg'")
    away = b'{"path": "../../away", "size": 1, "modified": "2026-01-01T00:00:00+00:00", "opened": true}\n'
    refused(archive(**{"objects.jsonl": away, "files/../../away": b"x"}), 17, "outside of the table")
    for given in (["--from", str(good), whole.uri], [], ["--from", str(good), "--storage-option", "a=b"]):
        for command in ("inspect", "verify"):
            assert run_here(capfd, command, *given).code == 2


def test_where_it_is_written(
    whole: LsmTable, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    document = run_here(capfd, "export-support", whole.uri, "--json").document
    assert document["decision"] == "exported"
    assert document["file"] == "t-support.zip"
    assert document["bytes"] == Path("t-support.zip").stat().st_size
    assert 0 < document["contents"] < document["objects"]
    assert run_here(capfd, "export-support", whole.uri).code == 0, "an earlier export is replaced"
    Path("t-support.zip").write_text("mine")
    assert run_here(capfd, "export-support", whole.uri).code == 2
    assert Path("t-support.zip").read_text() == "mine"
    assert run_here(capfd, "export-support", whole.uri, "--force").code == 0
    assert run_here(capfd, "export-support", whole.uri, "-o", str(tmp_path / "none" / "x")).code == 2
    assert run_here(capfd, "export-support", str(tmp_path / "none")).code == 3
    assert sorted(path.name for path in tmp_path.iterdir()) == ["t-support.zip"]
    with zipfile.ZipFile("t-support.zip") as archive:
        about = json.loads(archive.read("export.json"))
    assert any(one["name"] == "pylance" for one in about["checks"])
    assert about["history"]["revisions"][0]["revision"] == lance.dataset(whole.uri).version


def test_other_formats_have_none(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    uri = str(tmp_path / "v.lmd")
    assert run_here(capfd, "init", uri, "--format", "lm_diskann", "--dimension", "4").code == 0
    outcome = run_here(capfd, "export-support", uri, "-o", str(tmp_path / "v.zip"))
    assert outcome.code == 2
    assert "lm_diskann" in outcome.err
    assert not (tmp_path / "v.zip").exists()


@pytest.mark.parametrize("kind", ["BTREE", "ZONEMAP"])
def test_indexes_that_lack_rows(tmp_path: Path, capfd: pytest.CaptureFixture[str], kind: str) -> None:
    """The file has neither rows nor the files of indexes: what the versions show is reported, and no more."""
    uri = str(tmp_path / "t.lance")
    lance.write_dataset(pa.table({"id": range(100)}), uri, max_rows_per_file=50, enable_stable_row_ids=True)
    lance.dataset(uri).create_scalar_index("id", kind, name="by_id")
    compact_and_leave(uri, "by_id")
    file = exported(capfd, uri, tmp_path / "t.zip")
    [shown] = run_here(capfd, "inspect", "--from", file, "--json").document["indexes"]
    found = run_here(capfd, "verify", "--from", file, "--json").document
    severities = [one["severity"] for one in found["findings"] if one["check"] == "index_rows"]
    assert "rows of indexes" in found["skipped"]
    assert (shown["problem"] is None, severities) == ((False, ["warning"]) if kind == "BTREE" else (True, []))
