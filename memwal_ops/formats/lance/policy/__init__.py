"""What to rewrite, decided by pure functions: no I/O, no pylance."""
