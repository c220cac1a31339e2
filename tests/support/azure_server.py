"""A stand-in for Azure Blob Storage that gives Azurite's own answers, the odd ones included.

One container, kept in memory; nothing is signed. Only what the tests ask for is there.
"""

from __future__ import annotations

import hashlib
import threading
from dataclasses import dataclass, field
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

if TYPE_CHECKING:
    from collections.abc import Callable

ACCOUNT = "devstoreaccount1"
SAS = "sv=2021-12-02&ss=b&srt=co&sp=rl&se=2099-01-01T00%3A00%3A00Z&sig=c2VjcmV0U2lnbmF0dXJl%2BMTIzNDU2Nzg5MA%3D%3D"
DENIED = (403, "AuthorizationPermissionMismatch", "This request is not authorized to perform this operation.")
Answer = tuple[int, dict[str, str], bytes]


def by_utf16(name: str) -> bytes:
    """Azurite sorts JavaScript's strings."""
    return name.encode("utf-16-be")


@dataclass
class AzureServer:
    """``seen`` has (method, path with query).

    ``denied``: writes and deletes are answered with 403. ``locked``: blobs that may not be deleted. ``broken``: how
    many further requests with a ``marker`` or ``startFrom`` are answered with 503. ``ignores_start``: a listing begins
    at the beginning whatever is asked for. ``batch``: the status of any batch; 500 with nothing else is Azurite's
    answer to an account SAS. ``single``: the status of any single delete.
    """

    blobs: dict[str, bytes] = field(default_factory=dict)
    seen: list[tuple[str, str]] = field(default_factory=list)
    denied: bool = False
    locked: set[str] = field(default_factory=set)
    broken: int = 0
    ignores_start: bool = False
    order: Callable[[str], bytes] = str.encode
    page: int = 5000
    batch: int = 500
    single: int | None = None
    _server: ThreadingHTTPServer | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __enter__(self) -> AzureServer:
        service = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True

            def log_message(self, *_: object) -> None:
                pass

            def answer(self) -> None:
                body = self.rfile.read(int(self.headers.get("content-length") or 0))
                with service._lock:
                    service.seen.append((self.command, self.path))
                    status, headers, content = service.answer(self.command, self.path, dict(self.headers), body)
                self.send_response(status)
                for key, value in {"Content-Length": str(len(content)), **headers}.items():
                    self.send_header(key, value)
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(content)

            do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = answer

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.shutdown()
        self._server.server_close()

    def options(self, *, sas: bool = False) -> dict[str, str]:
        """Storage options that reach it."""
        assert self._server is not None
        secret = {"azure_storage_sas_token": SAS} if sas else {"azure_storage_account_key": "bm8ga2V5"}
        return {
            "azure_storage_account_name": ACCOUNT,
            "azure_storage_endpoint": f"http://127.0.0.1:{self._server.server_port}/{ACCOUNT}",
            "allow_http": "true",
            **secret,
        }

    def methods(self) -> list[str]:
        return [method for method, _ in self.seen]

    def answer(self, method: str, target: str, headers: dict[str, str], body: bytes) -> Answer:
        parts = urlsplit(target)
        query = {key: values[0] for key, values in parse_qs(parts.query).items()}
        if query.get("comp") == "list":
            return self.listing(query)
        if query.get("comp") == "batch":
            return self.batch, {}, b""
        headers = {key.lower(): value for key, value in headers.items()}
        name = unquote(parts.path.split("/", 3)[3])
        content = self.blobs.get(name)
        if method in {"PUT", "DELETE"} and self.denied:
            return error(*DENIED)
        if method == "DELETE" and self.single is not None:
            return self.single, {}, b""
        if method == "PUT":
            return self.put(name, body, headers)
        if content is None:
            return error(404, "BlobNotFound", "The specified blob does not exist.")
        if method == "DELETE":
            if name in self.locked:
                return error(*DENIED)
            del self.blobs[name]
            return 202, {}, b""
        return got(content, headers.get("x-ms-range") or headers.get("range"))

    def put(self, name: str, body: bytes, headers: dict[str, str]) -> Answer:
        content = self.blobs.get(name)
        if headers.get("if-none-match") == "*" and content is not None:
            return error(409, "BlobAlreadyExists", "The specified blob already exists.")
        wanted = headers.get("if-match")
        if wanted is not None and (content is None or wanted.strip('"') != tag(content)):
            return error(412, "ConditionNotMet", "The condition specified was not met.")
        self.blobs[name] = body
        return 201, {"ETag": f'"{tag(body)}"', "Last-Modified": formatdate(usegmt=True)}, b""

    def listing(self, query: dict[str, str]) -> Answer:
        if self.broken and {"marker", "startFrom"} & set(query):
            self.broken -= 1
            return error(503, "ServerBusy", "The server is busy.")
        names = sorted((name for name in self.blobs if name.startswith(query.get("prefix", ""))), key=self.order)
        if "startFrom" in query and not self.ignores_start:
            names = [name for name in names if self.order(name) >= self.order(query["startFrom"])]
        if "marker" in query:
            names = [name for name in names if self.order(name) > self.order(query["marker"])]
        here, rest = names[: self.page], names[self.page :]
        blobs = "".join(
            f"<Blob><Name>{escape(name)}</Name><Properties><Creation-Time>{formatdate(usegmt=True)}</Creation-Time>"
            f"<Last-Modified>{formatdate(usegmt=True)}</Last-Modified><Etag>{tag(self.blobs[name])}</Etag>"
            f"<Content-Length>{len(self.blobs[name])}</Content-Length><Content-Type>x/y</Content-Type>"
            "<BlobType>BlockBlob</BlobType></Properties></Blob>"
            for name in here
        )
        marker = f"<NextMarker>{escape(here[-1])}</NextMarker>" if rest else "<NextMarker/>"
        text = (
            '<?xml version="1.0" encoding="UTF-8" standalone="yes"?><EnumerationResults ServiceEndpoint="x" '
            f'ContainerName="c"><Prefix>p</Prefix><Blobs>{blobs}</Blobs>{marker}</EnumerationResults>'
        )
        return 200, {"Content-Type": "application/xml"}, text.encode()


def tag(content: bytes) -> str:
    """Without quotes, as listings have it; HEAD and GET put quotes around."""
    return f"0x{hashlib.md5(content).hexdigest()[:15].upper()}"


def got(content: bytes, wanted: str | None) -> Answer:
    headers = {"ETag": f'"{tag(content)}"', "Last-Modified": formatdate(usegmt=True), "x-ms-blob-type": "BlockBlob"}
    if wanted is None:
        return 200, headers, content
    start, end = (int(one) for one in wanted.removeprefix("bytes=").split("-"))
    # Azurite's own reckoning: the first byte of nothing is "bytes 0--1/0", everything else beyond the end is 416.
    if (start > 0 and start >= len(content)) or (not content and end > 0):
        return error(416, "InvalidRange", "The range specified is invalid for the current size of the resource.")
    end = min(end, len(content) - 1)
    return 206, {**headers, "Content-Range": f"bytes {start}-{end}/{len(content)}"}, content[start : end + 1]


def error(status: int, code: str, message: str) -> Answer:
    text = (
        f'<?xml version="1.0" encoding="UTF-8" standalone="yes"?>\n<Error>\n  <Code>{code}</Code>\n'
        f"  <Message>{message}\n"
        "RequestId:e813cbf0-ba7d-46d8-8cab-262037017e9e\nTime:2026-11-22T01:24:13.370Z</Message>\n</Error>"
    )
    return status, {"Content-Type": "application/xml", "x-ms-error-code": code}, text.encode()
