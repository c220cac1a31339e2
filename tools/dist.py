"""Build the wheel and the source archive reproducibly, and check them against the tree.

The files that git tracks are copied into an empty folder, so that nothing else of a working folder gets in. Each
archive is built twice, in folders of other names, with the time of the last commit: the bytes must be the same. The
wheel is built from the source archive, which therefore is complete.
"""

from __future__ import annotations

import argparse
import gzip
import io
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from email.parser import Parser
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

ROOT = Path(__file__).resolve().parent.parent
MAN = "man/memwal-ops.1"
# What differs in an archive from the tree, on purpose: links, URLs.
_REWRITTEN = {"README.md", "pyproject.toml"}
_LINK = re.compile(r"\]\((?!https?://|#|mailto:)([^)\s]+)\)")
_MODES = {True: 0o755, False: 0o644}


def tracked(root: Path) -> list[str]:
    """Return the paths of all files that git tracks, sorted; links are files."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=root, check=True, capture_output=True).stdout.decode()
    return sorted(filter(None, listed.split("\0")))


def commit_epoch(root: Path) -> int:
    """Return the time of the last commit, in seconds since 1970."""
    shown = subprocess.run(["git", "log", "-1", "--format=%ct"], cwd=root, check=True, capture_output=True, text=True)
    return int(shown.stdout)


def page_of_an_index(text: str, url: str) -> str:
    """Return a README whose links work outside of the repository; without its URL, they become plain text."""
    if url:
        return _LINK.sub(lambda match: f"]({url.rstrip('/')}/blob/main/{match[1]})", text)
    return re.sub(r"\[([^]]*)\]\((?!https?://|mailto:)[^)\s]+\)", r"\1", text)


def with_urls(project: str, url: str) -> str:
    """Return pyproject.toml with the URLs of the project; unchanged without one."""
    if not url:
        return project
    base = url.rstrip("/")
    places = {
        "Homepage": base,
        "Documentation": f"{base}/blob/main/README.md",
        "Changelog": f"{base}/blob/main/CHANGELOG.md",
        "Issues": f"{base}/issues",
        "Security": f"{base}/blob/main/SECURITY.md",
    }
    lines = ["[project.urls]", *(f'{name} = "{place}"' for name, place in places.items())]
    return project.replace("[project.scripts]", "\n".join([*lines, "", "[project.scripts]"]), 1)


def lay_tree(root: Path, tree: Path, url: str, epoch: int) -> None:
    """Copy the tracked files into a new folder, with the man page, and with links and URLs for a package index."""
    for name in tracked(root):
        source, target = root / name, tree / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, target, follow_symlinks=False)
        if not source.is_symlink():
            target.chmod(_MODES[os.access(source, os.X_OK)])
    readme, project = tree / "README.md", tree / "pyproject.toml"
    readme.write_text(page_of_an_index(readme.read_text(encoding="utf-8"), url), encoding="utf-8")
    project.write_text(with_urls(project.read_text(encoding="utf-8"), url), encoding="utf-8")
    command = [sys.executable, "-m", "tools.man_page", MAN, "--epoch", str(epoch)]
    subprocess.run(command, cwd=tree, check=True, env={**os.environ, "PYTHONPATH": str(tree)})
    for cache in tree.rglob("__pycache__"):
        shutil.rmtree(cache)


def _build(kind: str, folder: Path, out: Path, epoch: int) -> Path:
    """Build an archive of a folder by setuptools' own hooks (PEP 517); ``kind`` is sdist or wheel."""
    hook = f"import sys; from setuptools.build_meta import build_{kind}; print(build_{kind}(sys.argv[1]))"
    environment = {**os.environ, "SOURCE_DATE_EPOCH": str(epoch), "PYTHONHASHSEED": "0", "PYTHONDONTWRITEBYTECODE": "1"}
    environment.pop("PYTHONPATH", None)
    out.mkdir(parents=True, exist_ok=True)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", hook, str(out.resolve())],
        cwd=folder, env=environment, capture_output=True, text=True, check=False, umask=0o022,
    )  # fmt: skip
    if done.returncode:
        sys.exit(f"{done.stdout}{done.stderr}\nThe {kind} cannot be built.")
    return out / done.stdout.split()[-1]


def repack(path: Path, epoch: int) -> None:
    """Write a source archive again with sorted names, one time, one owner, and modes that no umask changes."""
    with tarfile.open(path) as archive:
        members = sorted((one for one in archive.getmembers() if not one.isdir()), key=lambda one: one.name)
        contents = [_content(archive, one) for one in members]
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for member, content in zip(members, contents, strict=True):
            info = tarfile.TarInfo(member.name)
            info.size, info.mtime, info.mode = len(content), epoch, _MODES[bool(member.mode & 0o100)]
            archive.addfile(info, io.BytesIO(content))
    with path.open("wb") as file, gzip.GzipFile("", "wb", fileobj=file, mtime=epoch) as packed:
        packed.write(buffer.getvalue())


def build(root: Path, work: Path, url: str) -> tuple[Path, Path]:
    """Build the source archive, and the wheel from it, below ``work``; return their paths."""
    epoch = commit_epoch(root)
    lay_tree(root, work / "tree", url, epoch)
    sdist = _build("sdist", work / "tree", work / "out", epoch)
    repack(sdist, epoch)
    with tarfile.open(sdist) as archive:
        archive.extractall(work / "unpacked", filter="data")
    (folder,) = (work / "unpacked").iterdir()
    return sdist, _build("wheel", folder, work / "out", epoch)


def files_of(path: Path) -> dict[str, bytes]:
    """Return the content of each file in an archive; names in a source archive without its first folder."""
    if path.suffix == ".whl":
        with zipfile.ZipFile(path) as archive:
            return {name: archive.read(name) for name in archive.namelist()}
    with tarfile.open(path) as archive:
        members = [one for one in archive.getmembers() if one.isfile()]
        return {one.name.partition("/")[2]: _content(archive, one) for one in members}


def _content(archive: tarfile.TarFile, member: tarfile.TarInfo) -> bytes:
    file = archive.extractfile(member)
    assert file is not None
    return file.read()


def tree_of(root: Path) -> dict[str, bytes]:
    """Return the content of each tracked file; what a link leads to is also below the link's name."""
    found: dict[str, bytes] = {}
    names = tracked(root)
    for name in names:
        path = root / name
        if path.is_symlink():
            target = str(path.resolve().relative_to(root.resolve()))
            behind = [one for one in names if one.startswith(f"{target}/")]
            found |= {f"{name}{one.removeprefix(target)}": (root / one).read_bytes() for one in behind}
        else:
            found[name] = path.read_bytes()
    return found


def faults_of_sdist(files: Mapping[str, bytes], tree: Mapping[str, bytes]) -> list[str]:
    """Return what a source archive lacks or has too much; it has each tracked file, and what the build adds."""
    added = re.compile(r"PKG-INFO|setup\.cfg|memwal_ops\.egg-info/.*|" + re.escape(MAN))
    rest = {name: content for name, content in files.items() if not added.fullmatch(name)}
    faults = _differences("the source archive", rest, tree)
    return faults + [f"the source archive lacks {name}" for name in ("PKG-INFO", MAN) if name not in files]


def faults_of_wheel(files: Mapping[str, bytes], tree: Mapping[str, bytes]) -> list[str]:
    """Return what a wheel lacks or has too much; it has the package and the man page, no tests and no tools."""
    package = {name: content for name, content in tree.items() if name.startswith("memwal_ops/")}
    added = re.compile(r"memwal_ops-[^/]+\.(dist-info/.*|data/data/share/man/man1/memwal-ops\.1)")
    rest = {name: content for name, content in files.items() if not added.fullmatch(name)}
    needed = ("/licenses/LICENSE", "/licenses/NOTICE", "/entry_points.txt", "/share/man/man1/memwal-ops.1")
    lacking = [name for name in needed if not any(one.endswith(name) for one in files)]
    return _differences("the wheel", rest, package) + [f"the wheel lacks {name}" for name in lacking]


def _differences(what: str, files: Mapping[str, bytes], tree: Mapping[str, bytes]) -> list[str]:
    return [
        *(f"{what} lacks {name}" for name in sorted(tree.keys() - files.keys())),
        *(f"{what} has {name}, which git does not track" for name in sorted(files.keys() - tree.keys())),
        *(
            f"{what} has another {name} than the tree"
            for name in sorted(files.keys() & tree.keys())
            if name not in _REWRITTEN and files[name] != tree[name]
        ),
    ]


def faults_of_paths(files: Mapping[str, bytes], places: Iterable[str]) -> list[str]:
    """Return the files that name a folder of this machine."""
    return [
        f"{name} names {place}, a folder of this machine"
        for name, content in files.items()
        for place in places
        if place.encode() in content
    ]


def faults_of_metadata(text: str) -> list[str]:
    """Return what a package index could not show: links that lead nowhere, no license, no supported Python."""
    message = Parser().parsestr(text)
    faults = [f"the description has a link that works only in the repository: {one}" for one in _LINK.findall(text)]
    if message["License-Expression"] != "Apache-2.0":
        faults.append("the metadata has no license expression")
    named = [one.rpartition(" ")[2] for one in message.get_all("Classifier", []) if "Python :: 3." in one]
    return faults if {"3.11", "3.12", "3.13"} <= {*named} else [*faults, f"the classifiers name Python {named}"]


def check(sdist: Path, wheel: Path, root: Path, places: Iterable[str]) -> list[str]:
    """Return all faults of the two archives."""
    tree, packed, installed = tree_of(root), files_of(sdist), files_of(wheel)
    (metadata,) = (content for name, content in installed.items() if name.endswith(".dist-info/METADATA"))
    return [
        *faults_of_sdist(packed, tree),
        *faults_of_wheel(installed, tree),
        *faults_of_paths({**packed, **installed}, places),
        *faults_of_metadata(metadata.decode()),
    ]


def main() -> None:
    """Entry of ``make dist``."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "dist")
    parser.add_argument("--url", default="", help="of the repository; links and metadata are made from it")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="memwal-ops-dist-") as name:
        works = [Path(name, "one"), Path(name, "a-folder-of-another-name")]
        built = [build(ROOT, work, given.url) for work in works]
        for first, second in zip(*built, strict=True):
            if first.read_bytes() != second.read_bytes():
                sys.exit(f"{first.name} is another one when it is built again.")
        sdist, wheel = built[0]
        faults = check(sdist, wheel, ROOT, [f"{ROOT}/", name, f"{Path.home()}/"])
        if faults:
            sys.exit("\n".join(faults))
        subprocess.run([sys.executable, "-m", "twine", "check", "--strict", str(sdist), str(wheel)], check=True)
        shutil.rmtree(given.out, ignore_errors=True)
        given.out.mkdir(parents=True)
        for path in (sdist, wheel):
            shutil.copy(path, given.out)
            print(f"{given.out / path.name}  {path.stat().st_size:,} bytes, the same twice")


if __name__ == "__main__":
    main()
