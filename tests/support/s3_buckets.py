"""An S3 server in threads of this process, for tests whose subject is not the store.

It answers in a tenth of the time of moto. It has the requests of a table's clients alone, compared with moto's by
``campaigns/pairs``, and passes the contract of the stores as moto does; others get 501.
"""

from __future__ import annotations

import hashlib
import re
import socketserver
import threading
import uuid
from collections import Counter
from dataclasses import dataclass, field
from datetime import UTC, datetime
from email.utils import format_datetime
from functools import cache
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl, quote, unquote, urlsplit
from xml.etree import ElementTree
from xml.sax.saxutils import escape

if TYPE_CHECKING:
    from collections.abc import Mapping

Answer = tuple[int, dict[str, str], bytes]
_NEXT = "\U0010ffff"
_REASONS = {200: "OK", 204: "No Content", 206: "Partial Content", 404: "Not Found", 412: "Precondition Failed"}


@dataclass(frozen=True)
class Stored:
    """An object."""

    body: bytes
    tag: str
    at: datetime

    @classmethod
    def of(cls, body: bytes, parts: int = 0) -> Stored:
        """Written now; S3 tells whole seconds."""
        tag = hashlib.md5(body).hexdigest() + (f"-{parts}" if parts else "")
        return cls(body, f'"{tag}"', datetime.now(UTC).replace(microsecond=0))

    def headers(self) -> dict[str, str]:
        return {"ETag": self.tag, "Last-Modified": format_datetime(self.at, usegmt=True), "Accept-Ranges": "bytes"}


def _error(status: int, code: str) -> Answer:
    text = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>{code}</Message></Error>"
    return status, {"Content-Type": "application/xml"}, text.encode()


def _xml(name: str, content: str) -> Answer:
    space = "http://s3.amazonaws.com/doc/2006-03-01/"
    text = f'<?xml version="1.0" encoding="UTF-8"?><{name} xmlns="{space}">{content}</{name}>'
    return 200, {"Content-Type": "application/xml"}, text.encode()


@dataclass
class Buckets:
    """Objects by key of each bucket. Each request is carried out whole, one after the other; ``counts``: by method."""

    objects: dict[str, dict[str, Stored]] = field(default_factory=dict)
    uploads: dict[str, dict[int, bytes]] = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def answer(self, method: str, target: str, headers: Mapping[str, str], body: bytes) -> Answer:
        """Status, headers and body."""
        parts = urlsplit(target)
        bucket, _, key = unquote(parts.path.lstrip("/")).partition("/")
        query = dict(parse_qsl(parts.query, keep_blank_values=True))
        with self.lock:
            self.counts[method] += 1
            if method == "PUT" and not key:
                self.objects.setdefault(bucket, {})
                return 200, {}, b""
            if (objects := self.objects.get(bucket)) is None:
                return _error(404, "NoSuchBucket")
            if not key:
                return self._of_bucket(method, query, objects, body)
            if {"uploads", "uploadId"} & query.keys():
                return self._of_upload(method, query, key, objects, body)
            return self._of_object(method, key, headers, objects, body)

    def _of_bucket(self, method: str, query: dict[str, str], objects: dict[str, Stored], body: bytes) -> Answer:
        if method == "GET" and query.get("list-type") == "2":
            return self._page(query, objects)
        if method == "POST" and "delete" in query:
            root, gone = ElementTree.fromstring(body), []
            for one in root.iterfind("{*}Object/{*}Key"):
                objects.pop(one.text or "", None)
                gone.append(f"<Deleted><Key>{_text(one.text or '')}</Key></Deleted>")
            quiet = (root.findtext("{*}Quiet") or "").lower() == "true"
            return _xml("DeleteResult", "" if quiet else "".join(gone))
        if method == "GET" and "versioning" in query:
            return _xml("VersioningConfiguration", "")
        if method == "GET" and "lifecycle" in query:
            return _error(404, "NoSuchLifecycleConfiguration")
        return (200, {}, b"") if method == "HEAD" else _error(501, "NotImplemented")

    def _page(self, query: dict[str, str], objects: dict[str, Stored]) -> Answer:
        prefix, delimiter = query.get("prefix", ""), query.get("delimiter", "")
        after = query.get("continuation-token") or query.get("start-after", "")
        most, last, count, parts = int(query.get("max-keys", 1000)), "", 0, []
        encoded = query.get("encoding-type") == "url"
        folders: set[str] = set()

        def told(name: str) -> str:
            return quote(name, safe="/") if encoded else _text(name)

        for key in sorted(one for one in objects if one.startswith(prefix) and one > after):
            end = key.find(delimiter, len(prefix)) if delimiter else -1
            folder = key[: end + len(delimiter)] if end >= 0 else ""
            if folder and (folder in folders or after.startswith(folder)):
                continue
            if count == most:
                parts.append(f"<NextContinuationToken>{_text(last)}</NextContinuationToken>")
                break
            count, last = count + 1, folder + _NEXT if folder else key
            if folder:
                folders.add(folder)
                parts.append(f"<CommonPrefixes><Prefix>{told(folder)}</Prefix></CommonPrefixes>")
                continue
            one, at = objects[key], objects[key].at.strftime("%Y-%m-%dT%H:%M:%S.000Z")
            parts.append(
                f"<Contents><Key>{told(key)}</Key><LastModified>{at}</LastModified><ETag>{escape(one.tag)}</ETag>"
                f"<Size>{len(one.body)}</Size><StorageClass>STANDARD</StorageClass></Contents>"
            )
        truncated = str(bool(parts) and parts[-1].startswith("<Next")).lower()
        return _xml(
            "ListBucketResult",
            f"<Prefix>{told(prefix)}</Prefix><KeyCount>{count}</KeyCount><MaxKeys>{most}</MaxKeys>"
            f"{'<EncodingType>url</EncodingType>' if encoded else ''}<IsTruncated>{truncated}</IsTruncated>"
            + "".join(parts),
        )

    def _of_upload(
        self, method: str, query: dict[str, str], key: str, objects: dict[str, Stored], body: bytes
    ) -> Answer:
        if method == "POST" and "uploads" in query:
            name = uuid.uuid4().hex
            self.uploads[name] = {}
            return _xml("InitiateMultipartUploadResult", f"<Key>{_text(key)}</Key><UploadId>{name}</UploadId>")
        if (upload := self.uploads.get(query.get("uploadId", ""))) is None:
            return _error(404, "NoSuchUpload")
        if method == "PUT":
            upload[int(query["partNumber"])] = body
            return 200, {"ETag": Stored.of(body).tag}, b""
        del self.uploads[query["uploadId"]]
        if method == "DELETE":
            return 204, {}, b""
        numbers = [int(one.text or "") for one in ElementTree.fromstring(body).iterfind("{*}Part/{*}PartNumber")]
        objects[key] = Stored.of(b"".join(upload[number] for number in numbers), len(numbers))
        tag = escape(objects[key].tag)
        return _xml("CompleteMultipartUploadResult", f"<Key>{_text(key)}</Key><ETag>{tag}</ETag>")

    def _of_object(
        self, method: str, key: str, headers: Mapping[str, str], objects: dict[str, Stored], body: bytes
    ) -> Answer:
        there, tag = objects.get(key), headers.get("if-match")
        if method == "PUT":
            if tag is not None and there is None:
                return _error(404, "NoSuchKey")
            if (headers.get("if-none-match") == "*" and there) or (tag and there and tag.strip('"') != there.tag[1:-1]):
                return _error(412, "PreconditionFailed")
            if (source := headers.get("x-amz-copy-source")) is None:
                objects[key] = Stored.of(body)
                return 200, {"ETag": objects[key].tag}, b""
            bucket, _, name = unquote(source.lstrip("/")).partition("/")
            if (copied := self.objects.get(bucket, {}).get(name)) is None:
                return _error(404, "NoSuchKey")
            if copied is there:
                return _error(400, "InvalidRequest")
            objects[key] = Stored.of(copied.body)
            at = objects[key].at.strftime("%Y-%m-%dT%H:%M:%S.000Z")
            return _xml("CopyObjectResult", f"<LastModified>{at}</LastModified><ETag>{escape(copied.tag)}</ETag>")
        if method == "DELETE":
            objects.pop(key, None)
            return 204, {}, b""
        if method not in {"GET", "HEAD"}:
            return _error(501, "NotImplemented")
        if there is None:
            return _error(404, "NoSuchKey")
        if tag and tag.strip('"') != there.tag[1:-1]:
            return _error(412, "PreconditionFailed")
        return self._read(there, headers.get("range", ""))

    @staticmethod
    def _read(one: Stored, asked: str) -> Answer:
        match, size = re.fullmatch(r"bytes=(\d*)-(\d*)", asked), len(one.body)
        if match is None or (not size and not match[1]):
            return 200, one.headers(), one.body
        first = int(match[1]) if match[1] else max(size - int(match[2]), 0)
        end = min(int(match[2]) + 1, size) if match[1] and match[2] else size
        if first >= end:
            return _error(416, "InvalidRange")
        return 206, {**one.headers(), "Content-Range": f"bytes {first}-{end - 1}/{size}"}, one.body[first:end]


def _text(name: str) -> str:
    return escape(name, {"\n": "&#10;", "\r": "&#13;", "\t": "&#9;"})


class _Handler(socketserver.StreamRequestHandler):
    """The requests of a connection."""

    disable_nagle_algorithm = True

    def handle(self) -> None:
        """Until the client closes it."""
        buckets: Buckets = self.server.buckets  # type: ignore[attr-defined]
        while line := self.rfile.readline():
            method, target, _ = line.decode("latin-1").split()
            headers: dict[str, str] = {}
            while (one := self.rfile.readline()).strip():
                name, _, value = one.decode("latin-1").partition(":")
                headers[name.lower()] = value.strip()
            if headers.get("expect"):
                self.wfile.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            body = self.rfile.read(int(headers.get("content-length") or 0))
            if headers.get("transfer-encoding"):
                status, answered, content = _error(501, "NotImplemented")
            else:
                status, answered, content = buckets.answer(method, target, headers, body)
            answered["Content-Length"], answered["Date"] = str(len(content)), format_datetime(datetime.now(UTC), True)
            head = "".join(f"{name}: {value}\r\n" for name, value in answered.items())
            text = f"HTTP/1.1 {status} {_REASONS.get(status, 'Error')}\r\n{head}\r\n".encode("latin-1")
            self.wfile.write(text if method == "HEAD" else text + content)


class Server(socketserver.ThreadingTCPServer):
    """Listens on a free port of the loopback interface, in threads of this process."""

    daemon_threads, request_queue_size, block_on_close = True, 128, False

    def __init__(self) -> None:
        self.buckets = Buckets()
        super().__init__(("127.0.0.1", 0), _Handler)
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def endpoint(self) -> str:
        """Its URL."""
        return "http://{}:{}".format(*self.server_address)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that disconnected is no error."""


@cache
def server() -> Server:
    """That of this process, with which it ends."""
    return Server()
