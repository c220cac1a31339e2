"""The configuration: the file, its model, and the effective values."""
