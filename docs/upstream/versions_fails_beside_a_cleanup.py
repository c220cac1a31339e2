"""versions() reads every manifest that it has listed, and fails where a clean-up took one meanwhile.

Expected: a version that is gone by the time it is read is left out.
"""

import tempfile
import threading
import time
from datetime import timedelta

import lance
import pyarrow as pa

SECONDS = 60
uri = f"{tempfile.mkdtemp()}/t.lance"
lance.write_dataset(pa.table({"id": [1]}), uri)
failed: list[str] = []
ended = threading.Event()


def list_versions() -> None:
    while not ended.is_set():
        try:
            lance.dataset(uri).versions()
        except Exception as error:
            failed.append(str(error))
            ended.set()


readers = [threading.Thread(target=list_versions) for _ in range(2)]
for one in readers:
    one.start()
end = time.monotonic() + SECONDS
while time.monotonic() < end and not ended.is_set():
    for number in range(50):
        lance.dataset(uri).update_config({"number": str(number)})
    lance.dataset(uri).cleanup_old_versions(older_than=timedelta(0))
ended.set()
for one in readers:
    one.join()
print(failed[:1])
print("FAULT" if failed else "GONE")
