"""Read the base table's indexes and region snapshots."""
