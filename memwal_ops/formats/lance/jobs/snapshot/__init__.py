"""Take region snapshots."""
