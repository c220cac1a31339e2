"""The version of this package, as its metadata and the transaction properties of its commits have it."""

__version__ = "0.1.0"
OLDEST_PYLANCE = "14.0.0"
"""The lower bound of the pin. Releases below it drop progress from commits, and number rows otherwise: refused."""
