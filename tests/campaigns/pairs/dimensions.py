"""What a table can be: dimensions with their values, and what cannot be together, each with its reason.

A value of a type is the source that makes it: rows of the covering array become programs (:mod:`scripts`), so that one
that fails is printed as it ran. ``k`` is the number of a key, ``w`` that of the write which set the row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    Values = Mapping[str, str]

#: Of each key: Arrow types of its columns, and their values; one to one for k from 0 to 255.
KEYS: dict[str, tuple[tuple[str, str], ...]] = {
    "int64": (("pa.int64()", "k - 3"),),
    "int32": (("pa.int32()", "k - 3"),),
    "int16": (("pa.int16()", "k - 3"),),
    "int8": (("pa.int8()", "k - 128"),),
    "uint8": (("pa.uint8()", "k"),),
    "uint16": (("pa.uint16()", "k + 65000"),),
    "uint32": (("pa.uint32()", "k + 2**31"),),
    "uint64": (("pa.uint64()", "k + 2**62"),),
    "string": (("pa.string()", "f'key-{k}-ü' if k else ''"),),
    "large_string": (("pa.large_string()", "f'key {k}'"),),
    "binary": (("pa.binary()", "bytes([k]) + bytes(k % 3)"),),
    "large_binary": (("pa.large_binary()", "bytes([k, 0, 7])"),),
    "fixed_binary": (("pa.binary(4)", "bytes([k, 0, k, 1])"),),
    "date": (("pa.date32()", "DAY + timedelta(days=k - 9)"),),
    "timestamp": (("pa.timestamp('us')", "TIME + timedelta(microseconds=k * 10**9 + 7)"),),
    "timestamp_zone": (("pa.timestamp('ms', 'Europe/Berlin')", "TIME.replace(tzinfo=UTC) + timedelta(hours=k)"),),
    "decimal": (("pa.decimal128(18, 3)", "Decimal(k - 5) / 8"),),
    "string+int64": (("pa.string()", "f'tenant {k % 3}'"), ("pa.int64()", "k // 3")),
    "bool+uint8": (("pa.bool_()", "k % 2 == 1"), ("pa.uint8()", "k // 2")),
    "large_string+date": (("pa.large_string()", "f't{k % 4}'"), ("pa.date32()", "DAY + timedelta(days=k // 4)")),
}
#: Of each type of the column ``c``: the Arrow type, and a value of a row.
COLUMNS: dict[str, tuple[str, str]] = {
    "bool": ("pa.bool_()", "(k + w) % 3 == 0"),
    "int8": ("pa.int8()", "(k + w) % 200 - 100"),
    "uint64": ("pa.uint64()", "2**63 + k + w"),
    "float16": ("pa.float16()", "np.float16((k + w) % 50 / 4)"),
    "float64": ("pa.float64()", "k / 8 - w"),
    "decimal128": ("pa.decimal128(20, 4)", "Decimal(k - w) / 8"),
    "decimal256": ("pa.decimal256(50, 4)", "Decimal(k - w) * 10**30 / 8"),
    "string": ("pa.string()", "f'text {k % 9} {w} é'"),
    "large_string": ("pa.large_string()", "'x' * (k % 5) + str(w)"),
    "string_view": ("pa.string_view()", "f'view {k} of {w}'"),
    "binary": ("pa.binary()", "bytes([k, w % 256])"),
    "large_binary": ("pa.large_binary()", "bytes([k]) * (w % 4)"),
    "fixed_binary": ("pa.binary(3)", "bytes([k, w % 256, 0])"),
    "date32": ("pa.date32()", "DAY + timedelta(days=k - w)"),
    "date64": ("pa.date64()", "DAY + timedelta(days=k - w)"),
    "time32": ("pa.time32('s')", "time(k % 24, w % 60)"),
    "time64": ("pa.time64('us')", "time(k % 24, w % 60, 1, 7)"),
    "timestamp_s": ("pa.timestamp('s')", "TIME + timedelta(hours=k - w)"),
    "timestamp_ns": ("pa.timestamp('ns')", "TIME + timedelta(microseconds=k - w)"),
    "timestamp_zone": ("pa.timestamp('us', 'Asia/Tokyo')", "TIME.replace(tzinfo=UTC) + timedelta(hours=k - w)"),
    "duration": ("pa.duration('ms')", "timedelta(milliseconds=k + w)"),
    "dictionary": ("pa.dictionary(pa.int8(), pa.string())", "f'word {(k + w) % 6}'"),
    "dictionary_large": ("pa.dictionary(pa.int32(), pa.large_string())", "f'word {(k + w) % 6}'"),
    "struct": ("pa.struct([('x', pa.int32()), ('y', pa.string())])", "{'x': k, 'y': None if k % 5 == 0 else str(w)}"),
    "struct_required": ("pa.struct([pa.field('x', pa.int32(), nullable=False)])", "{'x': k + w}"),
    "list": ("pa.list_(pa.string())", "[str(w)] * (k % 3)"),
    "large_list": ("pa.large_list(pa.int32())", "[w] * (k % 3)"),
    "list_of_struct": ("pa.list_(pa.struct([pa.field('p', pa.int64(), nullable=False)]))", "[{'p': w}] * (k % 3)"),
    "fixed_list": ("pa.list_(pa.int32(), 3)", "[k, w, 7]"),
    "map": ("pa.map_(pa.string(), pa.int32())", "[('a', k), ('b', w)]"),
    "blob": ("pa.large_binary()", "bytes([k, w % 256]) * 9"),
    "blob_2": ("lance.blob_field('c').type", "bytes([k, w % 256]) * 9"),
    "json": ("pa.json_()", "f'{{\"x\":{k}}}'"),
}
#: Of each kind of vector: the type of its elements, and the metric of its index.
VECTORS: dict[str, tuple[str, str]] = {
    "float32_l2": ("pa.float32()", "l2"),
    "float32_cosine": ("pa.float32()", "cosine"),
    "float32_dot": ("pa.float32()", "dot"),
    "float16_l2": ("pa.float16()", "l2"),
    "float64_cosine": ("pa.float64()", "cosine"),
    "uint8_hamming": ("pa.uint8()", "hamming"),
}
#: Region specs of the region layout; without one, writers choose their regions.
SPECS: dict[str, tuple[str, ...]] = {
    "region": (),
    "region_bucket": ("bucket(id, 2)",),
    "region_multi_bucket": ("multi_bucket(id, 3)",),
    "region_truncate": ("truncate(id, 5)",),
    "region_identity": ("identity(id)",),
    "region_year": ("year(id)",),
    "region_hour": ("hour(id)",),
    "region_two": ("bucket(id, 2)", "truncate(id, 5)"),
}
TIMED = ("date", "timestamp", "timestamp_zone")
#: Keys that pylance's writer hashes.
HASHED = ("int64", "int32", "string", "large_string", "binary", "string+int64")
JOBS = (
    "inspect", "verify", "verify_deep", "verify_answers", "why", "merge", "catchup", "catchup_rebuild", "compact",
    "compact_all", "snapshot", "expire", "gc", "erase", "repair", "adopt", "migrate", "maintain", "maintain_apply",
    "hold", "scan", "report",
)  # fmt: skip
#: Of a Lance table.
LANCE: dict[str, tuple[str, ...]] = {
    "layout": ("none", "legacy", "shard", *SPECS),
    "file": ("legacy", "2.0", "2.1", "2.2", "2.3"),
    "names": ("V2", "V1"),
    "row_ids": ("addresses", "stable"),
    "writer": ("pylance 14", "pylance 10", "pylance 7", "lancedb 0.40"),
    "key": (*KEYS,),
    "column": (*COLUMNS,),
    "vector": (*VECTORS,),
    "index": ("none", "BTREE", "BITMAP", "ZONEMAP", "BLOOMFILTER", "LABEL_LIST", "NGRAM", "INVERTED", "column"),
    "vector_index": (
        "none", "IVF_FLAT", "IVF_SQ", "IVF_PQ", "IVF_RQ", "IVF_HNSW_FLAT", "IVF_HNSW_SQ", "IVF_HNSW_PQ"
    ),
    "key_index": ("no", "yes"),
    "deletions": ("none", "few", "most", "fragment"),
    "place": ("root", "branch", "branch_of_branch", "shallow_clone", "deep_clone", "copy"),
    "history": ("none", "restored", "overwritten", "added", "dropped", "renamed", "added_again", "replaced"),
    "holder": ("none", "tag", "hold", "handle", "branch"),
    "damage": ("none", "missing", "empty", "half", "bit_start", "bit_middle", "bit_end", "other_file", "other_table"),
    "job": JOBS,
}  # fmt: skip
#: The plainest value of each: a row that fails is reduced to these.
PLAIN = {name: values[0] for name, values in LANCE.items()} | {"column": "string", "job": "inspect"}
#: What the covering array covers in threes.
THREES = ("layout", "job", "row_ids", "damage", "place")


@dataclass(frozen=True)
class Rule:
    """Values that cannot be together.

    Attributes:
        why: the reason.
        about: the dimensions that it reads.
        broken: whether their values are such.
    """

    why: str
    about: tuple[str, ...]
    broken: Callable[[Values], bool]


def _logged(row: Values) -> bool:
    return row["layout"] != "none"


def _indexes(row: Values) -> bool:
    return row["vector_index"] != "none"


LANCE_RULES = (
    Rule(
        "the writers of the legacy index take one key, of an integer type, and files that hold NULL structs",
        ("layout", "key"),
        lambda row: row["layout"] == "legacy" and row["key"] not in {"int64", "int32", "string"},
    ),
    Rule(
        "pylance's writer hashes these types of keys alone; others it refuses in initialize_mem_wal",
        ("layout", "key"),
        lambda row: row["layout"] == "shard" and row["key"] not in HASHED,
    ),
    Rule(
        "the fields of these specs are of one key column, named id",
        ("layout", "key"),
        lambda row: row["layout"] in SPECS and SPECS[row["layout"]] != () and "+" in row["key"],
    ),
    Rule(
        "region values are of no large or fixed bytes",
        ("layout", "key"),
        lambda row: row["layout"] == "region_identity" and row["key"] in {"large_binary", "fixed_binary"},
    ),
    Rule(
        "year and hour are of times",
        ("layout", "key"),
        lambda row: (
            row["layout"] in {"region_year", "region_hour"}
            and row["key"] not in (TIMED if row["layout"] == "region_year" else TIMED[1:])
        ),
    ),
    Rule(
        "truncate is of numbers and text",
        ("layout", "key"),
        lambda row: row["layout"] in {"region_truncate", "region_two"} and (row["key"] in TIMED or "binary" in row["key"]),
    ),
    Rule(
        "a log's tombstones are rows of NULL, which files of the first format and of 2.0 do not hold for all types",
        ("layout", "file"),
        lambda row: _logged(row) and row["layout"] != "legacy" and row["file"] in {"legacy", "2.0"},
    ),
    Rule(
        "MemWAL jobs commit detached versions, which pylance refuses beside V1 names",
        ("layout", "names"),
        lambda row: _logged(row) and row["names"] == "V1",
    ),
    Rule(
        "the first format has no such type",
        ("file", "column"),
        lambda row: row["file"] == "legacy" and row["column"] not in {
            "bool", "int8", "uint64", "float16", "float64", "decimal128", "string", "large_string", "binary",
            "large_binary", "date32", "date64", "time32", "time64", "timestamp_s", "timestamp_ns", "timestamp_zone",
            "duration", "dictionary", "list", "fixed_binary",
        },
    ),
    Rule(
        "pylance adds no column of NULL to the first format",
        ("file", "history"),
        lambda row: row["file"] == "legacy" and row["history"] == "added_again",
    ),
    Rule(
        "pylance has blob columns of version 2 and maps from 2.2 on, JSON and NULL structs from 2.1 on",
        ("file", "column"),
        lambda row: (row["column"] in {"blob_2", "map"} and row["file"] not in {"2.2", "2.3"})
        or (row["column"] in {"json", "struct", "struct_required", "list_of_struct"} and row["file"] == "2.0")
        or (row["column"] == "blob" and row["file"] not in {"2.0", "2.1"}),
    ),
    Rule(
        "blobs in a log are refused before a row is accepted; pylance takes views for another type than text",
        ("layout", "column"),
        lambda row: _logged(row) and row["column"] in {"blob", "blob_2", "string_view"},
    ),
    Rule(
        "pylance's MemTable and tombstones need nullable children",
        ("layout", "column"),
        lambda row: _logged(row) and row["column"] in {"struct_required", "list_of_struct"},
    ),
    Rule(
        "hamming distances are of bytes and bits; HNSW, SQ, PQ and RQ are not made of them",
        ("vector", "vector_index"),
        lambda row: row["vector"] == "uint8_hamming" and row["vector_index"] not in {"none", "IVF_FLAT"},
    ),
    Rule(
        "no older release is asked for what it lacks: stable row ids by LanceDB, 2.3, views",
        ("writer", "file"),
        lambda row: row["writer"] != "pylance 14" and row["file"] in {"legacy", "2.3"},
    ),
    Rule(
        "an older release makes none of these columns",
        ("writer", "column"),
        lambda row: row["writer"] != "pylance 14" and row["column"] in {"blob", "blob_2", "json", "map", "string_view"},
    ),
    Rule(
        "LanceDB has no option for names, files or indexes as pylance has them: its table is one of pylance 13",
        ("writer", "names"),
        lambda row: row["writer"] == "lancedb 0.40" and row["names"] == "V1",
    ),
    Rule(
        "an index on this column is a BTREE of a type that has an order",
        ("index", "column"),
        lambda row: row["index"] == "column" and row["column"] not in {
            "bool", "int8", "uint64", "float16", "float64", "decimal128", "string", "large_string", "binary",
            "date32", "date64", "time32", "time64", "timestamp_s", "timestamp_ns", "timestamp_zone", "fixed_binary",
        },
    ),
    Rule(
        "a key of two columns has no index of one column that is the key's",
        ("key", "key_index"),
        lambda row: "+" in row["key"] and row["key_index"] == "yes",
    ),
    Rule(
        "regions of a clone are the source's: a clone of a table with a log is refused by name",
        ("layout", "place"),
        lambda row: _logged(row) and row["place"] in {"shallow_clone", "deep_clone"},
    ),
    Rule(
        "clones are versions of the root: they have no branch to be held by",
        ("place", "holder"),
        lambda row: row["place"] != "root" and row["holder"] == "branch",
    ),
    Rule(
        "pylance refuses computed columns and overwrites beside a log",
        ("layout", "history"),
        lambda row: _logged(row) and row["history"] == "replaced",
    ),
)  # fmt: skip

#: Of a Lance table on S3, in an array of its own: what is done to files, and by other releases, is done locally.
REMOTE: dict[str, tuple[str, ...]] = {
    **LANCE,
    "layout": tuple(one for one in LANCE["layout"] if one != "legacy"),
    "writer": ("pylance 14",),
    "place": ("root", "branch"),
    "damage": ("none",),
    "store": ("s3",),
}
#: What that array covers; the other dimensions are drawn by the seed.
REMOTE_PAIRS = ("store", "job", "row_ids", "holder", "place")

# Zeppelin namespaces.

#: Of each: the id of row k.
ZEPPELIN_IDS = {
    "plain": "f'v{k}'",
    "long": "f'id{k}-' + 'x' * 200",
    "unicode": "f'ключ {k} é😀'",
    "punctuation": r"f'a/\"b\" {k}\n\t'",
    "like_keys": "f'segments/s{k}/cluster_0.bin'",
    "numbers": "f'{k}'",
}
#: Of each: the attributes of row k as write w set them.
ATTRIBUTES = {
    "none": "{}",
    "strings": "{'a': f'text {k % 7} of {w}', 'b': f'own{k}.'}",
    "booleans": "{'a': (k + w) % 2 == 0}",
    "integers": "{'a': 2**62 + k - w, 'b': -k}",
    "floats": "{'a': k / 8 - w, 'b': 1e-300 * k}",
    "lists": "{'a': [f's{k}', f'w{w}'], 'b': [k, w, 7], 'c': []}",
    "mixed": "{'a': [k, f'{w}', True, 1.5][(k + w) % 4]}",
    "sometimes": "{'a': w} if k % 3 == 0 else {}",
    "names": "{'a.b': k, 'a_b': w, 'id': 'x', 'vector': 1, 'имя é': f'значение {k}'}",
    "null": "{'a': None, 'b': k}",
    "nested": "{'a': {'x': [k, {'y': w}], 'é': None}}",
}
ZEPPELIN_JOBS = (
    "inspect", "verify", "verify_deep", "verify_answers", "why", "merge", "merge_retrain", "merge_small",
    "merge_indexed", "merge_scalar", "merge_product", "compact", "gc", "erase", "repair", "migrate", "maintain",
    "maintain_apply", "hold", "scan", "report",
)  # fmt: skip
DAMAGES = LANCE["damage"]
ZEPPELIN: dict[str, tuple[str, ...]] = {
    "format": ("zeppelin",),
    "dialect": ("wiki", "native"),
    "metric": ("cosine", "euclidean", "dot_product"),
    "size": ("4", "1", "3", "96"),
    "ids": (*ZEPPELIN_IDS,),
    "attributes": (*ATTRIBUTES,),
    "segments": ("ours", "none", "retrained", "unrecorded", "carried", "hidden", "emptied"),
    "holder": ("none", "hold", "reader"),
    "place": ("root", "copy"),
    "store": ("local", "s3"),
    "damage": DAMAGES,
    "job": ZEPPELIN_JOBS,
}
ZEPPELIN_RULES = (
    Rule(
        "a native attribute has no null and no object",
        ("dialect", "attributes"),
        lambda row: row["dialect"] == "native" and row["attributes"] in {"null", "nested"},
    ),
    Rule(
        "only a server's compaction carries clusters, and it writes the native dialect",
        ("dialect", "segments"),
        lambda row: row["dialect"] == "wiki" and row["segments"] == "carried",
    ),
    Rule(
        "ids are hidden by pending_deletes of the document; natively that list has keys of objects",
        ("dialect", "segments"),
        lambda row: row["dialect"] == "native" and row["segments"] == "hidden",
    ),
    Rule(
        "other programs, damage and copies are done to files",
        ("store", "segments", "damage", "place"),
        lambda row: row["store"] == "s3"
        and (row["segments"] in {"unrecorded", "carried", "hidden"} or row["damage"] != "none" or row["place"] != "root"),
    ),
    Rule(
        "a reader of an older manifest is promised a grace time, which damage and erase do not wait for",
        ("holder", "job"),
        lambda row: row["holder"] == "reader" and row["job"] == "erase",
    ),
)  # fmt: skip

# Index folders of LM-DiskANN.

#: Of each: the id of row k.
FOLDER_IDS = {"dense": "k", "sparse": "k * 7919 + 2**40", "largest": "2**63 - 1 - k"}
#: Of each: the vector of row k as write w set it, of D numbers.
FOLDER_VECTORS = {
    "noise": "np.random.default_rng([k, w]).normal(size=D)",
    "clustered": "np.random.default_rng([k % 7]).normal(size=D) * 9 + np.random.default_rng([k, w]).normal(size=D)",
    "twins": "np.random.default_rng([k // 4]).normal(size=D)",
    "tiny": "np.random.default_rng([k, w]).normal(size=D) * 1e-12",
    "huge": "np.random.default_rng([k, w]).normal(size=D) * 1e12",
}
FOLDER_JOBS = (
    "inspect", "verify", "verify_deep", "verify_answers", "why", "merge", "catchup", "catchup_rebuild", "compact", "gc",
    "erase", "repair", "snapshot", "maintain", "maintain_apply", "hold", "scan", "report",
)  # fmt: skip
LM_DISKANN: dict[str, tuple[str, ...]] = {
    "format": ("lm_diskann",),
    "metric": ("l2", "cosine"),
    "dims": ("8", "1", "2", "33", "200"),
    "links": ("16", "4", "70"),
    "quantizer": ("pq", "ternary"),
    "rows": ("300", "0", "1100"),
    "ids": (*FOLDER_IDS,),
    "vectors": (*FOLDER_VECTORS,),
    "follows": ("nothing", "by_key", "stable_ids", "a_branch"),
    "holder": ("none", "hold", "reader"),
    "place": ("root", "copy", "snapshot"),
    "damage": DAMAGES,
    "job": FOLDER_JOBS,
}
LM_DISKANN_RULES = (
    Rule(
        "stable row ids are the table's own, from 0 on",
        ("follows", "ids"),
        lambda row: row["follows"] == "stable_ids" and row["ids"] != "dense",
    ),
    Rule(
        "all vectors of one dimension and cosine are one of two, and ties have no order",
        ("metric", "dims"),
        lambda row: row["metric"] == "cosine" and row["dims"] == "1",
    ),
)  # fmt: skip

#: Of each format: what a table of it can be, and what cannot be together.
MODELS = {
    "lance": (LANCE, LANCE_RULES),
    "zeppelin": (ZEPPELIN, ZEPPELIN_RULES),
    "lm_diskann": (LM_DISKANN, LM_DISKANN_RULES),
}
PLAINS = {name: {one: values[0] for one, values in model.items()} for name, (model, _) in MODELS.items()} | {
    "lance": PLAIN
}
