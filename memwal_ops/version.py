"""The version of this package, as its metadata and the transaction properties of its commits have it."""

__version__ = "0.1.0"
