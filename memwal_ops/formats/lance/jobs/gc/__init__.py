"""Collect merged generations, WAL entries, region manifests and orphan files."""
