"""The documentation site: every page is on it, each link leads somewhere, and it needs nothing from elsewhere."""

from __future__ import annotations

import json
import re
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tools.build_site import DeadLinkError, Site, build, whole_site

if TYPE_CHECKING:
    from collections.abc import Mapping

NEEDS_MKDOCS = pytest.mark.skipif(
    any(find_spec(name) is None for name in ("material", "mkdocs", "mkdocstrings")),
    reason="MkDocs is not installed: make site",
)
# What a browser loads by itself: not the links that a reader follows.
LOADED = re.compile(r'<(?:script|img|iframe|source)[^>]* src="?(?:https?:)?//|<link[^>]* href="?(?:https?:)?//')


def project(root: Path, files: Mapping[str, str]) -> Site:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return Site(root)


def test_links_lead_to_where_pages_and_files_are_on_the_site(tmp_path: Path) -> None:
    """Pages of docs are at the root; a file becomes a page, a folder a list of its files."""
    page = '[a](../README.md#try) [b](deep/x.md) [c](../run/n.py) [d](../run) [e](../runbooks) <img src="i.svg">'
    site = project(
        tmp_path,
        {
            "README.md": "[home](docs/index.md) [same](#try) [out](https://lance.org)",
            "docs/index.md": page,
            "docs/deep/x.md": "[up](../index.md) `][`",
            "docs/i.svg": "<svg/>",
            "run/n.py": "1 < 2",
            "runbooks/README.md": "u64[n][3] | `a \\| b` |\n\n```sh\na \\| [b](none.md)\n```\n",
        },
    ).contents()
    text = {str(path): content for path, content in site.items() if isinstance(content, str)}
    assert text["overview.md"] == "[home](index.md) [same](#try) [out](https://lance.org)"
    assert text["index.md"].endswith(
        "[a](overview.md#try) [b](deep/x.md) [c](run/n.py.html) [d](run/index.html) [e](runbooks/README.md) "
        '<img src="i.svg">'
    )
    assert text["deep/x.md"] == "[up](../index.md) `][`"
    assert text["runbooks/README.md"] == "u64[n]\\[3] | `a | b` |\n\n```sh\na \\| [b](none.md)\n```\n"
    assert "<pre>1 &lt; 2</pre>" in text["run/n.py.html"]
    assert '<a href="n.py.html">n.py</a>' in text["run/index.html"]
    assert site[Path("i.svg")] == b"<svg/>"


def test_a_dead_link_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DeadLinkError, match=r"docs/index\.md leads to gone\.md, which does not exist"):
        project(tmp_path, {"README.md": "", "docs/index.md": "[a](gone.md)"}).contents()


def test_every_page_and_file_that_is_linked_is_on_the_site() -> None:
    site = Site()
    contents = site.contents()
    assert len(site.pages) > 100
    assert {site.place(path) for path in site.pages} <= contents.keys()
    assert Path("memwal_ops/core/anchors.py.html") in contents


@NEEDS_MKDOCS
@pytest.mark.long
def test_it_is_built_strictly_and_loads_nothing_from_elsewhere(tmp_path: Path) -> None:
    contents = whole_site().contents()
    done = build(contents, tmp_path)
    assert done.returncode == 0, done.stdout
    built = tmp_path / "site"
    pages = list(built.rglob("*.html"))
    assert len(pages) > len(contents) // 2
    assert [str(page) for page in pages if LOADED.search(page.read_text())] == []
    styles = [sheet.read_text() for sheet in (built / "assets").rglob("*.css")]
    assert styles
    assert not [sheet for sheet in styles if re.search(r"(?:@import|url\()\s*[\"']?(?:https?:)?//", sheet)]
    found = json.loads((built / "search/search_index.json").read_text())["docs"]
    for title in (
        "LanceDB <code>optimize()",
        "Lance compaction",
        "disk usage keeps growing",
        "After appends, vector search",
    ):
        assert [one for one in found if one["location"].startswith("answers/") and title in one["title"]], title
    assert "Run a job on a table" in (built / "reference.html").read_text()


@NEEDS_MKDOCS
@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "fault", ["[a](cli.md#no-such-heading)", "[a](no-such-page.md)", "::: memwal_ops.no_such_name"]
)
def test_a_fault_of_a_page_ends_the_build(fault: str, tmp_path: Path) -> None:
    done = build({Path("index.md"): f"# Home\n\n{fault}\n", Path("cli.md"): "# Commands\n"}, tmp_path)
    assert done.returncode == 1
    (name,) = re.findall(r"no[-_]such[-_]\w+", fault)
    assert name in done.stdout
