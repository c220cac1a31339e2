"""Programs of a row: the lines that make its table, and the steps of its history, with what each must come to.

A program runs alone, in a folder of its own, with pylance and memwal_ops. The model of what must be read is no part of it.
"""

from __future__ import annotations

import os
import random
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tests.campaigns.pairs.dimensions import COLUMNS, HASHED, KEYS, SPECS, VECTORS

if TYPE_CHECKING:
    from collections.abc import Mapping

BASE_ROWS, FRAGMENT_ROWS, DIMENSION = 96, 32, 8
#: Rows take less than half of the time: see :mod:`tests.campaigns.pairs.walk`.
SHORT = bool(os.environ.get("PAIRS_SHORT"))
REGION = "00000000-0000-4000-8000-000000000007"
#: ``k`` to ``w``, or None where the row is deleted.
Effect = tuple[tuple[int, int | None], ...]


@dataclass(frozen=True)
class Step:
    """One call, as source.

    Attributes:
        name: of writers ``append``, ``put`` and others; of jobs their name in the model.
        source: its lines.
        effect: the rows that it sets and deletes.
        logged: it writes into the log; ``flushed``: and leaves nothing of these rows outside of generations.
        columns: what it does to the column ``x``: ``drop``, ``add``, ``rename``.
    """

    name: str
    source: str
    effect: Effect = ()
    logged: bool = False
    flushed: bool = True
    columns: str = ""

    @property
    def is_job(self) -> bool:
        """Whether one of ours runs, that may refuse what a writer may not."""
        return self.name in JOB_SOURCES


@dataclass
class Program:
    """A table and what happens to it.

    Attributes:
        row: values by dimension.
        head: lines that make the table, before the place; run by the writer's release where they are ``portable``.
        steps: the history.
        deleted: keys that ``head`` deleted; all others below BASE_ROWS are there with write 0.
    """

    row: Mapping[str, str]
    imports: str = ""
    head: list[str] = field(default_factory=list)
    place: str = ""
    log: str = ""
    log_first: bool = True
    steps: list[Step] = field(default_factory=list)
    deleted: frozenset[int] = frozenset()

    @property
    def made(self) -> list[str]:
        """What makes the table and its place; a log is made before a branch or a copy of it, or after."""
        return [one for one in ((self.log, self.place) if self.log_first else (self.place, self.log)) if one]

    def text(self) -> str:
        """The program, to be printed."""
        parts = [self.imports, OURS, *self.head, *self.made, *(step.source for step in self.steps)]
        return "\n".join(part for part in parts if part) + "\n"


_AT_ONCE = "reader_grace='0s', orphan_min_age='0s', drain_after='0s', manifest_retention=2, allow_unsafe=True"
_EXPIRE = "older_than='0s', keep=1, allow_unsafe=True"
JOB_SOURCES: dict[str, str] = {
    "inspect": "run_job(URI, 'inspect')",
    "verify": "run_job(URI, 'verify')",
    "verify_deep": "run_job(URI, 'verify', deep=True)",
    "verify_answers": "run_job(URI, 'verify', answers=True, seed=1)",
    "why": "run_job(URI, 'why', target={target!r})",
    "merge": "run_job(URI, 'merge')",
    "catchup": "run_job(URI, 'catchup')",
    "catchup_rebuild": "run_job(URI, 'catchup', rebuild=True)",
    "compact": "run_job(URI, 'compact')",
    "compact_all": "run_job(URI, 'compact', tier_factor=1, deleted_fraction=0.01)",
    "snapshot": "run_job(URI, 'snapshot')",
    "expire": "run_job(URI, 'expire', apply=True, {expire})",
    "gc": "run_job(URI, 'gc', apply=True, {gc})",
    "erase": "run_job(URI, 'erase', where={where!r}, apply=True, {older})",
    "repair": "run_job(URI, 'repair', apply=True)",
    "adopt": "run_job(URI, 'adopt', moved=True, apply=True)",
    "migrate": "run_job(URI, 'migrate', apply=True{to})",
    "maintain": "run_job(URI, 'maintain')",
    "maintain_apply": "run_job(URI, 'maintain', apply=True, expire=dict({expire}), gc=dict({gc}))",
    "hold": "command(['hold', URI])",
    "scan": "command(['scan', URI, '--json'])",
    "report": "command(['report', URI, '--json'])",
}


def imports_of(row: Mapping[str, str]) -> str:
    """What each program begins with: the rows of any keys and writes."""
    keys = KEYS[row["key"]]
    names = ["id"] if len(keys) == 1 else ["id", "part"]
    kind, value = COLUMNS[row["column"]]
    if row.get("store") == "s3" and row["file"] == "2.1" and row["column"] == "dictionary_large":
        kind, value = COLUMNS["dictionary"]  # pylance does not read it there: docs/upstream.md
    element, _ = VECTORS[row["vector"]]
    mark = "{'lance-schema:unenforced-primary-key': 'true'}"
    marked = "" if row["layout"] in {"none", "legacy"} else f", metadata={mark}"
    blob = ", metadata={'lance-encoding:blob': 'true'}" if row["column"] == "blob" else ""
    column = "lance.blob_field('c')" if row["column"] == "blob_2" else f"pa.field('c', {kind}{blob})"
    # The first format keeps NULL of text, bytes and lists alone.
    null = "" if row["file"] == "legacy" else "None if (k + w) % 7 == 0 else "
    made = f"[{null}{value} for k, w, _ in pairs]"
    if row["column"] == "blob_2":
        made = f"lance.blob_array({made})"
    number = "np.float16" if row["vector"].startswith("float16") else "int" if "uint8" in row["vector"] else "float"
    fields = [
        *(f"pa.field({name!r}, {of}, nullable=False{marked})" for name, (of, _) in zip(names, keys, strict=True)),
        "pa.field('w', pa.int64()), pa.field('t', pa.string()), pa.field('g', pa.list_(pa.string()))",
        column, f"pa.field('v', pa.list_({element}, {DIMENSION})), pa.field('x', pa.int64())",
    ]  # fmt: skip
    values = ", ".join(f"{name!r}: [{of} for k, w, _ in pairs]" for name, (_, of) in zip(names, keys, strict=True))
    root = "os.environ['PAIRS_BUCKET'] + '/t.lance'" if row.get("store") == "s3" else "os.path.abspath('t.lance')"
    lines = [
        "import os, pathlib, shutil, lance, numpy as np, pyarrow as pa",
        "from datetime import UTC, date, datetime, time, timedelta",
        "from decimal import Decimal",
        f"DAY, TIME, ROOT = date(2020, 1, 1), datetime(2020, 1, 1), {root}",
        "URI = ROOT",
        f"SCHEMA = pa.schema([{', '.join(fields)}])",
        "def rows(pairs):  # k: number of the key, w: of the write, and what is in x",
        f"    return pa.table({{{values}, 'c': {made},",
        "        'w': [w for _, w, _ in pairs], 't': [f'name{k:04d} s{w}' for k, w, _ in pairs],",
        "        'g': [[f'label{k % 5}', f'own{k}'] for k, w, _ in pairs], 'x': [x for _, _, x in pairs],",
        f"        'v': [[{number}((k * (2 * j + 3) + j * j + w * 5) % 251 + 1) for j in range({DIMENSION})]",
        "              for k, w, _ in pairs]}, schema=SCHEMA)",
        "def put(ks, w):  # rows of one write, with the columns of today",
        "    made, names = rows([(k, w, w * 10) for k in ks]), lance.dataset(URI).schema.names",
        "    made = made.rename_columns(['y' if n == 'x' and 'y' in names else n for n in made.column_names])",
        "    return made.select([n for n in names if n in made.column_names])",
    ]
    return "\n".join(lines)


OURS = """from memwal_ops import run_job
from memwal_ops.memwal import *
from memwal_ops.legacy import MemWalWriter
from memwal_ops.cli.main import main as command"""


def program_of(row: Mapping[str, str], seed: str, *, most: int = 12 if SHORT else 20) -> Program:
    """The program of a row, its history drawn by the seed."""
    return _Writer(row, seed).write(most)


def _older(row: Mapping[str, str]) -> str:
    return "older_than='1h'" if row["holder"] == "handle" else "older_than='0s', allow_unsafe=True"


def job_source(row: Mapping[str, str], name: str) -> str:
    """A job with options that make it do the most, but nothing that a holder would feel."""
    handle = row["holder"] == "handle"
    to = ", to='shard'" if row["layout"] in SPECS else ", to='region'" if row["layout"] == "shard" else ""
    source = JOB_SOURCES[name].format(
        expire="older_than='1h'" if handle else _EXPIRE, gc="" if handle else _AT_ONCE, where="false",
        older=_older(row), target="_versions", to=to,
    )  # fmt: skip
    return source.replace("apply=True, )", "apply=True)")


class _Writer:
    """Draws a program."""

    def __init__(self, row: Mapping[str, str], seed: str) -> None:
        self.row = row
        self.random = random.Random(seed)
        self.program = Program(row, imports=imports_of(row))
        self.keys: set[int] = set()
        self.write_number, self.fresh = 0, BASE_ROWS
        self.layout = "region" if row["layout"] in SPECS else row["layout"]
        #: Rows wait in the log: the base is written and its columns are changed only when none does.
        self.waiting = False
        self.x = "x"

    def write(self, most: int) -> Program:
        row, program = self.row, self.program
        self._table()
        self._log()
        self._place()
        count = self.random.randint(10, most)
        focus = sorted(self.random.sample(range(count), 2))
        for at in range(count):
            if at in focus:
                program.steps.append(self.job(row["job"]))
            else:
                program.steps.extend(self._step())
        program.steps.append(self.job("verify_deep"))
        return program

    # The table.

    def _table(self) -> None:
        row, head = self.row, self.program.head
        options = [f"max_rows_per_file={FRAGMENT_ROWS}", f"data_storage_version={row['file']!r}"]
        if row["row_ids"] == "stable":
            options.append("enable_stable_row_ids=True")
        if row["names"] == "V1":
            options.append("enable_v2_manifest_paths=False")
        if row["file"] == "legacy":
            options.append("max_rows_per_group=16")
        made = f"rows([(k, 0, 0) for k in range({BASE_ROWS})])"
        create = f"lance.write_dataset({made}, URI, {', '.join(options)})"
        if row["history"] == "overwritten":
            head.append(f"lance.write_dataset(rows([(k, 9, 9) for k in range(50)]), URI, {', '.join(options)})")
            head.append(f"lance.write_dataset({made}, URI, mode='overwrite', {', '.join(options)})")
        else:
            head.append(create)
        # pylance itself cannot restore a version whose dictionaries are inside its manifest.
        if row["history"] == "restored" and not (row["file"] == "legacy" and row["column"].startswith("dictionary")):
            head.append("lance.dataset(URI).delete('w = 0'); lance.dataset(URI, version=1).restore()")
        elif row["history"] == "added":
            head.append(
                "lance.dataset(URI).add_columns({'later': 'w + 1'}); lance.dataset(URI).drop_columns(['later'])"
            )
        elif row["history"] == "dropped":
            head.append("lance.dataset(URI).drop_columns(['x'])")
            self.x = ""
        elif row["history"] == "renamed":
            head.append("lance.dataset(URI).alter_columns({'path': 'x', 'name': 'y'})")
            self.x = "y"
        elif row["history"] == "added_again":
            head.append(
                "lance.dataset(URI).drop_columns(['x']); lance.dataset(URI).add_columns(pa.field('x', pa.int64()))"
            )
        elif row["history"] == "replaced":
            head.append("lance.dataset(URI).drop_columns(['x']); lance.dataset(URI).add_columns({'x': 'w'})")
        self.keys = {*range(BASE_ROWS)}
        gone = {
            "none": [],
            "few": [3, 40],
            "most": [k for k in range(BASE_ROWS) if k % 8],
            "fragment": [*range(32, 64)],
        }
        deleted = gone[row["deletions"]]
        self._indexes()
        if deleted:
            names = "','".join(f"name{k:04d} s0" for k in deleted)
            head.append(f"""lance.dataset(URI).delete("t IN ('{names}')")""")
        self.keys -= {*deleted}
        self.program.deleted = frozenset(deleted)

    def _indexes(self) -> None:
        row, head = self.row, self.program.head
        columns = {"LABEL_LIST": "g", "NGRAM": "t", "INVERTED": "t", "column": "c"}
        if row["index"] != "none":
            kind = "BTREE" if row["index"] == "column" else row["index"]
            head.append(f"lance.dataset(URI).create_scalar_index({columns.get(row['index'], 'w')!r}, {kind!r})")
        if row["key_index"] == "yes":
            head.append("lance.dataset(URI).create_scalar_index('id', 'BTREE')")
        if (kind := row["vector_index"]) != "none":
            more = ", num_sub_vectors=2, num_bits=4" if kind.endswith("PQ") else ""
            metric = VECTORS[row["vector"]][1]
            head.append(f"lance.dataset(URI).create_index('v', {kind!r}, num_partitions=2, metric={metric!r}{more})")

    def _log(self) -> None:
        layout, program = self.row["layout"], self.program
        program.log_first = self.random.random() < 0.5
        if layout == "shard":
            program.log = "lance.dataset(URI).initialize_mem_wal()"
        elif layout == "legacy":
            program.log = (
                "from tests.support.tables.legacy_table import mem_wal, put_details\n"
                "lance.dataset(URI).update_field_metadata({'id': {'lance-schema:unenforced-primary-key': 'true'}})\n"
                "put_details(URI, [mem_wal('r', 0, 'MERGED')])"
            )
        elif layout in SPECS:
            made = "".join(f"RegionField.parse({one!r}), " for one in SPECS[layout])
            program.log = f"create_mem_wal(URI, [RegionSpec(({made}))])" if made else "create_mem_wal(URI)"

    def _place(self) -> None:
        place = self.row["place"]
        at = "lance.dataset(URI)"
        self.program.place = {
            "root": "",
            "branch": f"{at}.create_branch('b'); URI = ROOT + '/tree/b'",
            "branch_of_branch": f"{at}.create_branch('b')\n"
            "lance.dataset(ROOT + '/tree/b').create_branch('c'); URI = ROOT + '/tree/c'",
            "shallow_clone": "URI = os.path.abspath('s.lance'); lance.dataset(ROOT).shallow_clone(URI, lance.dataset(ROOT).version)",
            "deep_clone": "URI = os.path.abspath('d.lance'); lance.dataset(ROOT).deep_clone(URI, lance.dataset(ROOT).version)",
            "copy": "URI = os.path.abspath('c.lance'); shutil.copytree(ROOT, URI)",
        }[place]

    # Its history.

    def _some(self, most: int = 5) -> list[int]:
        # Half of the time few keys: those that are written again and again.
        among = sorted(self.keys)[:10] if self.random.random() < 0.5 else sorted(self.keys)
        return sorted(self.random.sample(among, min(len(among), self.random.randint(1, most))))

    def _new(self, most: int = 4) -> list[int]:
        count = min(self.random.randint(1, most), 250 - self.fresh)
        made = [*range(self.fresh, self.fresh + count)]
        self.fresh += count
        return made

    def _step(self) -> list[Step]:
        if self.random.random() < 0.45:
            return [self.job(self.random.choice([one for one in JOB_SOURCES if one not in {"migrate", "adopt"}]))]
        if self.layout == "none":
            return [self._base_write()]
        if self.layout == "legacy":
            return [self._legacy_write()]
        if not self.waiting and self.random.random() < 0.3:
            return [self._base_write()]
        if self.waiting and self.random.random() < 0.3:
            return [self.job("merge")]
        return [self._logged_write()]

    def _base_write(self) -> Step:
        self.write_number += 1
        w = self.write_number
        choices = ["append", "upsert", "update", "delete"]
        row = self.row
        if row["file"] == "legacy" and (
            row["column"].startswith("dictionary")
            or (row["row_ids"] == "stable" and ({row["index"]} & {"NGRAM", "BITMAP"}))
        ):
            choices.remove("upsert")  # pylance changes words, and returns rows twice: docs/upstream.md
        if self.layout == "none" or self.x:
            choices.append("columns")
        kind = self.random.choice(choices)
        if kind == "append":
            ks = self._new()
            self.keys |= {*ks}
            return Step(kind, f"lance.write_dataset(put({ks}, {w}), URI, mode='append')", tuple((k, w) for k in ks))
        if kind == "upsert":
            ks = [*self._some(), *self._new(2)]
            self.keys |= {*ks}
            on = ["id"] if "+" not in self.row["key"] else ["id", "part"]
            call = f"lance.dataset(URI).merge_insert({on}).when_matched_update_all().when_not_matched_insert_all()"
            return Step(kind, f"{call}.execute(put({ks}, {w}))", tuple((k, w) for k in ks))
        if kind == "update":
            ks = self._some()
            names = "','".join(f"own{k}" for k in ks)
            # Only x: the rest of a row depends on k and w.
            if not self.x:
                return self._base_write()
            source = f"""lance.dataset(URI).update({{{self.x!r}: '{w}'}}, "array_has_any(g, ['{names}'])")"""
            return Step("update", source, tuple((k, -w) for k in ks))
        if kind == "delete":
            ks = self._some()
            if len(self.keys) - len(ks) < 4:
                return self._logged_write() if self.layout in {"shard", "region"} else self._base_write()
            self.keys -= {*ks}
            names = "','".join(f"own{k}" for k in ks)
            source = f"""lance.dataset(URI).delete("array_has_any(g, ['{names}'])")"""
            return Step(kind, source, tuple((k, None) for k in ks))
        if self.x:
            dropped, self.x = self.x, ""
            return Step("drop_column", f"lance.dataset(URI).drop_columns([{dropped!r}])", columns="drop")
        self.x = "x"
        return Step("add_column", "lance.dataset(URI).add_columns(pa.field('x', pa.int64()))", columns="add")

    def _logged_write(self) -> Step:
        self.write_number += 1
        w, specs = self.write_number, self.row["layout"] in SPECS and SPECS[self.row["layout"]] != ()
        ks = [*self._some(), *self._new(3)]
        gone = [] if self.random.random() < 0.6 else self._some(3)
        if len(self.keys) - len(gone) < 4:
            gone = []
        self.waiting = True
        self.keys = (self.keys | {*ks}) - {*gone}
        flushed = self.random.random() < 0.75
        opened = "RegionRouter(URI)" if specs else f"RegionWriter(URI, {REGION!r})"
        if self.layout == "shard":
            opened = f"lance.dataset(URI).mem_wal_writer({REGION!r})"
            flushed = True  # closing it flushes
        names = "'id'" if "+" not in self.row["key"] else "'id', 'part'"
        lines = [f"log = {opened}", f"log.put(put({ks}, {w}))"]
        if gone:
            lines.append(f"log.delete(put({gone}, 0).select([{names}]))")
        # One of ours that is dropped leaves its rows in the log, as one that was killed does; closing flushes.
        lines.append("log.close()" if flushed else "del log")
        left = [(k, w) for k in ks if k not in gone]
        return Step("log", "\n".join(lines), (*left, *((k, None) for k in gone)), logged=True, flushed=flushed)

    def _legacy_write(self) -> Step:
        self.write_number += 1
        w, ks = self.write_number, [*self._some(), *self._new(2)]
        self.keys |= {*ks}
        self.waiting = True
        flush = self.random.random() < 0.7
        lines = ["log = MemWalWriter(URI, 'r', 'owner')", f"log.append(put({ks}, {w}))"]
        if flush:
            lines.append("log.seal(); log.flush()")
        return Step("legacy_log", "\n".join(lines), tuple((k, w) for k in ks), logged=True, flushed=flush)

    def job(self, name: str) -> Step:
        """One of ours, with options that make it do the most."""
        holders = self.row["holder"] == "handle"
        effect: Effect = ()
        where, target, to = "false", "_versions", ""
        if name == "erase" and len(self.keys) > 8:
            (k,) = self._some(1)
            self.keys -= {k}
            where, effect = f"t LIKE 'name{k:04d} %'", ((k, None),)
        refused = name == "migrate" and self.layout == "region" and self.row["key"] not in HASHED
        if name in {"merge", "maintain", "maintain_apply", "migrate"} and not refused:
            self.waiting = False
        if name == "migrate":
            if refused:
                to = ", to='shard'"
            elif self.layout in {"shard", "region"}:
                self.layout = "shard" if self.layout == "region" else "region"
                to = f", to={self.layout!r}"
            elif self.layout == "legacy":
                self.layout = "shard"
        source = JOB_SOURCES[name].format(
            expire="older_than='1h'" if holders else _EXPIRE, gc="" if holders else _AT_ONCE,
            older=_older(self.row), where=where, target=target, to=to,
        )  # fmt: skip
        return Step(name, source.replace("apply=True, )", "apply=True)"), effect)
