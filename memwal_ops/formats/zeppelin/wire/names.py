"""The names of a namespace's objects that are read first."""

MANIFEST = "manifest.json"
META = "meta.json"
