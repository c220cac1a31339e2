"""Files of the first format: empty texts are NULL, NULL lists empty; an upsert changes dictionaries, doubles rows."""

import tempfile

import lance
import pyarrow as pa

letters, first = [pa.array(one).dictionary_encode() for one in (["a", "b", "c"], ["c"])]
rows = pa.table({"k": [1, 2, 3], "text": ["", "x", None], "list": [[], [1], None], "word": letters})
read = lance.write_dataset(rows, tempfile.mkdtemp(), data_storage_version="legacy").to_table().to_pydict()
found = [read["text"], read["list"]]
for column, value, stable in (("word", first, False), ("text", pa.array(["y"]), True)):
    part, options = rows.select(["k", column]), {"data_storage_version": "legacy", "enable_stable_row_ids": stable}
    table = lance.write_dataset(part, tempfile.mkdtemp(), **options)
    if stable:
        table.create_scalar_index("k", "BITMAP")
    table.merge_insert("k").when_matched_update_all().execute(pa.table({"k": [1], column: value}))
    found.append(table.to_table(filter="k = 1")[column].to_pylist())
print(found)
print("GONE" if found == [["", "x", None], [[], [1], None], ["c"], ["y"]] else "FAULT")
