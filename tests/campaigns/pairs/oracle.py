"""What a table must read as: rows in a dictionary, answers by numpy; nothing of memwal_ops but its public functions."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lance
import numpy as np

from memwal_ops.errors import NotALanceTableError
from memwal_ops.legacy import read as read_legacy
from memwal_ops.memwal import read as read_logged
from tests.campaigns.pairs.buckets import mirror

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    import pyarrow as pa

    from tests.campaigns.pairs.scripts import Step

#: Of a row the write that it is of, and what is in ``x``.
Value = tuple[int, int | None]
Rows = dict[int, Value]


class Wrong(AssertionError):
    """A table, an answer or a statement that is not as it must be.

    Attributes:
        kind: in two or three words, the same for the same fault.
    """

    def __init__(self, kind: str, what: str) -> None:
        super().__init__(f"{kind}: {what}")
        self.kind = kind


@dataclass
class Model:
    """Rows by key: those of the base table, and what the log has of later ones.

    Attributes:
        unflushed: keys with writes that no generation may have.
        earlier: writes before those in ``log``, of keys whose last one may be unflushed: a merge brings one of them.
        x: the name of the column ``x`` by now; empty without it.
    """

    base: Rows = field(default_factory=dict)
    log: dict[int, Value | None] = field(default_factory=dict)
    unflushed: set[int] = field(default_factory=set)
    earlier: dict[int, list[Value | None]] = field(default_factory=dict)
    x: str = "x"

    def rows(self) -> Rows:
        """What a reader of base and log must get."""
        return {k: value for k, value in (self.base | self.log).items() if value is not None}

    def apply(self, step: Step) -> None:
        """What a writer's step did."""
        if step.columns:
            self.x = "" if step.columns == "drop" else "x"
            self.base = {k: (w, None) for k, (w, _) in self.base.items()}
        if step.logged:
            for k, _ in step.effect:
                if k in self.log:
                    self.earlier.setdefault(k, []).append(self.log[k])
            self.log |= {k: None if w is None else (w, w * 10) for k, w in step.effect}
            keys = {k for k, _ in step.effect}
            self.unflushed = self.unflushed - keys if step.flushed else self.unflushed | keys
            return
        for k, w in step.effect:
            if w is None:
                self.base.pop(k, None)
            elif w > 0:
                self.base[k] = (w, w * 10 if self.x else None)
            elif k in self.base:
                self.base[k] = (self.base[k][0], -w)


class Oracle:
    """Asks one table, in this process.

    Args:
        rows: makes rows of ``(k, w, x)``, as the writers do.
        row: values by dimension.
        keys: names of the key's columns.
    """

    def __init__(self, rows: Callable[[Any], pa.Table], row: Mapping[str, str], keys: list[str]) -> None:
        self.make, self.row, self.names = rows, row, keys
        self.model = Model()
        #: What is kept: how it is opened, and what it must read as.
        self.kept: dict[str, tuple[Callable[[], Any], list[tuple[Any, ...]]]] = {}

    # What is read.

    def values(self, rows: Rows, x: str | None = None) -> dict[tuple[Any, ...], tuple[Any, ...]]:
        """Expected rows by key."""
        x = self.model.x if x is None else x
        if not rows:
            return {}
        return self._by_key(self.make([(k, w, value) for k, (w, value) in rows.items()]), bool(x))

    def _by_key(self, table: pa.Table, with_x: bool) -> dict[tuple[Any, ...], tuple[Any, ...]]:
        names = ["w", "t", "g", "v"]
        if self.row["column"] not in {"blob", "blob_2"}:
            names.append("c")
        columns = [table[name].to_pylist() for name in names]
        if with_x:
            columns.append(table["y" if "y" in table.column_names else "x"].to_pylist())
        keys = [*zip(*(table[name].to_pylist() for name in self.names), strict=True)]
        if self.row["file"] == "legacy":  # reads empty values as NULL: docs/upstream.md
            columns = [[None if value in ("", b"") else value for value in column] for column in columns]
        found = dict(zip(keys, map(_plain, zip(*columns, strict=True)), strict=True))
        if len(found) != len(keys):
            raise Wrong("keys twice", f"{len(keys)} rows have {len(found)} keys")
        return found

    def compare(self, about: str, table: pa.Table, rows: Rows, x: str | None = None) -> None:
        """Raise unless a table has these rows."""
        x = self.model.x if x is None else x
        found, expected = self._by_key(table, bool(x)), self.values(rows, x)
        if found == expected:
            return
        missing, more = [*(expected.keys() - found.keys())], [*(found.keys() - expected.keys())]
        other = [k for k in expected if k in found and expected[k] != found[k]]
        example = [(found[k], expected[k]) for k in other[:1]]
        raise Wrong(
            f"{about} {'lost' if missing else 'more' if more else 'other'} rows",
            f"{len(missing)} are missing, {len(more)} are more, {len(other)} differ: {(missing + more)[:3]} {example}",
        )

    def base(self, uri: str) -> pa.Table:
        """The base table, as pylance reads it, by no index."""
        dataset = lance.dataset(uri)
        names = [one for one in dataset.schema.names if one != "c" or self.row["column"] not in {"blob", "blob_2"}]
        return dataset.scanner(columns=names, use_scalar_index=False).to_table()

    def check_base(self, uri: str, *, merged: bool = False) -> None:
        """Each key of the base has its own value, or that of the log which was merged; the model follows."""
        table = self.base(uri)
        found = self._by_key(table, bool(self.model.x))
        arrived: list[int] = []
        between: dict[int, Value | None] = {}
        number = {key: k for k, key in self._keys(self.model.base.keys() | self.model.log.keys()).items()}
        if strange := [key for key in found if key not in number]:
            raise Wrong("base more rows", f"{strange[:3]} were never written, or deleted")
        base, moved = self.values(self.model.base), set(self.model.log)
        log = self.values({k: value for k, value in self.model.log.items() if value is not None})
        for key, k in number.items():
            now = found.get(key)
            if k in moved and now == log.get(key) and (now is not None or self.model.log[k] is None):
                arrived.append(k)
                continue
            earlier = self.model.earlier.get(k, []) if k in self.model.unflushed or not merged else []
            if (same := [one for one in earlier if self._of(k, one) == now]) and now != base.get(key):
                between[k] = same[-1]
                continue
            if k in moved and merged and k not in self.model.unflushed:
                raise Wrong("merged rows not in base", f"key {key}: {now}, and not {log.get(key)}")
            if now != base.get(key):
                kind = "base lost rows" if now is None else "base other rows"
                raise Wrong(kind, f"key {key}: {now}, and not {base.get(key)}")
        for k, value in between.items():
            self.model.base.pop(k, None)
            if value is not None:
                self.model.base[k] = value
        for k in arrived:
            self.model.base.pop(k, None)
            if (value := self.model.log[k]) is not None:
                self.model.base[k] = value
            # A write that is in the base was merged; a key that is not there may never have been.
            if value is not None or (merged and k not in self.model.unflushed):
                del self.model.log[k]
                self.model.earlier.pop(k, None)
        if (count := lance.dataset(uri).count_rows()) != len(found):
            raise Wrong("count", f"count_rows is {count}, a scan has {len(found)}")

    def _of(self, k: int, value: Value | None) -> tuple[Any, ...] | None:
        """What a row of a key must read as."""
        return None if value is None else next(iter(self.values({k: value}).values()))

    def _keys(self, ks: Iterable[int]) -> dict[int, tuple[Any, ...]]:
        ks = sorted(ks)
        table = self.make([(k, 0, 0) for k in ks]) if ks else None
        if table is None:
            return {}
        return dict(zip(ks, zip(*(table[name].to_pylist() for name in self.names), strict=True), strict=True))

    # Answers.

    def check_strong(self, uri: str, seed: int, *, whole: bool = True) -> None:
        """Base and log together: scan, and in a ``whole`` check some of get, filters, nearest, search."""
        rows = self.model.rows()
        if self.row["layout"] == "legacy":
            try:
                reader = read_legacy(uri)
            except NotALanceTableError:  # it was migrated
                reader = read_logged(uri)
            self.compare("legacy read", reader.scan().to_table(), rows)
            return
        if self.row["layout"] == "none":
            return
        reader = read_logged(uri)
        self.compare("read scan", reader.scan().to_table(), rows)
        if not whole:
            return
        chance = np.random.default_rng(seed)
        some = [chance.choice([*one], 3).tolist() for one in (self.model.log, rows) if one]
        ks = sorted({*(k for drawn in some for k in drawn), 251})
        wanted = self.make([(k, 0, 0) for k in ks]).select(self.names)
        self.compare("read get", reader.get(wanted), {k: rows[k] for k in ks if k in rows})
        w = int(chance.choice([value[0] for value in rows.values()]))
        found = reader.scan(None, f"w = {w}").to_table()
        self.compare("read filter", found, {k: value for k, value in rows.items() if value[0] == w})
        self._check_nearest("read nearest", lambda v, k: reader.nearest("v", v, k), rows, chance)
        if self.row["index"] == "INVERTED":
            k = int(chance.choice([*rows]))
            self._check_names("read search", reader.search("t", f"name{k:04d}", 9), {k})

    def check_queries(self, uri: str, seed: int) -> None:
        """The base by pylance and its indexes."""
        rows, chance = self.model.base, np.random.default_rng(seed)
        if self.model.log or not rows:
            return
        dataset = lance.dataset(uri)
        w = int(chance.choice([value[0] for value in rows.values()]))
        names = [one for one in dataset.schema.names if one != "c" or self.row["column"] not in {"blob", "blob_2"}]
        of_w = {k: value for k, value in rows.items() if value[0] == w}
        self.compare("index filter", dataset.to_table(columns=names, filter=f"w = {w}"), of_w)
        k = int(chance.choice([*rows]))
        found = dataset.to_table(columns=["t"], filter=f"array_has_any(g, ['own{k}'])")
        self._check_names("index labels", found, {k})
        found = dataset.to_table(columns=["t"], filter=f"contains(t, 'name{k:04d}')")
        self._check_names("index contains", found, {k})
        if self.row["index"] == "INVERTED":
            found = dataset.to_table(columns=["t"], full_text_query=f"name{k:04d}")
            self._check_names("index search", found, {k})
        if self.row["vector_index"] != "none" or self.row["vector"] != "uint8_hamming":
            self._check_nearest("index nearest", lambda v, k: self._nearest(dataset, v, k), rows, chance)

    def _nearest(self, dataset: Any, vector: Any, k: int) -> pa.Table:
        query = {"column": "v", "q": vector, "k": k, "nprobes": 2}
        if self.row["vector_index"] not in {"none", "IVF_FLAT"}:
            query["refine_factor"] = 30
        return dataset.to_table(columns=["t"], nearest=query)

    def _check_names(self, about: str, table: pa.Table, ks: set[int]) -> None:
        found = sorted(text.split()[0] for text in table["t"].to_pylist())
        expected = sorted(f"name{k:04d}" for k in ks)
        if found != expected:
            raise Wrong(about, f"{found}, and not {expected}")

    def _metric(self) -> str:
        return "l2" if self.row["vector_index"] == "none" else self.row["vector"].rpartition("_")[2]

    def _check_nearest(self, about: str, ask: Callable[[Any, int], pa.Table], rows: Rows, chance: Any) -> None:
        ks, count = sorted(rows), min(5, len(rows))
        vectors = self.make([(k, *rows[k]) for k in ks])["v"].to_pylist()
        query = vectors[int(chance.integers(len(ks)))]
        if self.model.log and chance.random() < 0.5:  # of a row that was replaced or deleted, or replaces one
            k = int(chance.choice([*self.model.log]))
            query = self.make([(k, *self.model.base.get(k, (0, 0)))])["v"].to_pylist()[0]
        if self.row["vector"] == "uint8_hamming":
            if self.row["vector_index"] == "none":
                return
            query = np.array(query, np.uint8)
        coarse = self.row["vector_index"] not in {"none", "IVF_FLAT"}
        distances = self._distances(np.array(vectors), np.array(query))
        names = ask(query if isinstance(query, np.ndarray) else [float(one) for one in query], count)["t"].to_pylist()
        place = {f"name{k:04d} s{rows[k][0]}": at for at, k in enumerate(ks)}
        if strange := [name for name in names if name not in place]:
            raise Wrong(f"{about} more rows", f"{strange[:3]} are not there")
        if len({*names}) != len(names):
            raise Wrong(f"{about} twice", f"{sorted(names)}")
        found = sorted(distances[place[name]] for name in names)
        best = sorted(distances)[:count]
        tolerance = 1e-2 * (1 + abs(float(best[-1])))
        good = sum(one <= best[-1] + tolerance for one in found)
        if (not coarse and good < count) or len(names) < count:
            raise Wrong(
                f"{about} {'fewer' if len(names) < count else 'others'}",
                f"{good} of {count} nearest rows: {found} and not {best}",
            )

    def _distances(self, vectors: Any, query: Any) -> Any:
        metric = self._metric()
        if metric == "hamming":
            return np.unpackbits(vectors.astype(np.uint8) ^ query.astype(np.uint8), axis=1).sum(1).astype(float)
        vectors, query = vectors.astype(np.float64), query.astype(np.float64)
        if metric == "l2":
            return ((vectors - query) ** 2).sum(1)
        if metric == "dot":
            return 1 - vectors @ query
        return 1 - vectors @ query / (np.linalg.norm(vectors, axis=1) * np.linalg.norm(query))

    # What is kept.

    def keep(self, name: str, opened: Callable[[], Any]) -> None:
        """From now on it reads as it does now."""
        self.kept[name] = (opened, self._all(opened()))

    def check_kept(self) -> None:
        """Raise where one reads otherwise."""
        for name, (opened, rows) in self.kept.items():
            try:
                found = self._all(opened())
            except Exception as error:
                raise Wrong(f"kept {name} gone", str(error)[:300]) from error
            if found != rows:
                raise Wrong(f"kept {name} changed", f"{len(found)} rows, and not {len(rows)}")

    def _all(self, dataset: Any) -> list[tuple[Any, ...]]:
        names = [one for one in dataset.schema.names if one != "c" or self.row["column"] not in {"blob", "blob_2"}]
        found = dataset.scanner(columns=names, use_scalar_index=False).to_table()
        return sorted(map(repr, found.to_pylist()))

    # What commands say.

    def check_statement(self, name: str, report: Any, uri: str) -> None:
        """Numbers and words of a report, counted again."""
        document = report.to_json()
        if name == "inspect":
            dataset = lance.dataset(uri)
            if document["version"] != dataset.version or document["rows"] != dataset.count_rows():
                raise Wrong("inspect says", f"version {document['version']}, {document['rows']} rows")
            if document["fragments"] != len(dataset.get_fragments()):
                raise Wrong("inspect says", f"{document['fragments']} fragments")
            listed = [*Path(mirror(uri), "_versions").glob("*.manifest")]
            if document["versions"]["listed"] != len([one for one in listed if not one.name.startswith("d")]):
                raise Wrong("inspect says", f"{document['versions']} of {len(listed)} versions")
        if name == "merge" and report.decision in {"merged", "nothing_to_merge", "up_to_date"}:
            self.check_base(uri, merged=True)
        if name == "catchup" and report.decision in {"caught_up", "up_to_date"}:
            for index in lance.dataset(uri).describe_indices():
                covered = {one for segment in index.segments for one in segment.fragment_ids}
                if index.name.startswith("__") or not covered:
                    continue
                lacks = {one.fragment_id for one in lance.dataset(uri).get_fragments()} - covered
                if lacks:
                    raise Wrong("catchup says", f"{report.decision}, and {index.name} lacks the fragments {lacks}")


def _plain(value: Any) -> Any:
    """Comparable values: arrays of half floats as numbers."""
    if isinstance(value, tuple | list):
        return tuple(map(_plain, value))
    if isinstance(value, dict):
        return tuple((name, _plain(one)) for name, one in value.items())
    if isinstance(value, np.generic):
        return value.item()
    return value
