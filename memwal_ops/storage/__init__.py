"""Object stores and their conditional writes."""
