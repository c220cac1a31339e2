"""Status, metrics and health of the supervisor."""
