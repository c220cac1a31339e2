"""Tables by the options of pylance, for :mod:`client`: of writes, compactions, branches, columns and MemWAL.

A release that lacks an option raises an error here, and has no such table.
"""

from __future__ import annotations

import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa

if TYPE_CHECKING:
    from collections.abc import Callable

REGION = str(uuid.UUID(int=7, version=4))
STABLE = {"enable_stable_row_ids": True}
STORAGE = ("legacy", "2.0", "2.1", "2.2", "2.3", "next")
MEM_WAL = {
    "": {},
    "-unsharded": {"unsharded": True},
    "-buckets": {"bucket_column": "id", "num_buckets": 4},
    "-identity": {"identity_column": "number"},
    "-indexes": {"maintained_indexes": ["id_idx"]},
}
BIG = b"x" * 5_000_000


def kinds(
    client: Any, table: Callable[..., Callable[[str, Any], None]], rows: Callable[..., pa.Table]
) -> dict[str, Any]:
    """How a table of each kind is made: a function of its URI and the model of its rows."""
    lance = client.lance

    def after(*steps: Callable[[Any], Any], index: str = "BTREE", **options: Any) -> Callable[[str, Any], None]:
        """A table with one index, then these steps, each on the newest version."""

        def make(uri: str, model: Any) -> None:
            table(index, **options)(uri, model)
            for step in steps:
                step(lance.dataset(uri))

        return make

    def logged(options: dict[str, Any], more: dict[str, Any]) -> Callable[[str, Any], None]:
        """Two generations beside a base: their rows are in the model."""

        def make(uri: str, model: Any) -> None:
            table("BTREE", **more)(uri, model)
            lance.dataset(uri).initialize_mem_wal(**options)
            if {"bucket_column", "identity_column"} & options.keys():
                return  # which region a row belongs to is for its writers to compute
            for at in (0, 1):
                put = rows([*range(380 + at, 400 + at)], f"put {at}")
                with lance.dataset(uri).mem_wal_writer(REGION) as writer:
                    writer.put(put)
                model.log |= dict(zip(put["id"].to_pylist(), put["text"].to_pylist(), strict=True))

        return make

    def blobs(blob: pa.Field, values: Any, **options: Any) -> Callable[[str, Any], None]:
        def make(uri: str, model: Any) -> None:
            made = rows([*range(10)]).append_column(blob, values())
            lance.write_dataset(made, uri, max_rows_per_file=4, **options)
            model.put(made)

        return make

    def bases(**options: Any) -> Callable[[str, Any], None]:
        """Files in another folder than the table's."""

        def make(uri: str, model: Any) -> None:
            folder = Path(f"{uri}.base")
            folder.mkdir(exist_ok=True)
            base = lance.DatasetBasePath(str(folder), name="other", **options)
            table("BTREE", initial_bases=[base], target_bases=["other"])(uri, model)

        return make

    def cloned(uri: str, model: Any) -> None:
        source = f"{uri}.source"
        table("BTREE")(source, model)
        lance.dataset(source).shallow_clone(uri, lance.dataset(source).version)

    old_blob = pa.field("blob", pa.large_binary(), metadata={"lance-encoding:blob": "true"})
    new_blob = getattr(lance, "blob_field", lambda _: None)("blob")
    deleted = lambda dataset: dataset.delete("id = -1 OR id IN (NULL)")  # noqa: E731 - no row, but a version
    found: dict[str, Any] = {f"storage-{one}": table("BTREE", data_storage_version=one) for one in STORAGE}
    found |= {
        f"mem-wal{stable}{name}": logged(options, more)
        for stable, more in (("", {}), ("-stable", STABLE))
        for name, options in MEM_WAL.items()
    }
    found |= {
        "v1-names": table("BTREE", enable_v2_manifest_paths=False),
        "auto-cleanup": table("BTREE", auto_cleanup_options={"interval": 1, "older_than_seconds": 3600}),
        "properties": table("BTREE", commit_message="made", transaction_properties={"by": "hand"}),
        "no-version": after(deleted),
        "tags": after(lambda it: it.tags.create("kept", it.version)),
        "branch": after(lambda it: it.create_branch("dev")),
        "clone": cloned,
        "bases": bases(is_dataset_root=False),
        "bases-of-a-table": bases(is_dataset_root=True),
        "config": after(lambda it: it.update_config({"owner": "team"}), lambda it: it.update_metadata({"a": "b"})),
        "add-columns": after(lambda it: it.add_columns({"later": "number + 1"})),
        "drop-columns": after(lambda it: it.drop_columns(["labels"])),
        "alter-columns": after(lambda it: it.alter_columns({"path": "labels", "name": "words"})),
        "restore": after(lambda it: it.restore()),
        "untrained": after(lambda it: it.create_scalar_index("name", "BTREE", train=False)),
        "compact": after(lambda it: it.optimize.compact_files()),
        "compact-deferred": after(lambda it: it.optimize.compact_files(defer_index_remap=True)),
        "compact-deferred-bitmap": after(lambda it: it.optimize.compact_files(defer_index_remap=True), index="BITMAP"),
        "compact-copied": after(lambda it: it.optimize.compact_files(compaction_mode="try_binary_copy")),
        "compact-to-2.2": after(
            lambda it: it.optimize.compact_files(data_storage_version="2.2"), data_storage_version="2.1"
        ),
        "compact-setting": after(
            lambda it: it.update_config({"lance.compaction.data_storage_version": "2.2"}), data_storage_version="2.1"
        ),
        "compact-setting-refused": after(lambda it: it.update_config({"lance.compaction.data_storage_version": "9.9"})),
        "appended-2.2": after(
            lambda it: lance.write_dataset(rows([]), it, mode="append", data_storage_version="2.2"),
            data_storage_version="2.1",
        ),
        "lineage-spilled": after(
            lambda it: it.update_config({"lance.row_lineage.spill": "true", "lance.row_lineage.inline_max_bytes": "0"}),
            lambda it: it.optimize.compact_files(),
            **STABLE,
        ),
        "blobs": blobs(old_blob, lambda: pa.array([b"x" * 9, None] * 5, pa.large_binary())),
        "blobs-stable": blobs(old_blob, lambda: pa.array([b"x" * 9, None] * 5, pa.large_binary()), **STABLE),
        "blobs-2": blobs(new_blob, lambda: lance.blob_array([b"x", None] * 5), data_storage_version="2.2"),
        "blobs-2-big": blobs(new_blob, lambda: lance.blob_array([BIG, b"x"] * 5), data_storage_version="2.2"),
        "blobs-managed": blobs_managed(lance, rows),
    }
    return found


def blobs_managed(lance: Any, rows: Callable[..., pa.Table]) -> Callable[[str, Any], None]:
    """Blobs that several tables may share, in a folder of their own."""

    def make(uri: str, model: Any) -> None:
        made = rows([*range(4)]).append_column(lance.blob_field("blob"), lance.blob_array([BIG] * 4))
        made = made.replace_schema_metadata({"lance.blob.managed": "true"})
        lance.write_dataset(made, uri, data_storage_version="2.2")
        model.put(made)

    return make
