"""Use a table as another program does: ``python program.py NAME FOLDER``, in an environment that has it.

Nothing of the project is imported. A line on stdin is a call, ``[METHOD, ARGUMENTS]``; the line on stdout is its
result, ``[null, RESULT]``, or ``[ERROR, null]``. What a program cannot do is no method of its class. Rows are a key and
a text; :func:`vector_of` a key is its vector.
"""

from __future__ import annotations

import contextlib
import glob
import io
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa

DIMENSION = 8
Rows = dict[str, str]


def vector_of(key: str) -> list[float]:
    """A vector that no other key has."""
    return [float((int(key[1:]) + 1) * (2 * at + 3) % 1009) / 1009 for at in range(DIMENSION)]


def arrow(rows: Rows) -> pa.Table:
    """Rows as a table."""
    vectors = pa.array([vector_of(key) for key in rows], pa.list_(pa.float32(), DIMENSION))
    columns = {"id": pa.array(list(rows), pa.string()), "text": pa.array(list(rows.values()), pa.string())}
    fields = [pa.field("id", pa.string(), nullable=False), pa.field("text", pa.string())]
    schema = pa.schema([*fields, pa.field("vector", vectors.type)])
    return pa.table({**columns, "vector": vectors}, schema=schema)


def quoted(keys: list[str]) -> str:
    """Keys as SQL has them."""
    return ", ".join(f"'{key}'" for key in keys)


def pairs(table: pa.Table) -> list[list[str]]:
    """Keys and texts of rows."""
    return [list(row) for row in zip(table["id"].to_pylist(), table["text"].to_pylist(), strict=True)]


class Pylance:
    """What a program that is made of pylance writes; how it reads is its own."""

    def __init__(self, folder: str) -> None:
        """A table in a folder."""
        import lance

        self.lance, self.folder, self.uri = lance, folder, f"{folder}/t.lance"

    def create(self, rows: Rows) -> None:
        """A table, and its indexes."""
        self.lance.write_dataset(arrow(rows), self.uri, max_rows_per_file=150)
        opened = self.lance.dataset(self.uri)
        opened.create_scalar_index("id", "BTREE")
        opened.create_index("vector", "IVF_FLAT", num_partitions=2)

    def put(self, rows: Rows) -> None:
        """By the key."""
        builder = self.lance.dataset(self.uri).merge_insert("id")
        builder.when_matched_update_all().when_not_matched_insert_all().execute(arrow(rows))

    def delete(self, keys: list[str]) -> None:
        """By the key."""
        self.lance.dataset(self.uri).delete(f"id IN ({quoted(keys)})")

    def read(self) -> list[list[str]]:
        """All rows."""
        return pairs(self.lance.dataset(self.uri).to_table(columns=["id", "text"]))

    def find(self, keys: list[str]) -> list[list[str]]:
        """Rows by their keys."""
        return pairs(self.lance.dataset(self.uri).to_table(columns=["id", "text"], filter=f"id IN ({quoted(keys)})"))

    def nearest(self, key: str) -> str:
        """The key with the nearest vector."""
        query = {"column": "vector", "q": pa.array(vector_of(key), pa.float32()), "k": 1, "nprobes": 2}
        (found,) = self.lance.dataset(self.uri).to_table(columns=["id"], nearest=query)["id"].to_pylist()
        return str(found)

    def hold(self) -> None:
        """Open a handle, which stays open."""
        self.handle = self.lance.dataset(self.uri)

    def held(self) -> list[list[str]]:
        """All rows by that handle."""
        return pairs(self.handle.to_table(columns=["id", "text"]))


class Polars(Pylance):
    """Polars reads through its scan of Lance's datasets as Arrow has them."""

    def _all(self, handle: Any) -> Any:
        import polars  # type: ignore[import-not-found]

        return polars.scan_pyarrow_dataset(handle).select("id", "text")

    def read(self) -> list[list[str]]:
        """All rows."""
        return pairs(self._all(self.lance.dataset(self.uri)).collect().to_arrow())

    def find(self, keys: list[str]) -> list[list[str]]:
        """Rows by their keys."""
        import polars

        found = self._all(self.lance.dataset(self.uri)).filter(polars.col("id").is_in(keys))
        return pairs(found.collect().to_arrow())

    def held(self) -> list[list[str]]:
        """All rows by the handle."""
        return pairs(self._all(self.handle).collect().to_arrow())


class DataFusion(Pylance):
    """DataFusion reads through Lance's table provider, over FFI."""

    def _ask(self, handle: Any, where: str = "true") -> list[list[str]]:
        import datafusion

        context = datafusion.SessionContext()
        context.register_table("t", self.lance.FFILanceTableProvider(handle, with_row_id=False, with_row_addr=False))
        return pairs(pa.Table.from_batches(context.sql(f"SELECT id, text FROM t WHERE {where}").collect()))

    def read(self) -> list[list[str]]:
        """All rows."""
        return self._ask(self.lance.dataset(self.uri))

    def find(self, keys: list[str]) -> list[list[str]]:
        """Rows by their keys."""
        return self._ask(self.lance.dataset(self.uri), f"id IN ({quoted(keys)})")

    def held(self) -> list[list[str]]:
        """All rows by the handle."""
        return self._ask(self.handle)


class Csr(Pylance):
    """lance-csr answers Cypher over a version, which it keeps until it is refreshed."""

    def _engine(self) -> Any:
        import lance_csr  # type: ignore[import-not-found]

        nodes = lance_csr.GraphConfig.builder().node_table("T", "id").build()
        return lance_csr.CypherEngine(nodes, {"T": self.lance.dataset(self.uri)})

    def _ask(self, engine: Any, where: str = "") -> list[list[str]]:
        found = engine.execute(f"MATCH (p:T) {where} RETURN p.id AS id, p.text AS text")
        return pairs(found)

    def read(self) -> list[list[str]]:
        """All rows."""
        return self._ask(self._engine())

    def find(self, keys: list[str]) -> list[list[str]]:
        """Rows by their keys."""
        return self._ask(self._engine(), f"WHERE p.id IN [{quoted(keys)}]")

    def hold(self) -> None:
        """Open an engine, which stays open."""
        self.handle = self._engine()

    def held(self) -> list[list[str]]:
        """All rows by it."""
        return self._ask(self.handle)


class LanceCli(Pylance):
    """lancecli prints rows."""

    def _print(self, *arguments: str) -> list[list[str]]:
        from lancecli.cli import app  # type: ignore[import-not-found]
        from typer.testing import CliRunner  # type: ignore[import-not-found]

        done = CliRunner().invoke(app, ["jsonl", *arguments, "-c", "id,text", self.uri])
        assert done.exit_code == 0, done.output
        return [[row["id"], row["text"]] for row in map(json.loads, done.stdout.splitlines())]

    def read(self) -> list[list[str]]:
        """All rows."""
        return self._print("-n", "100000")

    def find(self, keys: list[str]) -> list[list[str]]:
        """Rows by their keys."""
        return self._print("-n", "100000", "--filter", f"id IN ({quoted(keys)})")

    def hold(self) -> None:
        """A version; the command has no handle."""
        self.version = self.lance.dataset(self.uri).version

    def held(self) -> list[list[str]]:
        """All rows of that version."""
        return self._print("-n", "100000", "--version", str(self.version))


class Namespace(Pylance):
    """A client of Lance's directory namespace: it names the table, and writes rows."""

    def connect(self) -> Any:
        """The client."""
        import lance.namespace

        return lance.namespace.DirectoryNamespace(root=self.folder)  # type: ignore[no-untyped-call]

    def __init__(self, folder: str) -> None:
        """Of a folder's tables."""
        super().__init__(folder)
        self.client = self.connect()

    def _open(self) -> Any:
        return self.lance.dataset(namespace_client=self.client, table_id=["t"])

    def put(self, rows: Rows) -> None:
        """By the key."""
        import lance_namespace

        request = lance_namespace.MergeInsertIntoTableRequest(
            id=["t"], on=["id"], when_matched_update_all=True, when_not_matched_insert_all=True
        )
        sink, table = io.BytesIO(), arrow(rows)
        with pa.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table)
        self.client.merge_insert_into_table(request, sink.getvalue())

    def read(self) -> list[list[str]]:
        """All rows."""
        return pairs(self._open().to_table(columns=["id", "text"]))

    def find(self, keys: list[str]) -> list[list[str]]:
        """Rows by their keys."""
        return pairs(self._open().to_table(columns=["id", "text"], filter=f"id IN ({quoted(keys)})"))

    def hold(self) -> None:
        """Open a handle, which stays open."""
        self.handle = self._open()


class Rest(Namespace):
    """The same over HTTP: the folder is served by Lance's own REST adapter, on loopback."""

    def connect(self) -> Any:
        """Serve, and the client."""
        import lance.namespace

        self.server = lance.namespace.RestAdapter("dir", {"root": self.folder}, host="127.0.0.1", port=0)
        self.server.start()  # type: ignore[no-untyped-call]
        address = f"http://127.0.0.1:{self.server.port}"
        return lance.namespace.RestNamespace(uri=address)  # type: ignore[no-untyped-call]


class Daft(Pylance):
    """daft-lance appends, compacts and indexes."""

    def __init__(self, folder: str) -> None:
        """A table in a folder."""
        super().__init__(folder)
        import daft  # type: ignore[import-not-found]
        import daft_lance  # type: ignore[import-not-found]

        self.daft, self.daft_lance = daft, daft_lance

    def append(self, rows: Rows) -> None:
        """New rows."""
        frame = self.daft.from_arrow(arrow(rows))
        self.daft_lance.write_lance(frame, self.uri, mode="append", schema=arrow({}).schema).collect()

    def maintain(self) -> None:
        """Its compaction, and its care of indexes."""
        self.daft_lance.compact_files(self.uri)
        self.daft_lance.optimize_indices(self.uri)

    def read(self) -> list[list[str]]:
        """All rows."""
        return pairs(self.daft_lance.read_lance(self.uri).select("id", "text").to_arrow())

    def find(self, keys: list[str]) -> list[list[str]]:
        """Rows by their keys."""
        frame = self.daft_lance.read_lance(self.uri)
        return pairs(frame.where(self.daft.col("id").is_in(keys)).select("id", "text").to_arrow())

    def hold(self) -> None:
        """A query that is not run yet."""
        self.frame = self.daft_lance.read_lance(self.uri).select("id", "text")

    def held(self) -> list[list[str]]:
        """Run it."""
        return pairs(self.frame.to_arrow())


class Ray(Pylance):
    """lance-ray appends, compacts and indexes on a Ray of this process."""

    def __init__(self, folder: str) -> None:
        """A table in a folder."""
        super().__init__(folder)
        import lance_ray  # type: ignore[import-not-found]
        import ray  # type: ignore[import-not-found]

        ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="error", _temp_dir=_short())
        self.ray, self.lance_ray = ray, lance_ray

    def append(self, rows: Rows) -> None:
        """New rows."""
        self.lance_ray.write_lance(self.ray.data.from_arrow(arrow(rows)), self.uri, mode="append")

    def maintain(self) -> None:
        """Its compaction, and its care of indexes."""
        self.lance_ray.compact_files(self.uri, num_workers=1)
        self.lance_ray.optimize_indices(self.uri)

    def read(self) -> list[list[str]]:
        """All rows."""
        found = self.lance_ray.read_lance(self.uri, columns=["id", "text"]).take_all()
        return [[row["id"], row["text"]] for row in found]

    def close(self) -> None:
        """End its processes."""
        self.ray.shutdown()


def _short() -> str:
    import tempfile

    return tempfile.mkdtemp(prefix="ray", dir="/tmp")  # its sockets' paths have at most 107 bytes


class LanceDb:
    """LanceDB, as its own documentation has it."""

    def __init__(self, folder: str) -> None:
        """A table in a folder."""
        import lancedb  # type: ignore[import-not-found]

        self.lancedb, self.folder = lancedb, folder

    def _open(self) -> Any:
        return self.lancedb.connect(self.folder).open_table("t")

    def create(self, rows: Rows) -> None:
        """A table, and its indexes."""
        made = self.lancedb.connect(self.folder).create_table("t", arrow(rows))
        made.create_scalar_index("id")
        made.create_index(metric="l2", num_partitions=2, index_type="IVF_FLAT")

    def put(self, rows: Rows) -> None:
        """By the key."""
        builder = self._open().merge_insert("id").when_matched_update_all().when_not_matched_insert_all()
        builder.execute(arrow(rows))

    def delete(self, keys: list[str]) -> None:
        """By the key."""
        self._open().delete(f"id IN ({quoted(keys)})")

    def maintain(self) -> None:
        """Compaction, indexes, and versions older than a week."""
        self._open().optimize()

    def read(self) -> list[list[str]]:
        """All rows."""
        return pairs(self._open().to_arrow())

    def find(self, keys: list[str]) -> list[list[str]]:
        """Rows by their keys."""
        return pairs(self._open().search().where(f"id IN ({quoted(keys)})").limit(1000).to_arrow())

    def nearest(self, key: str) -> str:
        """The key with the nearest vector."""
        query = self._open().search(vector_of(key), vector_column_name="vector").limit(1).nprobes(2)
        return str(query.to_arrow()["id"][0].as_py())

    def hold(self) -> None:
        """Open a handle, which stays open."""
        self.handle = self._open()

    def held(self) -> list[list[str]]:
        """All rows by that handle."""
        return pairs(self.handle.to_arrow())


class LanceDbRay(LanceDb):
    """lancedb-ray reads and writes tables of LanceDB on a Ray of this process."""

    def __init__(self, folder: str) -> None:
        """A table in a folder."""
        super().__init__(folder)
        import lancedb_ray  # type: ignore[import-not-found]
        import ray

        ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="error", _temp_dir=_short())
        self.ray, self.lancedb_ray = ray, lancedb_ray

    def _write(self, rows: Rows, **how: Any) -> None:
        self.lancedb_ray.write_lancedb(self.ray.data.from_arrow(arrow(rows)), "t", uri=self.folder, **how)

    def append(self, rows: Rows) -> None:
        """New rows, as fragments of its workers, in one commit."""
        self._write(rows, mode="append")

    def put(self, rows: Rows) -> None:
        """By the key."""
        self._write(rows, mode="upsert", on="id", partition_on_keys=False)  # no key is there twice

    def _read(self, **what: str) -> list[list[str]]:
        found = self.lancedb_ray.read_lancedb("t", uri=self.folder, columns=["id", "text"], **what).take_all()
        return [[row["id"], row["text"]] for row in found]

    def read(self) -> list[list[str]]:
        """All rows."""
        return self._read()

    def find(self, keys: list[str]) -> list[list[str]]:
        """Rows by their keys."""
        return self._read(filter=f"id IN ({quoted(keys)})")

    def close(self) -> None:
        """End its processes."""
        self.ray.shutdown()


class LanceDbLog(LanceDb):
    """LanceDB's writes into a log (MemWAL)."""

    def create(self, rows: Rows) -> None:
        """A table with a log, of one region."""
        made = self.lancedb.connect(self.folder).create_table("t", arrow(rows))
        made.set_unenforced_primary_key("id")
        made.set_lsm_write_spec(self.lancedb.LsmWriteSpec.unsharded())

    def put(self, rows: Rows) -> None:
        """Into the log."""
        opened = self._open()
        opened.merge_insert("id").when_matched_update_all().when_not_matched_insert_all().execute(arrow(rows))
        opened.close_lsm_writers()

    def live(self) -> None:
        """A handle has the base's version, and of the log what is there by now."""

    delete = nearest = None  # type: ignore[assignment]  # of the base alone


class LangChain(LanceDb):
    """The vector store of langchain-lancedb: it appends and deletes documents."""

    def _store(self) -> Any:
        from langchain_core.embeddings import Embeddings  # type: ignore[import-not-found]
        from langchain_lancedb import LanceDB  # type: ignore[import-not-found]

        class Vectors(Embeddings):  # type: ignore[misc]
            def embed_documents(self, texts: list[str]) -> list[list[float]]:
                return [vector_of(text.partition(" ")[0]) for text in texts]

            def embed_query(self, text: str) -> list[float]:
                return vector_of(text)

        return LanceDB(Vectors(), uri=self.folder, table_name="t")

    def append(self, rows: Rows) -> None:
        """Documents, whose text begins with the key."""
        self._store().add_texts([f"{key} {text}" for key, text in rows.items()], ids=list(rows))

    def create(self, rows: Rows) -> None:
        """A table, as the store makes it, and an index of LanceDB."""
        self.append(rows)
        self._open().create_scalar_index("id")

    def put(self, rows: Rows) -> None:
        """As its users do: delete, and add."""
        self._store().delete(list(rows))
        self.append(rows)

    def delete(self, keys: list[str]) -> None:
        """By the key."""
        self._store().delete(keys)

    def nearest(self, key: str) -> str:
        """The key of the most similar document."""
        (found,) = self._store().similarity_search(key, k=1)
        return str(found.page_content.partition(" ")[0])


class DuckDb:
    """DuckDB with its Lance extension, by SQL."""

    def __init__(self, folder: str) -> None:
        """A table in a folder, which is attached."""
        self.folder, self.uri = folder, f"{folder}/t.lance"

    def _connect(self) -> Any:
        import duckdb
        import duckdb_extension_lance  # type: ignore[import-not-found]

        (extension,) = glob.glob(f"{Path(duckdb_extension_lance.__file__).parent}/extensions/*/*.duckdb_extension")
        connection = duckdb.connect(config={"allow_unsigned_extensions": "true"})
        connection.execute(f"LOAD '{extension}'")
        connection.execute(f"ATTACH '{self.folder}' AS ns (TYPE LANCE)")
        return connection

    def _run(self, *statements: str, rows: Rows | None = None) -> Any:
        with self._connect() as connection:
            if rows is not None:
                connection.register("given", arrow(rows))
            return [connection.execute(one).fetchall() for one in statements][-1]

    def create(self, rows: Rows) -> None:
        """A table, and its indexes."""
        self._run(
            "CREATE TABLE ns.main.t AS SELECT * FROM given",
            f"CREATE INDEX vectors ON '{self.uri}' (vector) USING IVF_FLAT WITH (num_partitions=2, metric_type='l2')",
            f"CREATE INDEX ids ON '{self.uri}' (id) USING BTREE",
            rows=rows,
        )

    def put(self, rows: Rows) -> None:
        """By the key."""
        self._run(
            "MERGE INTO ns.main.t AS t USING given AS s ON t.id = s.id WHEN MATCHED THEN UPDATE SET text = s.text "
            "WHEN NOT MATCHED THEN INSERT (id, text, vector) VALUES (s.id, s.text, s.vector)",
            rows=rows,
        )

    def delete(self, keys: list[str]) -> None:
        """By the key."""
        self._run(f"DELETE FROM ns.main.t WHERE id IN ({quoted(keys)})")

    def maintain(self) -> None:
        """Compaction, indexes, and versions older than an hour; without that option all but the newest go."""
        self._run(
            f"OPTIMIZE '{self.uri}'",
            f"ALTER INDEX ids ON '{self.uri}' OPTIMIZE WITH (mode = 'append')",
            f"ALTER INDEX vectors ON '{self.uri}' OPTIMIZE WITH (mode = 'append')",
            f"VACUUM LANCE '{self.uri}' WITH (older_than_seconds = 3600)",
        )

    def read(self) -> list[list[str]]:
        """All rows."""
        return [list(row) for row in self._run("SELECT id, text FROM ns.main.t")]

    def find(self, keys: list[str]) -> list[list[str]]:
        """Rows by their keys."""
        return [list(row) for row in self._run(f"SELECT id, text FROM '{self.uri}' WHERE id IN ({quoted(keys)})")]

    def nearest(self, key: str) -> str:
        """The key with the nearest vector."""
        vector = f"{vector_of(key)}::FLOAT[{DIMENSION}]"
        ((found,),) = self._run(
            f"SELECT id FROM lance_vector_search('{self.uri}', 'vector', {vector}, k = 1, nprobs = 2)"
        )
        return str(found)

    def hold(self) -> None:
        """A connection that read the table."""
        self.connection = self._connect()
        self.held()

    def held(self) -> list[list[str]]:
        """All rows by that connection, which keeps the version that it read first."""
        return [list(row) for row in self.connection.execute("SELECT id, text FROM ns.main.t").fetchall()]


class Generic:
    """A generic store of lance-context: a log. Its own merge is not called: beside it ours blocks, as the page says."""

    def __init__(self, folder: str) -> None:
        """A store in a folder."""
        import lance_context  # type: ignore[import-not-found]

        self.module, self.uri = lance_context, f"{folder}/t.lance"

    def _open(self) -> Any:
        return self.module.GenericStore.open(self.uri, {"id": {"type": "string", "nullable": False}, "text": "string"})

    def create(self, rows: Rows) -> None:
        """A store."""
        self.put(rows)

    def put(self, rows: Rows) -> None:
        """Into the log."""
        store = self._open()
        store.add([{"id": key, "text": text} for key, text in rows.items()])
        store.flush()

    def live(self) -> None:
        """A handle has the base's version, and of the log what is there by now."""

    def read(self) -> list[list[str]]:
        """All rows."""
        return [[row["id"], row["text"]] for row in self._open().list(limit=100_000)]

    def find(self, keys: list[str]) -> list[list[str]]:
        """Rows by their keys."""
        store = self._open()
        return [[row["id"], row["text"]] for row in map(store.get, keys) if row is not None]

    def hold(self) -> None:
        """An open store."""
        self.store = self._open()

    def held(self) -> list[list[str]]:
        """All rows by it."""
        return [[row["id"], row["text"]] for row in self.store.list(limit=100_000)]


class Rollout(Generic):
    """A rollout store of lance-context; only its server merges it."""

    def _open(self) -> Any:
        return self.module.RolloutStore.open(self.uri)

    def append(self, rows: Rows) -> None:
        """Rows of one rollout, which are never changed."""
        store = self._open()
        store.add([{"id": key, "rollout_id": "one", "problem_id": text} for key, text in rows.items()])
        store.flush()

    create, put = append, None  # type: ignore[assignment]

    def _rows(self, store: Any) -> list[list[str]]:
        return [[row["id"], row["problem_id"]] for row in store.list(limit=100_000)]

    def read(self) -> list[list[str]]:
        """All rows."""
        return self._rows(self._open())

    def held(self) -> list[list[str]]:
        """All rows by the open store."""
        return self._rows(self.store)

    def find(self, keys: list[str]) -> list[list[str]]:
        """Rows by their keys."""
        store = self._open()
        return [[row["id"], row["problem_id"]] for row in map(store.get, keys) if row is not None]


class Context(Rollout):
    """A context of lance-context: entries, each written at once."""

    def _open(self) -> Any:
        return self.module.Context.create(self.uri)

    def append(self, rows: Rows) -> None:
        """Entries."""
        self._open().add_many([{"role": "user", "content": text, "external_id": key} for key, text in rows.items()])

    create = append

    def maintain(self) -> None:
        """Its compaction."""
        self._open().compact()

    def _rows(self, store: Any) -> list[list[str]]:
        return [[row["external_id"], row["text"]] for row in store.list(limit=100_000)]

    def find(self, keys: list[str]) -> list[list[str]]:
        """Rows by their keys."""
        context = self._open()
        found = (context.get(external_id=key) for key in keys)
        return [[row["external_id"], row["text"]] for row in found if row is not None]


PROGRAMS: dict[str, Callable[[str], Any]] = {
    "daft-lance": Daft, "datafusion": DataFusion, "duckdb": DuckDb, "lance-context context": Context,
    "lance-context generic": Generic, "lance-context rollout": Rollout, "lance-csr": Csr,
    "lance-namespace directory": Namespace,
    "lance-namespace rest": Rest, "lance-ray": Ray, "lancecli": LanceCli, "lancedb": LanceDb,
    "lancedb log": LanceDbLog, "lancedb-ray": LanceDbRay, "langchain-lancedb": LangChain, "polars": Polars,
}  # fmt: skip


def main() -> None:
    """Answer calls until stdin ends."""
    name, folder = sys.argv[1:]
    answers, sys.stdout = sys.stdout, sys.stderr  # what a library prints is no answer
    program = PROGRAMS[name](folder)
    for line in sys.stdin:
        method, arguments = json.loads(line)
        try:
            if method == "has":
                answer: list[Any] = [None, callable(getattr(program, arguments[0], None))]
            else:
                answer = [None, getattr(program, method)(*arguments)]
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # a panic of Lance is no Exception
            answer = [f"{type(error).__name__}: {error}"[:2000], None]
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
    with contextlib.suppress(AttributeError):
        program.close()


if __name__ == "__main__":
    main()
