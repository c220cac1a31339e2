"""A namespace under test: its writer, and the last write of every id."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

from memwal_ops import open_table
from memwal_ops.formats import zeppelin
from tests.support.zeppelin.independent import Reader, Rows, f32


class NamespaceUnderTest:
    """A namespace of four dimensions on local files."""

    def __init__(self, uri: str, dialect: str = "wiki", seed: int = 7, metric: str = "cosine") -> None:
        self.uri = uri
        self.dialect = dialect
        self.random = random.Random(seed)
        self.model: Rows = {}
        zeppelin.create(uri, dimensions=4, metric=metric, dialect=dialect)

    def put(self, *ids: str, deletes: tuple[str, ...] = ()) -> str:
        rows = []
        for name in ids:
            values = tuple(f32(self.random.uniform(-1, 1)) for _ in range(4))
            more: dict[str, Any] = {} if self.random.random() < 0.2 else {"color": self.random.choice(["red", "blue"])}
            rows.append({"id": name, "values": list(values), "attributes": more})
        written = zeppelin.open_writer(self.uri).append(vectors=rows, deletes=list(deletes))
        for name in deletes:
            self.model.pop(name, None)
        self.model.update({row["id"]: (tuple(row["values"]), row["attributes"]) for row in rows})
        return written

    def write(self) -> None:
        """Three fragments: new ids, replaced ones, deletes."""
        self.put("a", "b", "c", "d")
        self.put("b", "e", deletes=("a",))
        self.put("f", deletes=("c", "never"))

    def expected(self) -> Rows:
        return dict(self.model)

    def read(self) -> Rows:
        return Reader(self.uri).read()

    def read_revision(self, revision: int) -> Rows:
        return Reader(self.uri, self.manifest_of(revision)).read_base()

    def manifest_of(self, revision: int) -> bytes:
        native = Path(self.uri, f"manifests/{revision:020}.msgpack")
        record = Path(self.uri, f"_mem_wal_ops/history/{revision:020}.json")
        if native.exists():
            return native.read_bytes()
        if record.exists():
            return json.loads(record.read_bytes())["manifest"].encode()
        assert open_table(self.uri).revision == revision
        return Path(self.uri, "manifest.json").read_bytes()

    def remove_entry(self) -> None:
        """Take away the fragment that a compaction would read first."""
        first = open_table(self.uri).manifest.fragments[0]
        Path(self.uri, first.key).unlink()

    def forget_records(self) -> None:
        """Make its segments those of another program: without records of sizes and checksums."""
        shutil.rmtree(Path(self.uri, "_mem_wal_ops/training"))

    def damage(self) -> None:
        Path(self.uri, "manifest.json").write_text("{")
