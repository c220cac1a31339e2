"""A commit publishes exactly one version, of exactly what was decided, and leaves no file that no version needs."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock
from uuid import UUID

import lance
import pytest

from memwal_ops.errors import CommitStateUnknownError, InvariantViolatedError, StorageError, UnsupportedFeatureError
from memwal_ops.formats.lance.commit import commit as module
from memwal_ops.formats.lance.commit.commit import (
    CommitLostError,
    CommitNote,
    IndexChange,
    check_committable,
    check_rewritable,
    commit_built,
    commit_indexes,
    commit_strict,
)
from memwal_ops.formats.lance.wire._pb import memwal_pb2, table_pb2
from memwal_ops.formats.lance.wire.memwal_index import MEMWAL_INDEX_NAME, decode_memwal_index
from memwal_ops.formats.lance.wire.names import NamingScheme, detached_manifest_name
from memwal_ops.formats.lance.wire.region_manifest import RegionRecord, region_records, with_region_records
from memwal_ops.formats.lance.wire.version_manifest import (
    NO_TRANSACTION_FILES,
    VersionManifest,
    decode_version_manifest,
    encode_version_manifest,
)

REGION = UUID(int=1)
NOTE = CommitNote("merge", "run-1", "0.1")
MEMWAL, OTHER, THIRD = (UUID(int=number) for number in (10, 11, 12))
DETACHED = (1 << 63) | 77
FILE = "_transactions/4-uuid.txn"
DETACHED_FILE = f"_versions/{detached_manifest_name(DETACHED)}"


def details(progress: int = 3, **fields: Any) -> memwal_pb2.MemWalIndexDetails:
    made = memwal_pb2.MemWalIndexDetails(**fields)
    made.merged_generations.add(generation=progress).region_id.uuid = REGION.bytes
    return made


def entry(name: str, uuid: UUID, value: bytes = b"") -> table_pb2.IndexMetadata:
    made = table_pb2.IndexMetadata(name=name, dataset_version=2)
    made.uuid.uuid = uuid.bytes
    made.index_details.value = value
    return made


def version_4(*, flags: int = 0, inline: bool = True, progress: int = 3) -> VersionManifest:
    """A version with a MemWAL index between two others."""
    manifest = table_pb2.Manifest(version=4, writer_feature_flags=flags, transaction_file="3-old.txn")
    manifest.fragments.add(id=1).files.add(path="1.lance")
    indexes = table_pb2.IndexSection()
    memwal = entry(MEMWAL_INDEX_NAME, MEMWAL, details(progress).SerializeToString())
    indexes.indices.extend([entry("first", OTHER), memwal, entry("third", THIRD)])
    return VersionManifest(manifest, indexes, table_pb2.Transaction(read_version=3) if inline else None, 0, 2)


class Store:
    def __init__(self, log: list[Any]) -> None:
        self.log = log

    def put(self, path: str, data: bytes) -> None:
        self.log.append(("put", path, data))

    def get(self, path: str) -> str:
        self.log.append(("get", path))
        return f"bytes of {path}"


def table_on(manifest: VersionManifest | None = None, log: list[Any] | None = None, **fields: Any) -> Any:
    log = [] if log is None else log
    values = {
        "version": 4,
        "dataset": "version 4",
        "manifest": manifest or version_4(),
        "naming": NamingScheme.V2,
        "location": SimpleNamespace(uri="memory://t", plain="memory://t", scheme="memory", dynamodb_table=None),
        "index": SimpleNamespace(merged_generations={REGION: 3}),
        "store": Store(log),
        "discard": lambda paths: log.append(("discard", *paths)),
        "sound": set(),
        **fields,
    }
    return SimpleNamespace(handle=SimpleNamespace(get=lambda: values["dataset"]), **values)


# -- refused before any work


def test_a_table_that_must_not_be_rewritten_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    check_committable(table_on())
    check_rewritable(table_on(naming=NamingScheme.V1))
    with pytest.raises(UnsupportedFeatureError, match="V1 scheme"):
        check_committable(table_on(naming=NamingScheme.V1))
    external = table_on(location=SimpleNamespace(uri="s3+ddb://t", scheme="s3+ddb", dynamodb_table="t"))
    check_rewritable(external)
    with pytest.raises(UnsupportedFeatureError, match="has its versions in DynamoDB"):
        check_committable(external)
    unknown = table_on(version_4(flags=1 << 40))
    for check in (check_committable, check_rewritable):
        with pytest.raises(UnsupportedFeatureError):
            check(unknown)


# -- the order of a commit


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Each step of a commit notes itself, and raises if ``faults`` has an error for it."""
    log: list[Any] = []
    firsts: list[Any] = []
    faults: dict[str, BaseException] = {}
    built = version_4()
    built.manifest.transaction_file = "4-uuid.txn"

    def step(name: str, answer: Any = None, owner: Any = module) -> None:
        def taken(*arguments: Any, **named: Any) -> Any:
            log.append((name, *arguments[1:], *sorted(named.items())))
            firsts.append(arguments[0])
            if name in faults:
                raise faults[name]
            return answer

        monkeypatch.setattr(owner, name, taken)

    monkeypatch.setattr(module, "added_files", lambda table, built: frozenset())  # tests/integration/.../test_commit.py
    monkeypatch.setattr(module, "refuse_missing_files", lambda table, added: None)
    monkeypatch.setattr(module, "refuse_wrong_deletions", lambda table, built, added: None)
    stamped = version_4(progress=5)
    step("check_committable")
    step("_build_detached", DETACHED)
    step("_refuse_rebased")
    step("stamp_progress", stamped, module.memwal_index)
    step("_encoded", "encoded stamped")
    step("_refuse_unreadable")
    step("drop_contradicted")
    step("refuse_if_not_newest")
    step("publish")
    step("verify_in_history")
    step("advance_hint")
    monkeypatch.setattr(
        module.version_manifest, "decode_version_manifest", lambda data: built if DETACHED_FILE in data else None
    )
    return SimpleNamespace(log=log, firsts=firsts, faults=faults, built=built, stamped=stamped)


def test_data_and_progress_are_published_together(steps: Any) -> None:
    table = table_on(log=steps.log)
    progress = {REGION: 5}
    assert commit_strict(table, "operation", progress, NOTE, records={REGION: "record"}) == 5  # type: ignore[arg-type, dict-item]
    transaction = steps.log[1][1]
    assert (transaction.read_version, transaction.operation) == (4, "operation")
    assert transaction.transaction_properties == NOTE.properties()
    assert steps.log == [
        ("check_committable",),
        ("_build_detached", transaction),
        ("get", DETACHED_FILE),
        ("_refuse_rebased", steps.built, 5),
        ("stamp_progress", table.manifest, progress, ("records", {REGION: "record"}), ("version", 5)),
        ("_encoded", steps.stamped),
        ("_refuse_unreadable", steps.stamped),
        ("drop_contradicted", {REGION: 3}),
        ("refuse_if_not_newest", 5),
        ("publish", "encoded stamped", 5),
        ("discard", DETACHED_FILE),
        ("verify_in_history", steps.stamped, progress),
        ("advance_hint", 5),
    ]
    assert [first is table for first in steps.firsts] == [True, True, True, False, *[True] * 7]
    assert steps.firsts[3] is steps.built


BEFORE_PUBLISHING = [
    "_refuse_rebased",
    "stamp_progress",
    "_encoded",
    "_refuse_unreadable",
    "drop_contradicted",
    "refuse_if_not_newest",
    "publish",
]


@pytest.mark.parametrize("fault", BEFORE_PUBLISHING)
@pytest.mark.parametrize(
    ("error", "named"),
    [
        (CommitLostError("late"), False),
        (StorageError("no answer"), False),
        (CommitLostError("late", files_unreferenced=False), True),
        (CommitStateUnknownError("no answer"), True),
        (KeyboardInterrupt(), True),
    ],
)
def test_what_a_commit_leaves_where_it_fails(steps: Any, fault: str, error: BaseException, named: bool) -> None:
    """The transaction file stays where a version may refer to it."""
    steps.faults[fault] = error
    with pytest.raises(type(error)):
        commit_strict(table_on(log=steps.log), "operation", {REGION: 5}, NOTE)  # type: ignore[arg-type]
    done = [step[0] for step in steps.log]
    after = [path for _, *paths in steps.log[done.index(fault) + 1 :] for path in paths]
    assert after == ([DETACHED_FILE] if named else [FILE, DETACHED_FILE])


@pytest.mark.parametrize("fault", ["check_committable", "_build_detached"])
def test_what_was_not_built_leaves_nothing(steps: Any, fault: str) -> None:
    steps.faults[fault] = StorageError("no answer")
    with pytest.raises(StorageError):
        commit_strict(table_on(log=steps.log), "operation", {}, NOTE)  # type: ignore[arg-type]
    assert steps.log[-1][0] == fault


def test_a_version_that_is_not_in_the_history_is_not_reported(steps: Any) -> None:
    steps.faults["verify_in_history"] = CommitLostError("late", files_unreferenced=False)
    with pytest.raises(CommitLostError):
        commit_strict(table_on(log=steps.log), "operation", {REGION: 5}, NOTE)  # type: ignore[arg-type]
    assert [one[0] for one in steps.log][-2:] == ["discard", "verify_in_history"]


def test_what_this_release_would_refuse_is_not_published(index_steps: Any) -> None:
    """pylance may build a version with a feature that the table did not have."""
    refused = version_4()
    refused.manifest.reader_feature_flags |= 2048
    with pytest.raises(UnsupportedFeatureError, match=r"was not published.*spilled row lineage"):
        commit_built(table_on(log=index_steps.log), refused, table_pb2.Transaction(read_version=4))
    assert not [one for one in index_steps.log if one[0] in {"publish", "put"}]


# -- a change of indexes alone


@pytest.fixture
def index_steps(monkeypatch: pytest.MonkeyPatch) -> Any:
    log: list[Any] = []
    firsts: list[Any] = []
    faults: dict[str, BaseException] = {}

    def step(name: str) -> None:
        def taken(*arguments: Any) -> None:
            log.append((name, *arguments[1:]))
            firsts.append(arguments[0])
            if name in faults:
                raise faults[name]

        monkeypatch.setattr(module, name, taken)

    monkeypatch.setattr(module, "added_files", lambda table, built: frozenset())  # tests/integration/.../test_commit.py
    monkeypatch.setattr(module, "refuse_missing_files", lambda table, added: None)
    for name in ("refuse_if_not_newest", "publish", "verify_in_history", "advance_hint"):
        step(name)
    return SimpleNamespace(log=log, firsts=firsts, faults=faults)


def test_a_change_of_indexes(index_steps: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "time", SimpleNamespace(time=lambda: 1_700_000_000.5))
    table = table_on(log=index_steps.log)
    added = entry("added", UUID(int=13))
    change = IndexChange(details(maintained_indexes=["a"]), MEMWAL, (added,), frozenset({OTHER}))
    assert commit_indexes(table, change, NOTE) == 5
    assert all(one is table for one in index_steps.firsts)
    put, overtaken, published, verified, hint = index_steps.log
    assert (overtaken, published[0], published[2], hint) == (
        ("refuse_if_not_newest", 5),
        "publish",
        5,
        ("advance_hint", 5),
    )
    built = decode_version_manifest(published[1])
    transaction = table_pb2.Transaction.FromString(put[2])
    assert put[:2] == ("put", f"_transactions/4-{transaction.uuid}.txn")
    assert UUID(transaction.uuid).version == 4
    assert built.transaction == transaction
    assert (transaction.read_version, transaction.transaction_properties) == (4, NOTE.properties())
    assert built.manifest.transaction_file == f"4-{transaction.uuid}.txn"
    assert built.manifest.version == 5
    assert built.manifest.fragments == table.manifest.manifest.fragments
    assert built.manifest.timestamp.seconds > 0
    assert verified == ("verify_in_history", verified[1], {})
    assert verified[1].manifest.version == 5
    assert built.indexes is not None
    third, memwal, last = built.indexes.indices
    assert (third, last) == (entry("third", THIRD), added)
    assert decode_memwal_index(memwal).maintained_indexes == ("a",)
    assert (memwal.uuid.uuid, memwal.dataset_version) == (MEMWAL.bytes, 5)
    assert memwal.created_at == 1_700_000_000_500, "milliseconds"
    before = table.manifest.indexes.indices
    assert [*transaction.create_index.removed_indices] == [before[1], before[0]]
    assert [*transaction.create_index.new_indices] == [memwal, added]


def test_the_records_of_regions_are_in_the_same_version(index_steps: Any) -> None:
    before, added = RegionRecord(3, "0123abcd"), RegionRecord(1, "unmerged")
    parent = version_4()
    parent = replace(parent, manifest=with_region_records(parent.manifest, {UUID(int=2): before}))
    commit_indexes(table_on(parent, index_steps.log), IndexChange(details(), records={REGION: added}), NOTE)
    [published] = [one for one in index_steps.log if one[0] == "publish"]
    assert region_records(decode_version_manifest(published[1]).manifest) == {REGION: added, UUID(int=2): before}


@pytest.mark.parametrize("fault", ["refuse_if_not_newest", "publish"])
@pytest.mark.parametrize(
    ("error", "discarded"),
    [
        (CommitLostError("late"), True),
        (CommitLostError("late", files_unreferenced=False), False),
        (StorageError("no answer"), True),
        (CommitStateUnknownError("no answer"), False),
        (KeyboardInterrupt(), False),
    ],
)
@pytest.mark.parametrize("flags", [0, NO_TRANSACTION_FILES])
def test_the_transaction_file_goes_if_no_version_can_refer_to_it(
    index_steps: Any, fault: str, error: BaseException, discarded: bool, flags: int
) -> None:
    index_steps.faults[fault] = error
    table = table_on(version_4(flags=flags), index_steps.log)
    with pytest.raises(type(error)):
        commit_indexes(table, IndexChange(details()), NOTE)
    puts = [one[1] for one in index_steps.log if one[0] == "put"]
    assert len(puts) == (0 if flags else 1)
    assert [path for one in index_steps.log if one[0] == "discard" for path in one[1:]] == (puts if discarded else [])
    assert not {"verify_in_history", "advance_hint"} & {one[0] for one in index_steps.log}


@pytest.mark.parametrize(("inline", "flags"), [(True, 0), (False, 0), (False, NO_TRANSACTION_FILES)])
def test_the_transaction_is_where_that_of_the_parent_is(index_steps: Any, inline: bool, flags: int) -> None:
    table = table_on(version_4(flags=flags, inline=inline), index_steps.log)
    commit_indexes(table, IndexChange(details()), NOTE)
    [published] = [one for one in index_steps.log if one[0] == "publish"]
    built = decode_version_manifest(published[1])
    assert (built.transaction is not None) is (inline or bool(flags))
    assert bool(built.manifest.transaction_file) is not bool(flags)


@pytest.mark.parametrize(
    ("fields", "kept"), [({}, False), ({"num_regions": 2}, True), ({"num_regions": 2, "inline_snapshots": b"x"}, False)]
)
def test_the_id_of_the_memwal_entry(index_steps: Any, fields: dict[str, Any], kept: bool) -> None:
    """It names the file of a snapshot; where there is none, a new id identifies the version's descendants."""
    commit_indexes(table_on(log=index_steps.log), IndexChange(details(**fields)), NOTE)
    [published] = [one for one in index_steps.log if one[0] == "publish"]
    indexes = decode_version_manifest(published[1]).indexes
    assert indexes is not None
    [memwal] = [one for one in indexes.indices if one.name == MEMWAL_INDEX_NAME]
    assert (memwal.uuid.uuid == MEMWAL.bytes) is kept
    assert len(memwal.uuid.uuid) == 16


@pytest.mark.parametrize(
    "change",
    [
        IndexChange(details(), removed=frozenset({UUID(int=99)})),
        IndexChange(details(), removed=frozenset({OTHER, UUID(int=99)})),
        IndexChange(details(), removed=frozenset({MEMWAL})),
    ],
)
def test_an_index_that_is_not_there_is_not_replaced(index_steps: Any, change: IndexChange) -> None:
    with pytest.raises(InvariantViolatedError, match="lacks an index to be replaced"):
        commit_indexes(table_on(log=index_steps.log), change, NOTE)
    assert index_steps.log == []


@pytest.mark.parametrize("indexes", [None, table_pb2.IndexSection()])
def test_a_table_without_memwal_is_not_changed(index_steps: Any, indexes: Any) -> None:
    table = table_on(replace(version_4(), indexes=indexes), index_steps.log)
    with pytest.raises(InvariantViolatedError, match="lacks an index to be replaced"):
        commit_indexes(table, IndexChange(details()), NOTE)


@pytest.mark.parametrize("progress", [2, 4])
def test_a_change_of_indexes_does_not_change_progress(index_steps: Any, progress: int) -> None:
    with pytest.raises(InvariantViolatedError, match="must not change the merge progress"):
        commit_indexes(table_on(log=index_steps.log), IndexChange(details(progress)), NOTE)
    assert index_steps.log == []


@pytest.mark.parametrize("part", ["fragments", "indexes", "transaction"])
def test_what_is_published_is_what_was_built(index_steps: Any, part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a fault of the encoding changes, nothing is published."""

    def decoded(data: bytes) -> VersionManifest:
        read = decode_version_manifest(data)
        if part == "fragments":
            read.manifest.fragments[0].id = 9
        elif part == "indexes":
            read = replace(read, indexes=None)
        else:
            read = replace(read, transaction=None)
        return read

    monkeypatch.setattr(module.version_manifest, "decode_version_manifest", decoded)
    with pytest.raises(InvariantViolatedError, match="differs in more" if part == "fragments" else "does not decode"):
        commit_indexes(table_on(log=index_steps.log), IndexChange(details()), NOTE)
    assert index_steps.log == []


# -- what pylance built


def test_a_version_that_was_built_on_another_mergers_is_refused() -> None:
    module._refuse_rebased(table_on(), version_4(), 5)
    other = table_on(index=SimpleNamespace(merged_generations={REGION: 4}))
    for table, built in (
        (other, version_4()),
        (table_on(), version_4(progress=4)),
        (table_on(), replace(version_4(), indexes=None)),
        (table_on(), replace(version_4(), indexes=table_pb2.IndexSection())),
    ):
        with pytest.raises(CommitLostError, match="Version 5 of memory://t"):
            module._refuse_rebased(table, built, 5)


def test_pylance_builds_a_version_that_no_reader_opens(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []

    def commit(*arguments: Any, **named: Any) -> Any:
        calls.append((arguments, named))
        return SimpleNamespace(version=DETACHED)

    table = table_on()
    monkeypatch.setattr(lance.LanceDataset, "commit", commit)
    operation = lance.LanceOperation.Append([])
    wanted = lance.Transaction(read_version=4, operation=operation)
    assert module._build_detached(table, wanted) == DETACHED
    [((pinned, transaction), named)] = calls
    assert pinned is table.dataset, "a version that was published since is not built upon"
    assert named == {"detached": True}
    assert transaction is wanted


@pytest.mark.parametrize("taken", [True, False])
def test_a_conflict_of_pylance_is_a_commit_that_was_lost(taken: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: Any, **__: Any) -> None:
        raise OSError("Commit conflict")

    asked: list[int] = []

    def is_taken(_: Any, version: int) -> bool:
        asked.append(version)
        return taken

    monkeypatch.setattr(lance.LanceDataset, "commit", refused)
    monkeypatch.setattr(module, "is_taken", is_taken)
    with pytest.raises(CommitLostError if taken else StorageError) as raised:
        module._build_detached(table_on(), lance.Transaction(4, lance.LanceOperation.Append([])))
    assert asked == [5]
    assert isinstance(raised.value.__cause__, StorageError if taken else OSError)


class Opened:
    def __init__(self, fragments: list[int], indexes: list[str]) -> None:
        self.fragments, self.indexes = fragments, indexes

    def get_fragments(self) -> list[Any]:
        return [SimpleNamespace(fragment_id=number) for number in self.fragments]

    def describe_indices(self) -> list[Any]:
        return [SimpleNamespace(name=name) for name in self.indexes]


ALL = ["first", MEMWAL_INDEX_NAME, "third"]


@pytest.mark.parametrize(
    ("fragments", "indexes", "right"),
    [
        ([2, 1], ALL, True),
        ([1], ALL, False),
        ([1, 2, 3], ALL, False),
        ([1, 2], ALL[:2], False),
        ([1, 2], [*ALL, "x"], False),
    ],
)
def test_what_pylance_reads_back_is_what_was_stamped(
    fragments: list[int], indexes: list[str], right: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    stamped = version_4()
    stamped.manifest.fragments.add(id=2)
    log: list[Any] = []
    table = table_on(log=log)
    opened: list[Any] = []

    def open_dataset(location: Any, version: int) -> Opened:
        opened.append((location, version))
        return Opened(fragments, indexes)

    monkeypatch.setattr(module, "open_dataset", open_dataset)
    if right:
        module._refuse_unreadable(table, stamped)
    else:
        with pytest.raises(InvariantViolatedError, match="does not read back as it was built"):
            module._refuse_unreadable(table, stamped)
    [(_, path, data), discarded] = log
    written = decode_version_manifest(data)
    detached = written.manifest.version
    assert opened == [(table.location.plain, detached)]
    assert path == f"_versions/{detached_manifest_name(detached)}"
    assert discarded == ("discard", path)
    assert detached >> 63, "no reader opens it"
    assert stamped.manifest.version == 4, "only the copy has the detached number"
    assert encode_version_manifest(replace(written, manifest=stamped.manifest)) == encode_version_manifest(stamped)


def test_a_stamped_version_without_indexes(monkeypatch: pytest.MonkeyPatch) -> None:
    opened = Mock(return_value=Opened([1], []))
    monkeypatch.setattr(module, "open_dataset", opened)
    module._refuse_unreadable(table_on(), replace(version_4(), indexes=None))
    opened.assert_called_once()
