"""A version is published once, and reported as published only if it is in the table's history."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, call
from uuid import UUID

import pytest

from memwal_ops.errors import (
    CommitStateUnknownError,
    InvalidFormatError,
    LeaseLostError,
    ObjectNotFoundError,
    StorageError,
)
from memwal_ops.formats.lance.commit import publication as module
from memwal_ops.formats.lance.commit.publication import (
    CommitLostError,
    CommitNote,
    advance_hint,
    is_taken,
    publish,
    refuse_gaps,
    refuse_if_not_newest,
    refuse_replaced,
    verify_in_history,
)
from memwal_ops.formats.lance.files.version_files import VersionPage, version_path
from memwal_ops.formats.lance.wire._pb import table_pb2 as pb
from memwal_ops.formats.lance.wire.names import NamingScheme, detached_manifest_name
from memwal_ops.formats.lance.wire.version_manifest import VersionManifest
from memwal_ops.storage.api import DeleteReport, ObjectMeta

V2 = NamingScheme.V2
TIME = datetime(2026, 11, 21, tzinfo=UTC)
REGION = UUID(int=1)
OURS, THEIRS = b"ours", b"theirs"
UNANSWERED = StorageError("no answer")


@dataclass
class MemoryStore:
    """Objects with their times; ``faults``: what a method raises. ``put`` and ``delete`` have what was changed."""

    data: dict[str, bytes] = field(default_factory=dict)
    times: dict[str, datetime] = field(default_factory=dict)
    faults: dict[str, Exception] = field(default_factory=dict)
    stores_nothing: bool = False
    deleted: list[str] = field(default_factory=list)
    refused: bool = False

    def _fail(self, method: str) -> None:
        if method in self.faults:
            raise self.faults[method]

    def head(self, path: str) -> ObjectMeta | None:
        self._fail("head")
        if path not in self.data:
            return None
        return ObjectMeta(path, len(self.data[path]), self.times.get(path, TIME), None)

    def get(self, path: str) -> bytes:
        self._fail("get")
        if path not in self.data:
            raise ObjectNotFoundError(path)
        return self.data[path]

    def list(self, prefix: str) -> Iterator[ObjectMeta]:
        assert prefix == "_versions"
        for path in self.data:
            meta = self.head(path)
            assert meta is not None
            yield meta

    def put(self, path: str, data: bytes) -> None:
        self._fail("put")
        self.data[path] = data

    def put_if_absent(self, path: str, data: bytes) -> bool:
        free = path not in self.data
        if free and not self.stores_nothing:
            self.data[path] = data
        self._fail("put_if_absent")
        return free and not self.stores_nothing

    def delete_many(self, paths: Iterable[str]) -> DeleteReport:
        wanted = [*paths]
        if self.refused:
            return DeleteReport(0, dict.fromkeys(wanted, "locked"))
        self.deleted += wanted
        return DeleteReport(len(wanted), {})


def table(store: MemoryStore | None = None, version: int = 4, **fields: Any) -> Any:
    known: dict[str, Any] = {
        "remember": lambda *_: None,
        "file": None,
        "manifest": VersionManifest(pb.Manifest(), None, None, 0, 2),
        "listed": VersionPage((), complete=False, versions={}, newest=None),
    }
    location = SimpleNamespace(uri="memory://t")
    handle = SimpleNamespace(get=lambda: fields["dataset"])
    return SimpleNamespace(
        store=store or MemoryStore(), version=version, naming=V2, location=location, handle=handle, **known | fields
    )


def path_of(version: int) -> str:
    return version_path(version, V2)


# -- the put


@pytest.mark.parametrize("standing", [None, OURS])
def test_published(standing: bytes | None) -> None:
    """Also if a client repeats a put whose answer was lost, and is told that the object exists."""
    store = MemoryStore({} if standing is None else {path_of(5): standing})
    publish(table(store), OURS, 5)
    assert store.data == {path_of(5): OURS}


def test_published_by_another_writer() -> None:
    store = MemoryStore({path_of(5): THEIRS})
    with pytest.raises(CommitLostError, match=r"Version 5 of memory://t was published by another writer") as raised:
        publish(table(store), OURS, 5)
    assert raised.value.files_unreferenced
    assert store.data == {path_of(5): THEIRS}


def test_published_by_somebody_and_absent_now() -> None:
    """It may be a stale answer, and the version ours: its files must be kept."""
    store = MemoryStore(stores_nothing=True)
    with pytest.raises(CommitLostError) as raised:
        publish(table(store), OURS, 5)
    assert not raised.value.files_unreferenced


def test_an_answer_that_was_lost_after_the_put() -> None:
    store = MemoryStore(faults={"put_if_absent": UNANSWERED})
    publish(table(store), OURS, 5)
    assert store.data == {path_of(5): OURS}


def test_an_answer_that_was_lost_after_another_writers_put() -> None:
    store = MemoryStore({path_of(5): THEIRS}, faults={"put_if_absent": UNANSWERED})
    with pytest.raises(CommitLostError) as raised:
        publish(table(store), OURS, 5)
    assert raised.value.files_unreferenced


def test_no_answer_and_nothing_there() -> None:
    """The request may still be in flight."""
    store = MemoryStore(stores_nothing=True, faults={"put_if_absent": UNANSWERED})
    with pytest.raises(
        CommitStateUnknownError, match="Whether version 5 was committed is unknown: no answer"
    ) as raised:
        publish(table(store), OURS, 5)
    assert raised.value.__cause__ is UNANSWERED


@pytest.mark.parametrize("answered", [False, True])
def test_no_answer_at_all(answered: bool) -> None:
    again = StorageError("nor to this")
    faults: dict[str, Exception] = {"get": again} | ({} if answered else {"put_if_absent": UNANSWERED})
    store = MemoryStore({path_of(5): THEIRS}, faults=faults)
    with pytest.raises(CommitStateUnknownError, match="nor to this") as raised:
        publish(table(store), OURS, 5)
    assert raised.value.__cause__ is (again if answered else UNANSWERED)


def test_taken() -> None:
    store = MemoryStore({path_of(5): THEIRS})
    assert is_taken(table(store), 5) is True
    assert is_taken(table(store), 6) is False


# -- before the put


@pytest.mark.parametrize(
    ("newest", "standing", "refused"),
    [
        (4, "read", False),
        (5, "read", True),
        (4, "another", True),
        (4, ObjectNotFoundError("gone"), True),
        (4, InvalidFormatError("broken"), True),
    ],
)
def test_nothing_is_published_on_a_version_that_is_not_the_newest(
    newest: int, standing: Any, refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor if another table took the place of the one that was read."""
    read = Mock(side_effect=[standing] if isinstance(standing, Exception) else None, return_value=standing)
    monkeypatch.setattr(module.version_files, "read_version_manifest", read)
    one = table(dataset=SimpleNamespace(latest_version=newest), manifest="read")
    if refused:
        with pytest.raises(CommitLostError, match="Version 5 of") as raised:
            refuse_if_not_newest(one, 5)
        assert raised.value.files_unreferenced
    else:
        refuse_if_not_newest(one, 5)
        refuse_replaced(one, 5, one.listed)
    assert read.call_args_list == [call(one.store, 4, V2)] * (0 if newest == 5 else 2 if not refused else 1)


def listed(tag: str | None) -> ObjectMeta:
    return ObjectMeta(path_of(4), 10, TIME, tag)


@pytest.mark.parametrize(
    ("before", "now", "read_again"),
    [
        (listed("a"), listed("a"), False),
        (listed("a"), listed("b"), True),
        (listed(None), listed(None), True),
        (listed("a"), None, True),
        (None, listed("a"), True),
    ],
)
def test_a_version_that_is_listed_as_it_was_is_not_read_again(
    before: ObjectMeta | None, now: ObjectMeta | None, read_again: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By its entity tag; what a listing cannot tell, the manifest itself does."""
    read = Mock(return_value="another")
    monkeypatch.setattr(module.version_files, "read_version_manifest", read)
    page = VersionPage((), complete=True, versions={} if now is None else {4: now}, newest=4)
    one = table(file=before, manifest="read")
    if read_again:
        with pytest.raises(CommitLostError):
            refuse_replaced(one, 5, page)
    else:
        refuse_replaced(one, 5, page)
    assert read.called == read_again


@pytest.mark.parametrize(
    ("there", "missing"), [((4,), False), ((4, 5), False), ((4, 5, 6, 7), False), ((4, 5, 7), True), ((4, 6, 7), True)]
)
def test_a_rebase_over_a_version_that_is_missing_is_refused(
    there: tuple[int, ...], missing: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module.version_files, "read_version_manifest", lambda *_: "read")
    one = table(MemoryStore({path_of(version): b"" for version in there}), manifest="read")
    if missing:
        with pytest.raises(CommitLostError, match="Version 7 of memory://t"):
            refuse_gaps(one)
    else:
        refuse_gaps(one)


def test_a_version_that_a_page_does_not_list_is_looked_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.version_files, "read_version_manifest", lambda *_: "read")
    page = VersionPage((), complete=False, versions={}, newest=6)
    monkeypatch.setattr(module.version_files, "list_page", lambda _: page)
    store = MemoryStore({path_of(5): b"", path_of(6): b""})
    refuse_gaps(table(store, manifest="read"))
    del store.data[path_of(5)]
    with pytest.raises(CommitLostError):
        refuse_gaps(table(store, manifest="read"))


def test_no_rebase_onto_another_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.version_files, "read_version_manifest", lambda *_: "another")
    with pytest.raises(CommitLostError, match="Version 5 of memory://t"):
        refuse_gaps(table(MemoryStore({path_of(4): b"", path_of(5): b""}), manifest="read"))


# -- after the put


@dataclass
class Version:
    """A version by the names of its files alone."""

    number: int
    names: set[str]

    @property
    def manifest(self) -> Any:
        return SimpleNamespace(version=self.number)


@dataclass
class After:
    """The table as it is after version 5 was published on 4, by writers of 6 and 7."""

    newest: int = 7
    names: tuple[str, ...] = ("base",)
    added: tuple[str, ...] = ("new",)
    first: tuple[str, ...] = ("base",)
    progress: int = 3
    merged: int = 3
    times: dict[int, int] = field(default_factory=dict)
    store: MemoryStore = field(default_factory=MemoryStore)

    def verify(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Verify version 5, which merged generations up to ``merged``; ``times``: minutes of the versions."""
        for version in range(3, self.newest + 1):
            self.store.data.setdefault(path_of(version), b"v%d" % version)
            self.store.times[path_of(version)] = TIME + timedelta(minutes=self.times.get(version, version))
        newest = table(self.store, self.newest, manifest=Version(self.newest, {*self.names}))
        newest.index = SimpleNamespace(merged_generations={REGION: self.progress} if self.progress else {})
        latest = SimpleNamespace(latest_version=self.newest)
        one = table(self.store, manifest=Version(4, {"base"}), dataset=latest)
        one.newest = lambda: newest
        one.remember = self.remember = Mock()
        self.read = Mock(return_value=Version(6, {*self.first}))
        monkeypatch.setattr(module, "_names", lambda version: version.names)
        monkeypatch.setattr(module.version_files, "read_version_manifest", self.read)
        verify_in_history(one, Version(5, {"base", *self.added}), {REGION: self.merged})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "after",
    [
        After(newest=5),
        After(names=("base", "new"), progress=0),
        After(),
        After(times={5: 6}),
        After(added=(), times={5: 9}),
        After(times={5: 9}, first=("base", "new")),
        After(times={3: 99, 4: 99}),
    ],
)
def test_in_the_history(after: After, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is the newest, or later versions have its files or its progress, or it has no files of its own."""
    after.verify(monkeypatch)
    assert after.store.deleted == []
    assert after.remember.called == (after.newest == 5)
    if after.newest == 5:
        published, page = after.remember.call_args.args
        assert (published.number, page.newest) == (5, 5)


@pytest.mark.parametrize(("progress", "merged"), [(0, 3), (2, 3), (0, 1)])
def test_progress_that_was_taken_back(progress: int, merged: int, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(CommitLostError, match=r"Version 7 of .* reverted the merge progress of version 5") as raised:
        After(progress=progress, merged=merged).verify(monkeypatch)
    assert not raised.value.files_unreferenced


@pytest.fixture
def unreadable(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """What is known of version 5 when it is late; unchanged, it is to be deleted."""
    known = SimpleNamespace(needed=Mock(return_value={"new"}), missing=["new"], named=frozenset(), encoded=b"v5")
    monkeypatch.setattr(
        module.version_files,
        "references",
        lambda one: SimpleNamespace(own=known.needed() if one.manifest.version == 5 else {"base"}),
    )

    def missing(store: Any, needed: set[str]) -> list[str]:
        assert isinstance(store, MemoryStore)
        assert needed == {"new"} - {"base"}
        return known.missing  # type: ignore[no-any-return]

    monkeypatch.setattr(module.version_files, "missing_files", missing)
    monkeypatch.setattr(module, "named_versions", lambda one: known.named if one.version == 7 else None)
    monkeypatch.setattr(
        module.version_manifest,
        "encode_version_manifest",
        lambda one: known.encoded if one.manifest.version == 5 else b"",
    )
    known.log = Mock()
    monkeypatch.setattr(module, "get_logger", lambda _: known.log)
    return known


def late(monkeypatch: pytest.MonkeyPatch, **fields: Any) -> After:
    """Version 5 was published after 6 and 7, of which 7 came first by the clock; none is built on it."""
    after = After(times={5: 9, 6: 8, 7: 7}, **fields)
    with pytest.raises(CommitLostError, match="Version 5 of memory://t was published after a later version") as raised:
        after.verify(monkeypatch)
    assert not raised.value.files_unreferenced
    assert after.read.call_args_list == [call(after.store, 6, V2)]
    return after


def test_a_late_version_that_cannot_be_read_is_deleted(
    unreadable: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    unreadable.needed.return_value = {"new", "base"}
    after = late(monkeypatch)
    assert after.store.deleted == [path_of(5)]
    unreadable.log.warning.assert_called_once_with("published_late", table="memory://t", version=5, kept=False)


@pytest.mark.parametrize("why", ["readable", "named", "newer release", "other bytes", "expired", "refused", "replaced"])
def test_a_late_version_that_is_kept(why: str, unreadable: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    store = MemoryStore(refused=why == "refused")
    match why:
        case "readable":
            unreadable.missing = []
        case "named":
            unreadable.named = frozenset({5})
        case "newer release":
            unreadable.needed.side_effect = InvalidFormatError("a kind of file that this release does not know")
        case "other bytes":
            unreadable.encoded = b"another"
        case "expired":
            head = store.head
            heads = iter(range(99))
            monkeypatch.setattr(
                store, "head", lambda path: None if path == path_of(5) and next(heads) > 1 else head(path)
            )
        case "replaced":
            get = store.get

            def replaced(path: str) -> bytes:
                found = get(path)
                store.data[path] = b"longer"
                return found

            monkeypatch.setattr(store, "get", replaced)
    assert late(monkeypatch, store=store).store.deleted == []
    unreadable.log.warning.assert_called_once_with("published_late", table="memory://t", version=5, kept=True)


def test_detached_and_other_files_are_no_versions(unreadable: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    store = MemoryStore()
    for name in (detached_manifest_name(7), "other"):
        store.data[f"_versions/{name}"] = b""
        store.times[f"_versions/{name}"] = TIME - timedelta(days=1)
    After(store=store).verify(monkeypatch)
    assert store.deleted == []


def test_a_version_that_was_expired_was_not_late(monkeypatch: pytest.MonkeyPatch) -> None:
    after = After()
    real = after.store.list
    monkeypatch.setattr(after.store, "list", lambda prefix: (one for one in real(prefix) if one.path != path_of(5)))
    after.verify(monkeypatch)
    assert after.store.deleted == []


def test_whether_it_is_in_the_history_could_not_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """The version exists: the caller must not take this for a refusal, and delete its files."""
    after = After(times={5: 9})
    monkeypatch.setattr(after.store, "list", Mock(side_effect=UNANSWERED))
    with pytest.raises(CommitStateUnknownError, match=r"Version 5 was published, but .*: no answer") as raised:
        after.verify(monkeypatch)
    assert raised.value.__cause__ is UNANSWERED


def test_the_names_of_a_version() -> None:
    manifest = pb.Manifest()
    for number in range(2):
        fragment = manifest.fragments.add(id=number)
        fragment.files.add(path=f"{number}.lance")
        fragment.files.add(path=f"{number}-more.lance")
    manifest.fragments[1].deletion_file.read_version = 8
    manifest.fragments[1].deletion_file.id = 9
    files = {(f"{number}{more}.lance",) for number in range(2) for more in ("", "-more")}
    assert module._names(VersionManifest(manifest, None, None, 0, 2)) == files | {(1, 8, 9)}
    indexes, transaction = pb.IndexSection(), pb.Transaction()
    indexes.indices.add().uuid.uuid = b"a"
    transaction.create_index.removed_indices.add().uuid.uuid = b"b"
    whole = VersionManifest(manifest, indexes, transaction, 0, 2)
    assert module._names(whole) == files | {(1, 8, 9), ("index", b"a"), ("index", b"b")}


# -- the hint, and the note


def test_the_hint_is_advanced_where_there_is_one() -> None:
    hint = "_versions/latest_version_hint.json"
    store = MemoryStore()
    advance_hint(table(store), 5)
    assert store.data == {}
    store.data[module.version_files.VERSION_HINT] = b""
    advance_hint(table(store), 5)
    assert store.data == {hint: b'{"version":5}'}
    advance_hint(table(store, listed=VersionPage((), complete=True, versions={}, newest=4)), 6)
    assert store.data == {hint: b'{"version":5}'}, "there was none when the table was opened: on object stores"


@pytest.mark.parametrize("fault", [UNANSWERED, LeaseLostError("lost")])
@pytest.mark.parametrize("method", ["head", "put"])
def test_a_hint_that_cannot_be_advanced_is_no_failure(method: str, fault: Exception) -> None:
    store = MemoryStore({module.version_files.VERSION_HINT: b""}, faults={method: fault})
    advance_hint(table(store), 5)
    assert [*store.data] == [module.version_files.VERSION_HINT]


def test_the_note_of_a_commit() -> None:
    first, second = CommitNote("merge"), CommitNote("merge")
    assert first.run_id != second.run_id
    assert UUID(first.run_id).version == 4
    assert first.properties() == {
        "memwal-ops.job": "merge",
        "memwal-ops.run_id": first.run_id,
        "memwal-ops.version": module.__version__,
    }
