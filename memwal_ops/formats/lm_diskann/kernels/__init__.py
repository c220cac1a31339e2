"""Compiled code: distances, checksums, block reads, beam search, pruning, insertion and the bulk build (numba)."""
