"""Normalize entity tags, and find out how a store expects them in ``If-Match``.

Azurite quotes a tag in the response to HEAD and not in a listing. Ceph RGW 16.2 compares
``If-Match`` only with the tag without quotes, while RFC 9110 and AWS S3 require
them. Tags are therefore kept without quotes, and the spelling to send is tried out on the store.
"""

from __future__ import annotations

import os
import uuid
from typing import TYPE_CHECKING

from memwal_ops.errors import ConditionalWriteUnsupportedError
from memwal_ops.storage.probe import NO_SWAP, PROBE_FOLDER, create_object

if TYPE_CHECKING:
    from collections.abc import Callable

    from memwal_ops.storage.api import Store

# The standard's spelling first: if the store compares it, the other one is not tried.
_SPELLINGS = ('"{}"', "{}")


def bare(e_tag: str) -> str:
    """The tag without surrounding quotes; a weak one (``W/"..."``) unchanged."""
    return e_tag[1:-1] if len(e_tag) > 1 and e_tag.startswith('"') and e_tag.endswith('"') else e_tag


def accepted_spelling(store: Store, swap: Callable[[str, bytes, str], bool]) -> str:
    """The spelling of a tag in ``If-Match`` that the store compares, as a format string; 3 to 6 small requests.

    Tried on a temporary object: a spelling is accepted only if a swap with
    the current tag succeeds *and* one with the previous tag is refused. A store that ignores a
    condition it cannot parse would otherwise overwrite, with the second spelling, what another
    writer had just written.

    Args:
        store: the store.
        swap: one conditional write of (path, data, the tag exactly as it is sent).

    Raises:
        ConditionalWriteUnsupportedError: no spelling is compared.
        ReadOnlyStoreError: the store cannot be written.
    """
    path = f"{PROBE_FOLDER}/{uuid.uuid4().hex}-tag"
    written = [path]
    try:
        create_object(store, path, b"created " + os.urandom(16), written)
        for spelling in _SPELLINGS:
            meta = store.head(path)
            if meta is None or meta.e_tag is None:
                break
            sent = spelling.format(meta.e_tag)
            if not swap(path, b"swapped " + os.urandom(16), sent):
                continue
            if swap(path, b"stale " + os.urandom(16), sent):
                break
            return spelling
    finally:
        if written:
            store.delete_many(written)
    raise unsupported(store.root, "does not enforce compare-and-swap (If-Match)")


def unsupported(root: str, why: str) -> ConditionalWriteUnsupportedError:
    """The error for a store without compare-and-swap."""
    return ConditionalWriteUnsupportedError(f"{root} {why}.", remedy=NO_SWAP)
