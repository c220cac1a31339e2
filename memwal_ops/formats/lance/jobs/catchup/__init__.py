"""Index what indexes do not cover."""
