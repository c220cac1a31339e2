"""Each option by which pylance writes is in a table of the corpus, in another test, or here with the reason why not.

The options are read from pylance's signatures, its lists of index types and the documentation of their arguments, so
that a release with an option that nobody looked at fails, here and in ``make next-pylance``.
"""

from __future__ import annotations

import inspect
import re
import sys
from pathlib import Path
from typing import Any

import lance
import pytest

from tests.campaigns.clients import client, options

ROOT = Path(__file__).parents[2]
CORPUS = "".join(Path(module.__file__ or "").read_text() for module in (client, options))
REBUILD = "tests/integration/formats/lance/jobs/catchup/test_rebuild.py"

# Why an option needs no table: what a job reads is the same with and without it.
RUNTIME = "how it is done: memory, threads, requests, progress; nothing of it is in the files"
ADDRESS = "where the table is, and by what credentials"
SIZES = "how many files, pages or rows of a file: jobs read any"
NAMES = "names of an index or of what is replaced"
LEGACY_FORMAT = "row groups of the version legacy: storage-legacy"
TRAINED = "how centroids are chosen or where they come from: the index has them either way"
WRITER = "when the writer flushes: generations of any size are merged"
PARTS = "one index made in parts by several processes: pylance merges them before it is one of the table's"
WORDS = "how words are made of text, kept in the index as one document: test_rebuild.py has several of its settings"
OPEN = "not tried; an index or file that a job does not know is kept, and refused or left by its name"

OPTIONS: dict[str, dict[str, str]] = {
    "write_dataset": {
        **dict.fromkeys(("data_obj", "schema", "mode"), "the rows"),
        **dict.fromkeys(
            ("uri", "storage_options", "namespace_client", "table_id", "session", "base_store_params"), ADDRESS
        ),
        **dict.fromkeys(("data_cache_bytes", "commit_lock", "progress"), RUNTIME),
        **dict.fromkeys(("max_bytes_per_file", "max_page_bytes"), SIZES),
        "max_rows_per_file": "corpus",
        "max_rows_per_group": "corpus",
        "data_storage_version": "corpus",
        "use_legacy_format": "the older name of data_storage_version=legacy: storage-legacy",
        "enable_v2_manifest_paths": "corpus",
        "enable_stable_row_ids": "corpus",
        "auto_cleanup_options": "corpus",
        "commit_message": "corpus",
        "transaction_properties": "corpus",
        "initial_bases": "corpus",
        "target_bases": "corpus",
        "target_all_bases": "all of initial_bases instead of the named ones: bases",
        "external_blob_mode": OPEN,
        "allow_external_blob_outside_bases": OPEN,
        "blob_pack_file_size_threshold": SIZES,
    },
    "compact_files": {
        **dict.fromkeys(("target_rows_per_fragment", "max_rows_per_group", "max_bytes_per_file"), SIZES),
        **dict.fromkeys(("num_threads", "batch_size", "binary_copy_read_batch_bytes"), RUNTIME),
        **dict.fromkeys(("materialize_deletions", "materialize_deletions_threshold"), "which fragments are rewritten"),
        **dict.fromkeys(
            ("max_source_fragments", "max_source_rows", "max_source_bytes", "excluded_fragment_ids"),
            "which fragments are rewritten",
        ),
        "defer_index_remap": "corpus",
        "compaction_mode": "corpus",
        "data_storage_version": "corpus",
    },
    "create_scalar_index": {
        **dict.fromkeys(("column", "name", "replace"), NAMES),
        **dict.fromkeys(("fragment_ids", "index_uuid"), PARTS),
        **dict.fromkeys(("progress_callback", "memory_limit", "num_workers"), RUNTIME),
        "index_type": "corpus",
        "train": "corpus",
        "format_version": REBUILD,
        "document_granularity": REBUILD,
        "with_position": REBUILD,
        "block_size": REBUILD,
        "base_tokenizer": REBUILD,
        **dict.fromkeys(("language", "max_token_length", "lower_case", "stem", "custom_stop_words"), REBUILD),
        **dict.fromkeys(("remove_stop_words", "ascii_folding"), WORDS),
    },
    "create_index": {
        **dict.fromkeys(("column", "name", "replace"), NAMES),
        **dict.fromkeys(("fragment_ids", "index_uuid"), PARTS),
        **dict.fromkeys(
            ("accelerator", "index_cache_size", "shuffle_partition_batches", "shuffle_partition_concurrency"), RUNTIME
        ),
        **dict.fromkeys(("storage_options", "progress_callback", "skip_transpose"), RUNTIME),
        **dict.fromkeys(
            ("ivf_centroids", "pq_codebook", "ivf_centroids_file", "precomputed_partition_dataset", "filter_nan"),
            TRAINED,
        ),
        **dict.fromkeys(
            ("target_partition_size", "streaming_sample_rate", "streaming_coreset_rate", "streaming_refine_passes"),
            TRAINED,
        ),
        "index_type": "corpus",
        "metric": REBUILD,
        "num_partitions": "corpus",
        "num_sub_vectors": "corpus",
        "train": "corpus",
    },
    "initialize_mem_wal": {
        "maintained_indexes": "corpus",
        "bucket_column": "corpus",
        "num_buckets": "corpus",
        "identity_column": "corpus",
        "unsharded": "corpus",
    },
    "mem_wal_writer": {"shard_id": "corpus"},
    "index types": {
        **dict.fromkeys(("BTREE", "BITMAP", "LABEL_LIST", "INVERTED", "NGRAM", "ZONEMAP", "BLOOMFILTER"), "corpus"),
        **dict.fromkeys(client.VECTOR, "corpus"),
        "FTS": "another name of INVERTED",
        "RTREE": REBUILD,
        "MINHASHLSH": REBUILD,
    },
}
#: Defaults of writers, for the table as for one of them.
OPTIONS["initialize_mem_wal"] |= (
    writers := dict.fromkeys(
        (
            "durable_write", "max_wal_buffer_size", "max_wal_flush_interval_ms", "max_memtable_size",
            "max_memtable_rows", "max_memtable_batches", "max_unflushed_memtable_bytes", "manifest_scan_batch_size",
            "backpressure_log_interval_ms", "stats_log_interval_ms",
        ),
        WRITER,
    ) | {"hnsw_params": "how the writer's own index in memory is made: a flushed generation is read by its rows"}
)  # fmt: skip
OPTIONS["mem_wal_writer"] |= writers

_DATASET = sys.modules[lance.LanceDataset.__module__]
_WRITERS = {
    "write_dataset": lance.write_dataset,
    "compact_files": _DATASET.DatasetOptimizer.compact_files,
    "create_scalar_index": lance.LanceDataset.create_scalar_index,
    "create_index": lance.LanceDataset.create_index,
    "initialize_mem_wal": lance.LanceDataset.initialize_mem_wal,
    "mem_wal_writer": lance.LanceDataset.mem_wal_writer,
}


def parameters(function: Any) -> set[str]:
    """Those of the signature, and those that the documentation has for ``**kwargs``."""
    named = inspect.signature(function).parameters.values()
    found = {one.name for one in named if one.name != "self" and one.kind is not one.VAR_KEYWORD}
    if any(one.kind is one.VAR_KEYWORD for one in named):
        found |= {
            *re.findall(
                r"^ *(\w+) ?: (?:int|bool|str|float|list|optional|Optional)",
                inspect.getdoc(function) or "",
                re.MULTILINE,
            )
        }
    return found


def index_types() -> set[str]:
    """Those that pylance's two functions accept."""
    annotation = inspect.signature(lance.LanceDataset.create_scalar_index).parameters["index_type"].annotation
    source = inspect.getsource(lance.LanceDataset)
    vector = re.search(r"valid_index_types = \[(.*?)\]", source, re.DOTALL)
    assert vector is not None
    return {*re.findall(r"'([A-Z_]+)'", annotation)} | {*re.findall(r'"(\w+)"', vector[1])}


def found_options() -> dict[str, set[str]]:
    return {name: parameters(function) for name, function in _WRITERS.items()} | {"index types": index_types()}


def test_each_option_is_covered_or_has_a_reason() -> None:
    found = found_options()
    assert found.keys() == OPTIONS.keys()
    new = {name: sorted(options - OPTIONS[name].keys()) for name, options in found.items()}
    assert not any(new.values()), f"make a table by each in tests/campaigns/clients, or list it here: {new}"
    gone = {name: sorted(OPTIONS[name].keys() - options) for name, options in found.items()}
    assert not any(gone.values()), f"this release of pylance does not have: {gone}"


@pytest.mark.parametrize(
    ("option", "where"), [(option, where) for of in OPTIONS.values() for option, where in of.items()], ids=str
)
def test_what_is_said_to_cover_an_option_has_it(option: str, where: str) -> None:
    if where == "corpus" and option not in {"index_type", "shard_id"}:
        assert re.search(rf"\b{option}\b", CORPUS)
    elif where.startswith("tests/"):
        assert re.search(rf"\b{option}\b", (ROOT / where).read_text(), re.IGNORECASE)
    else:
        assert len(where) > 5


def test_settings_of_compactions_are_its_options() -> None:
    """A setting of the table that pylance obeys is an option of compact_files, and so listed above."""
    settings = {
        *re.findall(r"``lance\.compaction\.(\w+)``", inspect.getdoc(_DATASET.DatasetOptimizer.compact_files) or "")
    }
    assert "data_storage_version" in settings
    assert settings <= OPTIONS["compact_files"].keys()


def test_an_option_of_a_later_release_is_noticed() -> None:
    def write_dataset(uri: str, *, new_encoding: bool = False, **kwargs: Any) -> None:
        """kwargs: other: int, optional"""

    assert parameters(write_dataset) == {"uri", "new_encoding"}
    write_dataset.__doc__ = "Write.\n\nother: int, optional\n    of a later release"
    assert parameters(write_dataset) == {"uri", "new_encoding", "other"}
