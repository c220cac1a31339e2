"""What the suite does to a table: each job plans, then applies."""
