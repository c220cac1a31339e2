"""Merge engines: each carries out the passes of a merge."""
