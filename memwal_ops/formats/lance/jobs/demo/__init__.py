"""The demos of the current layouts."""
