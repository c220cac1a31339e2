"""Create an index folder, or report that it exists; and the demo, which changes and merges one."""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from memwal_ops.core.demo import DemoRun, indented, prove
from memwal_ops.core.run import run_job
from memwal_ops.errors import InvalidUsageError, NotALanceTableError, TableNotFoundError
from memwal_ops.formats import lm_diskann
from memwal_ops.formats.lm_diskann.errors import need_extra
from memwal_ops.text import counted

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy as np
    from numpy.typing import NDArray

    from memwal_ops.formats.lm_diskann.specs import IndexInitOptions
    from memwal_ops.storage.api import Store
    from memwal_ops.storage.locations import Location


_RESULTS = {"created": "was created", "unchanged": "exists already", "dry_run": "would be created"}
_ATTRIBUTES = {"R": "links", "L": "search_list"}


@dataclass(frozen=True)
class InitReport:
    """``decision``: created, unchanged or dry_run; ``document``: the parameters."""

    decision: str
    uri: str
    document: dict[str, Any]

    exit_code = 0

    def to_json(self) -> dict[str, Any]:
        """The document of ``--json``."""
        return {"decision": self.decision, "uri": self.uri, **self.document}

    def describe(self) -> str:
        """The text for a terminal."""
        text = ", ".join(f"{name} {value}" for name, value in self.document.items())
        return f"The index folder {self.uri} {_RESULTS[self.decision]}: {text}."


def init(location: Location, store: Store, options: IndexInitOptions, *, dry_run: bool) -> InitReport:
    """Create the folder if it does not exist.

    Raises:
        ExtraMissingError: the extra is not installed.
        InvalidUsageError: there is an index with other parameters, or other files; or a parameter is out of bounds.
        UnsupportedFeatureError: the folder is remote.
    """
    del store
    need_extra()
    from memwal_ops.formats.lm_diskann import files, source, table  # noqa: PLC0415 - the extra is checked first

    path, place = files.local_path(location.uri), options.table
    if place is not None and "://" not in place:
        place = os.path.abspath(os.path.expanduser(place))
    follows = None if place is None else source.Source(place, str(options.column), options.key)
    wanted: dict[str, Any] = {
        "dimension": options.dimension if follows is None else follows.dimension(follows.open()),
        "metric": options.index_metric, "R": options.links, "alpha": options.alpha, "L": options.search_list,
        "quantizer": options.quantizer,
    }  # fmt: skip
    followed = {} if follows is None else {"table": follows.uri, "column": follows.column, "key": follows.key}
    try:
        existing = files.read_parameters(path)
    except (TableNotFoundError, NotALanceTableError):
        if not dry_run:
            table.create(path, **wanted, follows=follows)
        return InitReport("dry_run" if dry_run else "created", path, wanted | followed)
    old = {name: getattr(existing, _ATTRIBUTES.get(name, name)) for name in wanted}
    differ = [f"{name} is {old[name]}, not {value}" for name, value in wanted.items() if old[name] != value]
    if differ:
        raise InvalidUsageError(f"{path} is already an index with other parameters: {', '.join(differ)}.")
    present = source.read_source(path)
    if present != follows:
        named = "no table" if present is None else f"column {present.column} of {present.uri}, key {present.key}"
        raise InvalidUsageError(f"{path} is already an index, which follows {named}.")
    return InitReport("unchanged", path, wanted | followed)


# -- the demo

_DIMENSION = 32
_VECTORS, _DELETED, _QUERIES = 3_000, 250, 100
_K = 10


def demo(run: DemoRun) -> Iterator[str]:
    """Build an index folder, change it, and merge it, unless ``run.merge`` is false.

    Yields: the output, step by step.

    Raises:
        ExtraMissingError: the extra is not installed.
        InvalidUsageError: the folder has such an index already, or cannot be created.
        InvariantViolatedError: a row was lost.
    """
    need_extra()
    import numpy as np  # noqa: PLC0415 - the extra is checked first

    folder = run.new_table("vectors.lmd")
    random = np.random.default_rng(7)
    centres = random.normal(size=(40, _DIMENSION)) * 2
    vectors = (centres[random.integers(0, 40, _VECTORS)] + random.normal(size=(_VECTORS, _DIMENSION))).astype("f4")
    deleted = random.choice(_VECTORS, _DELETED, replace=False)
    with lm_diskann.create(folder, dimension=_DIMENSION, R=32, L=80) as index:
        index.insert(np.arange(_VECTORS), vectors)
        index.delete(deleted)
    live = np.setdiff1d(np.arange(_VECTORS), deleted)
    queries = vectors[live[:: len(live) // _QUERIES][:_QUERIES]] + np.float32(0.01)
    distances = ((queries[:, None, :] - vectors[live][None, :, :]) ** 2).sum(axis=2)
    exact = live[np.argsort(distances, axis=1, kind="stable")[:, :_K]]

    yield f"""1. AN INDEX   {folder}

   {_VECTORS:,} vectors of {_DIMENSION} numbers were inserted, and {_DELETED:,} of them deleted again. All of that is durable and can be
   searched, but it lies in delta blocks beside the graph file, which every search looks up first.

2. THE BACKLOG   memwal-ops inspect {folder}
"""  # noqa: E501 - as it is printed
    yield indented(run_job(folder, "inspect").describe())
    before = _recall(folder, queries, exact, deleted)
    if not run.merge:
        yield f"""
3. YOUR TURN   Nothing is merged yet. The index stays until you remove it:   rm -r {run.to_remove(folder)}

   {run.command} merge {folder} --dry-run   what a merge would do
   {run.command} merge {folder}             merge it"""
        return
    yield f"\n3. THE MERGE   memwal-ops merge {folder}\n"
    report = run_job(folder, "merge")
    yield indented(report.describe())
    prove(report.decision == "merged", f"The merge decided {report.decision!r}.")
    after = _recall(folder, queries, exact, deleted)
    prove(after == before, f"The merge changed the results: recall {before} before, {after} after.")
    again = run_job(folder, "merge")
    prove(again.decision == "nothing_to_merge", f"A second merge decided {again.decision!r}.")
    checked = run_job(folder, "verify")
    prove(checked.exit_code == 0, f"verify found: {checked.describe()}")
    yield f"""
4. THE PROOF

   ok  {counted(len(queries), "query", "queries")} found {after:.1%} of the {_K} nearest vectors that an exact scan finds, before and after the merge
   ok  none of them returned a deleted vector
   ok  the merge became visible at once, as one epoch; a crash at any moment leaves the old or the new one
   ok  a second merge found nothing to do, and verify found nothing wrong

5. YOUR TURN   The index stays until you remove it:   rm -r {run.to_remove(folder)}

   {run.command} inspect {folder}
   {run.command} verify {folder}
   memwal_ops.formats.lm_diskann.open("{folder}").search(queries, k=10)      in Python"""  # noqa: E501 - see above


def _recall(folder: str, queries: NDArray[np.float32], exact: NDArray[np.int64], deleted: NDArray[np.int64]) -> float:
    """The share of the exact results that a search finds; no result may be a deleted vector."""
    import numpy as np  # noqa: PLC0415 - see above

    with lm_diskann.open(folder, read_only=True) as index:
        ids, _ = index.search(queries, k=_K)
    prove(not np.isin(ids, deleted).any(), "A deleted vector was found.")
    pairs = zip(ids, exact, strict=True)
    return float(np.mean([np.isin(ours, theirs).mean() for ours, theirs in pairs]))


def warm() -> int:
    """Compile the code of searches and jobs, so that none compiles it later; return how many functions were compiled.

    All of it is called once, on a small index in a temporary folder: with more rows than a filtered search compares one
    by one. Where numba keeps it is told in :mod:`memwal_ops.formats.lm_diskann.kernels`.
    """
    import numpy as np  # noqa: PLC0415 - of the extra

    from memwal_ops.formats.lm_diskann.graph import link_unreached  # noqa: PLC0415 - of the extra, too
    from memwal_ops.formats.lm_diskann.kernels import COMPILATIONS  # noqa: PLC0415

    before = COMPILATIONS.count

    vectors = np.random.default_rng(0).standard_normal((6000, 8), dtype=np.float32)
    rows = len(vectors)
    with tempfile.TemporaryDirectory(prefix="memwal-ops-") as parent:
        folder = os.path.join(parent, "index")
        with lm_diskann.create(folder, dimension=8, R=16, L=32) as index:
            index.insert(range(10), vectors[:10])
            for first, last in ((10, rows // 2), (rows // 2, rows)):
                index.insert(range(first, last), vectors[first:last])
            with index.transaction():
                index.insert([rows], vectors[:1])
                index.delete([rows])
            index.merge()
            with index.hold() as epoch:
                index.delete(range(100))
                for allowed in (range(300, 310), range(rows)):
                    index.search(vectors[:2], 5, allow=allowed)
                index.search(vectors[0], 5, as_of=epoch, beam_width=4)
            with index.staged() as staged:
                link_unreached(staged)
        run_job(folder, "verify")
        run_job(folder, "catchup")
        run_job(folder, "catchup", rebuild=True)
        for job in ("merge", "compact", "gc"):
            run_job(folder, job)
        with lm_diskann.open(folder, read_only=True) as index:
            index.search(vectors[:3], 5)
    return COMPILATIONS.count - before
