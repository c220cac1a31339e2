"""What local files add: folders, links, a missing root, permissions."""

from __future__ import annotations

import os
import shutil
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from memwal_ops.errors import (
    InvalidUsageError,
    ObjectNotFoundError,
    ReadOnlyStoreError,
    StorageCredentialsError,
    StorageError,
)
from memwal_ops.storage.api import LinkError, Listing
from memwal_ops.storage.catalogs import resolve
from memwal_ops.storage.objects import open_store
from memwal_ops.storage.probe import probe_conditional_writes

if TYPE_CHECKING:
    from collections.abc import Iterator

NOBODY = 65534


@pytest.fixture
def shared() -> Iterator[Path]:
    """A folder that every user may enter; pytest's own may be entered by its user only."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


@contextmanager
def unprivileged() -> Iterator[None]:
    """Without root's right to ignore permissions, where the tests run as root."""
    was_root = os.geteuid() == 0
    if was_root:
        os.seteuid(NOBODY)
    try:
        yield
    finally:
        if was_root:
            os.seteuid(0)


def test_a_missing_root_reads_as_empty_and_is_not_made(tmp_path: Path) -> None:
    root = tmp_path / "absent" / "t.lance"
    store = open_store(resolve(root))
    assert store.head("x") is None
    assert list(store.list()) == []
    assert store.list_level() == Listing((), ())
    assert store.delete_many(["x"]).deleted == 1
    with pytest.raises(ObjectNotFoundError):
        store.get("x")
    assert not root.parent.exists()
    store.put("x", b"1")
    assert (root / "x").read_bytes() == b"1"


def test_empty_folders_are_removed_but_never_the_root(tmp_path: Path) -> None:
    root = tmp_path / "t.lance"
    store = open_store(resolve(root))
    for name in ("a/b/c/1", "a/b/c/2", "a/keep"):
        store.put(name, b"x")
    store.delete_many(["a/b/c/1"])
    assert (root / "a/b/c/2").exists()
    store.delete_many(["a/b/c/2"])
    assert sorted(path.name for path in (root / "a").iterdir()) == ["keep"]
    store.delete_many(["a/keep"])
    assert root.is_dir()
    assert list(root.iterdir()) == []


def test_links_and_absent_files_in_a_batch_of_deletes(tmp_path: Path) -> None:
    """Each is judged by itself: what links lead to stays, and the others are deleted with the folders they leave."""
    store = open_store(resolve(str(tmp_path / "table")))
    paths = [f"data/{number}/file" for number in range(100)]
    for path in paths:
        store.put(path, b"")
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "file").write_bytes(b"kept")
    (tmp_path / "table" / "linked").symlink_to(outside)
    (tmp_path / "table" / "link").symlink_to(outside / "file")
    report = store.delete_many(["linked/file", *paths[:50], "data/absent", "link", *paths[50:]])
    assert (report.deleted, sorted(report.failed)) == (101, ["link", "linked/file"])
    assert (outside / "file").read_bytes() == b"kept"
    assert sorted(path.name for path in (tmp_path / "table").iterdir()) == ["link", "linked"]


def test_empty_folders_are_not_listed(tmp_path: Path) -> None:
    (tmp_path / "empty/deeper").mkdir(parents=True)
    (tmp_path / "full/deeper").mkdir(parents=True)
    (tmp_path / "full/deeper/object").write_bytes(b"x")
    assert open_store(resolve(tmp_path)).list_level().directories == ("full",)


def test_links_out_of_the_root_are_not_followed(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "precious").write_bytes(b"precious")
    root = tmp_path / "t.lance"
    root.mkdir()
    (root / "way").symlink_to(outside)
    (root / "file").symlink_to(outside / "precious")
    store = open_store(resolve(root))
    for verb in (
        lambda: store.get("way/precious"),
        lambda: store.get("file"),
        lambda: store.put("way/new", b"x"),
        lambda: store.put_if_absent("way/new", b"x"),
    ):
        with pytest.raises(StorageError, match="leads out of"):
            verb()
    # As what they are, so that nothing that stands behind a link is taken for absent.
    assert {meta.path for meta in store.list()} == {"way", "file"}
    assert store.list_level() == Listing((), (), links=("file", "way"))
    for prefix in ("way", "way/deeper"):
        with pytest.raises(LinkError, match=r"'way' is a symbolic link to .*outside"):
            list(store.list(prefix))
        with pytest.raises(LinkError, match=r"'way' is a symbolic link to .*outside"):
            store.list_level(prefix)
    report = store.delete_many(["way/precious", "file", "way"])
    assert report.deleted == 0
    assert set(report.failed) == {"way/precious", "file", "way"}
    assert [path.name for path in outside.iterdir()] == ["precious"]


@pytest.mark.timeout(60)
def test_a_pipe_is_not_read(tmp_path: Path) -> None:
    """A read of one would wait for a writer for ever."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to(tmp_path / "pipe")
    store = open_store(resolve(tmp_path))
    for verb in (store.get, store.head, lambda path: store.put(path, b"x")):
        with pytest.raises(LinkError, match=r"'pipe' is a pipe, a socket or a device"):
            verb("pipe")
        with pytest.raises(LinkError, match="'link' is a symbolic link"):
            verb("link")
    assert store.delete_many(["pipe"]).deleted == 0


def test_a_linked_root_and_links_to_files_within_it_work(tmp_path: Path) -> None:
    real = tmp_path / "real"
    (real / "data").mkdir(parents=True)
    (real / "data/object").write_bytes(b"x")
    (real / "copy").symlink_to(real / "data/object")
    (tmp_path / "link.lance").symlink_to(real)
    store = open_store(resolve(tmp_path / "link.lance"))
    assert store.get("copy") == b"x"
    assert {(meta.path, meta.size) for meta in store.list()} == {("data/object", 1), ("copy", 1)}
    assert [meta.path for meta in store.list_level().objects] == ["copy"]


def test_a_folder_is_not_reached_by_two_names(tmp_path: Path) -> None:
    """Deleted by the one name, what it holds is gone under the other."""
    (tmp_path / "data").mkdir()
    (tmp_path / "data/object").write_bytes(b"x")
    (tmp_path / "again").symlink_to("data")
    store = open_store(resolve(tmp_path))
    assert {meta.path for meta in store.list()} == {"data/object", "again"}
    assert store.list_level().links == ("again",)
    with pytest.raises(LinkError, match="another place"):
        store.get("again/object")
    assert "again/object" in store.delete_many(["again/object"]).failed
    assert (tmp_path / "data/object").exists()


def test_a_loop_of_links_names_itself(tmp_path: Path) -> None:
    root = tmp_path / "t.lance"
    (root / "a").mkdir(parents=True)
    (root / "a/object").write_bytes(b"x")
    (root / "loop").symlink_to("loop")
    (root / "gone").symlink_to("nothing")
    (root / "a/up").symlink_to("..")
    store = open_store(resolve(root))
    assert {meta.path for meta in store.list()} == {"a/object", "a/up", "loop", "gone"}
    assert store.list_level().links == ("gone", "loop")
    with pytest.raises(LinkError, match="'loop' is a symbolic link to 'loop', which leads to itself"):
        list(store.list("loop"))
    (tmp_path / "root.lance").symlink_to("root.lance")
    with pytest.raises(StorageError, match=r"root\.lance.*symbolic links"):
        list(open_store(resolve(tmp_path / "root.lance")).list())


ODD = [b"line\nbreak", b"no\xffutf8", b"\x1b[31mred", b"del\x7f", "bidi\u202e".encode(), b"x:", b"back\\slash"]


@pytest.mark.parametrize("name", ODD, ids=repr)
def test_any_name_is_listed_and_stops_nothing(tmp_path: Path, name: bytes) -> None:
    """obstore's own listing fails as a whole at most of them."""
    folder = os.fsencode(tmp_path) + b"/d"
    os.makedirs(folder + b"/" + name)
    for path in (b"/good", b"/" + name + b"/inner", b"/" + name + b".x"):
        with open(folder + path, "wb") as file:
            file.write(b"x")
    store = open_store(resolve(tmp_path))
    text = os.fsdecode(name)
    everything = {"d/good", f"d/{text}/inner", f"d/{text}.x"}
    assert {meta.path for meta in store.list()} == {meta.path for meta in store.list("d")} == everything
    level = store.list_level("d")
    assert level.directories == (f"d/{text}",)
    assert {meta.path for meta in level.objects} == {"d/good", f"d/{text}.x"}
    assert [meta.path for meta in store.list(f"d/{text}")] == [f"d/{text}/inner"]
    assert {meta.path for meta in store.list("d", after="d/good")} == {path for path in everything if path > "d/good"}
    # What cannot be deleted by its name is reported, and stands.
    report = store.delete_many(sorted(everything))
    assert report.deleted + len(report.failed) == len(everything)
    assert {meta.path for meta in store.list()} == set(report.failed)


def test_an_upload_under_way_is_not_listed(tmp_path: Path) -> None:
    (tmp_path / "object#1").write_bytes(b"x")
    (tmp_path / "object#x").write_bytes(b"x")
    store = open_store(resolve(tmp_path))
    assert [meta.path for meta in store.list()] == ["object#x"]
    assert [meta.path for meta in store.list_level().objects] == ["object#x"]


@pytest.mark.parametrize("path", ["v/a|", "v/a:", "v/manifest#1"])
def test_names_that_obstore_would_mangle_are_refused(tmp_path: Path, path: str) -> None:
    with pytest.raises(InvalidUsageError):
        open_store(resolve(tmp_path)).put_if_absent(path, b"x")
    assert list(tmp_path.iterdir()) == []


def test_no_write_permission_is_a_read_only_store(shared: Path) -> None:
    shared.chmod(0o555)
    store = open_store(resolve(shared))
    with unprivileged():
        with pytest.raises(ReadOnlyStoreError):
            store.put_if_absent("new", b"x")
        with pytest.raises(ReadOnlyStoreError):
            store.put("sub/new", b"x")
        with pytest.raises(ReadOnlyStoreError):
            probe_conditional_writes(store)
    shared.chmod(0o755)
    assert list(store.list()) == []


def test_no_read_permission_is_about_credentials(shared: Path) -> None:
    secret = shared / "object"
    secret.write_bytes(b"x")
    secret.chmod(0)
    store = open_store(resolve(shared))
    with unprivileged(), pytest.raises(StorageCredentialsError):
        store.get("object")


def test_a_folder_that_may_not_be_read_hides_none_beside_it(shared: Path) -> None:
    """One such table of a database kept all others from being found."""
    for name in ("a/data/1", "b/data/1", "c/x"):
        (shared / name).parent.mkdir(parents=True)
        (shared / name).write_bytes(b"x")
    (shared / "a/data").chmod(0)
    (shared / "c").chmod(0)
    with unprivileged():
        level = open_store(resolve(shared)).list_level()
    (shared / "a/data").chmod(0o755)
    (shared / "c").chmod(0o755)
    assert (level.directories, level.empty) == (("a", "b", "c"), ())


def test_a_refused_delete_is_reported(shared: Path) -> None:
    (shared / "object").write_bytes(b"x")
    shared.chmod(0o555)
    with unprivileged():
        report = open_store(resolve(shared)).delete_many(["object", "absent"])
    shared.chmod(0o755)
    assert report.deleted == 1
    assert list(report.failed) == ["object"]
    assert (shared / "object").exists()


def test_a_folder_that_becomes_a_link_is_seen_before_the_next_batch(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere/kept").write_bytes(b"x")
    (tmp_path / "root/data").mkdir(parents=True)
    (tmp_path / "root/data/other").write_bytes(b"x")
    store = open_store(resolve(str(tmp_path / "root")))

    def paths() -> Iterator[str]:
        yield from (f"data/{number}" for number in range(store._delete_batch))
        (tmp_path / "root/data").rename(tmp_path / "root/before")
        (tmp_path / "root/data").symlink_to(tmp_path / "elsewhere")
        yield "data/kept"

    assert list(store.delete_many(paths()).failed) == ["data/kept"]
    assert (tmp_path / "elsewhere/kept").exists()
