"""Measurements: the merge against what users do today and against the floor."""
