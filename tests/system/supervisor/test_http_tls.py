"""TLS: a certificate that is read again when it changes, and clients that speak none."""

from __future__ import annotations

import datetime
import http.client
import os
import socket
import ssl
from collections.abc import Iterator
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from memwal_ops.errors import InvalidConfigError, InvalidUsageError
from memwal_ops.supervisor.config.model import HttpConfig
from memwal_ops.supervisor.http.access import TokenFile
from memwal_ops.supervisor.http.client import ServiceClient
from memwal_ops.supervisor.http.connections import Certificate
from memwal_ops.supervisor.http.server import HttpServer
from memwal_ops.supervisor.observe.pages import Page
from tests.support.waiting import PATIENCE, until


def make_pair(folder: Path, name: str, authority: tuple[bytes, bytes] | None = None) -> tuple[bytes, bytes]:
    """Write NAME.crt and NAME.key, for localhost; return both. ``authority``: who signs it; else itself."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
    issuer, signer = subject, key
    if authority is not None:
        issuer = x509.load_pem_x509_certificate(authority[0]).subject
        signer = serialization.load_pem_private_key(authority[1], None)  # type: ignore[assignment]
    began = datetime.datetime.now(datetime.UTC) - datetime.timedelta(days=1)
    made = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(began)
        .not_valid_after(began + datetime.timedelta(days=10))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost")]), critical=False)
        .add_extension(x509.BasicConstraints(ca=authority is None, path_length=None), critical=True)
        .sign(signer, hashes.SHA256())
    )
    pem, plain = serialization.Encoding.PEM, serialization.NoEncryption()
    pair = made.public_bytes(pem), key.private_bytes(pem, serialization.PrivateFormat.PKCS8, plain)
    (folder / f"{name}.crt").write_bytes(pair[0])
    (folder / f"{name}.key").write_bytes(pair[1])
    return pair


@pytest.fixture
def served(tmp_path: Path) -> Iterator[HttpServer]:
    make_pair(tmp_path, "one")
    (tmp_path / "tokens").write_text("t" * 20)
    (tmp_path / "tokens").chmod(0o600)
    server = HttpServer(
        "127.0.0.1", 0, alive=lambda: (True, "ok"), ready=lambda: (True, "ready"), metrics=list, status=dict,
        runs=lambda **_: [], certificate=Certificate(str(tmp_path / "one.crt"), str(tmp_path / "one.key")),
        tokens=TokenFile(str(tmp_path / "tokens")), sign_in=lambda error: Page("text/html", error.encode()),
    )  # fmt: skip
    yield server
    server.close()


def ask(server: HttpServer, certificate: bytes) -> int:
    context = ssl.create_default_context(cadata=certificate.decode())
    connection = http.client.HTTPSConnection("localhost", server.port, timeout=PATIENCE, context=context)
    connection.request("GET", "/healthz")
    status = connection.getresponse().status
    connection.close()
    return status


def test_a_changed_certificate_is_used_and_a_bad_one_is_not(served: HttpServer, tmp_path: Path) -> None:
    first = (tmp_path / "one.crt").read_bytes()
    assert ask(served, first) == 200
    second = make_pair(tmp_path, "two")
    os.replace(tmp_path / "two.crt", tmp_path / "one.crt")  # without its key: the first pair stays
    until(lambda: served._server._certificate._stamp == served._server._certificate._stamped())
    assert ask(served, first) == 200
    os.replace(tmp_path / "two.key", tmp_path / "one.key")

    def used() -> bool:
        try:
            return ask(served, second[0]) == 200
        except ssl.SSLError:
            return False

    until(used)
    with pytest.raises(ssl.SSLError):
        ask(served, first)


def test_a_client_trusts_only_the_certificate_itself(
    served: HttpServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a chain, not the authority: it signs the certificates of others, too."""
    monkeypatch.setenv("HOME", str(tmp_path))
    authority = make_pair(tmp_path, "authority")
    for name in ("own", "others"):
        (tmp_path / f"{name}.pem").write_bytes(make_pair(tmp_path, name, authority)[0] + authority[0])
    served._server._certificate = Certificate(str(tmp_path / "own.pem"), str(tmp_path / "own.key"))
    assert ask(served, authority[0]) == 200
    own, others = (
        ServiceClient(HttpConfig(port=served.port, tls_certificate=f"~/{name}.pem", tls_key="~/x"))
        for name in ("own", "others")
    )
    assert own.get("/api/v1/status") == {}
    with pytest.raises(OSError, match="CERTIFICATE_VERIFY_FAILED"):
        others.get("/api/v1/status")
    (tmp_path / "own.pem").write_text("")
    with pytest.raises(InvalidUsageError, match="has no certificate"):
        ServiceClient(HttpConfig(port=served.port, tls_certificate="~/own.pem", tls_key="~/x"))


def test_clients_without_tls_get_nothing_and_block_nobody(served: HttpServer, tmp_path: Path) -> None:
    with socket.create_connection(("127.0.0.1", served.port), timeout=PATIENCE) as plain:
        plain.sendall(b"GET /healthz HTTP/1.0\r\n\r\n")
        assert b"ok" not in plain.recv(1000)
    silent = [socket.create_connection(("127.0.0.1", served.port), timeout=PATIENCE) for _ in range(70)]
    assert ask(served, (tmp_path / "one.crt").read_bytes()) == 200, "handshakes that never come block nobody"
    for one in silent:
        one.close()


def test_its_cookie_is_secure(served: HttpServer, tmp_path: Path) -> None:
    context = ssl.create_default_context(cafile=str(tmp_path / "one.crt"))
    connection = http.client.HTTPSConnection("localhost", served.port, timeout=PATIENCE, context=context)
    kind = {"Content-Type": "application/x-www-form-urlencoded", "Origin": f"https://localhost:{served.port}"}
    connection.request("POST", "/sign-in", f"token={'t' * 20}", kind)
    answer = connection.getresponse()
    assert (answer.status, "Secure" in str(answer.getheader("Set-Cookie")).split("; ")) == (303, True)
    connection.close()


def test_a_pair_that_does_not_fit_is_refused_at_the_start(tmp_path: Path) -> None:
    make_pair(tmp_path, "one")
    make_pair(tmp_path, "two")
    for key in ("two.key", "none.key", "one.crt"):
        with pytest.raises(InvalidConfigError, match="cannot be used") as refused:
            Certificate(str(tmp_path / "one.crt"), str(tmp_path / key))
        assert "http.tls_key" in refused.value.remedy
