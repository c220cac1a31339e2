"""Plain reads and writes below a table's URI, on local paths and on S3.

Only for builders and judges of tests: no retries, no mapping of errors.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

import obstore
from obstore.store import LocalStore, from_url


class Files:
    """The objects below one table; paths are relative to it and use `/`."""

    def __init__(self, uri: str, storage_options: Mapping[str, str] | None = None) -> None:
        self.uri = uri.rstrip("/")
        self.storage_options = dict(storage_options or {})
        if "://" in self.uri:
            options = dict(self.storage_options)
            client: dict[str, bool] = {}
            if options.pop("allow_http", "false") == "true":
                client["allow_http"] = True
            self.store = from_url(self.uri, config=options, client_options=client)  # type: ignore[call-overload]
        else:
            os.makedirs(self.uri, exist_ok=True)
            self.store = LocalStore(self.uri)

    def get(self, path: str) -> bytes:
        return bytes(obstore.get(self.store, path).bytes())

    def put(self, path: str, data: bytes) -> None:
        obstore.put(self.store, path, data)

    def put_new(self, path: str, data: bytes) -> None:
        """Put if nothing is there; raises obstore's AlreadyExistsError."""
        obstore.put(self.store, path, data, mode="create")

    def delete(self, path: str) -> None:
        obstore.delete(self.store, path)

    def listing(self, prefix: str) -> list[str]:
        """Paths of all objects below a folder, sorted."""
        return sorted(str(meta["path"]) for chunk in obstore.list(self.store, prefix) for meta in chunk)

    def size(self, path: str) -> int:
        return int(obstore.head(self.store, path)["size"])
