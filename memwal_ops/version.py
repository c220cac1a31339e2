"""The release, stated once: the package's metadata and every commit's transaction properties take it from here."""

__version__ = "0.1.0"
