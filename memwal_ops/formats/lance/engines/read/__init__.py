"""Read a table with its unmerged rows."""
