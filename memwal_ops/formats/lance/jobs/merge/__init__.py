"""Merge flushed generations into the base table."""
