"""Bytes: written by the library, read by a decoder that was written from the page; and what is damaged is refused."""

from __future__ import annotations

import os
import struct
from pathlib import Path
from uuid import uuid4

import numpy as np
import pytest
import xxhash

from memwal_ops.errors import InvalidUsageError, TableCorruptError, UnsupportedFeatureError
from memwal_ops.formats import lm_diskann
from memwal_ops.formats.lm_diskann import wire
from memwal_ops.formats.lm_diskann.kernels.reading import block_checksum
from tests.support.lm_diskann.decoder import Folder, View
from tests.support.lm_diskann.folders import check_sound


@pytest.mark.parametrize("size", [4096, 8192, 36864])
@pytest.mark.req("S2-058")
def test_the_compiled_checksum_is_that_of_the_package(size: int) -> None:
    data = np.random.default_rng(size).integers(0, 256, size, np.uint8)
    expected = xxhash.xxh3_64_intdigest(bytes(data[:40]) + bytes(8) + bytes(data[48:]))
    assert int(block_checksum(data.view(np.uint64))) == expected


@pytest.mark.parametrize(
    ("dimension", "quantizer", "size"),
    [(128, "pq", 4096), (1, "pq", 4096), (1536, "pq", 12288), (1536, "ternary", 36864)],
)
@pytest.mark.req("S2-032", "S2-050", "S2-061", "S2-064")
def test_metadata(tmp_path: Path, dimension: int, quantizer: str, size: int) -> None:
    folder = str(tmp_path / "x")
    lm_diskann.create(folder, dimension=dimension, metric="cosine", R=70, alpha=1.3, L=77, quantizer=quantizer)
    found = Folder(folder)
    assert (found.dimension, found.metric, found.r_f, found.r_b) == (dimension, "cosine", 70, 140)
    assert (found.alpha, found.search_list, found.quantizer, found.block_size) == (1.3, 77, quantizer, size)
    with lm_diskann.open(folder) as index:
        assert index.parameters.uuid.bytes == found.uuid


def test_damaged_metadata_is_refused() -> None:
    good = wire.encode_metadata(wire.Parameters(8, "l2", 16, 1.2, 50, "pq", uuid4()))
    for at in range(len(good)):
        with pytest.raises(TableCorruptError):
            wire.decode_metadata(good[:at] + bytes([good[at] ^ 1]) + good[at + 1 :])
    with pytest.raises(TableCorruptError):
        wire.decode_metadata(good[:-1])
    later = struct.pack("<I", 2)
    body = good[:8] + later + good[12:120]
    with pytest.raises(UnsupportedFeatureError, match="release 2"):
        wire.decode_metadata(body + xxhash.xxh3_64_intdigest(body).to_bytes(8, "little"))
    smaller = good[:40] + struct.pack("<I", 2048) + good[44:120]
    with pytest.raises(TableCorruptError, match="inconsistent"):
        wire.decode_metadata(smaller + xxhash.xxh3_64_intdigest(smaller).to_bytes(8, "little"))


@pytest.mark.parametrize(
    "wrong", [{"dimension": 0}, {"R": 3}, {"alpha": 0.9}, {"alpha": float("nan")}, {"metric": "dot"}, {"L": 0},
              {"quantizer": "none"}]
)  # fmt: skip
def test_parameters_that_no_index_can_have(folder: str, wrong: dict[str, object]) -> None:
    with pytest.raises(InvalidUsageError):
        lm_diskann.create(folder, **{"dimension": 8, **wrong})
    assert not os.path.exists(folder)


def test_a_frame_with_any_bit_flipped_is_none() -> None:
    good = wire.encode_frame(wire.COMMIT, 3, 9, uuid4(), {"rows": np.arange(3), "dead": np.arange(5, dtype="<u4")})
    found = wire.decode_frame(np.frombuffer(good, np.uint8))
    assert found is not None
    assert found.array("rows", "<i8").tolist() == [0, 1, 2]
    for at in range(len(good)):
        bad = bytearray(good)
        bad[at] ^= 4
        assert wire.decode_frame(np.frombuffer(bytes(bad), np.uint8)) is None, at
        assert wire.decode_frame(np.frombuffer(good[:at], np.uint8)) is None, at


@pytest.mark.long
@pytest.mark.req("S2-002", "S2-007", "S2-018", "S2-029", "S2-033", "S2-034", "S2-054", "S2-057", "S2-059")
@pytest.mark.req("S2-060", "S2-062", "S2-083")
def test_an_independent_decoder_reads_every_block(folder: str, vectors: np.ndarray) -> None:
    lm_diskann.create(folder, dimension=16, R=12, L=40)
    with lm_diskann.open(folder) as index:
        index.insert(np.arange(1500), vectors[:1500])
        index.insert(np.arange(1500, 1520), vectors[1500:1520])
        index.delete(np.arange(3))
        book = index.view.book
    view = View(folder)
    assert view.live == 1517
    live = view.live_rows()
    assert {*live} == {*range(3, 1520)}
    assert all(live[row] == tuple(vectors[row].tolist()) for row in live)
    block = view.block(10, view.epoch)
    assert block is not None
    assert 0 < len(block["links"]) <= 12
    codes = block["codes"].reshape(len(block["links"]), -1)
    for link, code in zip(block["links"], codes, strict=True):
        other = view.block(link, view.epoch)
        assert other is not None
        about = book.base.copy()
        for byte, value in enumerate(code):
            about[book.starts[byte] : book.starts[byte] + book.widths[byte]] += book.parts[
                byte, value, : book.widths[byte]
            ]
        assert ((about - other["vector"]) ** 2).sum() < 0.5 * ((vectors.mean(0) - other["vector"]) ** 2).sum() + 1
    check_sound(folder)
