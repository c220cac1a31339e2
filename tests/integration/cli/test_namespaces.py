"""Tables in catalogs: on the command line, in a configuration, and what becomes of secrets."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from urllib.parse import unquote

import pyarrow as pa
import pytest

from memwal_ops.errors import StorageCredentialsError, StorageError, StoreUnavailableError, TableNotFoundError
from memwal_ops.storage import catalogs
from memwal_ops.storage.catalogs import resolve
from memwal_ops.storage.errors import RetryPolicy
from memwal_ops.storage.objects import open_store
from memwal_ops.supervisor.config.loader import load_settings
from memwal_ops.supervisor.scheduling.discovery import Discovery, discover
from tests.support.catalog_server import TOKEN, CatalogServer, catalog_server
from tests.support.run_cli import run_here
from tests.support.tables.plain import PlainTable

pytest_plugins = ["tests.support.s3_server"]

AUTHORIZATION = {"namespace.header.Authorization": f"Bearer {TOKEN}"}
OPTION = ("--storage-option", f"namespace.header.Authorization=Bearer {TOKEN}")
VENDED = "vended-secret-0123456789"


@pytest.fixture
def catalog(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[CatalogServer]:
    """Five tables on three pages."""
    monkeypatch.setattr(catalogs, "_RETRY", RetryPolicy(deadline=1.0))
    with catalog_server() as server:
        for name in "abcde":
            server.tables[name] = PlainTable(str(tmp_path / f"files/{name}-1.lance")).create(fragments=2).uri
        yield server


def _uri(catalog: CatalogServer, *table: str) -> str:
    return f"lance+namespace://rest/{'/'.join(('prod', *table))}?uri={catalog.url}"


def _found(file: Path, catalog: CatalogServer, more: str = "") -> Discovery:
    file.write_text(f"""
tables:
  - name: prod
    namespace: {{impl: rest, path: [prod], {more}
                properties: {{uri: "{catalog.url}", header.Authorization: "Bearer ${{TOKEN}}"}}}}
""")
    return discover(load_settings(str(file), {"TOKEN": TOKEN}).tables)


def test_a_directory_is_scanned_and_its_configuration_finds_the_same(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """By the catalog or as a database: the same tables."""
    for name in ("one", "two $x"):
        PlainTable(str(tmp_path / f"db/{name}.lance")).create()
    shown = run_here(capfd, "scan", "--namespace", f"lance+namespace://dir?root={tmp_path}/db", "--json")
    assert shown.code == 0, shown.err
    file = tmp_path / "memwal.yaml"
    file.write_text(shown.document["configuration"])
    found = discover(load_settings(str(file), {}).tables)
    assert [table.name for table in found.tables] == ["one", "two $x"]
    assert [table.uri for table in found.tables] == [one["uri"] for one in shown.document["tables"]]
    inspected = run_here(capfd, "inspect", found.tables[1].uri, "--json")
    assert inspected.code == 0, inspected.err
    assert inspected.document["uri"] == f"{tmp_path}/db/two $x.lance"


def test_tables_of_a_rest_catalog_appear_and_vanish(catalog: CatalogServer, tmp_path: Path) -> None:
    """All pages, each time anew; a filter is matched against the name."""
    file = tmp_path / "memwal.yaml"
    assert [table.name for table in _found(file, catalog).tables] == [f"prod/{name}" for name in "abcde"]
    del catalog.tables["b"]
    catalog.tables["f"] = catalog.tables["a"]
    found = _found(file, catalog, 'exclude: ["[de]"],')
    assert ([table.name for table in found.tables], found.faults) == (["prod/a", "prod/c", "prod/f"], ())
    assert [table.name for table in _found(file, catalog, "include: [c],").tables] == ["prod/c"]
    assert all(table.settings.storage_options.items() >= AUTHORIZATION.items() for table in found.tables)


def test_a_table_that_vanishes_between_list_and_look_is_not_found(
    catalog: CatalogServer, capfd: pytest.CaptureFixture[str]
) -> None:
    """The others are scanned."""
    catalog.before = lambda path: catalog.tables.pop("c", None) if "/prod%24c/" in path else None
    shown = run_here(capfd, "scan", "--namespace", _uri(catalog), *OPTION, "--json")
    assert shown.code == 3
    reasons = {
        one["uri"].partition("?")[0][-1]: [e["reason"] for e in one["errors"]] for one in shown.document["tables"]
    }
    assert reasons == {"a": [], "b": [], "c": ["table_not_found"], "d": [], "e": []}


def test_a_catalog_that_is_away_keeps_its_tables(
    catalog: CatalogServer, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """As a store that is away: exit code 24, and a fault of the entry, with which the supervisor keeps what it has."""
    file = tmp_path / "memwal.yaml"
    known = _found(file, catalog).tables
    catalog.stop()
    found = _found(file, catalog)
    assert (found.tables, [fault.exit_code for fault in found.faults]) == ((), [24])
    assert found.faults[0].pattern == known[0].settings.pattern
    down = run_here(capfd, "inspect", _uri(catalog, "a"), *OPTION)
    assert down.code == 24
    assert catalog.url.rsplit(":", 1)[0] in down.err
    assert TOKEN not in down.err + str(found)
    file.write_text(f"state_dir: {tmp_path}/state\n{file.read_text().replace('${TOKEN}', TOKEN)}")
    status = run_here(capfd, "status", "--config", str(file))
    assert (status.code, "no pattern matches any" in status.out) == (1, False), status.err
    assert catalog.url.rsplit(":", 1)[0] in run_here(capfd, "status", "--config", str(file), "--table", "prod/a").err


@pytest.mark.parametrize(
    ("uri", "code", "says"),
    [
        ("lance+namespace://rest/prod/zz?uri={url}", 3, "there is none"),
        ("lance+namespace://rest/a/b/c?uri={url}", 3, "there is none"),
        ("lance+namespace://rest/prod/a?uri={url}&header.Authorization=Bearer+x", 2, "--storage-option"),
        ("lance+namespace://rest?uri={url}", 2, "a catalog, not a table"),
        ("lance+namespace://bogus/t", 2, "bogus"),
        ("lance+namespace://", 2, "Not a catalog"),
    ],
)
def test_what_is_wrong_is_said(
    uri: str, code: int, says: str, catalog: CatalogServer, capfd: pytest.CaptureFixture[str]
) -> None:
    """Each with the exit code of its kind."""
    shown = run_here(capfd, "inspect", uri.format(url=catalog.url), *OPTION)
    assert (shown.code, says in shown.err) == (code, True), shown.err


def test_a_job_takes_the_name_of_a_table_and_its_catalog(
    catalog: CatalogServer, capfd: pytest.CaptureFixture[str]
) -> None:
    by_uri = run_here(capfd, "inspect", _uri(catalog, "a"), *OPTION)
    named = run_here(capfd, "inspect", "a", "--namespace", _uri(catalog), *OPTION)
    nested = run_here(capfd, "inspect", "prod/a", "--namespace", f"lance+namespace://rest?uri={catalog.url}", *OPTION)
    assert (by_uri.code, by_uri.out) == (named.code, named.out) == (nested.code, nested.out)
    assert by_uri.code == 0
    assert run_here(capfd, "inspect", "a", "--namespace", catalog.url).code == 2


def test_a_wrong_token_is_a_matter_of_credentials(catalog: CatalogServer, capfd: pytest.CaptureFixture[str]) -> None:
    """And is not shown."""
    wrong = "wrong-token-9876543210"
    option = ("--storage-option", f"namespace.header.Authorization=Bearer {wrong}")
    shown = run_here(capfd, "inspect", _uri(catalog, "a"), *option)
    assert shown.code == 21, shown.err
    assert wrong not in shown.err


@pytest.mark.long
def test_no_secret_is_shown(catalog: CatalogServer, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Neither the catalog's own, nor one that it vends: in documents, texts, configurations, errors and reprs."""
    catalog.vend = lambda: {"aws_secret_access_key": VENDED}
    found = _found(file := tmp_path / "memwal.yaml", catalog)
    plain = file.read_text().replace("${TOKEN}", TOKEN)
    (tmp_path / "plain.yaml").write_text(plain)
    texts = [repr(resolve(found.tables[0].uri, AUTHORIZATION)), *(table.uri for table in found.tables)]
    for command in (
        ("scan", "--namespace", _uri(catalog), *OPTION),
        ("scan", "--namespace", _uri(catalog), *OPTION, "--json"),
        ("inspect", _uri(catalog, "a"), *OPTION, "--json"),
        ("inspect", _uri(catalog, "zz"), *OPTION),
        ("config", "check", str(tmp_path / "plain.yaml")),
        ("config", "check", str(tmp_path / "plain.yaml"), "--json"),
    ):
        shown = run_here(capfd, *command)
        assert shown.code in {0, 3}, (command, shown.err)
        texts += [shown.out, shown.err]
    assert catalog.url in "".join(texts)
    for text in texts:
        assert TOKEN not in text
        assert VENDED not in text


def test_vended_credentials_are_used_and_renewed(
    catalog: CatalogServer, bucket: tuple[str, dict[str, str]], no_aws_environment: None
) -> None:
    """Before they end; the table's own options are merged, its own identity is not."""
    root, options = bucket
    open_store(resolve(f"{root}/t.lance", options)).put("x", b"1")
    given = {**AUTHORIZATION, **{key: value for key, value in options.items() if "access" not in key}}
    times = [timedelta(minutes=1), timedelta(hours=1)]

    def vend() -> dict[str, str]:
        ends = datetime.now(UTC) + (times.pop(0) if times else timedelta(seconds=-1))
        number = len(times)
        return {
            "aws_access_key_id": f"vended-key-{number}",
            "aws_secret_access_key": f"vended-secret-{number}",
            "aws_session_token": f"vended-token-{number}",
            "expires_at_millis": str(int(ends.timestamp() * 1000)),
        }

    catalog.tables, catalog.vend = {"t": f"{root}/t.lance"}, vend
    location = resolve(_uri(catalog, "t"), {**given, "aws_profile": "no-such-profile"})
    assert location.expires
    assert "expires_at_millis" not in location.lance_options
    first, second = location.lance_options, location.refreshed().lance_options
    assert (first["aws_session_token"], second["aws_session_token"]) == ("vended-token-1", "vended-token-0")
    assert location.refreshed().lance_options == second, "which have an hour left"
    assert [meta.path for meta in open_store(location).list()] == ["x"]
    assert len([path for path in catalog.requests if "describe" in path]) == 2
    with pytest.raises(StorageCredentialsError, match="expired"):
        resolve(_uri(catalog, "t"), given)


def test_credentials_that_are_renewed_may_be_short_lived(
    catalog: CatalogServer, bucket: tuple[str, dict[str, str]], no_aws_environment: None
) -> None:
    """Shorter than those of obstore are kept."""
    root, options = bucket

    def vend() -> dict[str, str]:
        return {**options, "expires_at_millis": str(int((datetime.now(UTC).timestamp() + 60) * 1000))}

    catalog.tables, catalog.vend = {"t": f"{root}/t.lance"}, vend
    store = open_store(resolve(_uri(catalog, "t"), AUTHORIZATION))
    store.put("x", b"1")
    assert [meta.path for meta in store.list()] == ["x"]


@pytest.mark.parametrize(
    ("location", "options", "says"),
    [
        ("relative/x.lance", {}, "relative path"),
        ("~/x.lance", {}, "relative path"),
        ("http://host/x", {}, "scheme"),
        ("s3:/b/x", {}, "not a valid URI"),
        (f"s3://user:{VENDED}@bucket/x", {}, "carries credentials"),
        ("s3://b/x", {"aws_access_key_id": VENDED}, "given together"),
    ],
)
def test_what_a_catalog_has_wrong_is_told_of_the_catalog(
    location: str, options: dict[str, str], says: str, catalog: CatalogServer, capfd: pytest.CaptureFixture[str]
) -> None:
    """And not of the command line; a relative path would be one in the folder in which the process happens to be."""
    catalog.tables["a"], catalog.vend = location, lambda: options
    shown = run_here(capfd, "inspect", _uri(catalog, "a"), *OPTION)
    assert shown.code == 2
    text = " ".join(shown.err.split())
    assert "What the catalog has about" in text
    assert says in text
    assert VENDED not in text


@pytest.mark.parametrize(
    ("status", "code"), [(429, 24), (500, 24), (502, 24), (503, 24), (401, 21), (403, 21), (418, 20)]
)
def test_an_answer_of_a_proxy_has_the_exit_code_of_its_status(
    status: int, code: int, catalog: CatalogServer, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Its body is none of the specification's."""
    monkeypatch.setattr(catalog, "answer", lambda path: (status, {"message": f"secret_key={VENDED}"}))
    shown = run_here(capfd, "inspect", _uri(catalog, "a"), *OPTION)
    assert shown.code == code, shown.err
    assert str(status) in shown.err
    assert VENDED not in shown.err


def test_a_catalog_that_is_overloaded_is_asked_again(
    catalog: CatalogServer, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """One refusal ends no run, as with a store."""
    monkeypatch.setattr(catalogs, "_RETRY", RetryPolicy(deadline=10.0))
    answer, refusals = catalog.answer, [503, 429]
    monkeypatch.setattr(catalog, "answer", lambda path: (refusals.pop(), {}) if refusals else answer(path))
    shown = run_here(capfd, "inspect", _uri(catalog, "a"), *OPTION)
    assert (shown.code, len(catalog.requests)) == (0, 3), shown.err


def test_an_answer_that_breaks_off_is_a_catalog_that_is_away(
    catalog: CatalogServer, capfd: pytest.CaptureFixture[str]
) -> None:
    def breaks(path: str) -> None:
        raise ConnectionAbortedError(path)

    catalog.before = breaks
    assert run_here(capfd, "inspect", _uri(catalog, "a"), *OPTION).code == 24


def test_an_address_with_a_password_is_a_secret(
    catalog: CatalogServer, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """URIs of tables are logged and stored, with the catalog's address."""
    address = catalog.url.replace("://", f"://svc:{VENDED}@")
    refused = run_here(capfd, "inspect", f"lance+namespace://rest/prod/a?uri={address}", *OPTION)
    assert (refused.code, "--storage-option namespace.uri=" in refused.err) == (2, True)
    given = run_here(
        capfd, "inspect", "lance+namespace://rest/prod/a", *OPTION, "--storage-option", f"namespace.uri={address}"
    )
    assert given.code == 0, given.err
    scan = run_here(
        capfd,
        "scan",
        "--namespace",
        "lance+namespace://rest/prod",
        *OPTION,
        "--storage-option",
        f"namespace.uri={address}",
    )
    assert 'uri": "${URI}"' in scan.out
    file = tmp_path / "memwal.yaml"
    file.write_text(f"""
tables:
  - namespace: {{impl: rest, path: [prod], properties: {{uri: "{address}", header.Authorization: "Bearer {TOKEN}"}}}}
""")
    found = discover(load_settings(str(file), {}).tables)
    assert [table.uri for table in found.tables] == [f"lance+namespace://rest/prod/{name}" for name in "abcde"]
    checked = run_here(capfd, "config", "check", str(file))
    assert checked.code == 0, checked.err
    for text in (refused.err, given.out, scan.out, scan.err, checked.out, checked.err, str(found)):
        assert VENDED not in text


def test_credentials_of_a_table_that_has_moved_are_not_used(
    catalog: CatalogServer,
    bucket: tuple[str, dict[str, str]],
    no_aws_environment: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They are those of another table, which was perhaps created under the same name."""
    root, options = bucket
    given = {**AUTHORIZATION, **{key: value for key, value in options.items() if "access" not in key}}

    def vend() -> dict[str, str]:
        ends = datetime.now(UTC) + timedelta(minutes=1)
        return {
            "aws_access_key_id": "vended-key",
            "aws_secret_access_key": VENDED,
            "expires_at_millis": str(int(ends.timestamp() * 1000)),
        }

    catalog.tables, catalog.vend = {"t": f"{root}/t-1.lance"}, vend
    location = resolve(_uri(catalog, "t"), given)
    store = open_store(location, retry=RetryPolicy(deadline=1.0))
    catalog.tables["t"] = f"{root}/t-2.lance"
    with pytest.raises(StorageError, match="another location"):
        location.refreshed()
    with pytest.raises(StorageError, match="another location"):
        store.put("x", b"1")
    answer = catalog.answer
    monkeypatch.setattr(catalog, "answer", lambda path: (503, {}))
    with pytest.raises(StoreUnavailableError):
        store.put("x", b"1")
    monkeypatch.setattr(catalog, "answer", answer)
    del catalog.tables["t"]
    with pytest.raises(TableNotFoundError, match="there is none") as gone:
        store.put("x", b"1")
    assert VENDED not in str(gone.value)


def _in_namespaces(root: Path, *paths: list[str]) -> list[str]:
    """A table in each namespace of a directory, with the marks that LanceDB leaves beside it; returns their folders."""
    import lance_namespace  # 1.5 s, which each process of the tests would need to collect them
    from lance.namespace import DirectoryNamespace

    client, rows, stream = DirectoryNamespace(root=str(root)), pa.table({"id": range(5)}), io.BytesIO()
    with pa.ipc.new_stream(stream, rows.schema) as writer:
        writer.write_table(rows)
    folders = []
    for path in paths:
        for end in range(1, len(path) + 1):
            with suppress(lance_namespace.NamespaceAlreadyExistsError):
                client.create_namespace(lance_namespace.CreateNamespaceRequest(id=path[:end]))
        request = lance_namespace.CreateTableRequest(id=[*path, "t"])
        encoded = client.create_table(request, stream.getvalue()).location.rpartition("/")[2]
        folders.append(unquote(encoded))
        if encoded != folders[-1]:
            (root / encoded).mkdir()
            (root / encoded / ".lance-reserved").touch()
            (root / encoded.replace("%", "%25")).mkdir()
    return folders


def test_namespaces_with_names_that_are_not_ascii(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Whatever marks a catalog writes beside a table, the table is found, and no command has it dropped."""
    root = tmp_path / "db"
    folders = _in_namespaces(root, ["día"], ["día", "noche"], ["plain"])
    shown = run_here(capfd, "scan", "--database", str(root), "--json")
    assert shown.code == 0, shown.err
    wanted = {*folders, "__manifest"}
    assert {one["uri"].rpartition("/")[2] for one in shown.document["tables"]} == wanted
    assert len(shown.document["skipped"]) == 4
    for one in shown.document["skipped"]:
        assert "It is no table" in one["why"]
        repair = run_here(capfd, "repair", one["uri"], "--json")
        [decision] = repair.document["decisions"]
        assert [choice["choice"] for choice in decision["choices"]] == ["Leave it as it is."]
    catalog = f"lance+namespace://dir/d%C3%ADa?root={root}"
    shown = run_here(capfd, "scan", "--namespace", catalog, "--json")
    assert shown.code == 0, shown.err
    assert [one["uri"].partition("?")[0].rpartition("dir/")[2] for one in shown.document["tables"]] == [
        "d%C3%ADa/t",
        "d%C3%ADa/noche/t",
    ]
    file = tmp_path / "memwal.yaml"
    file.write_text(shown.document["configuration"])
    found = discover(load_settings(str(file), {}).tables)
    assert ([table.name for table in found.tables], found.faults) == (["t", "d_C3_ADa/noche/t"], ())
    file.write_text(f"tables: [{{database: {root}}}]")
    assert {table.uri.rpartition("/")[2] for table in discover(load_settings(str(file), {}).tables).tables} == wanted


def test_namespaces_that_cannot_be_listed_are_named(catalog: CatalogServer, capfd: pytest.CaptureFixture[str]) -> None:
    answer = catalog.answer
    catalog.answer = lambda path: (
        (406, {"error": "no", "code": 0}) if "/list?" in path and "/table/" not in path else answer(path)
    )  # type: ignore[method-assign]  # of this server
    shown = run_here(capfd, "scan", "--namespace", _uri(catalog), *OPTION, "--json")
    assert (shown.code, len(shown.document["tables"])) == (0, 5), shown.err
    [skipped] = shown.document["skipped"]
    assert "namespaces below it could not be listed" in skipped["why"]
