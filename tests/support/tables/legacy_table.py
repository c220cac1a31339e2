"""Tables with the legacy MemWAL index, made by hand: no release of pylance writes its states from Python.

pylance makes the base and the flushed MemTables, ``CreateIndex`` puts the details (as bytes of our own encoder,
:mod:`tests.support.tables.legacy_wire`), and the reader takes them from the manifest by the decoder beside it.
"""

from __future__ import annotations

import random
import struct
import uuid
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lance
import pyarrow as pa
from lance import LanceOperation
from lance.dataset import Index

from tests.support.tables import legacy_wire, wire
from tests.support.tables.files import Files
from tests.support.tables.schemas import PRIMARY_KEY

OWNER = "owner-1"
SCHEMA = pa.schema([pa.field("id", pa.int64(), nullable=False), pa.field("val", pa.float64())])
MARKED = pa.schema([SCHEMA.field("id").with_metadata(PRIMARY_KEY), SCHEMA.field("val")])


def rows(values: dict[int, float], schema: pa.Schema = SCHEMA) -> pa.Table:
    """Rows by key."""
    return pa.Table.from_pylist([{"id": key, "val": value} for key, value in values.items()], schema=schema)


def entries(numbers: list[int]) -> bytes:
    """A ``U64Segment``: a range, with holes where numbers are missing."""
    if not numbers:
        return b"\x0a\x00"
    bounds = [(1, numbers[0]), (2, numbers[-1] + 1)]
    holes = [one for one in range(numbers[0], numbers[-1]) if one not in numbers]
    if not holes:
        return wire.encode([(1, wire.encode(bounds))])
    array = wire.encode([(3, wire.encode([(2, struct.pack(f"<{len(holes)}Q", *holes))]))])
    return wire.encode([(2, wire.encode([*bounds, (3, array)]))])


def mem_wal(region: str, generation: int, state: str, **more: Any) -> dict[str, Any]:
    """One MemWAL of the details; ``version`` is the one that changed it last."""
    return {
        "region": region,
        "generation": generation,
        "mem_table_location": more.get("mem_table", f"memory://{region}/{generation}"),
        "wal_location": more.get("wal", f"wal/{region}/{generation}"),
        "entries": more.get("entries", b"\x0a\x00"),
        "state": state,
        "owner_id": more.get("owner", OWNER),
        "last_updated_dataset_version": more.get("version", 1),
    }


def put_details(uri: str, listed: list[dict[str, Any]]) -> int:
    """Add or replace the MemWAL index; the version that does it."""
    return put_bytes(uri, legacy_wire.encoded(listed))


def put_bytes(uri: str, details: bytes) -> int:
    """The same with any details."""
    dataset = lance.dataset(uri)
    if wire.mem_wal_entry(wire.newest_manifest(Files(uri))[1]) is not None:
        dataset.drop_index(wire.MEM_WAL_INDEX)
        dataset = lance.dataset(uri)
    index = Index(
        uuid=str(uuid.uuid4()), name=wire.MEM_WAL_INDEX, fields=[], dataset_version=dataset.version,
        fragment_ids=set(), index_version=0, index_details=(wire.DETAILS_URL, details),
    )  # fmt: skip
    lance.LanceDataset.commit(uri, LanceOperation.CreateIndex([index], []), read_version=dataset.version)
    return int(lance.dataset(uri).version)


def details_of(uri: str) -> list[dict[str, Any]]:
    """The newest version's MemWALs, by the independent decoder."""
    entry = wire.mem_wal_entry(wire.newest_manifest(Files(uri))[1])
    assert entry is not None
    ((details,),) = [list(wire.sub(entry, 6))]
    value = wire.get(details, 2, b"")
    assert isinstance(value, bytes)
    return legacy_wire.details(value)


def states_of(uri: str) -> dict[tuple[str, int], str]:
    """Region and generation to state."""
    return {(one["region"], one["generation"]): one["state"] for one in details_of(uri)}


def base_rows(uri: str, version: int | None = None) -> dict[int, float]:
    """The base table's rows by key; each key stands once."""
    found = lance.dataset(uri, version=version).to_table(columns=["id", "val"]).to_pydict()
    assert len({*found["id"]}) == len(found["id"])
    return dict(zip(found["id"], found["val"], strict=True))


def read_legacy(uri: str) -> dict[int, float]:
    """Base and unmerged MemWALs by the document's rules, with the decoder beside it and no code of ours.

    MemTables and logs lie as :class:`LegacyTable` and the writer of ours put them.
    """
    found = base_rows(uri)
    for one in sorted(details_of(uri), key=lambda each: (each["region"], each["generation"])):
        if one["state"] == "MERGED":
            continue
        place = Path(uri, one["mem_table_location"])
        if one["state"] == "FLUSHED" and place.exists():
            tables = [lance.dataset(str(place)).to_table()]
        else:
            paths = (Path(uri, one["wal_location"], f"{number:020}.arrow") for number in one["entries"])
            tables = [pa.ipc.open_stream(path.read_bytes()).read_all() for path in paths]
        for table in tables:
            found |= {row["id"]: row["val"] for row in table.to_pylist()}
    return found


@dataclass
class LegacyTable:
    """A base of ``size`` rows and flushed MemTables below ``mem/``, with a model of what it must read as.

    Attributes:
        marked: whether the key column says that it is the primary key.
        merged: the base as it is once everything FLUSHED is merged.
    """

    uri: str
    size: int = 20
    marked: bool = True
    data_storage_version: str = "2.0"
    v2_names: bool = True
    model: dict[int, float] = field(default_factory=dict)
    merged: dict[int, float] = field(default_factory=dict)
    listed: list[dict[str, Any]] = field(default_factory=list)

    def create(self) -> LegacyTable:
        """Write the base; no index yet."""
        self.model = {number: float(number) for number in range(self.size)}
        self.merged = dict(self.model)
        lance.write_dataset(
            rows(self.model, MARKED if self.marked else SCHEMA), self.uri,
            data_storage_version=self.data_storage_version, enable_v2_manifest_paths=self.v2_names,  # type: ignore[arg-type]
            max_rows_per_file=max(1, self.size // 2),
        )  # fmt: skip
        return self

    def flushed(self, region: str, generation: int, values: dict[int, float], *, state: str = "FLUSHED") -> None:
        """Add a MemWAL whose rows lie in a dataset at its ``mem_table_location``."""
        place = f"{self.uri}/mem/{region}/{generation}"
        lance.write_dataset(rows(values), place)
        self.listed.append(mem_wal(region, generation, state, mem_table=place, entries=entries([0])))
        if state == "FLUSHED":
            self.merged |= values

    def logged(
        self, region: str, generation: int, batches: dict[int, dict[int, float]], *, state: str = "FLUSHED",
        suffix: str = "arrow", strangers: tuple[int, ...] = (),
    ) -> None:  # fmt: skip
        """Add a MemWAL whose rows are in its log alone; ``strangers`` are files of entries that are not its own."""
        folder = Path(self.uri, "wal", region, str(generation))
        folder.mkdir(parents=True, exist_ok=True)
        for number, values in [*batches.items(), *((one, {0: -1.0}) for one in strangers)]:
            write_entry(folder / f"{number:020}.{suffix}", rows(values))
        self.listed.append(mem_wal(region, generation, state, entries=entries(sorted(batches))))
        if state == "FLUSHED":
            for _, values in sorted(batches.items()):
                self.merged |= values

    def other(self, region: str, generation: int, state: str, **more: Any) -> None:
        """Add any MemWAL."""
        self.listed.append(mem_wal(region, generation, state, **more))

    def finish(self) -> LegacyTable:
        """Put the index, with the version that puts it as the one that changed each MemWAL last."""
        newest = int(lance.dataset(self.uri).version)
        for one in self.listed:
            if one["last_updated_dataset_version"] == 1:
                one["last_updated_dataset_version"] = newest + 1
        put_details(self.uri, self.listed)
        return self


def write_entry(path: Path, table: pa.Table) -> None:
    """An entry of a log: an Arrow stream, or a Lance file."""
    if path.suffix == ".arrow":
        with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table)
        return
    from lance.file import LanceFileWriter

    with LanceFileWriter(str(path), table.schema) as writer:
        for batch in table.to_batches():
            writer.write_batch(batch)


def empty_by_state_commit(uri: str, listed: list[dict[str, Any]] | None = None) -> int:
    """Publish a version as the defect of old releases does: a change of states, without fragments."""
    files = Files(uri)
    name, manifest = wire.newest_manifest(files)
    version = manifest.version + 1
    if listed is not None:
        manifest = wire.with_details(manifest, legacy_wire.encoded(listed))
    fields = [one for one in manifest.replaced(f3=version).fields if one.number not in {2, 12, 21, 23}]
    transaction = wire.encode([(1, version - 1), (2, str(uuid.uuid4()).encode()), (112, b"")])
    made = wire.ManifestFile([*fields, wire.Field(23, 0, 0)], manifest.index, transaction, manifest.tail)
    folder, _, stem = name.rpartition("/")
    new = f"{2**64 - 1 - version:020}" if len(stem) > len("0.manifest") + 10 else str(version)
    files.put(f"{folder}/{new}.manifest", wire.build_manifest(made))
    Path(uri, "_versions/latest_version_hint.json").unlink(missing_ok=True)
    return version


def say_release(uri: str, release: str, library: str = "lance") -> None:
    """Let the newest version say that another release wrote it."""
    files = Files(uri)
    name, manifest = wire.newest_manifest(files)
    writer = wire.Field(13, wire.encode([(1, library.encode()), (2, release.encode())]))
    fields = [one for one in manifest.fields if one.number != 13]
    files.put(
        name,
        wire.build_manifest(wire.ManifestFile([*fields, writer], manifest.index, manifest.transaction, manifest.tail)),
    )


def random_states(random_: random.Random, regions: int) -> list[dict[str, Any]]:
    """Any list of states: most regions in order, some not."""
    listed = []
    for number in range(regions):
        region, first = f"r{number}", random_.choice([0, 0, 3])
        count = random_.randrange(1, 5)
        states = sorted((random_.choice(legacy_wire.STATES) for _ in range(count)), key=legacy_wire.STATES.index)
        states.reverse()
        if random_.random() < 0.25:
            random_.shuffle(states)
        for at, state in enumerate(states):
            if random_.random() < 0.9:
                listed.append(mem_wal(region, first + at, state))
    return listed
