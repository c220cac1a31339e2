"""Tables with an index of every type, and faults that are planted in the files and manifests of their indexes."""

from __future__ import annotations

import shutil
import uuid
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import UUID

import lance
import numpy as np
import pyarrow as pa
from lance.indices import IndexConfig

from memwal_ops.formats.lance.commit.index_build import IndexBuild
from memwal_ops.formats.lance.indexes.base_indexes import base_indexes
from memwal_ops.formats.lance.wire.version_manifest import encode_fragment_bitmap

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from memwal_ops.formats.lance.table import Table

DIMENSION = 16
WORDS = ["alpha", "the", "running", "runs", "quick", "fox", "jumped", "lazy", *(f"word{n}" for n in range(300))]
SCALARS: Mapping[str, tuple[str, str]] = {
    "by_number": ("number", "BTREE"),
    "by_float": ("real", "BTREE"),
    "by_time": ("at", "BTREE"),
    "by_kind": ("kind", "BITMAP"),
    "by_tags": ("tags", "LABEL_LIST"),
    "by_text": ("text", "INVERTED"),
    "by_gram": ("gram", "NGRAM"),
    "by_zone": ("zone", "ZONEMAP"),
    "by_bloom": ("bloom", "BLOOMFILTER"),
}
VECTORS = ("IVF_FLAT", "IVF_PQ", "IVF_SQ", "IVF_RQ", "IVF_HNSW_FLAT", "IVF_HNSW_PQ", "IVF_HNSW_SQ")


def rows(random: np.random.Generator, first: int, count: int) -> pa.Table:
    """Rows with values that indexes find hard: NULL, NaN, both zeros, empty lists, texts of stop words, ties."""
    number = np.arange(count)
    real = random.normal(size=count)
    real[number % 50 == 0], real[number % 50 == 1], real[number % 50 == 2] = np.nan, -0.0, 0.0
    texts = [" ".join(random.choice(WORDS, 5)) for _ in range(count)]
    for at, text in ((3, "the"), (4, ""), (5, None)):
        texts[at::100] = [text] * len(texts[at::100])
    tags: list[list[str | None] | None] = [[f"t{n % 7}", f"u{n % 11}"] for n in range(count)]
    for at, tag in ((0, None), (1, []), (2, [None, "t1"])):
        tags[at::13] = [tag] * len(tags[at::13])
    return pa.table(
        {
            "number": pa.array(np.arange(first, first + count), pa.int64()),
            "real": pa.array(real, mask=number % 17 == 0),
            "at": pa.array(1_600_000_000_000_000 + random.integers(0, 10**12, count), pa.timestamp("us")),
            "kind": pa.array([None if n % 13 == 0 else f"kind{n % 60}" for n in range(count)], pa.string()),
            "tags": pa.array(tags, pa.list_(pa.string())),
            "text": pa.array(texts, pa.string()),
            "phrase": pa.array(texts, pa.string()),
            "gram": pa.array(texts, pa.string()),
            "zone": pa.array(np.sort(random.integers(0, 5000, count)) + first, pa.int64()),
            "bloom": pa.array(random.integers(0, 5000, count), pa.int64()),
        }
    )


def vectors(random: np.random.Generator, count: int, *, centers: np.ndarray[Any, Any] | None = None) -> pa.Array:
    """Vectors; with ``centers``, in clusters around these."""
    values = random.normal(size=(count, DIMENSION))
    if centers is not None:
        values += centers[random.integers(0, len(centers), count)]
    return pa.FixedSizeListArray.from_arrays(pa.array(values.ravel().astype("f4")), DIMENSION)


def claims_too_much(table: Table, name: str, **_: Any) -> IndexBuild:
    """What the index has, under another id, and the claim that it has all fragments."""
    [old] = base_indexes(table)[name].segments
    entry, folder = type(old)(), Path(table.location.uri) / "_indices"
    entry.CopyFrom(old)
    entry.uuid.uuid = uuid.uuid4().bytes
    shutil.copytree(folder / str(UUID(bytes=old.uuid.uuid)), folder / str(UUID(bytes=entry.uuid.uuid)))
    entry.fragment_bitmap = encode_fragment_bitmap({one.id for one in table.manifest.manifest.fragments})
    return IndexBuild((entry,), frozenset({UUID(bytes=old.uuid.uuid)}))


def about_to_be_ruined(uri: str, name: str) -> lance.LanceDataset:
    """A table with appended rows under an index of the metric dot; with these, pylance's update hides all others."""
    random = np.random.default_rng(3)
    centers = random.normal(size=(20, 16))

    def clustered(count: int) -> pa.Table:
        made = (centers[random.integers(0, 20, count)] + 0.5 * random.normal(size=(count, 16))).astype("f4")
        return pa.table({"vector": pa.FixedSizeListArray.from_arrays(pa.array(made.reshape(-1)), 16)})

    dataset = lance.write_dataset(clustered(2_000), uri)
    dataset.create_index("vector", "IVF_PQ", metric="dot", num_partitions=2, num_sub_vectors=4, name=name)
    return lance.write_dataset(clustered(400), uri, mode="append")


def make_scalars(uri: str, random: np.random.Generator, count: int, **options: Any) -> None:
    """A table with every scalar index in four fragments; then deletions, updates and appended rows."""
    dataset = lance.write_dataset(rows(random, 0, count), uri, max_rows_per_file=count // 4, **options)
    for name, (column, kind) in SCALARS.items():
        dataset.create_scalar_index(column, kind, name=name)
    dataset.create_scalar_index("phrase", "INVERTED", name="by_phrase", with_position=True)
    dataset.delete("number % 97 = 5")
    dataset.update({"kind": "'changed'"}, "number % 1000 = 7")
    dataset.insert(rows(random, count, count // 10))


def make_vectors(uri: str, random: np.random.Generator, count: int, kind: str, metric: str = "l2") -> None:
    """A table with one vector index in two segments, the second of appended rows."""
    centers = 3 * random.normal(size=(30, DIMENSION))

    def some(number: int) -> pa.Table:
        return pa.table({"vector": vectors(random, number, centers=centers)})

    dataset = lance.write_dataset(some(count), uri, max_rows_per_file=count // 4)
    arguments = {"num_sub_vectors": 8} if kind.endswith("PQ") else {}
    dataset.create_index("vector", kind, name="by_vector", metric=metric, num_partitions=64, **arguments)
    dataset.insert(some(count // 10))
    dataset.optimize.optimize_indices(num_indices_to_merge=0)


def json_rows(count: int) -> pa.Table:
    """Documents for an index on a path."""
    texts = [None if n % 9 == 0 else f'{{"x": {n % 50}, "y": "v{n % 20}"}}' for n in range(count)]
    return pa.table({"document": pa.array(texts, pa.json_())})


def index_json(dataset: lance.LanceDataset) -> None:
    """Indexes on two paths."""
    for path, kind in (("x", "btree"), ("y", "bitmap")):
        config = IndexConfig("json", {"target_index_type": kind, "path": path})
        dataset.create_scalar_index("document", config, name=f"by_{path}")


def folders(uri: str, name: str) -> list[Path]:
    """Folders of the segments of an index, in the order of its fragments."""
    [index] = [one for one in lance.dataset(uri).describe_indices() if one.name == name]
    ordered = sorted(index.segments, key=lambda one: min(one.fragment_ids, default=0))
    return [Path(uri) / "_indices" / str(one.uuid) for one in ordered]


def replace_files(place: Path, other: Path) -> None:
    """Put the files of one segment in the place of another's."""
    for path in place.iterdir():
        path.unlink()
    for path in other.iterdir():
        shutil.copyfile(path, place / path.name)


def swap(first: Path, second: Path) -> None:
    """Exchange two segments."""
    aside = first.with_name("aside")
    first.rename(aside)
    second.rename(first)
    aside.rename(second)


def rebuilt_elsewhere(
    uri: str,
    aside: str,
    name: str,
    column: str,
    kind: str,
    change: Callable[[pa.Table], pa.Table],
    **arguments: Any,
) -> None:
    """Publish an index that was built from rows which differ from the table's, at the same row addresses."""
    dataset = lance.dataset(uri)
    sizes = [one.physical_rows for one in dataset.get_fragments()]
    changed = change(dataset.to_table())
    assert changed.num_rows == sum(sizes)
    start = 0
    for size in sizes:
        mode = "append" if start else "create"
        lance.write_dataset(changed.slice(start, size), aside, mode=mode)
        start += size
    fragments = [one.fragment_id for one in lance.dataset(aside).get_fragments()]
    built = lance.dataset(aside).create_index_uncommitted(column, kind, name=name, fragment_ids=fragments, **arguments)
    shutil.copytree(Path(aside) / "_indices" / built.uuid, Path(uri) / "_indices" / built.uuid)
    dataset.commit_existing_index_segments(name, column, [replace(built, dataset_version=dataset.version)])
