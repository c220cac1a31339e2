"""An HTTP server that refuses every request, quotes it as stores do, and remembers who asked."""

from __future__ import annotations

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self


class RefusingStore:
    """A context; ``authorizations`` are the headers of the requests that came."""

    def __init__(self, *quoted: str) -> None:
        self.authorizations: list[str] = []
        seen = self.authorizations
        body = (
            "<?xml version='1.0'?><Error><Code>SignatureDoesNotMatch</Code>"
            f"<AWSAccessKeyId>{quoted[0]}</AWSAccessKeyId><StringToSign>{' '.join(quoted)}</StringToSign></Error>"
        ).encode()

        class Refuse(BaseHTTPRequestHandler):
            def _refuse(self) -> None:
                seen.append(self.headers.get("Authorization", ""))
                self.send_response(403)
                self.send_header("Content-Type", "application/xml")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(body)

            do_GET = do_HEAD = do_PUT = do_POST = _refuse

            def log_message(self, *_: Any) -> None:
                return

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Refuse)
        self.endpoint = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
