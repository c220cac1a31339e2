"""Report the state of a table."""
