"""Files of the first format: empty texts become NULL, NULL lists empty ones; an update changes dictionary values."""

import tempfile

import lance
import pyarrow as pa

words = pa.array(["a", "b", "c"]).dictionary_encode()
rows = pa.table({"k": [1, 2, 3], "text": ["", "x", None], "list": [[], [1], None], "word": words})
table = lance.write_dataset(rows, tempfile.mkdtemp(), data_storage_version="legacy")
read = table.to_table().to_pydict()
print(read["text"], read["list"])
other = pa.table({"k": [1], "word": pa.array(["c"]).dictionary_encode()})
part = lance.write_dataset(rows.select(["k", "word"]), tempfile.mkdtemp(), data_storage_version="legacy")
part.merge_insert("k").when_matched_update_all().execute(other)
word = part.to_table(filter="k = 1")["word"].to_pylist()
print(word)
print("FAULT" if (read["text"], read["list"], word) != (["", "x", None], [[], [1], None], ["c"]) else "GONE")
