"""Write and use tables as their owner does, with the release of pylance or LanceDB that runs this.

Nothing of the project is imported. ``python client.py write FOLDER KIND ...`` makes a table of each kind,
``KIND.lance``, with its rows in ``KIND.json``; ``use`` reads all rows, finds keys by each index, and changes the
tables; ``use-maintained`` does so after a compaction of its own. A line on stdout is a kind, a step, and ``ok`` or what
went wrong.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa

ROWS, FRAGMENTS, DIMENSION = 384, 3, 16
KEY = {"lance-schema:unenforced-primary-key": "true"}
SCHEMA = pa.schema(
    [
        pa.field("id", pa.int64(), nullable=False, metadata=KEY),
        pa.field("text", pa.string()),
        pa.field("number", pa.int64()),
        pa.field("name", pa.string()),
        pa.field("labels", pa.list_(pa.string())),
        pa.field("vector", pa.list_(pa.float32(), DIMENSION)),
    ]
)
COLUMNS = {"BTREE": "id", "LABEL_LIST": "labels", "NGRAM": "name", "INVERTED": "name"}
SCALAR = ("BTREE", "BITMAP", "ZONEMAP", "BLOOMFILTER", "LABEL_LIST", "NGRAM", "INVERTED")
VECTOR = ("IVF_FLAT", "IVF_SQ", "IVF_PQ", "IVF_RQ", "IVF_HNSW_FLAT", "IVF_HNSW_SQ", "IVF_HNSW_PQ")
STABLE = {"enable_stable_row_ids": True}


def vector_of(key: int) -> list[float]:
    """A vector that no other key has."""
    return [float((key + 1) * (2 * at + 3) % 1009) / 1009 for at in range(DIMENSION)]


def rows(keys: list[int], text: str = "written") -> pa.Table:
    """Rows with these keys; every column but ``text`` depends on the key alone."""
    columns = {
        "id": keys,
        "text": [f"{text} {key}" for key in keys],
        "number": keys,
        "name": [f"name{key:05d}" for key in keys],
        "labels": [[f"label{key}", "each"] for key in keys],
        "vector": [vector_of(key) for key in keys],
    }
    return pa.table(columns, schema=SCHEMA)


def fitted(table: pa.Table, schema: pa.Schema) -> pa.Table:
    """The rows with the columns that a table has by now."""
    table = table.select([name for name in table.column_names if name in schema.names])
    for field in schema:
        if field.name not in table.column_names and "blob" not in field.name:
            table = table.append_column(field, pa.nulls(len(table), field.type))
    return table


def column_of(index: str) -> str:
    """The column on which an index of this type is."""
    return "vector" if index in VECTOR else COLUMNS.get(index, "number")


class Pylance:
    """The calls of pylance that a table's owner makes."""

    def __init__(self) -> None:
        """Name the release."""
        import lance

        self.lance = lance
        self.release = f"pylance {lance.__version__}"

    def open(self, uri: str) -> Any:
        """The newest version."""
        return self.lance.dataset(uri)

    def create(self, uri: str, table: pa.Table, **options: Any) -> None:
        """Some fragments."""
        self.lance.write_dataset(table, uri, max_rows_per_file=ROWS // FRAGMENTS, max_rows_per_group=64, **options)

    def append(self, uri: str, table: pa.Table) -> None:
        """More rows."""
        self.lance.write_dataset(fitted(table, self.open(uri).schema), uri, mode="append")

    def upsert(self, uri: str, table: pa.Table) -> None:
        """By the key."""
        opened = self.open(uri)
        builder = opened.merge_insert("id").when_matched_update_all().when_not_matched_insert_all()
        builder.execute(fitted(table, opened.schema))

    def update(self, uri: str, values: dict[str, str], where: str) -> None:
        """By a condition."""
        self.open(uri).update(values, where=where)

    def delete(self, uri: str, where: str) -> None:
        """By a condition."""
        self.open(uri).delete(where)

    def index(self, uri: str, kind: str) -> None:
        """One index, on the column that is there for it."""
        if kind in SCALAR:
            self.open(uri).create_scalar_index(column_of(kind), kind)
            return
        more = {"num_sub_vectors": 4} if kind.endswith("PQ") else {}
        self.open(uri).create_index("vector", kind, num_partitions=2, **more)

    def optimize(self, uri: str) -> None:
        """Indexes."""
        self.open(uri).optimize.optimize_indices()

    def compact(self, uri: str) -> None:
        """Fragments."""
        self.open(uri).optimize.compact_files()

    def read(self, uri: str) -> pa.Table:
        """All rows, by no index."""
        return self.open(uri).scanner(columns=["id", "text"], use_scalar_index=False).to_table()

    def where(self, uri: str, condition: str) -> set[int]:
        """Keys of rows, by an index if there is one."""
        return {*self.open(uri).to_table(columns=["id"], filter=condition)["id"].to_pylist()}

    def search(self, uri: str, words: str) -> set[int]:
        """Keys of rows, by their words."""
        found = self.open(uri).scanner(columns=["id"], full_text_query={"query": words, "columns": ["name"]})
        return {*found.to_table()["id"].to_pylist()}

    def nearest(self, uri: str, vector: list[float]) -> int:
        """The key of the row with the nearest vector."""
        query = {"column": "vector", "q": vector, "k": 1, "nprobes": 2, "ef": 400, "refine_factor": 400}
        (found,) = self.open(uri).scanner(columns=["id"], nearest=query).to_table()["id"].to_pylist()
        return int(found)


class LanceDb:
    """The same calls of LanceDB."""

    def __init__(self) -> None:
        """Name the release."""
        import lancedb  # type: ignore[import-not-found]

        self.lancedb = lancedb
        self.release = f"lancedb {lancedb.__version__}"

    def open(self, uri: str) -> Any:
        """The newest version."""
        path = Path(uri)
        return self.lancedb.connect(str(path.parent)).open_table(path.stem)

    def create(self, uri: str, table: pa.Table, *, enable_stable_row_ids: bool = False) -> None:
        """As many appends as there are fragments."""
        path = Path(uri)
        options = {"new_table_enable_stable_row_ids": "true"} if enable_stable_row_ids else None
        size = ROWS // FRAGMENTS
        self.lancedb.connect(str(path.parent)).create_table(path.stem, table.slice(0, size), storage_options=options)
        for at in range(size, len(table), size):
            self.append(uri, table.slice(at, size))

    def append(self, uri: str, table: pa.Table) -> None:
        """More rows."""
        opened = self.open(uri)
        opened.add(fitted(table, opened.schema))

    def upsert(self, uri: str, table: pa.Table) -> None:
        """By the key."""
        opened = self.open(uri)
        builder = opened.merge_insert("id").when_matched_update_all().when_not_matched_insert_all()
        builder.execute(fitted(table, opened.schema))

    def update(self, uri: str, values: dict[str, str], where: str) -> None:
        """By a condition."""
        self.open(uri).update(where=where, values_sql=values)

    def delete(self, uri: str, where: str) -> None:
        """By a condition."""
        self.open(uri).delete(where)

    def index(self, uri: str, kind: str) -> None:
        """One index, on the column that is there for it."""
        if kind == "INVERTED":
            self.open(uri).create_fts_index("name")
        elif kind in SCALAR:
            self.open(uri).create_scalar_index(column_of(kind), index_type=kind)
        else:
            more = {"num_sub_vectors": 4} if kind.endswith("PQ") else {}
            self.open(uri).create_index(metric="l2", num_partitions=2, index_type=kind, **more)

    def optimize(self, uri: str) -> None:
        """Indexes and fragments: LanceDB has one call for both."""
        self.open(uri).optimize()

    compact = optimize

    def read(self, uri: str) -> pa.Table:
        """All rows."""
        return self.open(uri).to_arrow().select(["id", "text"])

    def where(self, uri: str, condition: str) -> set[int]:
        """Keys of rows, by an index if there is one."""
        return {*self.open(uri).search().where(condition).limit(10_000).to_arrow()["id"].to_pylist()}

    def search(self, uri: str, words: str) -> set[int]:
        """Keys of rows, by their words."""
        found = self.open(uri).search(words, query_type="fts", fts_columns="name").limit(10_000).to_arrow()
        return {*found["id"].to_pylist()}

    def nearest(self, uri: str, vector: list[float]) -> int:
        """The key of the row with the nearest vector."""
        query = self.open(uri).search(vector, vector_column_name="vector").limit(1).nprobes(2).ef(400)
        (found,) = query.refine_factor(400).to_arrow()["id"].to_pylist()
        return int(found)


class Model:
    """The rows of a table and of its log, by key, and the types of its indexes; in a file beside the table."""

    def __init__(self, uri: str) -> None:
        """Of the table there."""
        self.path = Path(uri).with_suffix(".json")
        found = json.loads(self.path.read_text()) if self.path.exists() else {}
        self.rows: dict[int, str] = {int(key): text for key, text in found.get("rows", {}).items()}
        self.log: dict[int, str] = {int(key): text for key, text in found.get("log", {}).items()}
        self.indexes: list[str] = found.get("indexes", [])

    def merged(self) -> None:
        """The rows of the log are in the table."""
        self.rows.update(self.log)
        self.log = {}
        self.save()

    def put(self, table: pa.Table) -> None:
        """Rows that were written."""
        self.rows.update(zip(table["id"].to_pylist(), table["text"].to_pylist(), strict=True))

    def save(self) -> None:
        """For the next process."""
        self.path.write_text(json.dumps({"rows": self.rows, "log": self.log, "indexes": self.indexes}))


def check_rows(client: Any, uri: str, model: Model) -> None:
    """Every key once, with its last text."""
    found = client.read(uri).to_pydict()
    assert len(found["id"]) == len(model.rows), f"{len(found['id'])} rows for {len(model.rows)}"
    wrong = [key for key, text in zip(found["id"], found["text"], strict=True) if model.rows.get(key) != text]
    assert not wrong, f"{len(wrong)} rows have other values, among them {wrong[:3]}"


def check_keys(client: Any, uri: str, model: Model) -> None:
    """Keys are found by each index: all by conditions, some by words and vectors."""
    keys = sorted(model.rows)
    for kind in model.indexes:
        lost: list[int] = []
        if kind in VECTOR:
            lost = [key for key in keys[::24] if client.nearest(uri, vector_of(key)) != key]
        elif kind == "INVERTED":
            lost = [key for key in keys[::24] if client.search(uri, f"name{key:05d}") != {key}]
        elif kind == "NGRAM":
            lost = [key for key in keys[::24] if client.where(uri, f"contains(name, 'name{key:05d}')") != {key}]
        else:
            for at in range(0, len(keys), 32):
                lost += {*keys[at : at + 32]} - client.where(uri, condition(kind, keys[at : at + 32]))
        allowed = len(keys[::24]) // 4 if kind in VECTOR[1:] else 0  # approximate; a lost fragment is a third
        assert len(lost) <= allowed, f"{kind} does not find {len(lost)} keys, among them {sorted(lost)[:3]}"


def condition(kind: str, keys: list[int]) -> str:
    """Rows with one of these keys."""
    if kind == "LABEL_LIST":
        return f"array_has_any(labels, [{', '.join(repr(f'label{key}') for key in keys)}])"
    return f"{column_of(kind)} IN ({', '.join(map(str, keys))})"


def steps_of_use(client: Any, uri: str, model: Model) -> Iterator[tuple[str, Callable[[], None]]]:
    """What an owner goes on to do; each is followed by a check of rows and keys."""
    start = max(model.rows) + 1

    def append() -> None:
        table = rows([*range(start, start + 20)], "appended")
        client.append(uri, table)
        model.put(table)

    def upsert() -> None:
        table = rows([*range(start + 15, start + 25), *sorted(model.rows)[:10]], "upserted")
        client.upsert(uri, table)
        model.put(table)

    def update() -> None:
        keys = sorted(model.rows)[10:20]
        client.update(uri, {"text": "'updated'"}, f"id IN ({', '.join(map(str, keys))})")
        model.rows.update(dict.fromkeys(keys, "updated"))

    def delete() -> None:
        keys = sorted(model.rows)[20:30]
        client.delete(uri, f"id IN ({', '.join(map(str, keys))})")
        for key in keys:
            del model.rows[key]

    yield from (("append", append), ("upsert", upsert), ("update", update), ("delete", delete))
    yield from (("optimize", lambda: client.optimize(uri)), ("compact", lambda: client.compact(uri)))


def use(client: Any, uri: str, *, maintained: bool) -> None:
    """Print what works: reading, finding, and each change with both after it; of one that it compacted before."""
    model, kind = Model(uri), Path(uri).stem
    if maintained:
        say(kind, "maintain", attempt(lambda: client.optimize(uri), lambda: client.compact(uri)))
    say(kind, "read", attempt(lambda: check_rows(client, uri, model)))
    say(kind, "find", attempt(lambda: check_keys(client, uri, model)))
    for name, step in steps_of_use(client, uri, model):
        say(kind, name, attempt(step, lambda: check_rows(client, uri, model), lambda: check_keys(client, uri, model)))
    model.save()


def attempt(*actions: Callable[[], None]) -> str:
    """``ok``, or the error of the first that fails; a panic of Lance is no Exception."""
    try:
        for action in actions:
            action()
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        return f"{type(error).__name__}: {error}"[:600]
    return "ok"


def kinds_of(client: Any) -> dict[str, Callable[[str, Model], None]]:
    """How a table of each kind is made."""

    def table(*indexes: str, **options: Any) -> Callable[[str, Model], None]:
        def make(uri: str, model: Model) -> None:
            made = rows([*range(ROWS)])
            client.create(uri, made, **options)
            model.put(made)
            for kind in indexes:
                client.index(uri, kind)
            model.indexes = [*indexes]

        return make

    kinds = {"plain": table(), "stable": table(**STABLE)}
    kinds |= {kind.lower(): table(kind) for kind in (*SCALAR, *VECTOR)}
    kinds |= {f"stable-{kind.lower()}": table(kind, **STABLE) for kind in (*SCALAR, *VECTOR)}
    if isinstance(client, Pylance):
        import options  # type: ignore[import-not-found]  # beside this file

        kinds |= options.kinds(client, table, rows)
    return kinds


def main() -> None:
    """Run one command; what is known so far is printed, since a search of a release may never return."""
    command, folder, *names = sys.argv[1:]
    client: Any
    try:
        client = Pylance()
    except ImportError:
        client = LanceDb()
    kinds = kinds_of(client)
    for name in names or (sorted(kinds) if command == "kinds" else []):
        uri = f"{folder}/{name}.lance"
        if command == "kinds":
            say(name, "", "ok")
        elif command == "write":
            say(name, "write", written(kinds[name], uri) if name in kinds else "it has no such table")
        else:
            use(client, uri, maintained=command == "use-maintained")


def written(make: Callable[[str, Model], None], uri: str) -> str:
    """Make a table."""
    model = Model(uri)
    outcome = attempt(lambda: make(uri, model))
    if outcome == "ok":
        model.save()
    return outcome


def say(kind: str, step: str, outcome: str) -> None:
    """Print one line."""
    sys.stdout.write(json.dumps([kind, step, outcome]) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
