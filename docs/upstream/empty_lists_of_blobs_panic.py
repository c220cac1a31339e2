"""A scan panics on a batch in which all lists of blobs are empty, also with the default batch size."""

import sys
import tempfile

import lance
import pyarrow as pa

ROWS = 100

with tempfile.TemporaryDirectory() as folder:
    offsets = pa.array([0, 1, *[1] * ROWS], pa.int32())
    lists = pa.ListArray.from_arrays(offsets, lance.blob_array([b"one"]))
    table = lance.write_dataset(pa.table({"x": lists}), f"{folder}/t.lance", data_storage_version="2.2")
    try:
        seen = table.scanner(batch_size=10).to_table().num_rows
    except BaseException as error:
        print(f"{ROWS + 1} rows, of which {ROWS} are empty lists, cannot be read 10 at a time: {error!s:.200}")
        print("FAULT")
        sys.exit()
    print(f"{seen} rows were read.")
    print("GONE")
