"""An S3 server on the loopback interface, over a folder, that counts requests and bytes by what they are for.

Its objects are files below the folder: a table is also there to be read without a request. It does not check
signatures.
"""

from __future__ import annotations

import bisect
import contextlib
import email.utils
import itertools
import re
import shutil
import socketserver
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING
from urllib.parse import parse_qs, unquote
from xml.sax.saxutils import escape, unescape

if TYPE_CHECKING:
    from collections.abc import Iterator
    from io import BufferedIOBase
    from pathlib import Path

BUCKET = "life"
PAGE = 1000
# US dollars per request, S3 Standard, us-east-1. Deletions are free.
PRICES = {"GET": 0.0004 / 1000, "HEAD": 0.0004 / 1000, "LIST": 0.005 / 1000, "PUT": 0.005 / 1000, "DELETE": 0.0}
_PARTS = {"data": "data", "_indices": "indexes", "_mem_wal": "log"}


def part_of(key: str) -> str:
    """What an object of a table is: data, indexes, log or, for manifests and deletion files, metadata."""
    return next((_PARTS[folder] for folder in key.split("/")[1:-1] if folder in _PARTS), "metadata")


@dataclass(slots=True)
class Used:
    """Requests by kind, bytes written by part, and bytes read."""

    requests: Counter[str] = field(default_factory=Counter)
    written: Counter[str] = field(default_factory=Counter)
    read: int = 0

    @property
    def price(self) -> float:
        """What the requests cost, in US dollars."""
        return sum(PRICES[kind] * count for kind, count in self.requests.items())

    def add(self, other: Used) -> None:
        """Add the figures of another one."""
        self.requests.update(other.requests)
        self.written.update(other.written)
        self.read += other.read


@dataclass(slots=True)
class _Object:
    size: int
    tag: str
    written: float


@dataclass(slots=True)
class _Answer:
    status: int
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""


class CountingStore:
    """The objects, and what was asked for since :meth:`taken`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._objects: dict[str, _Object] = {}
        self._keys: list[str] = []  # in order
        self._parts: dict[str, dict[int, bytes]] = {}
        self._number = itertools.count(1)
        self._lock = threading.Lock()
        self._used = Used()

    def taken(self) -> Used:
        """What was used since the last call."""
        with self._lock:
            used, self._used = self._used, Used()
        return used

    def sizes(self, table: str) -> Counter[str]:
        """Bytes of a table's objects, by part."""
        with self._lock:
            found: Counter[str] = Counter()
            for key in self._below(f"{table}/"):
                found[part_of(key)] += self._objects[key].size
        return found

    def remove(self, table: str) -> None:
        """Remove a table."""
        with self._lock:
            for key in [*self._below(f"{table}/")]:
                self._delete(key)
        shutil.rmtree(self.folder / table, ignore_errors=True)

    def answer(self, method: str, key: str, query: dict[str, str], headers: dict[str, str], body: bytes) -> _Answer:
        """Carry out one request."""
        with self._lock:
            if method == "GET" and not key:
                self._used.requests["LIST"] += 1
                return _Answer(200, {"content-type": "application/xml"}, self._listed(query).encode())
            if method in {"GET", "HEAD"}:
                self._used.requests[method] += 1
                return self._got(method, key, headers)
            if method == "DELETE" or "delete" in query:
                self._used.requests["DELETE"] += 1
                return self._removed(key, query, body)
            self._used.requests["PUT"] += 1
            self._used.written[part_of(key)] += len(body) if method == "PUT" else 0
            return self._put(method, key, query, headers, body)

    def _got(self, method: str, key: str, headers: dict[str, str]) -> _Answer:
        found = self._objects.get(key)
        if found is None:
            return _Answer(404, body=b"<Error><Code>NoSuchKey</Code></Error>")
        said = {"etag": found.tag, "last-modified": email.utils.formatdate(found.written, usegmt=True)}
        if method == "HEAD":
            return _Answer(200, {**said, "content-length": str(found.size)})
        first, last, status = 0, found.size - 1, 200
        span = re.fullmatch(r"bytes=(\d*)-(\d*)", headers.get("range", ""))
        if span is not None:
            first = int(span[1]) if span[1] else max(0, found.size - int(span[2]))
            last = min(int(span[2]), last) if span[1] and span[2] else last
            said["content-range"], status = f"bytes {first}-{last}/{found.size}", 206
        with (self.folder / key).open("rb") as file:
            file.seek(first)
            content = file.read(last - first + 1)
        self._used.read += len(content)
        return _Answer(status, said, content)

    def _put(self, method: str, key: str, query: dict[str, str], headers: dict[str, str], body: bytes) -> _Answer:
        if method == "POST" and "uploads" in query:
            name = str(next(self._number))
            self._parts[name] = {}
            text = f"<InitiateMultipartUploadResult><UploadId>{name}</UploadId></InitiateMultipartUploadResult>"
            return _Answer(200, {"content-type": "application/xml"}, text.encode())
        if "partNumber" in query:
            self._parts[query["uploadId"]][int(query["partNumber"])] = body
            return _Answer(200, {"etag": f'"{next(self._number)}"'})
        found = self._objects.get(key)
        expected = headers.get("if-match")
        if (headers.get("if-none-match") == "*" and found) or (expected and (not found or found.tag != expected)):
            return _Answer(412, body=b"<Error><Code>PreconditionFailed</Code></Error>")
        if "uploadId" in query:
            parts = self._parts.pop(query["uploadId"])
            tag = self._stored(key, b"".join(parts[number] for number in sorted(parts)))
            text = f"<CompleteMultipartUploadResult><ETag>{escape(tag)}</ETag></CompleteMultipartUploadResult>"
            return _Answer(200, {"content-type": "application/xml"}, text.encode())
        if source := headers.get("x-amz-copy-source"):
            body = (self.folder / unquote(source).strip("/").removeprefix(f"{BUCKET}/")).read_bytes()
            text = f"<CopyObjectResult><ETag>{escape(self._stored(key, body))}</ETag></CopyObjectResult>"
            return _Answer(200, {"content-type": "application/xml"}, text.encode())
        return _Answer(200, {"etag": self._stored(key, body)})

    def _stored(self, key: str, content: bytes) -> str:
        path = self.folder / key
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        path.write_bytes(content)
        if key not in self._objects:
            bisect.insort(self._keys, key)
        tag = f'"{next(self._number)}"'
        self._objects[key] = _Object(len(content), tag, time.time())
        return tag

    def _removed(self, key: str, query: dict[str, str], body: bytes) -> _Answer:
        if "uploadId" in query:
            self._parts.pop(query["uploadId"], None)
            return _Answer(204)
        if "delete" not in query:
            self._delete(key)
            return _Answer(204)
        names = [unescape(name) for name in re.findall("<Key>(.*?)</Key>", body.decode())]
        for name in names:
            self._delete(name)
        rows = "".join(f"<Deleted><Key>{escape(name)}</Key></Deleted>" for name in names)
        return _Answer(200, {"content-type": "application/xml"}, f"<DeleteResult>{rows}</DeleteResult>".encode())

    def _delete(self, key: str) -> None:
        if self._objects.pop(key, None) is not None:
            del self._keys[bisect.bisect_left(self._keys, key)]
            (self.folder / key).unlink(missing_ok=True)

    def _below(self, prefix: str) -> Iterator[str]:
        for at in range(bisect.bisect_left(self._keys, prefix), len(self._keys)):
            if not self._keys[at].startswith(prefix):
                return
            yield self._keys[at]

    def _listed(self, query: dict[str, str]) -> str:
        prefix, delimiter = query.get("prefix", ""), query.get("delimiter", "")
        after = query.get("continuation-token") or query.get("start-after", "")
        limit = min(PAGE, int(query.get("max-keys") or PAGE))
        rows: list[str] = []
        at, last = bisect.bisect_left(self._keys, prefix), ""
        if after >= prefix and after:
            # A token that is a folder: what is in it was named by it.
            whole = bool(delimiter) and after.endswith(delimiter)
            at = bisect.bisect_left(self._keys, f"{after}\U0010ffff") if whole else bisect.bisect(self._keys, after)
        while at < len(self._keys) and self._keys[at].startswith(prefix):
            if len(rows) == limit:
                token = f"<NextContinuationToken>{escape(last)}</NextContinuationToken>"
                return f"<ListBucketResult><IsTruncated>true</IsTruncated>{token}{''.join(rows)}</ListBucketResult>"
            key = self._keys[at]
            folder, found, _ = key[len(prefix) :].partition(delimiter) if delimiter else ("", "", "")
            if found:
                last = f"{prefix}{folder}{delimiter}"
                rows.append(f"<CommonPrefixes><Prefix>{escape(last)}</Prefix></CommonPrefixes>")
                at = bisect.bisect_left(self._keys, f"{last}\U0010ffff", at)
            else:
                last, one = key, self._objects[key]
                when = datetime.fromtimestamp(one.written, UTC).isoformat(timespec="milliseconds")
                rows.append(
                    f"<Contents><Key>{escape(key)}</Key><LastModified>{when.replace('+00:00', 'Z')}</LastModified>"
                    f"<ETag>{escape(one.tag)}</ETag><Size>{one.size}</Size></Contents>"
                )
                at += 1
        return f"<ListBucketResult><IsTruncated>false</IsTruncated>{''.join(rows)}</ListBucketResult>"


class _Handler(socketserver.StreamRequestHandler):
    """One connection; parses what it needs of HTTP itself, since there are tens of thousands of requests."""

    disable_nagle_algorithm = True
    store: CountingStore

    def handle(self) -> None:
        with contextlib.suppress(ConnectionError):
            while self._one():
                pass

    def _one(self) -> bool:
        first = self.rfile.readline().split()
        if len(first) < 2:  # noqa: PLR2004 - a request is not shorter: the client closed the connection
            return False
        method, target = (one.decode() for one in first[:2])
        headers = dict(_headers(self.rfile))
        body = self.rfile.read(int(headers.get("content-length") or 0))
        path, _, text = target.partition("?")
        key = unquote(path).strip("/").removeprefix(BUCKET).strip("/")
        query = {name: values[0] for name, values in parse_qs(text, keep_blank_values=True).items()}
        answer = self.store.answer(method, key, query, headers, body)
        lines = {"content-length": str(len(answer.body)), **answer.headers}
        head = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
        self.wfile.write(f"HTTP/1.1 {answer.status} x\r\n{head}\r\n".encode() + answer.body)
        return True


def _headers(file: BufferedIOBase) -> Iterator[tuple[str, str]]:
    while line := file.readline().strip():
        name, _, value = line.decode("latin-1").partition(":")
        yield name.lower(), value.strip()


class _Server(socketserver.ThreadingTCPServer):
    allow_reuse_address = daemon_threads = True
    request_queue_size = 128


@contextlib.contextmanager
def counting_store(folder: Path) -> Iterator[tuple[CountingStore, dict[str, str]]]:
    """The store over a folder, and storage options that reach it."""
    store = CountingStore(folder)
    handler = type("Handler", (_Handler,), {"store": store})
    with _Server(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        options = {
            "aws_endpoint": f"http://127.0.0.1:{server.server_address[1]}",
            "aws_region": "us-east-1",
            "allow_http": "true",
            "aws_access_key_id": BUCKET,
            "aws_secret_access_key": BUCKET,
        }
        try:
            yield store, options
        finally:
            server.shutdown()
            thread.join()
