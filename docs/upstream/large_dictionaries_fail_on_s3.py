"""Dictionaries of large_string in files of 2.1 fail to read from S3 where the head of the response has some lengths."""

from typing import Any

import lance
import pyarrow as pa
from small_s3 import SmallS3


class Padded(SmallS3):
    """Heads of other lengths."""

    def carry_out(self, *request: Any) -> tuple[int, dict[str, str], bytes]:
        """As the store does."""
        status, headers, content = super().carry_out(*request)
        return status, {**headers, "x-request-id": "i" * length}, content


length, store, words = 1, Padded(), pa.array(["a", "b"], pa.large_string()).dictionary_encode()
lance.write_dataset(pa.table({"w": words}), store.uri, storage_options=store.options, data_storage_version="2.1")
try:
    for length in range(1, 9):
        print(length, lance.dataset(store.uri, storage_options=store.options).to_table().num_rows, "rows")
    print("GONE")
except Exception as error:
    print(str(error)[:200], "FAULT", sep="\n")
