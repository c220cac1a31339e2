"""Encode the scalar and product quantization codes of a segment, stored in addition to the full-precision rows."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    Matrix = NDArray[np.float32]

CALIBRATION = "sq_calibration.bin"
CODEBOOK = "pq_codebook.bin"
CODES = 256


@dataclass(frozen=True, eq=False)
class ScalarQuantizer:
    """One byte for each dimension: the range from ``least`` to ``most`` in 255 steps, rounded down as Zeppelin does."""

    least: Matrix
    most: Matrix

    def artifact(self) -> tuple[str, bytes]:
        """Name and bytes of the segment's quantizer object."""
        pairs = np.stack([self.least, self.most], axis=1).astype("<f4")
        return CALIBRATION, struct.pack("<I", len(pairs)) + pairs.tobytes()

    def cluster_name(self, number: int) -> str:
        """The name of a cluster's codes."""
        return f"sq_cluster_{number}.bin"

    def cluster(self, number: int, ids: Sequence[str], vectors: Matrix) -> tuple[str, bytes]:
        """Name and bytes of a cluster's codes."""
        span = self.most - self.least
        flat = span < np.finfo(np.float32).eps
        scale = np.where(flat, 0, 255 / np.where(flat, 1, span)).astype(np.float32)
        codes = np.clip((vectors - self.least) * scale, 0, 255).astype(np.uint8)
        return self.cluster_name(number), _coded(ids, codes, vectors.shape[1])


@dataclass(frozen=True, eq=False)
class ProductQuantizer:
    """One byte for each of ``len(codebook)`` parts of a vector; ``codebook`` has shape (parts, 256, part width)."""

    codebook: Matrix

    def artifact(self) -> tuple[str, bytes]:
        """Name and bytes of the segment's quantizer object."""
        return CODEBOOK, struct.pack("<III", *self.codebook.shape) + self.codebook.astype("<f4").tobytes()

    def cluster_name(self, number: int) -> str:
        """The name of a cluster's codes."""
        return f"pq_cluster_{number}.bin"

    def cluster(self, number: int, ids: Sequence[str], vectors: Matrix) -> tuple[str, bytes]:
        """Name and bytes of a cluster's codes."""
        parts, _, width = self.codebook.shape
        codes = np.empty((len(vectors), parts), dtype=np.uint8)
        for part, book in enumerate(self.codebook):
            slices = vectors[:, part * width : (part + 1) * width]
            distances = (book**2).sum(axis=1) - 2 * (slices @ book.T)
            codes[:, part] = distances.argmin(axis=1)
        return self.cluster_name(number), _coded(ids, codes, parts)


Quantizer = ScalarQuantizer | ProductQuantizer


def _coded(ids: Sequence[str], codes: NDArray[np.uint8], width: int) -> bytes:
    parts = [struct.pack("<II", len(ids), width)]
    for name, code in zip(ids, codes, strict=True):
        encoded = name.encode()
        parts += [struct.pack("<I", len(encoded)), encoded, code.tobytes()]
    return b"".join(parts)
