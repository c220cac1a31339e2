"""What reaches a page: redacted, printable, escaped; and what a page may load."""

from __future__ import annotations

import hashlib
import re
import sys
from base64 import b64encode
from typing import Any

import pytest

from memwal_ops.core.table_history import IndexRecord, LogRecord, RevisionRecord, StorageRecord, TableHistory
from memwal_ops.pages.charts import backlog_chart, bar_chart, line_chart
from memwal_ops.pages.rendering import content_security_policy, split_command
from memwal_ops.storage.redaction import remember
from tests.support.fleet import pages_of, run, status, table

TAGS = {
    *("body", "h1", "h2", "p", "span", "article", "section", "div", "a", "img", "dl", "dt", "dd", "ul", "li"),
    *("strong", "br", "pre", "table", "tr", "th", "td", "meter"),
}
HOSTILE = [
    "<script>alert(1)</script>",
    '" onmouseover="alert(1)',
    "</style><img src=x onerror=alert(1)>",
    "{{ 7 * 7 }}{% raw %}",
    "a\x1b[2Jb\u202ec",
    "half\udcff",
    "a/../b?c#d&amp;",
]  # fmt: skip


def hostile_history(name: str) -> dict[str, Any]:
    return TableHistory(
        (RevisionRecord(1, None, name, name, None, None, 2, 5, 5), RevisionRecord(2, None, name, name, 1, 1, 2, 5, 5)),
        (LogRecord(name, None, None, None, None, None, None, name),),
        (IndexRecord(name, name, 0, 0, 0),),
        (StorageRecord(name, 1, 1, name),),
        name,
    ).to_json()


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_names_are_text(name: str) -> None:
    hostile = table(name, look_error=name, uri=f"s3://lake/{name}")
    error = {"reason": name, "message": name, "remedy": name}
    pages = pages_of(
        status([hostile, table("plain")], holder=name),
        runs=lambda **_: [run(why=name, decision=name, error=error, report={"blocked": [{"region_id": name}]})],
        history=lambda _: hostile_history(name),
    )
    one = pages.table(name)
    assert one is not None
    for page in (pages.fleet(), one):
        text = page.decode()
        body = text.partition("</style>")[2]
        assert not re.search(r"<(script|img src=x)|\son\w+=\"alert", body)
        assert not any(character in text for character in "\x1b\u202e")
        assert "</style>" not in body
        tags = set(re.findall(r"<([a-z0-9]+)", body))
        assert tags <= TAGS
    assert "{{ 7 * 7 }}" in one.decode() or "7 * 7" not in name


def test_no_secret_reaches_a_page() -> None:
    remember(["planted-secret-value"])
    leaks = "s3://KEY:hunter2hunter2@host/x?sig=abcdefgh token=qwertyuiop planted-secret-value"
    leaky = table("a", uri=leaks, look_error=leaks)
    error = {"reason": "storage", "message": leaks, "remedy": leaks}
    pages = pages_of(status([leaky], state_error=leaks, holder=leaks), runs=lambda **_: [run(error=error, why=leaks)])
    for page in (pages.fleet(), pages.table("a") or b""):
        for secret in (b"hunter2hunter2", b"abcdefgh", b"qwertyuiop", b"planted-secret-value"):
            assert secret not in page
        assert b"***" in page


def test_the_policy_admits_the_style_and_nothing_else() -> None:
    page = pages_of(status([table("a")])).fleet().decode()
    style = page.partition("<style>")[2].partition("</style>")[0]
    digest = b64encode(hashlib.sha256(style.encode()).digest()).decode()
    policy = content_security_policy()
    assert f"style-src 'sha256-{digest}'" in policy
    assert policy.startswith("default-src 'none'")
    assert "unsafe" not in policy
    assert "script-src" not in policy
    assert 'style="' not in page
    # Nothing of another server: every address is a path of this one, or in the page itself.
    addresses = re.findall(r'(?:src|href)="([^"]*)"', page)
    assert addresses
    assert all(one.startswith(("/", "data:")) and not one.startswith("//") for one in addresses)


def test_charts_are_svg_without_addresses() -> None:
    for svg in (
        backlog_chart([(1e9, 3.0), (1e9 + 60, 0.0)], small=True),
        backlog_chart([(1e9, 3.0)], small=False),
        bar_chart({"<b>": [1, 2]}, ["<i>", "b"]),
        line_chart({"<b>": [0.5, 0.75], "c": [1, 1]}, ["<i>", "b"], "{:.3f}"),
    ):
        text = svg.decode()
        assert "<svg" in text
        assert "prefers-color-scheme: dark" in text
        assert "<b>" not in text
        assert not re.search(r"(?:href|src)=\"?https?:", text)


def test_the_library_of_charts_leaves_imports_alone() -> None:
    assert all(hasattr(finder, "find_spec") for finder in sys.meta_path)


def test_a_command_is_split_from_the_words_before_it() -> None:
    assert split_command("See which: memwal-ops inspect x") == ("See which:", "memwal-ops inspect x")
    assert split_command("Make the state folder writable.") == ("Make the state folder writable.", "")
    assert split_command("Restore it") == ("Restore it", "")
