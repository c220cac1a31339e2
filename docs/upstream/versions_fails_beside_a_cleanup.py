"""versions() reads every manifest that it has listed, and fails where a clean-up took one meanwhile."""

import tempfile
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import lance
import pyarrow as pa

uri, failed = lance.write_dataset(pa.table({"id": [1]}), tempfile.mkdtemp()).uri, None
with ThreadPoolExecutor() as threads:
    for _ in range(300):
        for number in range(50):
            lance.dataset(uri).update_config({"number": str(number)})
        listings = [threads.submit(lance.dataset(uri).versions) for _ in range(3)]
        lance.dataset(uri).cleanup_old_versions(older_than=timedelta(0))
        if failed := next(filter(None, (listing.exception() for listing in listings)), None):
            break
print(failed)
print("FAULT" if failed else "GONE")
