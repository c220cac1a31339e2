"""A decoder of index folders, written from docs/formats/lm-diskann.md alone: it imports nothing of the package.

It reads what a reader may: metadata.lmd, the published view and graph.lmd; never the store.
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

NEVER = 2**64 - 1


def digest(data: bytes, at: int) -> int:
    return xxhash.xxh3_64_intdigest(data[:at] + bytes(8) + data[at + 8 :])


def aligned(value: int, to: int) -> int:
    return (value + to - 1) // to * to


class Folder:
    def __init__(self, path: str) -> None:
        self.path = Path(path)
        data = (self.path / "metadata.lmd").read_bytes()
        assert len(data) == 128
        assert data[:8] == b"LMDISKAN"
        assert xxhash.xxh3_64_intdigest(data[:120]) == int.from_bytes(data[120:], "little")
        release, self.dimension = struct.unpack_from("<II", data, 8)
        metric, quantizer, self.r_f, self.r_b = struct.unpack_from("<HHHH", data, 16)
        assert release == 1
        self.metric, self.quantizer = {1: "l2", 2: "cosine"}[metric], {1: "pq", 2: "ternary"}[quantizer]
        (self.alpha,) = struct.unpack_from("<d", data, 24)
        self.search_list, self.code_bytes, self.block_size = struct.unpack_from("<III", data, 32)
        self.uuid = data[48:64]
        assert self.r_b == 2 * self.r_f
        self.at_ids = aligned(64 + 4 * self.dimension, 32)
        self.at_codes = aligned(self.at_ids + 4 * self.r_f, 32)
        self.at_backlinks = aligned(self.at_codes + self.r_f * self.code_bytes, 32)
        assert self.block_size == aligned(self.at_backlinks + 4 * self.r_b, 4096)

    def block(self, data: bytes) -> dict[str, Any]:
        assert len(data) == self.block_size
        node, row, epoch, version, origin, checksum, overflow = struct.unpack_from("<QqQQQQQ", data, 0)
        links, backlinks, codebook, flags, reserved = struct.unpack_from("<HHHBB", data, 56)
        assert checksum == digest(data, 40)
        assert reserved == 0
        numbers = np.frombuffer(data, "<u4")
        ids, back = self.at_ids // 4, self.at_backlinks // 4
        assert (numbers[ids + links : ids + self.r_f] == 0xFFFFFFFF).all()
        assert (numbers[back + backlinks : back + self.r_b] == 0xFFFFFFFF).all()
        return {
            "node_id": node, "row_id": row, "creation_epoch": epoch, "version": version, "origin_txn": origin,
            "overflow_reference": overflow, "codebook_id": codebook, "tombstoned": bool(flags & 1),
            "overflowed": bool(flags & 2), "vector": np.frombuffer(data, "<f4", self.dimension, 64),
            "links": numbers[ids : ids + links].tolist(), "backlinks": numbers[back : back + backlinks].tolist(),
            "codes": np.frombuffer(data, np.uint8, links * self.code_bytes, self.at_codes),
        }  # fmt: skip

    def frame(self, data: bytes, at: int = 0) -> dict[str, Any] | None:
        """The frame at a place; None where there is none."""
        if len(data) - at < 64:
            return None
        magic, length, epoch, number, uuid, kind, count, checksum = struct.unpack_from("<8sQQQ16sIIQ", data, at)
        if magic != b"LMDFRAME" or length > len(data) - at or digest(data[at : at + length], 56) != checksum:
            return None
        assert length % 64 == 0
        assert uuid == self.uuid
        sections = {}
        for one in range(count):
            name, offset, size, _, _ = struct.unpack_from("<8sQQII", data, at + 64 + 32 * one)
            assert offset % 64 == 0
            sections[name.rstrip(b"\0").decode()] = data[at + offset : at + offset + size]
        return {"kind": kind, "epoch": epoch, "number": number, "length": length, **sections}


class View:
    """The newest published view: per node its versions, as (epoch, block); and what rows and tombstones it tells."""

    def __init__(self, path: str) -> None:
        self.folder = folder = Folder(path)
        current = folder.frame((folder.path / "view/CURRENT").read_bytes())
        assert current is not None
        assert current["kind"] == 1
        number = current["number"]
        base = folder.frame((folder.path / f"view/{number:016d}.base").read_bytes())
        assert base is not None
        assert (base["kind"], base["number"]) == (2, number)
        self.graph = (folder.path / "graph.lmd").read_bytes()
        self.versions: dict[int, dict[int, dict[str, Any]]] = {}
        self.dead = dict(zip(_u4(base.get("dead")), _u8(base.get("deadat")), strict=True))
        self.rows = [*zip(_i8(base.get("rows")), _u4(base.get("rownodes")), strict=True)]
        self.entries = [tuple(one) for one in np.array(_u8(base.get("entries")), np.uint64).reshape(-1, 3).tolist()]
        slots = enumerate(_u4(base.get("slots")))
        self.placed: list[tuple[int, int | None, int]] = [(node, None, at) for node, at in slots if at != 0xFFFFFFFF]
        history = [tuple(one) for one in np.array(_u8(base.get("history")), np.uint64).reshape(-1, 3).tolist()]
        several = {node for node, _, _ in history}
        self._at = {
            (node, epoch): slot for node, epoch, slot in [*self.placed, *history] if epoch or node not in several
        }
        self._left: set[tuple[int, int | None, int]] = set()
        self._left_at: dict[int, int] = {}
        self._base_epoch = base["epoch"]
        self.placed += history
        self._deltas(base, _u8(base.get("depochs")))
        self._state(base)
        log = (folder.path / f"view/{number:016d}.log").read_bytes()
        at = 0
        while (frame := folder.frame(log, at)) is not None and frame["epoch"] == self.epoch + 1:
            assert (frame["kind"], frame["number"]) == (3, number)
            self._apply(frame)
            at += frame["length"]
        assert self.epoch >= current["epoch"], f"the log ends at {self.epoch}, and {current['epoch']} was published"
        # A slot that was freed since the base may hold another node by now: whoever came last is in it,
        # or one that a merge wrote and did not commit; or gc has cut it off.
        self.placed = [one for one in self.placed if one not in self._left]
        last = {slot: number for number, (_, _, slot) in enumerate(self.placed)}
        overwritten = set()
        for number in sorted(last.values()):
            node, epoch, slot = self.placed[number]
            data = self._slot(slot)  # nothing where the end of the file was cut off
            found = self.folder.block(data) if data else {"node_id": None}
            if found["node_id"] == node and epoch in {None, found["creation_epoch"]}:
                self._add(node, epoch, found)
            else:
                overwritten.add((node, epoch))
        for node, epoch in overwritten:
            later = [one for one in self.versions.get(node, {}) if epoch is None or one > epoch]
            assert later, f"node {node} has no block"
            assert min(later) <= self.retained, f"the slot of node {node} was used again too early"

    def _slot(self, slot: int) -> bytes:
        size = self.folder.block_size
        return self.graph[slot * size : (slot + 1) * size]

    def _add(self, node: int, epoch: int | None, found: dict[str, Any]) -> None:
        assert found["node_id"] == node
        assert epoch in {None, found["creation_epoch"]}
        self.versions.setdefault(node, {})[found["creation_epoch"]] = found

    def _deltas(self, frame: dict[str, Any], epochs: list[int]) -> None:
        size = self.folder.block_size
        for at, (node, epoch) in enumerate(zip(_u8(frame.get("dnodes")), epochs, strict=True)):
            self._add(node, epoch, self.folder.block(frame["blocks"][at * size : (at + 1) * size]))

    def _apply(self, frame: dict[str, Any]) -> None:
        self._deltas(frame, [frame["epoch"]] * len(_u8(frame.get("dnodes"))))
        for node, epoch, slot in np.array(_u8(frame.get("moves")), np.uint64).reshape(-1, 3).tolist():
            # Views before a move lead to the old slot, and are given up first.
            assert self._left_at.get(slot, 0) <= self.retained, f"slot {slot} was used again too early"
            for known in (epoch, *((None,) if epoch <= self._base_epoch else ())):
                if (old := self._at.pop((node, known), None)) is not None:
                    self._left.add((node, known, old))
                    self._left_at[old] = frame["epoch"]
            self._at[node, epoch] = slot
            self.placed.append((node, epoch, slot))
        self.rows += [*zip(_i8(frame.get("rows")), _u4(frame.get("rownodes")), strict=True)]
        self.dead |= dict.fromkeys(_u4(frame.get("dead")), frame["epoch"])
        gone = {*_u4(frame.get("gone"))}
        self.dead = {node: at for node, at in self.dead.items() if node not in gone}
        self.rows = [(row, node) for row, node in self.rows if node not in gone]
        self.placed = [one for one in self.placed if one[0] not in gone]
        if "entries" in frame:
            now = {*_u8(frame["entries"])}
            self.entries = [
                (node, added, frame["epoch"] if removed == NEVER and node not in now else removed)
                for node, added, removed in self.entries
            ]
            held = {node for node, _, removed in self.entries if removed == NEVER}
            self.entries += [(node, frame["epoch"], NEVER) for node in sorted(now - held)]
        self._state(frame)

    def _state(self, frame: dict[str, Any]) -> None:
        numbers = _u8(frame["state"])
        self.epoch, self.merges, self.next_node, self.slots, self.retained, self.codebook, self.live, *more = numbers
        self.healed, self.followed, self.unusable = more
        assert self.epoch == frame["epoch"]

    def block(self, node: int, epoch: int) -> dict[str, Any] | None:
        """The version of a node that a reader at an epoch sees."""
        seen = [one for one in self.versions.get(node, {}) if one <= epoch]
        if not seen:
            return None
        return self.versions[node][max(seen)]

    def live_rows(self, epoch: int | None = None) -> dict[int, tuple[float, ...]]:
        """Rows and vectors at an epoch."""
        epoch = self.epoch if epoch is None else epoch
        assert self.retained <= epoch <= self.epoch
        found: dict[int, tuple[float, ...]] = {}
        for row, node in self.rows:
            block = self.block(node, epoch)
            if block is None:
                assert epoch < self.epoch, f"node {node} has no block"
                continue
            assert block["row_id"] == row
            assert block["tombstoned"] == (self.dead.get(node, NEVER) <= epoch), node
            if not block["tombstoned"]:
                assert row not in found, f"row {row} is there twice"
                found[row] = tuple(block["vector"].tolist())
        return found


def _u4(data: bytes | None) -> list[int]:
    return np.frombuffer(data or b"", "<u4").tolist()


def _u8(data: bytes | None) -> list[int]:
    return np.frombuffer(data or b"", "<u8").tolist()


def _i8(data: bytes | None) -> list[int]:
    return np.frombuffer(data or b"", "<i8").tolist()
