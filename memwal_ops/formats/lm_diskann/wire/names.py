"""The names of files by which a folder is detected."""

COPY = "snapshot.lmd"
"""The manifest of a copy on an object store."""
