"""Read flushed generations and the backlog of a table."""
