"""``make audit``: its command ends with an error for a package with a known vulnerability, by advisories of our own."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
pytestmark = pytest.mark.skipif(find_spec("pip_audit") is None, reason="pip-audit is not installed: make audit")
ADVISORY = {
    "id": "GHSA-planted",
    "summary": "planted",
    "modified": "2026-01-01T00:00:00Z",
    "affected": [
        {
            "package": {"name": "planted", "ecosystem": "PyPI"},
            "ranges": [{"type": "ECOSYSTEM", "events": [{"introduced": "0"}, {"fixed": "1.1"}]}],
        }
    ],
}


class Advisories(BaseHTTPRequestHandler):
    """What OSV answers: of ``planted`` 1.0 alone is something known."""

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        known = (asked["package"]["name"], asked["version"]) == ("planted", "1.0")
        answer = json.dumps({"vulns": [ADVISORY]} if known else {}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def service() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Advisories)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/v1/query"
    server.shutdown()
    server.server_close()


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("pinned", "code", "says"),
    [
        ("planted==1.0", 1, "GHSA-planted"),
        ("planted==1.1", 0, "No known vulnerabilities"),
        ("planted>=1", 1, "planted"),
    ],
)
def test_a_planted_vulnerability_ends_the_audit(
    service: str, tmp_path: Path, pinned: str, code: int, says: str
) -> None:
    (options,) = re.findall(r"-m pip_audit (.+) -r constraints\.txt", (ROOT / "Makefile").read_text())
    (tmp_path / "constraints.txt").write_text(f"{pinned}\nfine==2.0\n")
    command = [sys.executable, "-m", "pip_audit", *options.split(), "-r", "constraints.txt", "--cache-dir", "cache"]
    done = subprocess.run(
        [*command, "--vulnerability-service", "osv", "--osv-url", service],
        cwd=tmp_path, capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip
    assert done.returncode == code, done
    assert says in done.stdout + done.stderr
