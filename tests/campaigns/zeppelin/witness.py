"""What must hold after each step, from the files alone: no import of our code, but for the store's wrapper."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from memwal_ops.storage.wrapper import StoreWrapper
from tests.support.zeppelin.independent import Reader, Rows


class Witness:
    """Looks at all files of a namespace, and at its lease at each write."""

    def __init__(self, uri: str) -> None:
        self.root = Path(uri)
        self.readers: list[tuple[bytes, Rows]] = []
        self._token = self._leased = 0
        self._holders: dict[int, str] = {}
        self._fragments: dict[str, bytes] = {}
        self._pending: set[str] = set()

    def check(self, expected: Rows) -> None:
        """The last write of every id, old readers, the token, fragments and keys that are pending deletion."""
        reader = Reader(str(self.root))
        assert reader.read() == expected
        token = reader.manifest["fencing_token"]
        assert token >= self._token, "the manifest's token went down"
        self._token = token
        for data, rows in self.readers:
            assert Reader(str(self.root), data).read() == rows, "a reader of an old manifest"
        for path in self.root.glob("wal/*"):
            assert self._fragments.setdefault(path.name, path.read_bytes()) == path.read_bytes(), "written again"
        if not reader.wiki:
            pending = {*reader.manifest["pending_deletes"]}
            for key in self._pending - pending:
                assert not self.root.parent.joinpath(key).exists(), f"{key} is nowhere pending, and nobody's"
            self._pending = pending

    def lease(self) -> dict[str, Any] | None:
        """The lease, as it is stored."""
        path = self.root / "lease.json"
        found: dict[str, Any] | None = json.loads(path.read_bytes()) if path.exists() else None
        return found

    def lease_written(self) -> None:
        """A token has one holder, and tokens rise."""
        lease = self.lease()
        assert lease is not None, "a lease is never deleted"
        token, holder = lease["fencing_token"], lease.get("holder") or lease["holder_id"]
        assert token >= self._leased, "the lease's token went down"
        assert self._holders.setdefault(token, holder) == holder, f"two compactors have the token {token}"
        self._leased = token


class Watched(StoreWrapper):
    """A store of which the witness sees each write of the lease."""

    def __init__(self, store: Any, witness: Witness) -> None:
        super().__init__(store)
        self._witness = witness

    def _call(self, verb: str, method: Any, /, *arguments: Any, **named: Any) -> Any:
        result = method(*arguments, **named)
        if arguments[:1] == ("lease.json",) and verb in {"put", "put_if_absent", "compare_and_swap"}:
            self._witness.lease_written()
        return result
