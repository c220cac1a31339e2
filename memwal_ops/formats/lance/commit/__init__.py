"""Publish versions of the base table."""
