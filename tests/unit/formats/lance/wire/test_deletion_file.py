"""What is refused of a deletion file: everything on which pylance ends the process, or would hide other rows."""

from __future__ import annotations

import random
import struct
from typing import TYPE_CHECKING

import lance
import pyarrow as pa
import pytest
from pyroaring import BitMap

from memwal_ops.errors import InvalidFormatError
from memwal_ops.formats.lance.wire.lance_file import check_deletion_file
from tests.support.seeds import CAMPAIGN_SEED

if TYPE_CHECKING:
    from pathlib import Path

SETS = {
    "one": [5],
    "an array": range(0, 60_000, 17),
    "a bitset": [row for row in range(60_000) if row % 3],
    "several containers": [*range(10), *range(70_000, 100_000), *range(131_072, 196_608)],
}


def made_by_pylance(folder: Path, where: str, rows: int) -> tuple[bytes, bool, int]:
    """The bytes of a deletion file, whether it is a bitmap, and how many rows it deletes."""
    dataset = lance.write_dataset(pa.table({"id": range(rows)}), str(folder / "t.lance"))
    dataset.delete(where)
    [file] = (folder / "t.lance/_deletions").iterdir()
    return file.read_bytes(), file.suffix == ".bin", rows - dataset.count_rows()


@pytest.mark.parametrize(("where", "is_bitmap"), [("id = 5", False), ("id % 11 = 3", False), ("id % 3 != 1", True)])
def test_what_pylance_writes_is_right_and_no_part_of_it_is(tmp_path: Path, where: str, is_bitmap: bool) -> None:
    data, bitmap, deleted = made_by_pylance(tmp_path, where, 3_000 if not is_bitmap else 30_000)
    assert bitmap is is_bitmap
    rows = 3_000 if not is_bitmap else 30_000
    check_deletion_file(data, bitmap=bitmap, deleted=deleted, rows=rows)
    check_deletion_file(data, bitmap=bitmap, deleted=0, rows=0)
    for wrong in ({"deleted": deleted + 1, "rows": rows}, {"deleted": deleted, "rows": 5}):
        with pytest.raises(
            InvalidFormatError, match=r"it deletes [\d,]+ rows, and|it deletes row [\d,]+ of a fragment"
        ):
            check_deletion_file(data, bitmap=bitmap, **wrong)
    generator = random.Random(CAMPAIGN_SEED)
    cuts = [0, 1, 9, len(data) // 2, len(data) - 1, *(generator.randrange(len(data)) for _ in range(50))]
    for end in cuts:
        with pytest.raises(InvalidFormatError):
            check_deletion_file(data[:end], bitmap=bitmap, deleted=deleted, rows=rows)
        zeroed = data[:end] + bytes(len(data) - end)  # as a store does that loses the rest of an answer
        if zeroed != data:
            with pytest.raises(InvalidFormatError):
                check_deletion_file(zeroed, bitmap=bitmap, deleted=deleted, rows=rows)
    with pytest.raises(InvalidFormatError):
        check_deletion_file(data, bitmap=not bitmap, deleted=deleted, rows=rows)


def test_no_length_of_an_arrow_file_is_believed(tmp_path: Path) -> None:
    """pylance allocates what the footer claims that the record batch has: the process ends by SIGABRT."""
    data, bitmap, deleted = made_by_pylance(tmp_path, "id = 5", 100)
    block = data.rindex(struct.pack("<qi", 192, 192))  # its position, and the length of its metadata; then of its body
    for at in (*range(block, block + 12), *range(block + 16, block + 24)):
        for bit in range(8):
            flipped = bytearray(data)
            flipped[at] ^= 1 << bit
            with pytest.raises(InvalidFormatError):
                check_deletion_file(bytes(flipped), bitmap=bitmap, deleted=deleted, rows=100)


@pytest.mark.parametrize("optimized", [False, True])
@pytest.mark.parametrize("name", SETS)
def test_bitmaps_of_each_container(name: str, optimized: bool) -> None:
    """The portable format, as CRoaring writes it, with and without runs."""
    bitmap = BitMap(SETS[name])
    if optimized:
        bitmap.run_optimize()
    data = bitmap.serialize()
    check_deletion_file(data, bitmap=True, deleted=len(bitmap), rows=bitmap.max() + 1)
    with pytest.raises(InvalidFormatError, match=f"deletes row {bitmap.max():,} of a fragment"):
        check_deletion_file(data, bitmap=True, deleted=len(bitmap), rows=bitmap.max())
    for at in range(min(len(data), 40)):  # the header, and the first values
        for bit in range(8):
            flipped = bytearray(data)
            flipped[at] ^= 1 << bit
            assert _is_refused_or_right(bytes(flipped), bitmap), (at, bit)


def _is_refused_or_right(data: bytes, bitmap: BitMap) -> bool:
    """Whether bytes that are accepted are those of another set of as many rows in the fragment, by CRoaring."""
    try:
        check_deletion_file(data, bitmap=True, deleted=len(bitmap), rows=bitmap.max() + 1)
    except InvalidFormatError:
        return True
    values = list(BitMap.deserialize(data))
    return len(values) == len(bitmap) and values == sorted(set(values)) and values[-1] <= bitmap.max()
