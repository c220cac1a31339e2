"""Build the documentation site (``make site``): ``build/site``, from README, docs/, runbooks/ and the docstrings.

MkDocs builds a site from one folder, and this project's pages lie in several and lead to its files. So the pages are
copied first, those of ``docs`` to the root. Each link is written anew for the place of its target,
and each file that a page leads to becomes a page with its text.
"""

from __future__ import annotations

import html
import importlib
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from tools import build_docs, requirements

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

ROOT = Path(__file__).resolve().parents[1]
_FOLDERS = ("benchmarks", "docs", "runbooks", "tests")
_IMAGES = {".svg", ".png"}
# What is not prose: blocks, and code within a line.
_CODE = re.compile(r"(^ *```.*?^ *```$|`[^`\n]+`)", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r'(\]\(|<img src=")([^)\s"]+)')
_PUBLIC = {"memwal_ops": "Tables and jobs", "memwal_ops.memwal": "Tables with a log"}
# The first page is one screen, without lists of pages at its sides.
_WIDE = "---\nhide: [navigation, toc]\n---\n"
_TEXT = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<meta name="color-scheme" content="light dark">
<title>{name}</title>
<p><a href="{home}">memwal-ops</a> / {name}</p>
{body}
</html>
"""


class DeadLinkError(Exception):
    """A page leads to a file that does not exist."""


@dataclass
class Site:
    """Site of the project's pages: those below ``root``, and ``generated`` ones, by where they would be."""

    root: Path = ROOT
    generated: Mapping[Path, str] = field(default_factory=dict)
    _leads_to: set[Path] = field(default_factory=set)

    @cached_property
    def pages(self) -> frozenset[Path]:
        """All Markdown pages, by their paths below the root."""
        found = [*self.root.glob("*.md")]
        for folder in _FOLDERS:
            found += (self.root / folder).rglob("*.md")
        return frozenset(path.relative_to(self.root) for path in found) | self.generated.keys()

    def contents(self) -> dict[Path, str | bytes]:
        """What MkDocs reads: pages, images, and the other files that pages lead to, by their places.

        Raises:
            DeadLinkError: a page leads to nothing.
        """
        site: dict[Path, str | bytes] = {self.place(path): self._page(path) for path in self.pages}
        while self._leads_to:
            path = self._leads_to.pop()
            if self.place(path) not in site:
                site[self.place(path)] = self._file(path)  # of a folder: it leads to its files
        site[Path("reference.md")] = _reference()
        home = Path("index.md")
        site[home] = f"{_WIDE}{site[home]!s}"
        return site

    def place(self, path: Path) -> Path:
        """Where a page or a file of the project is on the site."""
        if path == Path("README.md"):
            return Path("overview.md")  # the site's first page is docs/index.md
        moved = path.relative_to("docs") if path.parts[0] == "docs" else path
        if (self.root / path).is_dir():
            return moved / "index.html"
        return moved if path.suffix in {".md", *_IMAGES} else moved.with_name(f"{moved.name}.html")

    def _page(self, path: Path) -> str:
        """A page with its links for its place on the site."""

        def link(found: re.Match[str]) -> str:
            opening, target = found.groups()
            file, mark, heading = target.partition("#")
            if "://" in target or not file:
                return found.group()
            aim = Path(os.path.normpath(path.parent / file))
            if not (self.root / aim).exists():
                raise DeadLinkError(f"{path} leads to {file}, which does not exist.")
            if aim / "README.md" in self.pages:
                aim /= "README.md"
            if aim not in self.pages:
                self._leads_to.add(aim)
            return f"{opening}{self._from(path, self.place(aim))}{mark}{heading}"

        text = self.generated.get(path)
        parts = _CODE.split((self.root / path).read_text(encoding="utf-8") if text is None else text)
        for at, part in enumerate(parts):
            if at % 2:
                # GitHub wants a bar within code escaped in a table; Python-Markdown shows the escape.
                parts[at] = part if part.startswith((" ", "```")) else part.replace("\\|", "|")
            else:
                parts[at] = _LINK.sub(link, part.replace("][", "]\\["))  # no page has links by reference
        return "".join(parts)

    def _file(self, path: Path) -> str | bytes:
        """A file that is no page, as HTML; of a folder, a list of what it has."""
        file = self.root / path
        if path.suffix in _IMAGES:
            return file.read_bytes()
        if file.is_dir():
            inside = [one for one in sorted(file.iterdir()) if one.is_file() and not one.name.startswith("__")]
            links = {one.name: one.relative_to(self.root) for one in inside}
            self._leads_to.update(set(links.values()) - self.pages)
            places = {name: self.place(aim) for name, aim in links.items()}
            built = {name: aim.with_suffix(".html") if aim.suffix == ".md" else aim for name, aim in places.items()}
            items = (
                f'<li><a href="{self._from(path / name, aim)}">{html.escape(name)}</a></li>'
                for name, aim in built.items()
            )
            body = f"<ul>{''.join(items)}</ul>"
        else:
            body = f"<pre>{html.escape(file.read_text(encoding='utf-8'))}</pre>"
        home = os.path.relpath("index.html", self.place(path).parent)
        return _TEXT.format(name=html.escape(str(path)), home=home, body=body)

    def _from(self, path: Path, aim: Path) -> str:
        """A link from a page or file to a place."""
        return os.path.relpath(aim, self.place(path).parent)


def whole_site() -> Site:
    """The site of this project, with the pages of the commands and of the specifications' statements."""
    return Site(generated={build_docs.PAGE: build_docs.page(), requirements.PAGE: requirements.page()})


def _reference() -> str:
    """The page of what is public in Python: MkDocs fills in the docstrings."""
    parts = ["# Python reference\n\nFrom the docstrings. [From Python](api.md) has examples, and what is stable.\n"]
    for module, about in _PUBLIC.items():
        parts += [f"## {about}\n\nIn `{module}`.\n", *(f"::: {name}\n" for name in sorted(_exported(module)))]
    return "\n".join(parts)


def _exported(module: str) -> Iterator[str]:
    """Where the classes and functions of a module's ``__all__`` are defined."""
    package = importlib.import_module(module)
    for name in package.__all__:
        member = getattr(package, name)
        if not isinstance(member, str):
            yield f"{member.__module__}.{member.__qualname__}"


def build(contents: dict[Path, str | bytes], folder: Path) -> subprocess.CompletedProcess[str]:
    """Build the site below a folder: from ``pages``, MkDocs makes ``site``. Its exit code is 1 after a warning."""
    shutil.rmtree(folder / "pages", ignore_errors=True)
    for path, content in contents.items():
        target = folder / "pages" / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(content if isinstance(content, bytes) else content.encode())
    settings = folder / "mkdocs.yml"
    settings.write_text(f"INHERIT: {ROOT}/mkdocs.yml\ndocs_dir: pages\nsite_dir: site\n", encoding="utf-8")
    return subprocess.run(
        # Not --quiet: it would not count the warnings.
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--config-file", str(settings)],
        cwd=ROOT,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
        stderr=subprocess.STDOUT,
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )


def main() -> int:
    """Build the site into ``build/site``; return the exit code."""
    try:
        done = build(whole_site().contents(), ROOT / "build")
    except DeadLinkError as error:
        sys.exit(str(error))
    print(done.stdout if done.returncode else "build/site/index.html")
    return done.returncode


if __name__ == "__main__":
    sys.exit(main())
