"""Rewrite small fragments and deleted rows."""
