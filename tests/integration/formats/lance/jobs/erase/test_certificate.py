"""The certificate of an erasure: what it lists, its signature, and what later contradicts it."""

from __future__ import annotations

import json
import os
import shutil
from typing import TYPE_CHECKING, Any

import lance
import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa

from memwal_ops import run_job
from memwal_ops.errors import CertificateError, InvalidUsageError
from tests.support.run_cli import run_here
from tests.support.tables import patterns

if TYPE_CHECKING:
    from pathlib import Path

KEYS = {
    "ed25519": ed25519.Ed25519PrivateKey.generate,
    "ecdsa-sha256": lambda: ec.generate_private_key(ec.SECP256R1()),
    "rsa-sha256": lambda: rsa.generate_private_key(65537, 2048),
}


@pytest.fixture
def uri(tmp_path: Path) -> str:
    found = str(tmp_path / "t.lance")
    lance.write_dataset(patterns.rows(range(20)), found)
    lance.dataset(found).create_scalar_index("btree", "BTREE")
    return found


def erase(uri: str, certificate: str, **options: Any) -> Any:
    return run_job(
        uri, "erase", where="id = 5", apply=True, older_than="0s", allow_unsafe=True, certificate=certificate, **options
    )


def key_file(path: Path, kind: str) -> str:
    data = KEYS[kind]().private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    path.write_bytes(data)
    return str(path)


def check(capfd: pytest.CaptureFixture[str], path: str) -> tuple[int, dict[str, Any]]:
    """By the file alone: it names the table."""
    outcome = run_here(capfd, "erase", "--check", path, "--json")
    return outcome.code, outcome.document


def test_it_lists_every_object_and_holds_later(uri: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = str(tmp_path / "proof.json")
    assert erase(uri, path).certificate == path
    document = json.loads((tmp_path / "proof.json").read_text())
    listed = {os.path.join(folder, name) for folder, _, names in os.walk(uri) for name in names}
    assert {os.path.join(uri, one["path"]) for one in document["objects"]} == listed
    assert all(one["why"] and one["e_tag"] for one in document["objects"])
    assert patterns.pattern(5, "btree") not in json.dumps(document)
    assert "id = 5" not in json.dumps(document)
    assert check(capfd, path)[1]["decision"] == "valid"
    lance.write_dataset(patterns.rows(range(30, 40)), uri, mode="append")
    run_job(uri, "compact")
    run_job(uri, "expire", apply=True, older_than="0s", allow_unsafe=True)
    code, told = check(capfd, path)
    assert (code, told["decision"], told["signed_by"]) == (0, "valid", None)
    assert told["objects"]["gone"]
    assert told["objects"]["added"]


def test_none_is_written_before_all_is_erased(uri: str, tmp_path: Path) -> None:
    path = tmp_path / "proof.json"
    lance.dataset(uri).tags.create("kept", 1)
    report = erase(uri, str(path))
    assert (report.decision, report.certificate) == ("held", None)
    assert not path.exists()


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", KEYS)
def test_a_signature(uri: str, tmp_path: Path, capfd: pytest.CaptureFixture[str], kind: str) -> None:
    path = tmp_path / "proof.json"
    erase(uri, str(path), sign_with=key_file(tmp_path / "key.pem", kind))
    document = json.loads(path.read_text())
    assert document["signature"]["algorithm"] == kind
    assert check(capfd, str(path))[1]["signed_by"].startswith("SHA256:")
    document["objects"].pop()
    path.write_text(json.dumps(document))
    assert check(capfd, str(path))[0] == CertificateError.exit_code


def test_what_was_put_back_or_replaced_is_found(uri: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = str(tmp_path / "proof.json")
    shutil.copytree(f"{uri}/data", tmp_path / "backup")
    erase(uri, path)
    (old,) = (tmp_path / "backup").iterdir()
    shutil.copy2(old, f"{uri}/data/{old.name}")
    code, told = check(capfd, path)
    assert (code, told["decision"]) == (CertificateError.exit_code, "changed")
    assert told["wrong"] == [f"data/{old.name} is not in the certificate, and is older than it: it was put there since"]
    os.unlink(f"{uri}/data/{old.name}")
    (new,) = os.listdir(f"{uri}/data")
    shutil.copy(old, f"{uri}/data/{new}")
    assert "another object" in check(capfd, path)[1]["wrong"][0]


def test_bad_files_and_keys_are_refused(uri: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "text").write_text("no key")
    with pytest.raises(InvalidUsageError, match="not a private key"):
        erase(uri, str(tmp_path / "proof.json"), sign_with=str(tmp_path / "text"))
    assert lance.dataset(uri).count_rows() == 20, "refused before any work"
    assert check(capfd, str(tmp_path / "text"))[0] == CertificateError.exit_code
    assert check(capfd, str(tmp_path / "nowhere"))[0] == InvalidUsageError.exit_code
    assert run_here(capfd, "erase").code == InvalidUsageError.exit_code
    assert run_here(capfd, "erase", uri).code == InvalidUsageError.exit_code
