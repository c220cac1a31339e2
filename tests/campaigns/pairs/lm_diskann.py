"""Rows of LM-DiskANN index folders: their programs, and an oracle of its own.

The oracle has a dictionary of vectors by row id, and compares answers of the public library with numpy's.
"""

from __future__ import annotations

import contextlib
import os
import random
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lance
import numpy as np

from memwal_ops.formats import lm_diskann
from tests.campaigns.pairs.dimensions import FOLDER_IDS, FOLDER_VECTORS
from tests.campaigns.pairs.formats import FormatRun
from tests.campaigns.pairs.oracle import Wrong
from tests.campaigns.pairs.scripts import Program, Step

if TYPE_CHECKING:
    from collections.abc import Mapping

JOBS: dict[str, str] = {
    "inspect": "run_job(URI, 'inspect')",
    "verify": "run_job(URI, 'verify')",
    "verify_deep": "run_job(URI, 'verify', deep=True)",
    "verify_answers": "run_job(URI, 'verify', answers=True, seed=1)",
    "why": "run_job(URI, 'why', target='nodes/1')",
    "merge": "run_job(URI, 'merge', max_bytes=65536)",
    "catchup": "run_job(URI, 'catchup', batch=20, max_rows=100)",
    "catchup_rebuild": "run_job(URI, 'catchup', rebuild=True)",
    "compact": "run_job(URI, 'compact')",
    "gc": "run_job(URI, 'gc', apply=True)",
    "erase": "run_job(URI, 'erase', where={where!r}, apply=True)",
    "repair": "run_job(URI, 'repair', apply=True)",
    "snapshot": "run_job(URI, 'snapshot', destination=os.path.abspath('copy'))",
    "maintain": "run_job(URI, 'maintain')",
    "maintain_apply": "run_job(URI, 'maintain', apply=True)",
    "hold": "command(['hold', URI])",
    "scan": "command(['scan', URI, '--json'])",
    "report": "command(['report', URI, '--json'])",
}
#: Jobs that bring the rows of a followed table first.
FOLLOWING = {"catchup", "catchup_rebuild", "maintain", "maintain_apply", "erase"}
#: Below this many live rows there is no codebook, and every search compares all rows.
EXACT_BELOW = 1024
TABLE = """T = os.path.abspath('t.lance')
def rows(ks, w):
    flat = pa.array(vectors(ks, w).reshape(-1))
    return pa.table({'id': pa.array(ids(ks)), 'vec': pa.FixedSizeListArray.from_arrays(flat, D)})
def insert(ks, w):
    call = lance.dataset(T).merge_insert('id').when_matched_update_all().when_not_matched_insert_all()
    call.execute(rows(ks, w))
def delete(ks): lance.dataset(T).delete(f"id IN ({', '.join(map(str, ids(ks)))})")"""
ALONE = """def insert(ks, w):
    with lm_diskann.open(URI) as index: index.insert(ids(ks), vectors(ks, w))
def delete(ks):
    with lm_diskann.open(URI) as index: index.delete(ids(ks))"""


def imports_of(row: Mapping[str, str]) -> str:
    """What each program begins with."""
    lines = [
        "import os, pathlib, shutil, lance, numpy as np, pyarrow as pa",
        "from memwal_ops import run_job",
        "from memwal_ops.cli.main import main as command",
        "from memwal_ops.formats import lm_diskann",
        f"ROOT, D = os.path.abspath('i.lmd'), {row['dims']}",
        "URI = ROOT",
        f"def ids(ks): return np.array([{FOLDER_IDS[row['ids']]} for k in ks], np.int64)",
        "def vectors(ks, w):",
        f"    return np.array([{FOLDER_VECTORS[row['vectors']]} for k in ks], np.float32).reshape(len(ks), D)",
        ALONE if row["follows"] == "nothing" else TABLE,
    ]
    return "\n".join(lines)


def program_of(row: Mapping[str, str], seed: str, most: int = 20) -> Program:
    """The program of a row, its history drawn by the seed."""
    return _Writer(row, seed).write(most)


def job_step(name: str, where: str = "row_id = -9", k: int | None = None) -> Step:
    """A job; ``erase`` deletes the row k."""
    return Step(name, JOBS[name].format(where=where), () if k is None else ((k, None),))


class _Writer:
    """Draws a program."""

    def __init__(self, row: Mapping[str, str], seed: str) -> None:
        self.row, self.random = row, random.Random(seed)
        self.program = Program(row, imports=imports_of(row))
        self.fresh, self.number = int(row["rows"]), 0
        self.keys = {*range(self.fresh)}

    def write(self, most: int) -> Program:
        row, head = self.row, self.program.head
        follows = row["follows"]
        if follows == "nothing":
            head.append(
                f"lm_diskann.create(URI, dimension=D, metric={row['metric']!r}, R={row['links']}, "
                f"quantizer={row['quantizer']!r}).close()"
            )
            if self.keys:
                head.append(f"insert(range({self.fresh}), 0)")
        else:
            stable = ", enable_stable_row_ids=True" if follows == "stable_ids" else ""
            head.append(f"lance.write_dataset(rows(range({self.fresh}), 0), T, max_rows_per_file=200{stable})")
            if follows == "a_branch":
                head.append("lance.dataset(T).create_branch('b'); T += '/tree/b'")
            key = "" if follows == "stable_ids" else ", '--key', 'id'"
            head.append(
                "try: command(['init', URI, '--format', 'lm_diskann', '--table', T, '--column', 'vec', "
                f"'--index-metric', {row['metric']!r}, '--links', {row['links']!r}, "
                f"'--quantizer', {row['quantizer']!r}{key}])\n"
                "except SystemExit as ended: assert not ended.code\n"
                "run_job(URI, 'catchup')"
            )
        self.program.place = {
            "root": "",
            "copy": "URI = os.path.abspath('c.lmd'); shutil.copytree(ROOT, URI)",
            "snapshot": "URI = os.path.abspath('s.lmd'); run_job(ROOT, 'snapshot', destination=URI)",
        }[row["place"]]
        count = self.random.randint(10, most)
        focus = {*self.random.sample(range(count), 2)}
        for at in range(count):
            if at in focus:
                self.program.steps.append(self.job(row["job"]))
            elif self.random.random() < 0.5:
                self.program.steps.append(self.job(self.random.choice([*JOBS])))
            else:
                self.program.steps.append(self.change())
        self.program.steps.append(job_step("verify_deep"))
        return self.program

    def change(self) -> Step:
        self.number += 1
        w, most = self.number, max(2, len(self.keys) // 8)
        kind = self.random.random()
        if kind < 0.35 and len(self.keys) > 8:
            gone = sorted(self.random.sample(sorted(self.keys), self.random.randint(1, most)))
            self.keys -= {*gone}
            return Step("delete", f"delete({gone})", tuple((k, None) for k in gone))
        if kind < 0.45 and self.row["follows"] != "nothing":
            return Step("compact_table", "lance.dataset(T).optimize.compact_files()")
        some = self.random.sample(sorted(self.keys), min(len(self.keys), self.random.randint(0, 5)))
        ks = sorted({*some, *range(self.fresh, self.fresh + self.random.randint(1, most))})
        self.fresh = max(self.fresh, ks[-1] + 1)
        self.keys |= {*ks}
        return Step("insert", f"insert({ks}, {w})", tuple((k, w) for k in ks))

    def job(self, name: str) -> Step:
        if name != "erase" or len(self.keys) < 8 or self.row["follows"] != "nothing":
            return job_step(name)
        (k,) = self.random.sample(sorted(self.keys), 1)
        self.keys.discard(k)
        number = eval(FOLDER_IDS[self.row["ids"]], {"k": k})
        return job_step(name, f"row_id = {number}", k)


Content = dict[int, Any]


class Run(FormatRun):
    """An index, and the vector of each row id."""

    jobs = JOBS
    refusals = (
        ("why", "object_not_found", "", lambda _: True, "node 1 was not deleted, or is gone"),
        ("snapshot", "invalid_usage", "not empty", lambda _: True, "the copy of an earlier epoch is there"),
        ("erase", "held|waiting|partial", "", lambda row: row["holder"] != "none", "it is held"),
        ("erase", "held|waiting|partial", "hold", lambda _: True, "a step before it took a hold"),
        (
            "verify.*|repair", "findings|decision_needed", "unreachable|index_recall_low",
            lambda row: row["links"] == "4", "lm-diskann-operation.md: of 4 links, rows may become unreachable",
        ),
    )  # fmt: skip

    def begin(self) -> None:
        """What is in the index, and what a holder keeps."""
        count = int(self.row["rows"])
        self.written = dict.fromkeys(range(count), 0)
        self.content = self.table_content()
        self.stack = contextlib.ExitStack()
        holder = self.row["holder"]
        if holder == "none":
            return
        content = dict(self.content)
        if holder == "reader":
            reader = self.stack.enter_context(lm_diskann.open(self.uri, read_only=True))
            epoch = self.stack.enter_context(reader.hold())
            self.kept[holder] = (lambda: self.answers(reader, content, 3, epoch), True)
            return
        with lm_diskann.open(self.uri, read_only=True) as index:
            epoch = index.epoch
        assert self.attempt("command(['hold', URI])")[1] == 0

        def opened() -> bool:
            with lm_diskann.open(self.uri, read_only=True) as index:
                return self.answers(index, content, 3, epoch)

        self.kept[holder] = (opened, True)

    def release(self) -> None:
        """Its handles."""
        with contextlib.suppress(AttributeError):
            self.stack.close()

    def table_content(self) -> Content:
        """Vectors by row id, of what was written; of a followed table as pylance reads it now."""
        make = self.names
        if self.row["follows"] == "nothing":
            by_write: dict[int, list[int]] = {}
            for k, w in self.written.items():
                by_write.setdefault(w, []).append(k)
            return {
                int(one): self.stored(vector)
                for w, ks in by_write.items()
                for one, vector in zip(make["ids"](ks), make["vectors"](ks, w), strict=True)
            }
        stable = self.row["follows"] == "stable_ids"
        table = lance.dataset(make["T"]).to_table(columns=["id", "vec"], with_row_id=stable)
        found = dict(zip(table["id"].to_pylist(), table["vec"].to_pylist(), strict=True))
        for w in {*self.written.values()}:
            ks = [k for k, of in self.written.items() if of == w]
            expected = dict(zip(make["ids"](ks).tolist(), make["vectors"](ks, w).tolist(), strict=True))
            assert all(found.get(one) == vector for one, vector in expected.items()), "the table has other rows"
        keys = table["_rowid" if stable else "id"].to_pylist()
        return {
            key: self.stored(np.array(vector, np.float32))
            for key, vector in zip(keys, table["vec"].to_pylist(), strict=True)
        }

    def stored(self, vector: Any) -> Any:
        """A vector as the index compares it."""
        vector = np.asarray(vector, np.float64)
        return vector / np.linalg.norm(vector) if self.row["metric"] == "cosine" else vector

    def wrote(self, step: Step) -> None:
        """The model follows; an index that follows a table has it after catchup."""
        for k, w in step.effect:
            if w is None:
                self.written.pop(k, None)
            else:
                self.written[k] = w
        if self.row["follows"] == "nothing":
            self.content = self.table_content()

    def check(self, number: int) -> None:
        """Number of rows, and answers, of a reader that opens it now."""
        with lm_diskann.open(self.uri, read_only=True) as index:
            if len(index) != len(self.content):
                raise Wrong("number of rows", f"{len(index)}, and not {len(self.content)}")
            self.answers(index, self.content, number)
            if self.content and number % 3 == 0:
                some = sorted(self.content)[:: max(1, len(self.content) // 40)]
                content = {one: self.content[one] for one in some}
                self.answers(index, content, number, allow=np.array(some, np.int64))

    def answers(self, index: Any, content: Content, seed: int, epoch: int | None = None, allow: Any = None) -> bool:
        """Whether each answer has rows of this content with their distances, and enough of the nearest."""
        chance = np.random.default_rng(seed)
        ids, size = np.array(sorted(content), np.int64), int(self.row["dims"])
        queries = chance.normal(size=(6, size)).astype(np.float32)
        if len(ids):
            known = np.stack([content[int(one)] for one in chance.choice(ids, 6)])
            scale = float(np.abs(known).max())
            queries[:3] = known[:3]
            queries[3:] = known[3:] + queries[3:] * scale / 10
        count = min(10, len(ids))
        more = {} if allow is None else {"allow": allow}
        found, far = index.search(queries, k=10, as_of=epoch, L=200, **more)
        about = "search" if epoch is None else "search of an epoch"
        if not len(ids):
            if (found >= 0).any():
                raise Wrong(f"{about} more rows", f"{found.tolist()} of an empty index")
            return True
        matrix = np.stack([content[int(one)] for one in ids])
        place = {int(one): at for at, one in enumerate(ids)}
        good = 0
        for query, near, distances in zip(queries, found.tolist(), far.tolist(), strict=True):
            exact = self.distances(matrix, query)
            near, distances = near[:count], distances[:count]
            if strange := [one for one in near if one not in place]:
                raise Wrong(f"{about} more rows", f"{strange[:3]} of {len(ids)} rows")
            if len({*near}) != len(near):
                raise Wrong(f"{about} twice", f"{near}")
            mine = np.array([exact[place[one]] for one in near])
            tolerance = 1e-4 * (1 + 0 * exact.max()) if self.row["metric"] == "cosine" else 1e-4 * float(exact.max())
            if not np.allclose(mine, distances, rtol=1e-3, atol=tolerance):
                raise Wrong(f"{about} other distances", f"{near[:3]}: {distances[:3]} and not {mine[:3].tolist()}")
            good += int((mine <= np.sort(exact)[count - 1] * (1 + 1e-4) + tolerance).sum())
        least = 1.0 if len(index) < EXACT_BELOW and not self.built() else self.least()
        if good < least * count * len(queries):
            raise Wrong(f"{about} recall", f"{good} of {count * len(queries)} nearest rows, at least {least}")
        return True

    def built(self) -> bool:
        """Whether there may be a graph: with that many rows ever, also by a rebuild."""
        return int(self.row["rows"]) >= EXACT_BELOW

    def least(self) -> float:
        """Below the recall that the docs have of L = 200: of few links and of noise in many dimensions, less."""
        few, many = self.row["links"] == "4", int(self.row["dims"]) > 33
        return 0.2 if few and many else 0.3 if few else 0.6 if many else 0.9

    def distances(self, matrix: Any, query: Any) -> Any:
        """As the library defines them, in double precision."""
        query = query.astype(np.float64)
        if self.row["metric"] == "l2":
            return ((matrix - query) ** 2).sum(1)
        return 1 - matrix @ (query / np.linalg.norm(query))

    def check_statement(self, step: Step, report: Any) -> None:
        """Counts of inspect, nothing due after a job, the copy of a snapshot, no erased value in a file."""
        document = report.to_json()
        if step.name in FOLLOWING and not report.exit_code:
            self.content = self.table_content()
        elif step.name in FOLLOWING:
            self.reads()  # one that is held, for example, may have brought the rows before
        if step.name == "inspect":
            with lm_diskann.open(self.uri, read_only=True) as index:
                counts = {"live": len(self.content), "epoch": index.epoch}
            said = {name: document["state"][name] for name in counts}
            behind = document["backlog"]["versions_behind"]
            if self.row["follows"] != "nothing":
                counts["behind"] = lance.dataset(self.names["T"]).version - document["state"]["followed"]
                said["behind"] = behind
            if said != counts:
                raise Wrong("inspect says", f"{said} and not {counts}")
        if step.name == "merge" and report.decision in {"merged", "nothing_to_merge"}:
            left = self.execute("run_job(URI, 'inspect')").to_json()["backlog"]["delta_blocks"]
            if left:
                raise Wrong("merge says", f"{report.decision}, and {left} blocks are left")
        if step.name == "gc" and report.decision in {"deleted", "nothing_to_delete"}:
            again = self.execute("run_job(URI, 'gc')")
            if again.decision != "nothing_to_delete":
                raise Wrong("gc says", f"{report.decision}, and then {again.describe():.300}")
        if step.name == "snapshot" and report.decision == "copied":
            with lm_diskann.open("copy", read_only=True) as index:
                if len(index) != len(self.content):
                    raise Wrong("snapshot rows", f"{len(index)}, and not {len(self.content)}")
                self.answers(index, self.content, 1)
            os.rename("copy", f"copy-{document['epoch']}-{self.chance.random()}")
        if step.name == "erase" and report.decision == "erased" and step.effect:
            self.gone(step)

    def gone(self, step: Step) -> None:
        """No file has the vector that erase says it erased, unless another row has the same."""
        for k, _ in step.effect:
            w = self.written.pop(k, None)
            self.content = self.table_content()
            if w is None or self.row["vectors"] == "twins" or int(self.row["dims"]) < 8 or self.row["metric"] != "l2":
                continue
            data = self.names["vectors"]([k], w).tobytes()
            for path in Path(self.uri).rglob("*"):
                if path.is_file() and data in path.read_bytes():
                    raise Wrong("erased value stays", f"the vector of row {k} in {path.name}")

    def refused_erase(self, step: Step) -> None:
        """It may have deleted the row, and not yet what is left of it."""
        if not step.effect:
            return
        with lm_diskann.open(self.uri, read_only=True) as index:
            for k, _ in step.effect:
                if k not in self.written:
                    continue
                number = self.names["ids"]([k])
                query = self.names["vectors"]([k], self.written[k])
                found, _ = index.search(query, k=1, allow=number)
                if found[0, 0] != number[0]:
                    self.written.pop(k, None)
        self.content = self.table_content()

    def reads(self) -> bool | None:
        """By the library. An index that follows a table may have the rows of now since the last command."""
        contents = [self.content, *([self.table_content()] if self.row["follows"] != "nothing" else [])]
        for number, content in enumerate(contents, 1):
            try:
                with lm_diskann.open(self.uri, read_only=True) as index:
                    whole = self.answers(index, content, 1) and len(index) == len(content)
            except Wrong:
                if number == len(contents) and not self.tolerant:
                    raise
                continue
            except Exception:
                return None
            if whole:
                self.content = content
                return True
        return False

    def is_earlier(self, name: str, way: str) -> bool:
        """A file of another place or time of the same index."""
        return way == "other_file"

    def is_other(self, name: str, way: str) -> bool:
        """It follows another table then, and catchup says so: lm-diskann-operation.md, "unusable"."""
        return name == "follow.json" and way == "other_table"

    def comes_back(self, name: str) -> bool:
        """The graph, the store and the view are written together: lm-diskann-operation.md, "Verify and repair"."""
        return name in {"metadata.lmd", "follow.json"}

    def make_other(self) -> Path:
        """The same index elsewhere, with the vectors of other writes."""
        if os.path.exists("o"):
            return Path("o/i.lmd").absolute()
        here = os.getcwd()
        os.makedirs("o")
        os.chdir("o")
        try:
            source = "\n".join([self.program.imports, *self.program.head]).replace(", 0)", ", 100)")
            exec(compile(source, "other", "exec"), {})
        finally:
            os.chdir(here)
        return Path("o/i.lmd").absolute()

    def job_source(self, name: str) -> str:
        """Of a job."""
        return job_step(name).source
