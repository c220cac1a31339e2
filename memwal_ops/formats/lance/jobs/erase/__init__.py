"""Erase rows: delete them, and remove whatever still holds rows that were deleted."""
