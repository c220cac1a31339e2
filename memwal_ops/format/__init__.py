"""Bytes to values and back: pure functions, no I/O, no pylance."""
