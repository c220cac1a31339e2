"""Decode and encode the stored objects of Lance and MemWAL: pure functions, no I/O, no pylance."""
