"""Delete old versions."""
