"""Determine which versions, and which of their files, are needed, and by what."""
