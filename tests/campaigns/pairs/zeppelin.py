"""Rows of Zeppelin namespaces: their programs, and an oracle of its own.

Answers come from the public reader; files are read by tests/support/zeppelin/independent.py, which imports no code
of the product.
"""

from __future__ import annotations

import json
import os
import random
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lance
import numpy as np

from memwal_ops.formats import zeppelin
from tests.campaigns.pairs.buckets import mirror
from tests.campaigns.pairs.dimensions import ATTRIBUTES, ZEPPELIN_IDS
from tests.campaigns.pairs.formats import FormatRun
from tests.campaigns.pairs.oracle import Wrong
from tests.campaigns.pairs.scripts import Program, Step
from tests.support.zeppelin.independent import Reader

if TYPE_CHECKING:
    from collections.abc import Mapping

BASE_ROWS = 40
_AT_ONCE = "reader_grace='0s', orphan_min_age='0s', keep_revisions=1, allow_unsafe=True"
JOBS: dict[str, str] = {
    "inspect": "run_job(URI, 'inspect')",
    "verify": "run_job(URI, 'verify')",
    "verify_deep": "run_job(URI, 'verify', deep=True)",
    "verify_answers": "run_job(URI, 'verify', answers=True, seed=1)",
    "why": "run_job(URI, 'why', target=[*run_job(URI, 'gc').to_json()['delete'], {{'path': 'lease.json'}}][0]['path'])",
    "merge": "run_job(URI, 'merge')",
    "merge_retrain": "run_job(URI, 'merge', retrain=True, clusters=3)",
    "merge_small": "run_job(URI, 'merge', max_bytes=1)",
    "merge_indexed": "run_job(URI, 'merge', retrain=True, bitmap_field=('a',), fts_field=('a', 'b'))",
    "merge_scalar": "run_job(URI, 'merge', retrain=True, quantization='scalar')",
    "merge_product": "run_job(URI, 'merge', retrain=True, quantization='product')",
    "compact": "run_job(URI, 'compact')",
    "gc": "run_job(URI, 'gc', apply=True, {gc})",
    "erase": "run_job(URI, 'erase', where={where!r}, apply=True, older_than='0s', allow_unsafe=True)",
    "repair": "run_job(URI, 'repair', apply=True)",
    "migrate": "run_job(URI, 'migrate', target=os.path.abspath('m.lance'), apply=True)",
    "maintain": "run_job(URI, 'maintain')",
    "maintain_apply": "run_job(URI, 'maintain', apply=True, gc=dict({gc}))",
    "hold": "command(['hold', URI])",
    "scan": "command(['scan', URI, '--json'])",
    "report": "command(['report', URI, '--json'])",
}
MERGES = {name for name in JOBS if name.startswith("merge")} | {"compact"}
CARRY = """def carry(ks, w):  # a server's incremental compaction, with a token of its own
    from tests.support.zeppelin.server import compact_carrying
    run_job(URI, 'merge', clusters=4, retrain=True); put(ks, w)
    P = pathlib.Path(URI, 'lease.json'); L = json.loads(P.read_bytes()); T = L['fencing_token'] + 1
    if compact_carrying(URI, T): P.write_text(json.dumps(L | {'fencing_token': T}))"""


def imports_of(row: Mapping[str, str]) -> str:
    """What each program begins with."""
    root = "os.path.abspath('ns')" if row["store"] == "local" else "os.environ['PAIRS_BUCKET'] + '/ns'"
    lines = [
        "import json, os, pathlib, shutil",
        "from memwal_ops import run_job",
        "from memwal_ops.cli.main import main as command",
        "from memwal_ops.formats import zeppelin",
        f"ROOT = {root}",
        "URI = ROOT",
        f"def name(k): return {ZEPPELIN_IDS[row['ids']]}",
        f"def attributes(k, w): return {ATTRIBUTES[row['attributes']]}",
        f"def values(k, w): return [(k * (2 * j + 3) + j * j + w * 5) % 251 / 16 - 7 for j in range({row['size']})]",
        "def put(ks, w, gone=()):",
        "    rows = [{'id': name(k), 'values': values(k, w), 'attributes': attributes(k, w)} for k in ks]",
        "    zeppelin.open_writer(URI).append(vectors=rows, deletes=[name(k) for k in gone])",
    ]
    if row["segments"] == "carried":
        lines.append(CARRY)
    return "\n".join(lines)


def program_of(row: Mapping[str, str], seed: str, most: int = 20) -> Program:
    """The program of a row, its history drawn by the seed."""
    return _Writer(row, seed).write(most)


def job_step(row: Mapping[str, str], name: str, where: str = '{"id": "never"}', k: int | None = None) -> Step:
    """A job; ``erase`` deletes the row k."""
    gc = "" if row["holder"] == "reader" else _AT_ONCE
    source = JOBS[name].format(gc=gc, where=where).replace("apply=True, )", "apply=True)")
    return Step(name, source, () if k is None else ((k, None),))


class _Writer:
    """Draws a program."""

    def __init__(self, row: Mapping[str, str], seed: str) -> None:
        self.row, self.random = row, random.Random(seed)
        self.program = Program(row, imports=imports_of(row))
        self.keys, self.fresh, self.number = {*range(BASE_ROWS)}, BASE_ROWS, 0

    def write(self, most: int) -> Program:
        row, program = self.row, self.program
        program.head.append(
            f"zeppelin.create(URI, dimensions={row['size']}, metric={row['metric']!r}, dialect={row['dialect']!r})\n"
            f"put(range({BASE_ROWS}), 0)"
        )
        program.head.append(
            {
                "none": "",
                "ours": "run_job(URI, 'merge')",
                "retrained": "run_job(URI, 'merge', clusters=4, retrain=True)",
                "unrecorded": "run_job(URI, 'merge'); shutil.rmtree(URI + '/_mem_wal_ops/training')",
                "carried": "carry([1, 2], 0)",
                "hidden": "run_job(URI, 'merge')\nfrom tests.support.zeppelin.server import hide\nhide(URI, name(3))",
                "emptied": f"run_job(URI, 'merge'); put([], 0, range({BASE_ROWS}))\n"
                "run_job(URI, 'merge'); put(range(5), 0)",
            }[row["segments"]]
        )
        program.head = [one for one in program.head if one]
        if row["segments"] == "hidden":
            self.keys.discard(3)
        if row["segments"] == "emptied":
            self.keys = {*range(5)}
        program.deleted = frozenset({*range(BASE_ROWS)} - self.keys)
        if row["place"] == "copy":
            # A namespace's name is in its manifest, so that a copy has it, too.
            program.place = "URI = os.path.abspath('c/ns'); shutil.copytree(ROOT, URI)"
        count = self.random.randint(10, most)
        # A reader has no hold: it relies on a grace time, for which an erase of this moment does not wait.
        never = {"migrate", "erase"} if row["holder"] == "reader" else {"migrate"}
        jobs = [one for one in JOBS if one not in never]
        focus = {*self.random.sample(range(count), 2)}
        for at in range(count):
            if at in focus:
                program.steps.append(self.job(row["job"]))
            elif self.random.random() < 0.5:
                program.steps.append(self.job(self.random.choice(jobs)))
            else:
                program.steps.append(self.put())
        program.steps.append(self.job("verify_deep"))
        return program

    def put(self) -> Step:
        self.number += 1
        w = self.number
        if self.row["segments"] == "hidden" and self.random.random() < 0.3 and len(self.keys) > 5:
            (k,) = self.random.sample(sorted(self.keys), 1)
            self.keys.discard(k)
            return Step("hide", f"hide(URI, name({k}))", ((k, None),))
        some = self.random.sample(sorted(self.keys), min(len(self.keys), self.random.randint(0, 4)))
        ks = sorted({*some, *range(self.fresh, self.fresh + self.random.randint(0, 3))})
        self.fresh = max([self.fresh, *(k + 1 for k in ks)])
        gone = sorted({*self.random.sample(sorted(self.keys), min(len(self.keys), self.random.randint(0, 3)))} - {*ks})
        if not ks and not gone:
            ks = [self.fresh]
            self.fresh += 1
        self.keys = (self.keys | {*ks}) - {*gone}
        effect = (*((k, w) for k in ks), *((k, None) for k in gone))
        if self.row["segments"] == "carried" and ks and not gone and self.random.random() < 0.4:
            return Step("carry", f"carry({ks}, {w})", effect)
        return Step("put", f"put({ks}, {w}, {gone})", effect)

    def job(self, name: str) -> Step:
        if name != "erase" or len(self.keys) < 8:
            return job_step(self.row, name)
        (k,) = self.random.sample(sorted(self.keys), 1)
        self.keys.discard(k)
        names: dict[str, Any] = {}
        exec(f"def name(k): return {ZEPPELIN_IDS[self.row['ids']]}", names)
        return job_step(self.row, name, json.dumps({"id": names["name"](k)}), k)


class Run(FormatRun):
    """A namespace, and the last write of each id."""

    jobs = JOBS
    refusals = (
        ("why", "object_not_found", "lease.json", lambda _: True, "gc has no candidate, and the lease is none"),
        ("erase", "held|waiting", "hold [0-9]", lambda _: True, "a step before took a hold"),
        (
            "erase", "held|waiting", "", lambda row: row["holder"] != "none",
            "a hold or a reader keeps such rows",
        ),
        (
            "erase|merge.*|compact|maintain_apply", "blocked", "contested", lambda row: row["segments"] == "hidden",
            "another program's list hides an id that the log has: docs/formats/zeppelin.md",
        ),
    )  # fmt: skip

    def begin(self) -> None:
        """All rows have the write 0."""
        self.content: dict[int, int] = {k: 0 for k in range(BASE_ROWS) if k not in self.program.deleted}
        if self.row["holder"] != "none":
            data, rows = self.manifest(), self.rows()
            if self.row["holder"] == "hold":
                assert self.attempt("command(['hold', URI])")[1] == 0
            self.kept[self.row["holder"]] = (lambda: Reader(str(self.folder()), data).read(), rows)

    def folder(self) -> Path:
        """The files, or copies of the objects."""
        return mirror(self.uri)

    def manifest(self) -> bytes:
        return (self.folder() / "manifest.json").read_bytes()

    def rows(self) -> dict[str, Any]:
        """What must be read, by id."""
        make = self.names
        return {
            make["name"](k): (tuple(float(np.float32(one)) for one in make["values"](k, w)), make["attributes"](k, w))
            for k, w in self.content.items()
        }

    def wrote(self, step: Step) -> None:
        """The model follows."""
        for k, w in step.effect:
            if w is None:
                self.content.pop(k, None)
            else:
                self.content[k] = w

    def check(self, number: int) -> None:
        """The files, and queries: all rows, the nearest, filters, texts."""
        rows = self.rows()
        if (found := Reader(str(self.folder())).read()) != rows:
            self.differ("files", found, rows)
        chance = random.Random(number)
        query = self.names["values"](chance.randrange(BASE_ROWS), chance.randrange(9))
        everything = zeppelin.query(self.uri, vector=query, k=10**6, nprobe=10**6)
        self.compare("query", everything, rows, query, len(rows))
        self.compare("query of few", zeppelin.query(self.uri, vector=query, k=3), rows, query, 3)
        if not rows:
            return
        name = chance.choice(sorted(rows))
        values = rows[name][1].get("a")
        wanted = next(iter(values), None) if isinstance(values, list) else values
        if wanted is not None and not isinstance(wanted, dict):
            found = zeppelin.query(self.uri, vector=query, k=10**6, nprobe=10**6, filter={"a": wanted})
            expected = {one: row for one, row in rows.items() if _has(row[1].get("a"), wanted)}
            self.compare("query by filter", found, expected, query, len(expected))
        text = rows[name][1].get("a")
        if isinstance(text, str) and text:
            found = zeppelin.query(self.uri, text=text, field="a", k=10**6)
            words = {*text.lower().split()}
            expected = {one for one, row in rows.items() if words & _words(row[1].get("a"))}
            if {one["id"] for one in found} != expected:
                raise Wrong("query by text", f"{len(found)} rows, and not {len(expected)} of {text!r}")

    def differ(self, about: str, found: Mapping[str, Any], rows: Mapping[str, Any]) -> None:
        """Raise: two sets of rows."""
        missing, more = [*(rows.keys() - found.keys())], [*(found.keys() - rows.keys())]
        other = [(found[one], rows[one]) for one in rows if one in found and found[one] != rows[one]][:1]
        kind = "lost rows" if missing else "more rows" if more else "other rows"
        raise Wrong(f"{about} {kind}", f"{missing[:3]} are missing, {more[:3]} are more, {other}")

    def compare(
        self, about: str, found: list[dict[str, Any]], rows: Mapping[str, Any], query: list[float], count: int
    ) -> None:
        """The nearest rows in order, each with its attributes and its distance."""
        far = {one: _distance(self.row["metric"], row[0], query) for one, row in rows.items()}
        names = [one["id"] for one in found]
        if len({*names}) != len(names) or {*names} - rows.keys() or len(names) < min(count, len(rows)):
            raise Wrong(f"{about} lost or more rows", f"{names[:5]}, {len(names)} of {min(count, len(rows))}")
        for one in found:
            if one["attributes"] != rows[one["id"]][1]:
                raise Wrong(f"{about} other attributes", f"{one} and not {rows[one['id']][1]}")
            if not np.isclose(one["distance"], far[one["id"]], rtol=1e-4, atol=1e-4):
                raise Wrong(f"{about} other distances", f"{one} and not {far[one['id']]}")
        best = sorted(far.values())[: len(found)]
        if not np.allclose(sorted(one["distance"] for one in found), best, rtol=1e-4, atol=1e-4):
            raise Wrong(f"{about} others", f"{[one['distance'] for one in found][:5]} and not {best[:5]}")

    def check_statement(self, step: Step, report: Any) -> None:
        """Counts of inspect, an empty log after a merge, no file too many after gc, the rows of a migration."""
        document, reader = report.to_json(), Reader(str(self.folder()))
        live = reader.manifest
        if step.name == "inspect":
            counts = {
                "fragments": len(live["fragments"]), "segments": len(live["segments"]), "dialect": self.row["dialect"],
                "dimensions": int(self.row["size"]), "metric": self.row["metric"],
            }  # fmt: skip
            said = {name: document[name] for name in counts}
            said |= {"fragments": len(document["fragments"]), "segments": len(document["segments"])}
            said["backlog"], counts["backlog"] = document["backlog"]["fragments"], len(live["fragments"])
            if said != counts and not document["contested"]:
                raise Wrong("inspect says", f"{said} and not {counts}")
        if step.name in MERGES and report.decision in {"merged", "nothing_to_merge"} and live["fragments"]:
            hidden = {*live["pending_deletes"]} if reader.wiki else set()
            listed = {row for ref in live["fragments"] for row in self.ids_of(reader, ref["id"])}
            if listed - hidden:
                raise Wrong(f"{step.name} says", f"{report.decision}, and the log has {sorted(listed - hidden)[:3]}")
        if step.name == "gc" and not self.kept and "0s" in step.source and self.row["job"] != "hold":
            needed = {one["id"] for one in (*live["fragments"], *live["segments"])}
            needed |= {owner for one in live["segments"] for owner in one.get("cluster_owners") or ()}
            there = {path.name.split(".")[0] for path in reader.root.glob("wal/*")}
            there |= {path.name for path in reader.root.glob("segments/*")}
            held = any("hold" in one.name for one in self.program.steps)
            if there - needed and not held and report.decision in {"deleted", "nothing_to_delete"}:
                raise Wrong("gc says", f"{report.decision}, and {sorted(there - needed)[:3]} are there")
        if step.name == "erase" and report.decision == "erased":
            self.gone(step)
        if step.name == "migrate" and report.decision in {"migrated", "nothing_to_migrate"}:
            table = lance.dataset("m.lance").to_table(columns=["id", "vector"])
            found = dict(zip(table["id"].to_pylist(), map(tuple, table["vector"].to_pylist()), strict=True))
            expected = {one: row[0] for one, row in self.rows().items()}
            if found != expected:
                self.differ("migrate", found, expected)

    @staticmethod
    def ids_of(reader: Reader, name: str) -> set[str]:
        """The ids that a fragment has."""
        from tests.support.zeppelin.independent import fragment

        (path,) = reader.root.glob(f"wal/{name}.*")
        rows, deletes = fragment(path.read_bytes())
        return {row[0] for row in rows} | {*deletes}

    def gone(self, step: Step) -> None:
        """No file has the ids and vectors that erase says it erased, as they are."""
        make = self.names
        for k, _ in step.effect:
            w = self.content.pop(k, 0)
            planted = []
            if self.row["ids"] in {"long", "like_keys", "unicode"}:
                planted += [make["name"](k).encode(), json.dumps(make["name"](k))[1:-1].encode()]
            if int(self.row["size"]) >= 4:
                planted.append(np.array(make["values"](k, w), "<f4").tobytes())
            if self.row["attributes"] == "strings":
                planted.append(f"own{k}.".encode())
            for path in self.folder().rglob("*"):
                if path.is_file() and (found := [one for one in planted if one in path.read_bytes()]):
                    raise Wrong("erased value stays", f"{found[0][:60]!r} in {path.name}")

    def refused_erase(self, step: Step) -> None:
        """It may have deleted the row, and not yet the files."""
        there = {
            one["id"] for one in zeppelin.query(self.uri, vector=self.names["values"](0, 0), k=10**6, nprobe=10**6)
        }
        for k, _ in step.effect:
            if self.names["name"](k) not in there:
                self.content.pop(k, None)

    def reads(self) -> bool | None:
        """By the public reader."""
        query = self.names["values"](0, 0)
        try:
            found = zeppelin.query(self.uri, vector=query, k=10**6, nprobe=10**6)
        except Exception:
            return None
        try:
            self.compare("damaged", found, self.rows(), query, len(self.content))
        except Wrong:
            return False
        return True

    def is_earlier(self, name: str, way: str) -> bool:
        """An earlier manifest of the same namespace, whose objects are there."""
        return name == "manifest.json" and way == "other_file"

    def make_other(self) -> Path:
        """The same namespace elsewhere, with the vectors and attributes of other writes."""
        if os.path.exists("o"):
            return Path("o/ns").absolute()
        source = "\n".join([self.program.imports.replace("abspath('ns')", "abspath('o/ns')"), *self.program.head])
        source = source.replace("put(range(40), 0)", "put(range(40), 100)")
        os.makedirs("o")
        exec(compile(source, "other", "exec"), {})
        return Path("o/ns").absolute()

    def job_source(self, name: str) -> str:
        """Of a job."""
        return job_step(self.row, name).source


def _words(value: Any) -> set[str]:
    return {*value.lower().split()} if isinstance(value, str) else set()


def _has(value: Any, wanted: Any) -> bool:
    values = value if isinstance(value, list) else [value]
    return any(isinstance(one, bool) == isinstance(wanted, bool) and one == wanted for one in values if one is not None)


def _distance(metric: str, vector: Any, query: Any) -> float:
    one, other = np.array(vector, np.float64), np.array(np.float32(query), np.float64)
    if metric == "euclidean":
        return float(((one - other) ** 2).sum())
    if metric == "dot_product":
        return float(-(one @ other))
    lengths = float(np.linalg.norm(one) * np.linalg.norm(other))
    return float(1 - one @ other / lengths) if lengths else 1.0
