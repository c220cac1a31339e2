"""A scan panics on a batch in which all lists of a column of lists of blobs are empty."""

import tempfile

import lance
import pyarrow as pa

offsets = pa.array([0, 1, *[1] * 100], pa.int32())
lists = pa.ListArray.from_arrays(offsets, lance.blob_array([b"one"]))
table = lance.write_dataset(pa.table({"x": lists}), tempfile.mkdtemp(), data_storage_version="2.2")
try:
    print(table.scanner(batch_size=10).to_table().num_rows, "rows")
    print("GONE")
except BaseException as error:
    print(error)
    print("FAULT")
