"""Decode and encode the objects of Zeppelin namespaces, in both dialects. No I/O."""

MANIFEST, META = "manifest.json", "meta.json"
"""The names of the objects that are read first."""
