"""A short run of ``make fuzz``, the inputs that once were too much, and the harness itself."""

from __future__ import annotations

import random
import struct

import pyarrow as pa
import pytest
from pyarrow import ipc
from pyroaring import BitMap

from tests.campaigns.fuzz.__main__ import is_native, plan
from tests.campaigns.fuzz.corpus import real
from tests.campaigns.fuzz.decoder import REGION
from tests.campaigns.fuzz.decoders import DECODERS
from tests.campaigns.fuzz.harness import fuzz, trouble
from tests.campaigns.fuzz.planted import DECODERS as PLANTED
from tests.campaigns.fuzz.region_decoders import FIELD_KINDS
from tests.support.seeds import CAMPAIGN_SEED, env_number
from tests.support.tables import wire


def test_a_short_run() -> None:
    inputs = env_number("FUZZ_INPUTS", 20_000)
    rates, failures = fuzz(plan(inputs), env_number("FUZZ_SEED", 20_250_101 + CAMPAIGN_SEED))
    failures = [failure for failure in failures if not is_native(failure)]
    assert not failures, "\n\n".join(map(str, failures))
    assert {rate.decoder for rate in rates} == set(DECODERS)


def test_what_is_real_is_accepted() -> None:
    for decoder in DECODERS.values():
        for data in decoder.seeds:
            what, _ = trouble(decoder, data)
            assert what == "", (decoder.name, what)


def test_a_seed_means_the_same_inputs() -> None:
    for decoder in DECODERS.values():
        first, second = (decoder.input(random.Random("7")) for _ in range(2))
        assert first == second


def test_planted_faults_are_caught() -> None:
    inputs = {"raises": 600, "allocates": 600, "aborts": 600, "fine": 600, "hangs": 100}
    assert inputs.keys() == PLANTED.keys()
    _, failures = fuzz(inputs, 1, module="tests.campaigns.fuzz.planted", hang_seconds=10)
    assert {failure.decoder for failure in failures} == {"raises", "hangs", "allocates", "aborts"}

    def what(name: str) -> str:
        return " ".join(failure.what for failure in failures if failure.decoder == name)

    assert "ValueError" in what("raises")
    assert min(len(failure.data) for failure in failures if failure.decoder == "raises") == 21, "not shrunk"
    assert "does not end" in what("hangs")
    assert "memory" in what("allocates").lower()
    assert "ended the process" in what("aborts")


def _bitmap(count: int) -> bytes:
    bitmap = BitMap(range(count))
    bitmap.run_optimize()
    return bytes(bitmap.serialize())


def _footer(data: bytes, **changes: int) -> bytes:
    names = ("metadata", "columns_at", "buffers_at", "buffers", "columns")
    values = dict(zip(names, struct.unpack("<QQQII", data[-40:-8]), strict=True)) | changes
    return data[:-40] + struct.pack("<QQQII", *values.values()) + data[-8:]


def _arrow(**metadata: str) -> bytes:
    out = pa.BufferOutputStream()
    ipc.new_stream(out, pa.schema([("id", pa.int64())], metadata=metadata)).close()
    return out.getvalue().to_pybytes()


def _region(**changes: object) -> bytes:
    fields = [(1, 3), (2, 2), (6, 9), (10, 1), (11, wire.encode([(1, REGION.bytes)]))]
    return wire.encode([*fields, *((int(name[1:]), value) for name, value in changes.items())])


_SNAPSHOT, _LANCE_ENTRY = real("snapshot_file"), real("wal_lance")[0]
_ARROW = real("wal_arrow")[0]

FOUND = {
    # JSON without end is no ValueError
    "hint-deep": ("version_hint", b"[" * 100_000),
    "hold-deep": ("hold", b'{"versions":' * 100_000),
    # a hint above all numbers has no file name
    "hint-huge": ("version_hint", b'{"version": 18446744073709551616}'),
    # a date that Python does not have is no ValueError either
    "date32": ("region_field", bytes([FIELD_KINDS.index("date32")]) + b"\xff\xff\xff\x7f"),
    # 60 KB of bitmap, four gigabytes of numbers
    "bitmap-huge": ("fragment_bitmap", _bitmap(1 << 28)),
    # the end of the log at the end of all numbers
    "log-end": ("region_manifest", _region(f4=2**64 - 1)),
    # a name that the store refuses, for all regions instead of this one
    "path": ("region_manifest", _region(f8=wire.encode([(1, 7), (2, b"a\nb")]))),
    # superscript digits are digits, and no numbers
    "hold-name": ("hold_name", "²".encode() * 20 + b".json"),
    "hold-last": ("hold_name", b"9" * 20 + b".json"),
    "hold-text": ("hold", b'{"versions": "12", "ttl_seconds": 1, "by": "", "note": ""}'),
    "hold-surrogate": ("hold", b'{"versions": [1], "ttl_seconds": 1, "by": "\\ud800", "note": ""}'),
    "why": ("command_line", f"{REGION}/²".encode()),
    "size": ("command_line", b"9" * 401),
    "generation": ("file_name", b"0a1b2c3d_gen_" + b"9" * 5000),
    "version": ("file_name", b"9" * 5000 + b".manifest"),
    "host": ("location", b"file://["),
    # a minute of backtracking for a text of 5,000 letters
    "redaction": ("storage_options", b"a=" + b"9" * 5000),
    # pylance ends the process: room for 4 billion buffers, a zero byte in a C string
    "snapshot-buffers": ("snapshot_file", _footer(_SNAPSHOT[-1], buffers=2**32 - 1)),
    "snapshot-name": ("snapshot_file", _SNAPSHOT[0].replace(b"writer_epoch", b"wri\0er_epoch")),
    "entry-buffers": ("wal_entry_of_the_region_layout", _footer(_LANCE_ENTRY, buffers=2**32 - 1)),
    # Arrow has more errors than one
    "entry-int": ("wal_entry", _ARROW.replace(b"\x40\x00\x00\x00", b"\x04\x00\x00\x00")),
    "entry-epoch": ("wal_entry", _arrow(writer_epoch="9" * 5000)),
    # columns of other types: an id that is a number, a text of 16 letters, a generation without a number
    "columns": ("snapshot_columns", b"\xc7e7;'"),
}


@pytest.mark.parametrize("name", FOUND)
def test_what_was_found_once(name: str) -> None:
    decoder, data = FOUND[name]
    assert trouble(DECODERS[decoder], data)[0] == ""
