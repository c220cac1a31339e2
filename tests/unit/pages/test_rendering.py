"""What reaches a page: redacted, printable, escaped; and what a page may load."""

from __future__ import annotations

import hashlib
import json
import re
from base64 import b64encode
from datetime import UTC, datetime
from importlib.resources import files
from typing import Any
from urllib.parse import urlencode

import pytest

from memwal_ops.core.table_history import IndexRecord, LogRecord, RevisionRecord, StorageRecord, TableHistory
from memwal_ops.pages import rendering
from memwal_ops.pages.charts import lane, marks, story, time_ticks
from memwal_ops.pages.documents import document
from memwal_ops.pages.rendering import (
    compact_text,
    content_security_policy,
    day,
    share_text,
    split_command,
    until,
)
from memwal_ops.storage.options import remember
from memwal_ops.supervisor.http.access import Viewer
from tests.support.fleet import pages_of, run, status, table

TAGS = {
    *("body", "h1", "h2", "p", "span", "section", "div", "a", "img", "dl", "dt", "dd", "ul", "li", "main", "header"),
    *("strong", "br", "pre", "table", "tr", "th", "td", "meter", "small", "nav", "footer", "thead", "tbody", "caption"),
    *("em", "code", "output", "svg", "path", "text", "progress"),
    *("form", "input", "select", "option", "button", "label", "details", "summary", "figure", "figcaption"),
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


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_names_are_text(name: str) -> None:
    hostile = table(name, look_error=name, uri=f"s3://lake/{name}")
    error = {"reason": name, "message": name, "remedy": name}
    pages = pages_of(
        status([hostile, table("plain")], holder=name),
        runs=lambda **_: [run(why=name, decision=name, error=error, report={"blocked": [{"region_id": name}]})],
        run=lambda _: run(why=name, table=name, job=name, decision=name, error=error, report={name: name}, log=[name]),
        history=lambda _: hostile_history(name),
    )
    operator, hidden = Viewer("operate", name, acting=True), urlencode({"q": name}, errors="surrogateescape")
    one = pages.table(name, "", operator)
    shown = (
        *(pages.tables(), pages.tables("group=database"), pages.tables(hidden, operator), one),
        *(pages.run("7"), pages.run(name), pages.table(f"{name}?"), pages.sign_in(name)),
        pages.page_at(f"/runbooks/{name}.md") or pytest.fail(name),
    )
    for page in shown:
        text = page.body.decode()
        head, _, body = text.partition("</style>")
        assert head.count("<") == 12  # and no more elements by a title
        body = body.removeprefix('\n<script type="module" src="/assets/console.js?v=')
        assert not re.search(r"<(script|img src=x)|\son\w+=\"alert", body)
        assert not any(character in text for character in "\x1b\u202e")
        assert "</style>" not in body
        tags = set(re.findall(r"<([a-z0-9]+)", body))
        assert tags <= TAGS
    assert "{{ 7 * 7 }}" in one.body.decode() or "7 * 7" not in name


def test_no_secret_reaches_a_page() -> None:
    remember(["planted-secret-value"])
    leaks = "s3://KEY:hunter2hunter2@host/x?sig=abcdefgh token=qwertyuiop planted-secret-value"
    leaky = table("a", uri=leaks, look_error=leaks)
    error = {"reason": "storage", "message": leaks, "remedy": leaks}
    pages = pages_of(status([leaky], state_error=leaks, holder=leaks), runs=lambda **_: [run(error=error, why=leaks)])
    for page in (pages.tables().body, pages.table("a").body):
        for secret in (b"hunter2hunter2", b"abcdefgh", b"qwertyuiop", b"planted-secret-value"):
            assert secret not in page
        assert b"***" in page


def test_the_policy_admits_the_style_its_script_and_nothing_else() -> None:
    page = pages_of(status([table("a")])).tables().body.decode()
    style = page.partition("<style>")[2].partition("</style>")[0]
    digest = b64encode(hashlib.sha256(style.encode()).digest()).decode()
    policy = content_security_policy()
    assert f"style-src 'sha256-{digest}'" in policy
    assert policy.startswith("default-src 'none'")
    assert "unsafe" not in policy
    assert "script-src 'self';" in policy
    assert "script-src" not in content_security_policy(served=False)
    assert "form-action 'none'" in content_security_policy(served=False)
    assert 'style="' not in page
    # Nothing of another server: every address is a path of this one, or in the page itself.
    addresses = re.findall(r'(?:src|href)="([^"]*)"', page)
    assert addresses
    assert all(one.startswith(("/", "data:", "#")) and not one.startswith("//") for one in addresses)


def test_no_state_is_told_by_colour_alone_and_colours_can_be_read() -> None:
    """Every colour of a text has a contrast of 4.5 to every ground on which it can stand, in both schemes."""
    style = pages_of(status([])).tables().body.decode().partition("<style>")[2].partition("* {")[0]
    light, dark = (dict(re.findall(r"--([\w-]+): (#\w+)", part)) for part in style.split("dark)")[:2])
    for scheme in (light, dark):
        grounds = [scheme[name] for name in ("back", "card", "hover", "critical-back", "warning-back")]
        texts = [scheme[name] for name in ("ink", "soft", "ok", "warning", "critical", "paused", "accent")]
        worst = min(contrast(text, ground) for text in texts for ground in grounds)
        assert worst >= 4.5
        assert contrast(scheme["on-accent"], scheme["accent"]) >= 4.5
        assert contrast(scheme["strong-line"], scheme["card"]) >= 3
    style = files(rendering.__package__).joinpath("templates", "style.css").read_text(encoding="utf-8")
    for state in ("ok", "warning", "critical", "paused", "running"):
        assert f".state.{state}::before {{ content:" in style


def contrast(one: str, other: str) -> float:
    """The contrast of two colours, by WCAG 2."""

    def luminance(colour: str) -> float:
        digits = colour[1:] if len(colour) == 7 else "".join(2 * digit for digit in colour[1:])
        parts = [int(digits[at : at + 2], 16) / 255 for at in (0, 2, 4)]
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    high, low = sorted((luminance(one), luminance(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("hours", [0.05, 1, 3, 24, 7 * 24, 30 * 24, 90 * 24, 4000 * 24])
@pytest.mark.parametrize("end", [1.7e9, 1.7e9 + 12345.6, 1.7e9 + 43200])
def test_no_label_of_an_axis_repeats(hours: float, end: float) -> None:
    ticks, text = time_ticks(end - hours * 3600, end)
    labels = [text.format(datetime.fromtimestamp(tick, UTC)) for tick in ticks]
    assert 2 <= len(labels) <= 6
    assert len({*labels}) == len(labels)
    assert all(end - hours * 3600 <= tick <= end for tick in ticks)


def test_amounts_are_short_and_shares_are_not_rounded_up() -> None:
    amounts = [0, 950, 9999, 12_345, 1_234_567, 143e9, None]
    assert [compact_text(one) for one in amounts] == ["0", "950", "9,999", "12.3 k", "1.2 M", "143 G", ""]
    assert [share_text(one) for one in (0.9999, 1, 0.5, None)] == ["99.9 %", "100 %", "50 %", ""]
    assert until("2020-01-01T00:00:00+00:00") == day("2020-01-01T00:00:00+00:00") == "now"
    assert day("2126-12-01T10:00:00+00:00") == "1 Dec 2126"


def drawn(*lanes: dict[str, Any], start: float = 0.0, end: float = 100.0) -> str:
    macros = rendering._environment().get_template("charts.html.j2").module
    rendering._seen.texts = {}
    return str(macros.story(story(lanes, start, end)))  # type: ignore[attr-defined]  # a macro


def test_a_chart_is_of_steps_that_reach_to_its_end() -> None:
    one = lane("<b>", [(0.0, 3.0), (50.0, 0.0), (75.0, 6.0)], "{:.0f} B".format, 0.0, 100.0)
    assert one["line"] == "M0.0 50.0H500.0V100.0H750.0V0.0H1000"
    assert (one["top"], one["zero"], one["summary"]) == ("6 B", "0 B", "0 B to 6 B, now 6 B")
    assert json.loads(one["points"]) == [[0, "3 B"], [50, "0 B"], [75, "6 B"]]
    flat = lane("flat", [(0.0, 7.0)], "{:.0f}".format, 0.0, 100.0)
    assert (flat["line"], flat["summary"]) == ("M0.0 0.0H1000", "now 7")
    just_read = lane("new", [(100.0, 7.0)], "{:.0f}".format, 0.0, 100.0)
    assert just_read["line"] == "M994 0.0H1000", "it is seen"
    many = lane("many", [(float(at), float(at)) for at in range(1000)], "{:.0f}".format, 0.0, 999.0)
    assert json.loads(many["points"])[-1] == [999, "999"], "the last amount is shown"
    events = marks("runs", [(25.0, "ok", "merge: <i>"), (200.0, "critical", "failed")], 0.0, 100.0, "2")
    assert events["marks"] == [(250.0, "ok"), (1000.0, "critical")]
    text = drawn(one, flat, events)
    assert text.count("<svg") == 4
    assert "<b>" not in text
    assert "<i>" not in text
    assert not re.search(r"(?:href|src|style)=", text)


def test_a_command_is_split_from_the_words_before_it() -> None:
    assert split_command("See which: memwal-ops inspect x") == ("See which:", "memwal-ops inspect x")
    assert split_command("Make the state folder writable.") == ("Make the state folder writable.", "")
    assert split_command("Restore it") == ("Restore it", "")


def test_markdown_becomes_html_without_its_own() -> None:
    text = (
        "# A `b`\n\n<script>alert(1)</script> [in](x.md#y) [out](../../docs/z.md#w) [web](https://a.example/) "
        "[bad](javascript:alert(1)) ![img](http://evil/x.png)\n\n| a | b |\n|---|---|\n| 1 | `2` |\n"
    )
    page = document(text, "runbooks/errors/a.md", lambda path: path == "runbooks/errors/x.md")
    assert '<h1 id="a-b">A <code>b</code></h1>' in page
    assert "<script" not in page
    assert '<a href="/runbooks/errors/x.md#y">in</a>' in page
    assert '<span title="in the documentation: docs/z.md">out</span>' in page
    assert '<a href="https://a.example/">web</a>' in page
    assert "javascript" not in page.partition("bad")[0]
    assert 'href="javascript' not in page
    assert "<td><code>2</code></td>" in page
