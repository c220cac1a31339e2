"""List and apply repairs of a damaged table."""
