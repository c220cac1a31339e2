"""Migrate between layouts."""
