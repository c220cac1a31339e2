"""How a merge runs: an engine takes one pass and lands it."""
