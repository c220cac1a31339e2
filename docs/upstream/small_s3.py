"""A store in memory that speaks as much of S3 as pylance needs, for the scripts beside this file.

``lose`` is a pattern: the answer to the first PUT of such a path is lost after it was carried out. ``undeletable`` is a
pattern of paths whose deletion is refused, as by a bucket policy.
"""

import email.utils
import hashlib
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape, unescape


class SmallS3:
    """``uri`` and ``options`` are those for pylance; ``objects`` has everything that is stored."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.lose = self.undeletable = ""
        self.lock = threading.Lock()
        store = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            wbufsize = -1  # head and content in one piece

            def log_message(self, *_: object) -> None:
                """Keep quiet."""

            def answer(self) -> None:
                body = self.rfile.read(int(self.headers.get("content-length") or 0))
                url = urlsplit(self.path)
                with store.lock:
                    key = unquote(url.path).removeprefix("/bucket").strip("/")
                    status, headers, content = store.carry_out(self, key, parse_qs(url.query, True), body)
                    if self.command == "PUT" and store.lose and re.search(store.lose, key):
                        store.lose = ""
                        status, headers, content = 500, {}, b"<Error><Code>InternalError</Code></Error>"
                self.send_response(status)
                for name, value in {"content-length": str(len(content)), **headers}.items():
                    self.send_header(name, value)
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(content)

            do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = answer

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, daemon=True).start()
        self.uri = "s3://bucket/t.lance"
        self.options = {
            "aws_endpoint": f"http://127.0.0.1:{server.server_port}",
            "allow_http": "true",
            "aws_region": "us-east-1",
            "aws_access_key_id": "any",
            "aws_secret_access_key": "any",
        }

    def carry_out(
        self, request: BaseHTTPRequestHandler, key: str, query: dict[str, list[str]], body: bytes
    ) -> tuple[int, dict[str, str], bytes]:
        """Status, headers and content of the answer to one request."""
        if request.command == "GET" and not key:
            return 200, {"content-type": "application/xml"}, self.listed(query).encode()
        if request.command == "POST":
            names = [unescape(name) for name in re.findall("<Key>(.*?)</Key>", body.decode())]
            return 200, {"content-type": "application/xml"}, self.deleted(names).encode()
        if request.command == "DELETE":
            return (403 if "<Error>" in self.deleted([key]) else 204), {}, b""
        if request.command == "PUT":
            if request.headers.get("if-none-match") == "*" and key in self.objects:
                return 412, {}, b"<Error><Code>PreconditionFailed</Code></Error>"
            self.objects[key] = body
            return 200, {"etag": tag(body)}, b""
        if key not in self.objects:
            return 404, {}, b"<Error><Code>NoSuchKey</Code></Error>"
        content = self.objects[key]
        headers = {"etag": tag(content), "last-modified": email.utils.formatdate(0, usegmt=True)}
        if request.command == "HEAD":
            return 200, {**headers, "content-length": str(len(content))}, b""
        span = re.fullmatch(r"bytes=(\d*)-(\d*)", request.headers.get("range") or "")
        if span is None:
            return 200, headers, content
        first = int(span[1]) if span[1] else max(0, len(content) - int(span[2]))
        last = min(int(span[2]), len(content) - 1) if span[1] and span[2] else len(content) - 1
        headers["content-range"] = f"bytes {first}-{last}/{len(content)}"
        return 206, headers, content[first : last + 1]

    def listed(self, query: dict[str, list[str]]) -> str:
        """All names at once; everything is from 1970, so that no clean-up finds it too young."""
        (prefix,), (delimiter,) = query.get("prefix", [""]), query.get("delimiter", [""])
        (after,) = query.get("start-after", [""])
        rows, folders = [], set()
        for key, content in sorted(self.objects.items()):
            if not key.startswith(prefix) or key <= after:
                continue
            folder, found, _ = key[len(prefix) :].partition(delimiter) if delimiter else ("", "", "")
            if found:
                folders.add(f"{prefix}{folder}{delimiter}")
            else:
                rows.append(
                    f"<Contents><Key>{escape(key)}</Key><LastModified>1970-01-01T00:00:00.000Z</LastModified>"
                    f"<ETag>{escape(tag(content))}</ETag><Size>{len(content)}</Size></Contents>"
                )
        rows += [f"<CommonPrefixes><Prefix>{escape(one)}</Prefix></CommonPrefixes>" for one in sorted(folders)]
        return f"<ListBucketResult><IsTruncated>false</IsTruncated>{''.join(rows)}</ListBucketResult>"

    def deleted(self, names: list[str]) -> str:
        """Delete what may be deleted."""
        rows = []
        for name in names:
            if self.undeletable and re.search(self.undeletable, name):
                rows.append(
                    f"<Error><Key>{escape(name)}</Key><Code>AccessDenied</Code><Message>denied</Message></Error>"
                )
            else:
                self.objects.pop(name, None)
                rows.append(f"<Deleted><Key>{escape(name)}</Key></Deleted>")
        return f"<DeleteResult>{''.join(rows)}</DeleteResult>"


def tag(content: bytes) -> str:
    """The entity tag of a content."""
    return f'"{hashlib.sha256(content).hexdigest()}"'
